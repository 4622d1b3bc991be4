"""SGLang's causal_conv1d_update and selective_state_update: calls in every mode and form that they have."""

from functools import partial

import models_of_conv1d
import models_of_peers
import torch
from models_of_conv1d import WINDOWS
from peer_calls import BUFFER, Calls, Door, crossed
from peer_conv1d import CONV1D, LAST, WINDOWS_VARY
from peer_rules import PARENTS
from peer_selective import SELECTIVE, STOCHASTIC

from flashstate.compat import sglang

TREE = {  # the tables of one draw of PARENTS: first children, and next siblings
    "retrieve_next_token": [[1, 3, -1, -1], [1, 2, 3, -1], [1, 2, -1, -1]],
    "retrieve_next_sibling": [[-1, 2, -1, -1], [-1, -1, -1, -1], [-1, 3, -1, -1]],
}


WINDOW_CALLS: Calls = crossed(
    {
        "one token": {"conv_state_indices": [7, -1, 2]},
        "no slots": {"bias": None, "activation": False},
        "another padding": {"length": 5, "conv_state_indices": [7, 0, 2], "pad_slot_id": 0, "copies": (3, 2)},
        "windows": {
            "shape": (3, 6, 4), "conv_state_indices": [7, -1, 2], "copies": (5, 4),
            "intermediate_state_indices": [4, 0, 1],
        },
        "accepted counts": {
            "shape": (3, 6, 4), "length": 6, "conv_state_indices": [8, 0, 3], "num_accept_tokens": [1, 1, 4],
        },
        "a tree": {
            "shape": (3, 6, 4), "conv_state_indices": [7, 0, 2], "copies": (3, 4),
            "intermediate_state_indices": [2, 0, 1], "retrieve_parent_token": [[9] * 4] * 3, **TREE,
        },
        "a tree, parents not asked for": {"shape": (3, 6, 4), "width": 3, "conv_state_indices": [7, -1, 2], **TREE},
    },
    LAST,
)  # fmt: skip
WINDOW_CALLS["windows that share their inputs"] = {**WINDOW_CALLS["windows, channels first"], "sliding": True}
SEVERAL = {"tokens": (3, 4), "state_batch_indices": [5, 0, 8]}
FROZEN = {"disable_state_update": True, "buffer": True, "cache_steps": 4}
SELECTIVE_CALLS: Calls = {
    "in order": {},
    "padding": {"state_batch_indices": [5, -1, 8]},
    "another padding": {**SEVERAL, "pad_slot_id": 0},
    "headless": {"heads": None, "state_batch_indices": [5, 0, 8]},
    "stochastic": {**SEVERAL, **STOCHASTIC},
    "verify, an output given": {**SEVERAL, **FROZEN, "given": True},
    "verify": {**SEVERAL, **FROZEN, "intermediate_state_indices": [2, 0, 1]},
    "verify, rows of the slots, and update": {"tokens": (3, 2), "state_batch_indices": [5, -1, 8], "buffer": True},
    "a tree": {**SEVERAL, **FROZEN, "intermediate_state_indices": [2, 0, 1], "retrieve_parent_token": PARENTS},
    "a tree, bfloat16": {
        **SEVERAL, "disable_state_update": True, "state_dtype": torch.bfloat16, "retrieve_parent_token": PARENTS,
        "given": True,
    },
}  # fmt: skip

SGLANG_CONV = Door(
    sglang.causal_conv1d_update,
    "x, conv_state, weight, bias=None, activation=None, cache_seqlens=None, conv_state_indices=None, "
    "num_accept_tokens=None, intermediate_conv_window=None, intermediate_state_indices=None, retrieve_next_token=None, "
    "retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, metadata=None, validate_data=False",
    **{**CONV1D, "pools": {"conv_state": "", WINDOWS: ""}}, calls=WINDOW_CALLS,
    model=partial(models_of_conv1d.conv1d, models_of_conv1d.sglang_conv1d), fills=("retrieve_parent_token",),
    right={
        "a tree": (
            WINDOW_CALLS["a tree, channels first"],
            {
                "conv_state": WINDOWS_VARY, WINDOWS: "longer 0, longer 1, shorter 0, gaps",
                "intermediate_state_indices": "longer 0",
                **{f"retrieve_{name}": "longer 0, longer 1" for name in ("next_token", "next_sibling", "parent_token")},
            },
        ),
        "accepted counts": (
            WINDOW_CALLS["accepted counts, channels first"],
            {"conv_state": WINDOWS_VARY, "num_accept_tokens": "longer 0"},
        ),
        "a ring": (
            {"shape": (2, 6, 4), "cache_seqlens": [6, 3], "conv_state_indices": [8, 0]},
            {"x": "longer 2", "conv_state": WINDOWS_VARY},
        ),
    },
)  # fmt: skip
SGLANG_STATE = Door(
    sglang.selective_state_update,
    "state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False, state_batch_indices=None, pad_slot_id=-1, "
    "out=None, disable_state_update=False, intermediate_states_buffer=None, cache_steps=None, "
    "retrieve_parent_token=None, intermediate_state_indices=None, enable_stochastic_rounding=False, "
    "cache_philox_rounds=0",
    model=partial(models_of_peers.selective, models_of_peers.sglang), calls=SELECTIVE_CALLS, **SELECTIVE,
    right={
        "a tree": (
            {**SELECTIVE_CALLS["a tree"], "given": True},
            {
                "state": "longer 0, shorter 0", BUFFER: "longer 0, longer 1, shorter 0",
                "intermediate_state_indices": "longer 0", "retrieve_parent_token": "longer 0, longer 1",
            },
        ),
    },
)  # fmt: skip
