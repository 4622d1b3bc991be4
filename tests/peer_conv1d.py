"""The causal_conv1d_update of causal_conv1d, vLLM and SGLang: its results by their contracts, and calls in every mode
and form that they have."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from models_of_peers import Arguments, Outcome, Place, numbers, tokens_of_rows
from peer_calls import FLOAT, HALF, Adapter, Calls, in_turn
from torch import Tensor

from flashstate.compat import causal_conv1d, sglang, vllm
from flashstate.proof.inputs import Source
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


def ring_or_window(arguments: Arguments) -> Iterator[ConvRow]:
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
        yield from ring_or_window(arguments)
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


# Calls


def conv1d_arguments(
    device: torch.device,
    shape: tuple[int, ...] = (3, 6),
    width: int = 4,
    length: int = 3,
    dtype: torch.dtype = HALF,
    channels_last: bool = False,
    copies: tuple[int, int] | None = None,
    sliding: bool = False,
) -> Arguments:
    """The arguments of every causal_conv1d_update, for x of this shape and windows of this length, of 9 slots.

    copies: rows and steps of windows after every token. sliding: those of a row share their inputs in memory.
    """
    random, dim = Source(device, width + length), shape[1]
    window = random.normal(9, dim, length).to(dtype)
    arguments = {"x": random.normal(*shape).to(dtype), "weight": random.normal(dim, width).to(dtype)}
    arguments |= {"bias": random.normal(dim).to(dtype), "activation": "silu"}
    if copies is not None:
        rows, steps, entries = *copies, width - 1
        stream = window.new_full((rows, dim, steps + entries - 1), 7.0)
        shape, strides = (rows, steps, dim, entries), (stream.stride(0), 1, stream.stride(1), 1)
        arguments[WINDOWS] = stream.as_strided(shape, strides) if sliding else window.new_full(shape, 7.0)
    return {**arguments, "conv_state": window.mT.contiguous().mT if channels_last else window}


CONV1D: dict[str, Any] = {"make": conv1d_arguments, "pools": {"conv_state": "", WINDOWS: ""}, "tokens": ("x",)}
LAST: Calls = {"channels first": {}, "channels last": {"channels_last": True}}
CONV = Adapter(
    causal_conv1d.causal_conv1d_update,
    model=partial(conv1d, ring_or_window), **CONV1D,
    calls=in_turn(
        {
            "several tokens": {"shape": (2, 6, 5), "width": 3, "length": 2, "activation": "swish"},
            "slots, one of them negative": {"conv_state_indices": [7, -1, 2], "dtype": FLOAT},
            "a longer window": {"length": 4, "bias": None, "activation": None},
            "a ring": {"length": 5, "cache_seqlens": [0, 4, 123]},
            "a ring, several tokens, slots": {
                "shape": (2, 6, 4), "length": 7, "cache_seqlens": [6, 3], "conv_state_indices": [8, 0],
            },
        },
        LAST,
    ),
)  # fmt: skip

PACKED = {"query_start_loc": [0, 3, 3, 4], "max_query_len": 3, "conv_state_indices": [4, 0, 2], "shape": (4, 6)}
BLOCKS = {"shape": (2, 6), "conv_state_indices": [[1, 2, 3], [4, 5, 6]]}
VLLM_CONV = Adapter(
    vllm.causal_conv1d_update,
    model=partial(conv1d, partial(serving_conv1d, 0)), in_place=True, **CONV1D,
    calls=in_turn(
        {
            "one token": {"conv_state_indices": [7, 0, 2]},
            "several tokens": {
                "shape": (2, 6, 5), "width": 3, "length": 2, "conv_state_indices": [1, 5], "activation": True,
                "given": True,
            },
            "packed": {"length": 6, **PACKED},
            "blocks to read and to write": {
                **BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2],
            },
            "accepted counts, packed": {
                **PACKED, "width": 3, "length": 4, "num_accepted_tokens": [3, 1, 2], "null_block_id": 5, "given": True,
            },
            "accepted counts": {
                "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accepted_tokens": [1, 1, 4],
            },
        },
        LAST,
    ),
    edges={
        "no slots": {"bias": None, "activation": False},
        "another null block": {"length": 5, "conv_state_indices": [7, 0, -1], "null_block_id": -1, "given": True},
        "accepted counts of one token": {
            "shape": (2, 6), "length": 5, "conv_state_indices": [8, 3], "num_accepted_tokens": [3, 1],
        },
        "blocks to read and to write, accepted counts, packed": {
            **PACKED, "shape": (5, 6), "width": 3, "length": 4, "query_start_loc": [0, 3, 5], "max_query_len": 4,
            "conv_state_indices": [[1, 2, 3, 6], [4, 5, 6, 7]], "num_accepted_tokens": [3, 1],
            "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2],
        },
        "blocks to read that are not there": {**BLOCKS, "initial_state_idx": [-1, 3]},
        "blocks to write that are not there": {
            **BLOCKS, "initial_state_idx": [0, 0], "block_idx_last_scheduled_token": [3, -1],
        },
    },
)  # fmt: skip

TREE = {  # the tables of the trees of PARENTS: first children, and next siblings
    "retrieve_next_token": [[1, 3, -1, -1], [1, 2, 3, -1], [1, 2, -1, -1]],
    "retrieve_next_sibling": [[-1, 2, -1, -1], [-1, -1, -1, -1], [-1, 3, -1, -1]],
}
COPIES = {"shape": (3, 6, 4), "conv_state_indices": [7, -1, 2], "copies": (5, 4)}
SGLANG_CONV = Adapter(
    sglang.causal_conv1d_update,
    model=partial(conv1d, partial(serving_conv1d, -1)), fills=("retrieve_parent_token",), **CONV1D,
    calls=in_turn(
        {
            "one token": {"conv_state_indices": [7, -1, 2]},
            "windows": {**COPIES, "intermediate_state_indices": [4, 0, 1]},
            "accepted counts": {
                "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accept_tokens": [1, 1, 4],
            },
            "a tree": {
                **COPIES, "conv_state_indices": [7, 0, 2], "intermediate_state_indices": [2, 0, 1],
                "retrieve_parent_token": [[9] * 4] * 3, **TREE,
            },
        },
        LAST,
    ),
    edges={
        "no slots": {"bias": None, "activation": False},
        "another padding": {"length": 5, "conv_state_indices": [7, 0, 2], "pad_slot_id": 0, "copies": (3, 2)},
        "a tree, parents not asked for": {"shape": (3, 6, 4), "width": 3, "conv_state_indices": [7, -1, 2], **TREE},
        "windows that share their inputs": {**COPIES, "sliding": True, "intermediate_state_indices": [4, 0, 1]},
        "a ring": {"shape": (2, 6, 4), "length": 5, "cache_seqlens": [6, 3], "conv_state_indices": [8, 0]},
    },
)  # fmt: skip
