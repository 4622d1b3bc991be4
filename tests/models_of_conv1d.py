"""The results of other libraries' convolutions, by their contracts: windows, tokens and trees of them, row by row."""

from collections.abc import Callable, Iterator

import torch
from models_of_peers import Arguments, Outcome, Place, numbers, tokens_of_rows
from torch import Tensor

from flashstate.reference.conv1d import conv1d_token

WINDOWS = "intermediate_conv_window"
# Tokens, the slot read, inputs (dim, ...), or those of each token (dim, width), and windows stored.
ConvRow = tuple[list[int], int, Tensor | list[Tensor], dict[Place, Tensor]]


def conv1d(contract: Callable[[Arguments], Iterator[ConvRow]], arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """The outcome of a causal_conv1d_update of this contract: outputs, and windows to the byte."""
    x, weight, bias = arguments["x"], arguments["weight"], arguments.get("bias")
    activation = "silu" if arguments.get("activation") else None
    y = torch.zeros_like(conv_tokens(arguments)[0], dtype=dtype)
    outcome = Outcome(y, torch.zeros_like(y, dtype=torch.bool))
    for tokens, slot, inputs, stored in contract(arguments):
        outcome.read.add(slot)
        outcome.stored |= stored
        for t, token in enumerate(tokens):
            taps = inputs[t] if isinstance(inputs, list) else inputs[:, t : t + weight.shape[1]]
            outcome.y[token] = conv1d_token(taps[None].to(dtype), weight, bias, activation)[0]
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
    lengths, size, before = arguments.get("cache_seqlens"), *arguments["conv_state"].shape[2:], width_of(arguments) - 1
    for b, tokens in enumerate(rows):
        slot = slots[b][0] if slots else b
        if slot < 0:
            continue
        window = arguments["conv_state"][slot].clone()  # (dim, size)
        first = (size if lengths is None else int(lengths[b])) - before
        places = [(first + i) % size for i in range(before + len(tokens))]
        inputs = torch.cat([window[:, places[:before]].float(), x[tokens].T], 1)
        if lengths is None:
            window = torch.cat([window.float(), x[tokens].T], 1)[:, -size:].to(window.dtype)
        for i in range(before, len(places)) if lengths is not None else ():
            window[:, places[i]] = inputs[:, i]
        yield tokens, slot, inputs, {("conv_state", (slot,)): window}


def vllm_conv1d(arguments: Arguments) -> Iterator[ConvRow]:
    """The window starts at entry 0; its first width - 1 entries are the last inputs.

    With counts the call before left width - 2 inputs and its tokens there, and this one does so again.
    """
    (x, rows), table = conv_tokens(arguments), numbers(arguments.get("conv_state_indices"))
    counts, before = arguments.get("num_accepted_tokens"), width_of(arguments) - 1
    columns = [arguments.get(name) for name in ("initial_state_idx", "block_idx_last_scheduled_token")]
    null = arguments.get("null_block_id", 0) if table else -1
    for b, tokens in enumerate(rows):
        slots, chosen = table[b] if table else [b], (0 if column is None else int(column[b]) for column in columns)
        read, write = (slots[i] if 0 <= i < len(slots) else -1 for i in chosen)
        if read < 0 or read == null:
            continue
        first = 0 if counts is None else int(counts[b]) - 1
        window = arguments["conv_state"][read][:, first : first + before]
        inputs, stored = torch.cat([window.float(), x[tokens].T], 1), {}
        if tokens and write >= 0 and write != null:
            stored["conv_state", (write,)] = arguments["conv_state"][write].clone()
            kept = inputs[:, -before:] if counts is None else inputs[:, 1:]
            stored["conv_state", (write,)][:, : kept.shape[1]] = kept
        yield tokens, read, inputs, stored


def width_of(arguments: Arguments) -> int:
    return arguments["weight"].shape[1]


def sglang_conv1d(arguments: Arguments) -> Iterator[ConvRow]:
    """As vLLM's, without blocks. The windows after every token are kept, and in a tree no window moves on. A ring is
    causal_conv1d's."""
    if arguments.get("cache_seqlens") is not None:
        yield from causal_conv1d(arguments)
        return
    (x, rows), slots = conv_tokens(arguments), numbers(arguments.get("conv_state_indices"))
    counts, before, places = arguments.get("num_accept_tokens"), width_of(arguments) - 1, arguments.get(WINDOWS)
    window_rows, tree = numbers(arguments.get("intermediate_state_indices")), arguments.get("retrieve_next_token")
    for b, tokens in enumerate(rows):
        slot = slots[b][0] if slots else b
        if slot < 0 or slot == arguments.get("pad_slot_id", -1):
            continue
        first = 0 if counts is None else int(counts[b]) - 1
        window = arguments["conv_state"][slot].clone()
        history = window[:, first : first + before].float()
        parents = range(-1, len(tokens) - 1) if tree is None else parents_of(arguments, b)
        streams = streams_of(history, x[tokens].T, list(parents))
        kept, stored = torch.cat([history, x[tokens].T], 1), {}
        if tree is None:
            kept = kept[:, -before:] if counts is None else kept[:, 1:]
            window[:, : kept.shape[1]] = kept
            stored["conv_state", (slot,)] = window
        for t, stream in enumerate(streams if places is not None else []):
            row = window_rows[b][0] if window_rows else b
            stored[WINDOWS, (row, t)] = stream[:, -before:].to(places.dtype)
        yield tokens, slot, [stream[:, -before - 1 :] for stream in streams], stored


def streams_of(history: Tensor, x: Tensor, parents: list[int]) -> list[Tensor]:
    """The inputs (dim, ...) up to each token, along its branch."""
    streams: list[Tensor] = []
    for t, parent in enumerate(parents):
        streams.append(torch.cat([history if parent < 0 else streams[parent], x[:, t : t + 1]], 1))
    return streams


def parents_of(arguments: Arguments, b: int) -> list[int]:
    """Who has each token for a child: its first, or a sibling of that."""
    children, siblings = (arguments[f"retrieve_next_{name}"][b].tolist() for name in ("token", "sibling"))
    parents = [-1] * len(children)
    for parent, child in enumerate(children):
        while child >= 0:
            parents[child], child = parent, siblings[child]
    return parents
