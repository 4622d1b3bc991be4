"""The causal_conv1d_update of causal_conv1d, vLLM and SGLang: calls in every mode and form that they have."""

from functools import partial
from typing import Any

import models_of_conv1d as models
import torch
from models_of_conv1d import WINDOWS
from models_of_peers import Arguments
from peer_calls import FLOAT, HALF, Adapter, Calls, Random, in_turn

from flashstate.compat import causal_conv1d, sglang, vllm


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
    random, dim = Random(device, width + length), shape[1]
    window = random.normal(9, dim, length, dtype=dtype)
    arguments = {"x": random.normal(*shape, dtype=dtype), "weight": random.normal(dim, width, dtype=dtype)}
    arguments |= {"bias": random.normal(dim, dtype=dtype), "activation": "silu"}
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
    "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None",
    model=partial(models.conv1d, models.causal_conv1d), **CONV1D,
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
    "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None, "
    "query_start_loc=None, max_query_len=-1, null_block_id=0, block_idx_last_scheduled_token=None, "
    "initial_state_idx=None, validate_data=False, out=None",
    model=partial(models.conv1d, partial(models.serving_conv1d, 0)), in_place=True, **CONV1D,
    calls=in_turn(
        {
            "one token": {"conv_state_indices": [7, 0, 2]},
            "several tokens": {
                "shape": (2, 6, 5), "width": 3, "length": 2, "conv_state_indices": [1, 5], "activation": True,
                "given": True,
            },
            "packed": {"length": 6, **PACKED},
            "accepted counts": {
                "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accepted_tokens": [1, 1, 4],
            },
            "accepted counts, packed": {
                **PACKED, "width": 3, "length": 4, "num_accepted_tokens": [3, 1, 2], "null_block_id": 5, "given": True,
            },
            "blocks to read and to write": {
                **BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2],
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
    "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, "
    "num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None, retrieve_next_token=None, "
    "retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, metadata=None, validate_data=False",
    model=partial(models.conv1d, partial(models.serving_conv1d, -1)), fills=("retrieve_parent_token",), **CONV1D,
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
