"""What convolutions of other libraries give, by their contracts: windows, tokens and trees of them, row by row."""

from collections.abc import Callable, Iterator

import torch
from models_of_peers import Arguments, Outcome, Place, numbers, silu, tokens_of_rows
from torch import Tensor

ConvRow = tuple[list[int], int, Tensor, dict[Place, Tensor]]  # tokens, slot read, inputs (dim, ...), windows stored


def conv1d(contract: Callable[[Arguments], Iterator[ConvRow]], arguments: Arguments, dtype: torch.dtype) -> Outcome:
    """What a causal_conv1d_update of this contract gives: outputs, and windows to the byte."""
    x, weight, bias = arguments["x"], arguments["weight"].to(dtype), arguments.get("bias")
    y = torch.zeros_like(conv_tokens(arguments)[0], dtype=dtype)
    outcome = Outcome(y, torch.zeros_like(y, dtype=torch.bool))
    for tokens, slot, inputs, stored in contract(arguments):
        outcome.read.add(slot)
        outcome.stored |= stored
        for t, token in enumerate(tokens):
            y = (weight * inputs[:, t : t + weight.shape[1]].to(dtype)).sum(1)
            y = y if bias is None else y + bias.to(dtype)
            outcome.y[token] = silu(y) if arguments.get("activation") else y
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
