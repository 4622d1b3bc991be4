"""The results of other libraries' convolutions, by their contracts: windows, tokens and trees of them, row by row."""

from collections.abc import Callable, Iterator

import torch
from models_of_peers import Arguments, Outcome, Place, numbers, tokens_of_rows
from torch import Tensor

from flashstate.reference.conv1d import conv1d_token

WINDOWS = "intermediate_conv_window"
ConvRow = tuple[list[int], int, list[Tensor], dict[Place, Tensor]]  # tokens, slot, taps (dim, width), windows stored


def conv1d(contract: Callable[[Arguments], Iterator[ConvRow]], arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a causal_conv1d_update of this contract: outputs, and windows to the byte."""
    x, weight, bias = arguments["x"], arguments["weight"], arguments.get("bias")
    activation = "silu" if arguments.get("activation") else None
    y = torch.zeros_like(conv_tokens(arguments)[0], dtype=dtype)
    outcome = Outcome(y, torch.zeros_like(y, dtype=torch.bool))
    for tokens, slot, taps, stored in contract(arguments):
        outcome.read.add(slot)
        outcome.stored |= stored
        for token, inputs in zip(tokens, taps, strict=True):
            outcome.y[token] = conv1d_token(inputs[None].to(dtype), weight, bias, activation)[0]
            outcome.ran[token] = True
    if x.dim() == 3:
        outcome.y, outcome.ran = (t.reshape(x.mT.shape).mT for t in (outcome.y, outcome.ran))
    return outcome


def conv_tokens(arguments: Arguments) -> tuple[Tensor, list[list[int]]]:
    """Inputs (tokens, dim) in float32, which is exact, and where those of every row are."""
    x = arguments["x"]
    rows = tokens_of_rows(len(x), x.shape[2] if x.dim() == 3 else 1, arguments.get("query_start_loc"))
    return (x if x.dim() == 2 else x.mT.flatten(0, 1)).float(), rows


def causal_conv1d(arguments: Arguments) -> Iterator[ConvRow]:
    """The window holds the last inputs, newest last; with cache_seqlens token p is at p modulo its length."""
    (x, rows), slots = conv_tokens(arguments), numbers(arguments.get("conv_state_indices"))
    lengths, size, width = arguments.get("cache_seqlens"), *arguments["conv_state"].shape[2:], width_of(arguments)
    for b, tokens in enumerate(rows):
        slot = slots[b][0] if slots else b
        if slot < 0:
            continue
        window = arguments["conv_state"][slot].clone()  # (dim, size)
        first = (size if lengths is None else int(lengths[b])) - width + 1
        places = [(first + i) % size for i in range(width - 1 + len(tokens))]
        inputs = torch.cat([window[:, places[: width - 1]].float(), x[tokens].T], 1)
        if lengths is None:
            window = torch.cat([window.float(), x[tokens].T], 1)[:, -size:].to(window.dtype)
        for i in range(width - 1, len(places)) if lengths is not None else ():
            window[:, places[i]] = inputs[:, i]
        yield tokens, slot, [inputs[:, t : t + width] for t in range(len(tokens))], {("conv_state", (slot,)): window}


def width_of(arguments: Arguments) -> int:
    return arguments["weight"].shape[1]


def serving_conv1d(null: int, arguments: Arguments) -> Iterator[ConvRow]:
    """The contract of vLLM and SGLang. null: the slot of padding, unless the call names another.

    The window starts at entry 0; its first width - 1 entries are the last inputs. With counts the call before left
    width - 2 inputs and its tokens there, and this one does so again. SGLang's windows after every token are kept, and
    in a tree no window moves on; its ring is causal_conv1d's.
    """
    if arguments.get("cache_seqlens") is not None:
        yield from causal_conv1d(arguments)
        return
    (x, rows), table = conv_tokens(arguments), numbers(arguments.get("conv_state_indices"))
    counts, before = arguments.get("num_accepted_tokens", arguments.get("num_accept_tokens")), width_of(arguments) - 1
    columns = [arguments.get(name) for name in ("initial_state_idx", "block_idx_last_scheduled_token")]
    null = arguments.get("null_block_id", arguments.get("pad_slot_id", null)) if table else -1
    copies, tree = numbers(arguments.get("intermediate_state_indices")), arguments.get("retrieve_next_token")
    for b, tokens in enumerate(rows):
        slots, chosen = table[b] if table else [b], (0 if column is None else int(column[b]) for column in columns)
        read, write = (slots[i] if 0 <= i < len(slots) else -1 for i in chosen)
        if read < 0 or read == null:
            continue
        first = 0 if counts is None else int(counts[b]) - 1
        history = arguments["conv_state"][read][:, first : first + before].float()
        streams: list[Tensor] = []  # the inputs (dim, ...) up to each token, along its branch
        for t, parent in enumerate(range(-1, len(tokens) - 1) if tree is None else parents_of(arguments, b)):
            streams.append(torch.cat([history if parent < 0 else streams[parent], x[tokens[t], :, None]], 1))
        stored = {}
        if streams and tree is None and write >= 0 and write != null:
            stored["conv_state", (write,)] = arguments["conv_state"][write].clone()
            kept = streams[-1][:, -before:] if counts is None else streams[-1][:, 1:]
            stored["conv_state", (write,)][:, : kept.shape[1]] = kept
        for t, stream in enumerate(streams if arguments.get(WINDOWS) is not None else []):
            stored[WINDOWS, (copies[b][0] if copies else b, t)] = stream[:, -before:].to(arguments[WINDOWS].dtype)
        yield tokens, read, [stream[:, -before - 1 :] for stream in streams], stored


def parents_of(arguments: Arguments, b: int) -> list[int]:
    """Who has each token for a child: its first, or a sibling of that."""
    children, siblings = (arguments[f"retrieve_next_{name}"][b].tolist() for name in ("token", "sibling"))
    parents = [-1] * len(children)
    for parent, child in enumerate(children):
        while child >= 0:
            parents[child], child = parent, siblings[child]
    return parents
