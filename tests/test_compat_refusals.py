"""Wrong calls of the doors in flashstate/compat are refused by name and change nothing."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from models_of_conv1d import WINDOWS
from models_of_peers import Arguments
from peer_calls import BUFFER, DIM, DSTATE, HEADS, SLOTS, Call, Door, copied, doors_and, equal_bytes
from peer_conv1d import CONV, VLLM_CONV
from peer_delta import DECODING, EVERY, HERE, SEVERAL
from peer_fla import FLA_KDA, FLA_RULE
from peer_mamba3 import MAMBA3
from peer_rules import (
    SGLANG_KDA,
    SGLANG_RULE,
    SGLANG_UPDATE,
    VLLM_DECAYS,
    VLLM_DECODE,
    VLLM_KDA,
    VLLM_RAW_DECODE,
    VLLM_RAW_KDA,
    VLLM_RULE,
)
from peer_selective import FLASHINFER, SSM, VLLM
from peer_sglang import SGLANG_CONV, SGLANG_STATE
from torch import Tensor

WORDS = {  # that messages have for an argument besides its name
    "state": "data|scale", "state_scale": "scale", "initial_state": "state", "conv_state": "window|state",
    "Bstate": "k", "Xstate": "v", "xproj": "Wx", "zproj": "Wz", "outproj": "Wo", "output": "out",
    BUFFER: "data|scale|snapshots", "intermediate_state_scales": "scale", "intermediate_state_indices": "snapshot_rows",
    "state_batch_indices": "read|slots", "initial_state_indices": "read|slots", "conv_state_indices": "read|slots",
    "dst_state_batch_indices": "write", "output_state_indices": "write", "ssm_state_indices": "write",
    "num_accepted_tokens": "accepted", "query_start_loc": "cu_seqlens", "cache_seqlens": "positions",
    "initial_state_source": "state|data", "mixed_qkv": "q|k|v|slots", "num_accept_tokens": "accepted",
    WINDOWS: "snapshots", "raw_g": "a", "raw_beta": "b",
}  # fmt: skip
ERRORS = (TypeError, ValueError, RuntimeError)


def refuses(door: Door, arguments: Arguments, error: Any, message: str) -> None:
    """The call raises this, no tensor of it changes, and a shape that it got is one that it was given."""
    before = copied(arguments)
    with pytest.raises(error, match=message) as raised:
        door.function(**arguments)
    shape = re.search(r"must have (?:shape .*|[^:]*got shape )(\(\d[\d, ]*\))$", str(raised.value))
    given = [str(tuple(t.shape)) for t in arguments.values() if isinstance(t, Tensor)]
    assert shape is None or shape[1] in given, raised.value
    for name, tensor in arguments.items():
        if isinstance(tensor, Tensor) and not tensor.is_meta:
            assert equal_bytes(tensor, before[name]), name


def wrong_forms(door: Door, name: str, tensor: Tensor) -> Iterator[tuple[str, Any, bool]]:
    """What is no such tensor, and whether the message must speak of it: a wrong size may be that of others."""
    if inspect.signature(door.function).parameters[name].default is inspect.Parameter.empty:
        yield "missing", None, True
    yield "a list", tensor.tolist(), True
    floats = tensor.is_floating_point() or name in door.pools
    for dtype in (torch.float64, torch.int32) if floats else (torch.float32, torch.int16):
        yield str(dtype), tensor.to(dtype), True
    yield "elsewhere", tensor.to("meta"), True
    yield "one more axis", tensor[None], False
    for axis, size in enumerate(tensor.shape):
        yield f"longer {axis}", torch.cat([tensor, tensor], axis).narrow(axis, 0, size + 1), False
    yield "shorter 0", tensor[:-1], False
    if name in (*door.pools, *door.pools.values(), door.out):
        yield "gaps", torch.stack([tensor, tensor], -1)[..., 0], True
        yield "overlapping", tensor[:1].expand(tensor.shape), True


STATES, PAGES = torch.ones(3 * SLOTS, HEADS, DIM, DSTATE), torch.ones(SLOTS, 2, HEADS, DIM, DSTATE)
REACHING = PAGES.flatten(1)[:, 7 : 7 + STATES[0].numel()].view(SLOTS, *STATES.shape[1:])
ONE_SLOT = STATES.as_strided((1, *STATES.shape[1:]), (0, *STATES.stride()[1:]))
SEED, INT64 = torch.tensor([1]), torch.tensor([4, 0, 2])
ONE_TOKEN = dict.fromkeys((WINDOWS, "retrieve_next_token", "retrieve_next_sibling", "retrieve_parent_token"))
NO_POOL = {"initial_state": None, "initial_state_indices": None, "output_state_indices": None}
NO_INDICES = {"state_batch_indices": None, "dst_state_batch_indices": None, "num_accepted_tokens": None}
Wrong = tuple[type[Exception], str, Call]  # an error, how its message begins, and what makes a right call raise it

OF_SELECTIVE: list[Wrong] = [
    (ValueError, "x must have 2 axes or more, got shape (8,)", {"x": torch.ones(8)}),
    (ValueError, "D must have shape (heads=4", {"D": torch.ones(HEADS)}),
    (TypeError, "dt_softplus must be True or False, got 1", {"dt_softplus": 1}),
    (ValueError, "state_batch_indices must have shape (batch", {"state_batch_indices": [[[5]], [[0]], [[9]]]}),
]
OF_DELTA: list[Wrong] = [
    (TypeError, "scale must be a number, got '1'", {"scale": "1"}),
    (TypeError, "qk_l2norm must be True or False, got 1", {"use_qk_l2norm": 1}),
    (TypeError, "initial_state_indices must be a tensor, got NoneType", {"initial_state_indices": None}),
    (ValueError, "state of dtype int16 needs a scale", {"initial_state": STATES[:SLOTS].short()}),
]
OF_MAMBA3: list[Wrong] = [
    (ValueError, "state of dtype int16 needs a scale", {"state": STATES[:SLOTS].short()}),
    (ValueError, "state must not be empty", {"state": STATES[:0]}),
    (ValueError, "ssm must be contiguous", {"state": STATES[:SLOTS].mT.contiguous().mT}),
    (ValueError, "k must have a rank of 1 or more", {"Bstate": torch.ones(SLOTS, 0, HEADS, DSTATE)}),
    (ValueError, "B must have a number of", {"groups": 3}),
    (ValueError, "zproj needs z, got None", {"z": None}),
    (ValueError, "out must have shape (batch=3, R=4, H=4", {"out": torch.ones(3, HEADS, DIM), "outproj": None}),
    (ValueError, "out must have shape (batch=3, H=4, D=8)", {"out": torch.ones(3, 4, HEADS, DIM)}),
    (
        ValueError, "state_batch_indices must be given for a batch of 15 on 14 slots",
        {"batch": SLOTS + 1, "state_batch_indices": None, "out": None},
    ),
    (TypeError, "tile_D must be an int, got 64.0", {"tile_D": 64.0}),
    (TypeError, "tile_D must be an int, got tensor", {"tile_D": [5, 9, 8]}),
    (ValueError, "num_warps must be from 1 to 2147483647, got 0", {"num_warps": 0}),
    (TypeError, "update_kv_state must be True or False, got 1", {"update_kv_state": 1}),
    (
        ValueError, "state_out must not share memory with Bstate",
        {"state_out": PAGES[:, 1], "Bstate": PAGES[:, 1, :2].reshape(SLOTS, 4, HEADS, DSTATE)},
    ),
    *[
        (ValueError, "state_out must not share memory with state", {"state": state, "state_out": state_out, **others})
        for state, state_out, others in (
            (STATES[:SLOTS], STATES[:SLOTS], {}),  # another view
            (STATES[:SLOTS], STATES[1 : SLOTS + 1], {}),  # one slot further
            (STATES[1::2][:SLOTS], STATES[::3], {}),  # pages of another size
            (PAGES[:, 0], REACHING, {}),
            (REACHING, PAGES[:, 0], {}),
            (
                ONE_SLOT[:], ONE_SLOT[:],
                {"Bstate": torch.ones(1, 4, HEADS, DSTATE), "Xstate": torch.ones(1, HEADS, DIM)},
            ),
        )
    ],
]  # fmt: skip
OF_CONV1D: list[Wrong] = [
    (ValueError, "activation must be silu, swish, True, False or None, got 'gelu'", {"activation": "gelu"}),
    (TypeError, "window must be float16 or float32", {"conv_state": torch.ones(9, 6, 5).bfloat16()}),
]
OF_RULES: list[Wrong] = [
    (ValueError, "v must have a batch axis of 1 with cu_seqlens, got shape (2,", {"shape": (2, 3)}),
    (TypeError, "scale must be a number, got '1'", {"scale": "1"}),
]
OF_FLA: list[Wrong] = [
    *OF_RULES,
    (ValueError, "allow_neg_eigval must be left out: gated_delta_step has no such gate", {"allow_neg_eigval": True}),
    (ValueError, "head_first must be False, got True", {"head_first": True}),
    (
        ValueError,
        "state_v_first and transpose_state_layout must not both",
        {"v_first": True, "transpose_state_layout": True},
    ),
]
OF_VERIFYING: list[Wrong] = [
    (ValueError, "retrieve_parent_token needs disable_state_update=True", {"disable_state_update": False}),
    (TypeError, "disable_state_update must be True or False, got 1", {"disable_state_update": 1}),
    (TypeError, "cache_steps must be an int, got '4'", {"cache_steps": "4"}),
]
OF_DECODES: list[Wrong] = [
    (ValueError, "mixed_qkv must have 2 * H * 16 + 4 * 8 columns", {"mixed_qkv": torch.ones(3, 95)}),
    (TypeError, "scale must be a number, got None", {"scale": None}),
]
SPECIAL: dict[Door, list[Wrong]] = {
    SSM: [*OF_SELECTIVE, (ValueError, "state of dtype int16 needs a scale", {"state": STATES[:SLOTS].short()})],
    VLLM: [
        *OF_SELECTIVE,
        (ValueError, "num_accepted_tokens needs state_batch_indices, got", {**NO_INDICES, "num_accepted_tokens": [1]}),
        (ValueError, "dst_state_batch_indices needs state_batch_indices, got None", {"state_batch_indices": None}),
        (
            ValueError, "dst_state_batch_indices must have 3 rows and 3 columns or more, got shape (3,)",
            {"dst_state_batch_indices": [10, 3, 8]},
        ),
        (ValueError, "cu_seqlens must have shape (batch + 1), got (0,)", {"cu_seqlens": []}),
        (
            ValueError, "state_batch_indices must be given for a batch of 15 on 14 slots",
            {"cu_seqlens": [0] * 16, **NO_INDICES},
        ),
        (TypeError, "null_block_id must be an int, got None", {"null_block_id": None}),
        (ValueError, "cache_philox_rounds must be from 0 to 16, got 17", {"cache_philox_rounds": 17}),
        (TypeError, "enable_stochastic_rounding must be True or False, got 1", {"enable_stochastic_rounding": 1}),
        (ValueError, "rounding='stochastic' is not for float32", {"enable_stochastic_rounding": True}),
    ],
    FLASHINFER: [
        *OF_SELECTIVE,
        (ValueError, "algorithm must be one of auto, ", {"algorithm": "fast"}),
        (ValueError, "backend must be one of auto, ", {"backend": "triton"}),
        (
            ValueError, "intermediate_states_buffer and dst_state_batch_indices must not both be given",
            {"dst_state_batch_indices": [10, 3, 8]},
        ),
        (ValueError, "intermediate_state_scales needs intermediate_states_buffer, got None", {BUFFER: None}),
        (ValueError, "rand_seed and state_scale must not both be given", {"rand_seed": SEED}),
        (
            ValueError, "rand_seed is for a state of float16, got float32",
            {"rand_seed": SEED, "state_dtype": torch.float32},
        ),
        (
            ValueError, "philox_rounds must be from 1 to 16, got 0",
            {"rand_seed": SEED, "state_dtype": torch.float16, "philox_rounds": 0},
        ),
        *[
            (RuntimeError, f"{name} must be float32, as dt is, got float16", {name: torch.ones(HEADS, DIM).half()})
            for name in ("D", "dt_bias")
        ],
        *[
            (RuntimeError, f"{name} must be int32, as state_batch_indices is, got", {"buffer": buffer, name: INT64})
            for name, buffer in (("dst_state_batch_indices", False), ("intermediate_state_indices", True))
        ],
        (ValueError, "state_scale must be given where state is int16, got None", {"state_scale": None}),
        (
            ValueError, "intermediate_state_scales must be given where intermediate_states_buffer is int16, got None",
            {"intermediate_state_scales": None},
        ),
        (
            ValueError, "state_batch_indices must have shape (batch, n), got (3,)", {"num_accepted_tokens": [1, 1, 1]},
        ),
        (
            TypeError, "state_batch_indices must be a tensor, got NoneType",
            {"num_accepted_tokens": [1, 1, 1], "state_batch_indices": None},
        ),
        (
            ValueError, "dst_state_batch_indices must have 3 rows and 3 columns or more, got shape (3, 2)",
            {"buffer": False, "dst_state_batch_indices": [[10, 11], [3, 9], [8, 1]]},
        ),
        (ValueError, "cache_steps must be from 1 to ", {"cu_seqlens": [0, 1, 2, 3]}),
        (TypeError, "pad_slot_id must be an int, got None", {"pad_slot_id": None}),
        (TypeError, "disable_state_update must be True or False, got 0", {"disable_state_update": 0}),
    ],
    DECODING: [
        *OF_DELTA,
        (ValueError, "backend must be one of auto, ", {"backend": "triton"}),
        (TypeError, "disable_state_update must be True or False, 1 or 0, got None", {"disable_state_update": None}),
        *[
            (ValueError, f"{name} is for several tokens per row, got (3, 1, 4, 8)", {"tokens": 1, **one})
            for name, one in ((BUFFER, {"buffer": (3, 0)}), ("disable_state_update", {"disable_state_update": True}))
        ],
        (ValueError, "state and initial_state must not both be given", {"state": STATES[:3]}),
        (ValueError, "state or initial_state must be given, got None for both", NO_POOL),
        (
            ValueError, "initial_state_indices needs initial_state, got None",
            {"initial_state": None, "state": STATES[:3]},
        ),
        (
            ValueError, "output_state_indices needs initial_state, got None",
            {"initial_state": None, "initial_state_indices": None, "state": STATES[:3]},
        ),
    ],
    SEVERAL: [
        *OF_DELTA,
        (ValueError, "intermediate_states_buffer and ssm_state_indices must not both be given", {"every": EVERY}),
        (TypeError, "disable_state_update must be True or False, 1 or 0, got 2", {"disable_state_update": 2}),
        (ValueError, "cache_replayssm must be left out: there is no ring to write", {"cache_replayssm": True}),
        (
            ValueError, "output_state_indices must have shape (B=3), got (2,)",
            {"output_state_indices": HERE[:2], "disable_state_update": True},
        ),
        (
            TypeError, "intermediate_states_buffer must be float32 or bfloat16 or float16, got int16",
            {BUFFER: torch.ones(3, 3, HEADS, DIM, DSTATE).short()},
        ),
        (ValueError, "snapshots must have room for 3 tokens", {BUFFER: torch.ones(3, 2, HEADS, DIM, DSTATE)}),
    ],
    MAMBA3: OF_MAMBA3,
    CONV: [*OF_CONV1D, (ValueError, "window must have 3 entries or more", {"length": 2})],
    VLLM_CONV: [
        *OF_CONV1D,
        (TypeError, "max_query_len must be an int, got None", {"max_query_len": None}),
        (ValueError, "conv_state_indices must be given with query_start_loc", {"conv_state_indices": None}),
        (TypeError, "null_block_id must be an int, got None", {"null_block_id": None}),
        (ValueError, "window must have 5 entries or more to roll back 3 tokens, got 4", {"length": 4}),
    ],
    FLA_RULE: [
        *OF_FLA,
        (ValueError, "gv must be left out: gated_delta_step has no such gate", {"gv": torch.ones(3)}),
        (ValueError, "g and gk must not both be given", {"gk": torch.ones(3)}),
        (TypeError, "A_log must be a tensor, got NoneType", {"A_log": None}),
    ],
    FLA_KDA: [*OF_FLA, (ValueError, "lower_bound must be left out", {"lower_bound": -5.0})],
    VLLM_RULE: [
        *OF_RULES,
        (ValueError, "beta must be 1.0, got 2.0", {"beta": 2.0}),
        (ValueError, "threshold must be 20.0, got 10", {"threshold": 10}),
        (ValueError, "inplace_final_state=False is for rows of equal length", {"inplace_final_state": False}),
        (TypeError, "ssm_state_indices must be a tensor, got NoneType", {"ssm_state_indices": None}),
    ],
    VLLM_KDA: [
        *OF_RULES,
        (TypeError, "beta must be a tensor, got NoneType", {"beta": None}),
        (ValueError, "num_accepted_tokens must be left out", {"num_accepted_tokens": [1, 1, 1]}),
    ],
    VLLM_DECAYS: OF_RULES,
    VLLM_RAW_KDA: [
        (TypeError, "lower_bound must be a number, got '1'", {"lower_bound": "1"}),
        (TypeError, "ssm_state_indices must be a tensor, got NoneType", {"ssm_state_indices": None}),
    ],
    VLLM_RAW_DECODE: [
        (ValueError, "mixed_qkv must have shape (B, qkv_dim=160), got (3, 159)", {"mixed_qkv": torch.ones(3, 159)}),
        (TypeError, "scale must be a number, got '1'", {"scale": "1"}),
    ],
    SGLANG_RULE: [
        *OF_RULES[1:], *OF_VERIFYING,
        (ValueError, "softplus_beta must be 1.0, got 0.5", {"softplus_beta": 0.5}),
        (ValueError, "lower_bound must be left out", {"lower_bound": -5.0}),
        (ValueError, "cache_ring must be left out", {"cache_ring": True}),
        (ValueError, "match_cutedsl_decode must be left out", {"match_cutedsl_decode": True}),
    ],
    SGLANG_UPDATE: [
        *OF_RULES, *OF_VERIFYING,
        (TypeError, "initial_state_source must be a tensor, got NoneType", {"initial_state_source": None}),
    ],
    VLLM_DECODE: OF_DECODES,
    SGLANG_KDA: [*OF_DECODES, (ValueError, "lower_bound must be left out", {"lower_bound": -5.0})],
    SGLANG_CONV: [
        *OF_CONV1D,
        (TypeError, "pad_slot_id must be an int, got None", {"pad_slot_id": None}),
        (TypeError, "retrieve_next_sibling must be a tensor, got NoneType", {"retrieve_next_sibling": None}),
        (ValueError, "conv_state must have shape (slots, dim, 3), got (9, 6, 4); SGLang's", {**ONE_TOKEN, "length": 4}),
        (ValueError, "snapshots must not overlap itself", {"sliding": True}),
    ],
    SGLANG_STATE: [
        *OF_SELECTIVE[1:], *OF_VERIFYING,
        (TypeError, "pad_slot_id must be an int, got None", {"pad_slot_id": None}),
        (ValueError, "enable_stochastic_rounding is for a state of float16", {"enable_stochastic_rounding": True}),
    ],
}  # fmt: skip
LIKE_OTHERS = {FLA_KDA, VLLM_DECAYS, VLLM_KDA, SGLANG_UPDATE, SGLANG_KDA}  # whose tensors go the way of another door's
TENSORS = [
    (door, call, name)
    for door in SPECIAL
    if door not in LIKE_OTHERS
    for call, (right, _) in door.right.items()
    for name, value in door.arguments(right).items()
    if isinstance(value, Tensor)
]


@doors_and("call name", TENSORS)
def test_what_is_no_such_tensor_is_refused(door: Door, call: str, name: str) -> None:
    right, allowed = door.right[call]
    arguments = door.arguments(right)
    every = "|".join([*inspect.signature(door.function).parameters, *WORDS.values()])
    for what, value, by_name in wrong_forms(door, name, arguments[name]):
        changed = {**copied(arguments), name: value}
        if what in allowed.get(name, "").split(", "):
            door.function(**changed)
        else:
            named = f"{name}|{WORDS.get(name, name)}" if by_name else every
            refuses(door, changed, ERRORS, rf"^(?=.*\b({named})\b)\w+( or \w+)? (must|is|are|has) ")


def test_every_door_is_called_with_every_tensor_it_takes() -> None:
    for door in SPECIAL.keys() - LIKE_OTHERS:
        given = {name for of, _, name in TENSORS if of is door}
        taken = inspect.signature(door.function).parameters.values()
        assert given == {parameter.name for parameter in taken if "Tensor" in str(parameter.annotation)}


REFUSALS = [
    pytest.param(door, call, *wrong, id=f"{door.name}-{call}-{wrong[1]}")
    for door, table in SPECIAL.items()
    for call in (door.right if door is MAMBA3 else [next(iter(door.right))])
    for wrong in table
]


@pytest.mark.parametrize(("door", "call", "error", "message", "change"), REFUSALS)
def test_what_does_not_fit_is_refused(
    door: Door, call: str, error: type[Exception], message: str, change: Call
) -> None:
    right, _ = door.right[call]
    refuses(door, door.arguments({**right, **change}), error, "^" + re.escape(message))
