"""Wrong calls of the doors in flashstate/compat are refused by name and change nothing."""

from __future__ import annotations

import pytest
import torch
from models_of_peers import Arguments
from peer_calls import CPU, DIM, DSTATE, HEADS, SLOTS, Door, copied, make_arguments

from flashstate.compat import flashinfer, mamba_ssm, vllm

ROWS, MORE_ROWS = torch.tensor([5, 9, 8], dtype=torch.int32), torch.tensor([[5, 1], [9, 3], [8, 6]], dtype=torch.int32)
ONES = torch.ones(3, dtype=torch.int32)
BUFFER = torch.ones(SLOTS, 4, HEADS, DIM, DSTATE)
HALF, SHORT = BUFFER[:, 0].half(), BUFFER[:, 0].short()
Wrong = dict[str, tuple[Arguments, type[Exception], str]]  # what to change in a call that is right, and what it raises

OF_ALL: Wrong = {
    "x that is a list": ({"x": [1.0]}, TypeError, "^x must be a tensor, got list"),
    "x without a batch": ({"x": torch.ones(8)}, ValueError, r"^x must have 2 axes or more, got shape \(8,\)"),
    "no A": ({"A": None}, TypeError, "^A must be a tensor, got NoneType"),
    "D per head": ({"D": torch.ones(4)}, ValueError, r"^D must have shape .* got \(1, 4\)"),
    "z of another shape": ({"z": torch.ones(3, 4, 7)}, ValueError, r"^z must have shape .* got \(3, 4, 7\)"),
    "a transposed state": (
        {"state": torch.ones(14, 4, 16, 8).mT}, ValueError, "^state must be contiguous within a slot",
    ),
    "a state of int64": ({"state": BUFFER[:, 0].long()}, TypeError, "^state must be float32 or .* got int64"),
    "16-bit indices": (
        {"state_batch_indices": ROWS.short()}, TypeError, "^state_batch_indices must be int32 or int64, got int16",
    ),
    "few indices": ({"state_batch_indices": ROWS[:2]}, ValueError, r"^state_batch_indices must have .* got .*\(2,"),
    "indices of rank 3": (
        {"state_batch_indices": ROWS[:, None, None]}, ValueError, r"^state_batch_indices must have .* got \(3, 1, 1\)",
    ),
    "dt_softplus that is an int": ({"dt_softplus": 1}, TypeError, "^dt_softplus must be True or False, got 1"),
}  # fmt: skip

OF_MAMBA_SSM: Wrong = {
    "an int16 state": ({"state": SHORT}, ValueError, "^state of dtype int16 needs a scale"),
    "a table of indices": (
        {"state_batch_indices": MORE_ROWS}, ValueError, r"^state_batch_indices must have shape .* got \(3, 2\)",
    ),
}  # fmt: skip

OF_VLLM: Wrong = {
    "counts without indices": (
        {"state_batch_indices": None, "num_accepted_tokens": ONES},
        ValueError,
        "^num_accepted_tokens needs state_batch_indices, got None",
    ),
    "destinations without indices": (
        {"state_batch_indices": None, "dst_state_batch_indices": ROWS},
        ValueError,
        "^dst_state_batch_indices needs state_batch_indices, got None",
    ),
    "few destinations": (
        {
            "state_batch_indices": MORE_ROWS, "num_accepted_tokens": ONES, "dst_state_batch_indices": ROWS,
            "cu_seqlens": torch.tensor([0, 1, 2, 3]),
        },
        ValueError,
        r"^dst_state_batch_indices must have 3 rows and 2 columns or more, got shape \(3, 1\)",
    ),
    "few counts": (
        {"state_batch_indices": MORE_ROWS, "num_accepted_tokens": ONES[:2]},
        ValueError,
        r"^num_accepted_tokens must have 3 entries or more, got shape \(2,\)",
    ),
    "no boundaries": ({"cu_seqlens": ONES[:0]}, ValueError, r"^cu_seqlens must have shape \(batch \+ 1\), got \(0,\)"),
    "boundaries in a list": ({"cu_seqlens": [0, 1]}, TypeError, "^cu_seqlens must be a tensor, got list"),
    "more rows than slots": (
        {"cu_seqlens": torch.zeros(16, dtype=torch.int32), "state_batch_indices": None},
        ValueError,
        "^state_batch_indices must be given for a batch of 15 on 14 slots",
    ),
    "a null block that is no number": ({"null_block_id": None}, TypeError, "^null_block_id must be an int, got None"),
    "17 rounds": ({"cache_philox_rounds": 17}, ValueError, "^cache_philox_rounds must be from 0 to 16, got 17"),
    "a flag that is an int": (
        {"enable_stochastic_rounding": 1}, TypeError, "^enable_stochastic_rounding must be True or False, got 1",
    ),
    "stochastic float32": (
        {"enable_stochastic_rounding": True}, ValueError, "^rounding='stochastic' is not for float32",
    ),
    "out of another dtype": ({"out": torch.ones(3, 4, 8).half()}, TypeError, "^out must be float32, got float16"),
}  # fmt: skip

