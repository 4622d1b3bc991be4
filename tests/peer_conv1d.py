"""The causal_conv1d_update of causal_conv1d and of vLLM: calls in every mode and form that their contracts have."""

from functools import partial
from typing import Any

import models_of_conv1d as models
import torch
from models_of_conv1d import WINDOWS
from models_of_peers import Arguments
from peer_calls import GIVEN, Calls, Door, Random, crossed

from flashstate.compat import causal_conv1d, vllm

FLOAT, HALF = torch.float32, torch.float16


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
    """What every causal_conv1d_update has, for x of this shape and windows of this length, of 9 slots.

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


CONV1D: dict[str, Any] = {
    "make": conv1d_arguments, "pools": {"conv_state": ""}, "tokens": ("x",),
    "indices": (
        "conv_state_indices", "cache_seqlens", "num_accepted_tokens", "initial_state_idx",
        "block_idx_last_scheduled_token",
    ),
}  # fmt: skip
LAST: Calls = {"channels first": {}, "channels last": {"channels_last": True}}
OF_CAUSAL_CONV1D: Calls = crossed(
    {
        "one token": {},
        "a longer window": {"length": 4, "bias": None, "activation": None},
        "several tokens": {"shape": (2, 6, 5), "width": 3, "length": 2, "activation": "swish"},
        "several tokens, a longer window": {"shape": (2, 6, 3), "width": 2, "length": 6, "dtype": FLOAT},
        "slots, one of them negative": {"conv_state_indices": [7, -1, 2]},
        "a ring": {"length": 5, "cache_seqlens": [0, 4, 123]},
        "a ring, several tokens, slots": {
            "shape": (2, 6, 4), "length": 7, "cache_seqlens": [6, 3], "conv_state_indices": [8, 0],
        },
    },
    LAST,
)  # fmt: skip
PACKED = {"query_start_loc": [0, 3, 3, 4], "max_query_len": 3, "conv_state_indices": [4, 0, 2], "shape": (4, 6)}
BLOCKS = {"shape": (2, 6), "conv_state_indices": [[1, 2, 3], [4, 5, 6]]}
OF_VLLM_CONV1D: Calls = crossed(
    {
        "one token": {"conv_state_indices": [7, 0, 2]},
        "no slots": {"bias": None, "activation": False},
        "another null block": {"length": 5, "conv_state_indices": [7, 0, -1], "null_block_id": -1},
        "several tokens": {
            "shape": (2, 6, 5), "width": 3, "length": 2, "conv_state_indices": [1, 5], "activation": True,
        },
        "packed": {"length": 6, **PACKED},
        "accepted counts": {
            "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accepted_tokens": [1, 1, 4],
        },
        "accepted counts, packed": {
            **PACKED, "width": 3, "length": 4, "num_accepted_tokens": [3, 1, 2], "null_block_id": 5,
        },
        "accepted counts of one token": {
            "shape": (2, 6), "length": 5, "conv_state_indices": [8, 3], "num_accepted_tokens": [3, 1],
        },
        "blocks to read and to write": {
            **BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2],
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
    LAST,
    GIVEN,
)  # fmt: skip
WINDOWS_VARY = "longer 0, shorter 0, longer 2, gaps"

CONV = Door(
    causal_conv1d.causal_conv1d_update,
    "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None",
    model=partial(models.conv1d, models.causal_conv1d), calls=OF_CAUSAL_CONV1D, **CONV1D,
    right={
        "one token": ({"conv_state_indices": [7, 0, 2]}, {"conv_state": WINDOWS_VARY}),
        "a ring": (
            {"shape": (2, 6, 4), "cache_seqlens": [6, 3], "conv_state_indices": [8, 0]},
            {"x": "longer 2", "conv_state": WINDOWS_VARY},
        ),
    },
)  # fmt: skip
VLLM_CONV = Door(
    vllm.causal_conv1d_update,
    "x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, num_accepted_tokens=None, "
    "query_start_loc=None, max_query_len=-1, null_block_id=0, block_idx_last_scheduled_token=None, "
    "initial_state_idx=None, validate_data=False, out=None",
    model=partial(models.conv1d, models.vllm_conv1d), calls=OF_VLLM_CONV1D, in_place=True, **CONV1D,
    right={
        "packed": (
            {**PACKED, "length": 5, "num_accepted_tokens": [3, 1, 2], "given": True},
            {
                "conv_state": WINDOWS_VARY, "out": "gaps", "conv_state_indices": "shorter 0, one more axis",
                "query_start_loc": "longer 0", "num_accepted_tokens": "longer 0",
            },
        ),
        "blocks": (
            {**BLOCKS, "initial_state_idx": [0, 2], "block_idx_last_scheduled_token": [1, 2]},
            {
                "x": "shorter 0", "conv_state": WINDOWS_VARY, "conv_state_indices": "longer 0, longer 1",
                "initial_state_idx": "longer 0", "block_idx_last_scheduled_token": "longer 0",
            },
        ),
    },
)  # fmt: skip