OF_FLASHINFER: Wrong = {
    "an unknown algorithm": ({"algorithm": "fast"}, ValueError, "^algorithm must be one of auto, .* got 'fast'"),
    "an unknown backend": ({"backend": "triton"}, ValueError, "^backend must be one of auto, .* got 'triton'"),
    "a buffer and destinations": (
        {"intermediate_states_buffer": BUFFER, "dst_state_batch_indices": ROWS.long()},
        ValueError,
        "^intermediate_states_buffer and dst_state_batch_indices must not both be given",
    ),
    "scales without a buffer": (
        {"intermediate_state_scales": BUFFER[..., 0]},
        ValueError,
        "^intermediate_state_scales needs intermediate_states_buffer, got None",
    ),
    "a seed and scales": (
        {"rand_seed": torch.tensor([1]), "state_scale": BUFFER[:, 0, ..., 0], "state": SHORT},
        ValueError,
        "^rand_seed and state_scale must not both be given",
    ),
    "a seed for float32": (
        {"rand_seed": torch.tensor([1])}, ValueError, "^rand_seed is for a state of float16, got float32",
    ),
    "a seed that is an int": (
        {"rand_seed": 1, "state": HALF}, TypeError, "^rand_seed must be a tensor, got int",
    ),
    "two seeds": (
        {"rand_seed": torch.tensor([1, 2]), "state": HALF},
        ValueError,
        r"^rand_seed must be one int64 number, got int64 of shape \(2,\)",
    ),
    "a 32-bit seed": (
        {"rand_seed": torch.tensor([1]).int(), "state": HALF},
        ValueError,
        r"^rand_seed must be one int64 number, got int32 of shape \(1,\)",
    ),
    "a seed elsewhere": (
        {"rand_seed": torch.tensor([1], device="meta"), "state": HALF},
        ValueError,
        "^rand_seed is on meta, but the state is on cpu",
    ),
    "no rounds": (
        {"rand_seed": torch.tensor([1]), "state": HALF, "philox_rounds": 0},
        ValueError,
        "^philox_rounds must be from 1 to 16, got 0",
    ),
    "D in another dtype": (
        {"D": torch.ones(HEADS, DIM).half()}, RuntimeError, "^D must be float32, as dt is, got float16",
    ),
    "dt_bias in another dtype": (
        {"dt_bias": torch.ones(HEADS, DIM).half()}, RuntimeError, "^dt_bias must be float32, as dt is, got float16",
    ),
    "destinations in another dtype": (
        {"dst_state_batch_indices": ROWS.long()},
        RuntimeError,
        "^dst_state_batch_indices must be int32, as state_batch_indices is, got int64",
    ),
    "buffer rows in another dtype": (
        {"intermediate_states_buffer": BUFFER, "intermediate_state_indices": ROWS.long()},
        RuntimeError,
        "^intermediate_state_indices must be int32, as state_batch_indices is, got int64",
    ),
    "int16 without scales": (
        {"state": SHORT}, ValueError, "^state_scale must be given where state is int16, got None",
    ),
    "an int16 buffer without scales": (
        {"intermediate_states_buffer": BUFFER.short()},
        ValueError,
        "^intermediate_state_scales must be given where intermediate_states_buffer is int16, got None",
    ),
    "counts for a list": (
        {"num_accepted_tokens": ONES},
        ValueError,
        r"^state_batch_indices must have shape \(batch, n\), got \(3,\)",
    ),
    "counts without indices": (
        {"num_accepted_tokens": ONES, "state_batch_indices": None},
        TypeError,
        "^state_batch_indices must be a tensor, got NoneType",
    ),
    "few destinations": (
        {"dst_state_batch_indices": MORE_ROWS, "x": torch.ones(3, 3, HEADS, DIM)},
        ValueError,
        r"^dst_state_batch_indices must have 3 rows and 3 columns or more, got shape \(3, 2\)",
    ),
    "packed tokens without cache_steps": (
        {"cu_seqlens": torch.tensor([0, 1, 2, 3])}, ValueError, "^cache_steps must be from 1 to .* got 0",
    ),
    "a pad that is no number": ({"pad_slot_id": None}, TypeError, "^pad_slot_id must be an int, got None"),
    "a flag that is an int": (
        {"disable_state_update": 0}, TypeError, "^disable_state_update must be True or False, got 0",
    ),
}  # fmt: skip

DOORS: dict[Door, Wrong] = {
    mamba_ssm.selective_state_update: OF_ALL | OF_MAMBA_SSM,
    vllm.selective_state_update: OF_ALL | OF_VLLM,
    flashinfer.selective_state_update: OF_ALL | OF_FLASHINFER,
}
REFUSALS = [
    pytest.param(door, *refusal, id=f"{door.__module__.rpartition('.')[2]}: {what}")
    for door, refusals in DOORS.items()
    for what, refusal in refusals.items()
]


@pytest.mark.parametrize(("door", "change", "error", "message"), REFUSALS)
def test_wrong_arguments_are_refused_by_name_and_change_nothing(
    door: Door, change: Arguments, error: type[Exception], message: str
) -> None:
    arguments = {**make_arguments(CPU), "state_batch_indices": ROWS, **change}
    before = copied(arguments)
    with pytest.raises(error, match=message):
        door(**arguments)
    assert torch.equal(arguments["state"], before["state"])
