"""Wrong calls of the doors in flashstate/compat are refused by name and change nothing."""

from __future__ import annotations

import pytest
import torch
from models_of_peers import Arguments
from peer_calls import (
    BUFFERS,
    CPU,
    DIM,
    DSTATE,
    HEADS,
    SLOTS,
    Door,
    copied,
    make_arguments,
    make_delta_arguments,
    make_mamba3_arguments,
)

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


TOKENS = 3  # of calls of several
STATES, TABLE = torch.ones(SLOTS, HEADS, DIM, DSTATE), torch.arange(9, dtype=torch.int32).reshape(3, TOKENS)
OF_DELTA_RULES: Wrong = {
    "q that is a list": ({"q": [1.0]}, TypeError, "^q must be a tensor, got list"),
    "q without a token axis": ({"q": torch.ones(3, 2, DSTATE)}, ValueError, r"^q must have shape \(B, T, H, K\)"),
    "k of integers": ({"k": torch.ones(3, TOKENS, 2, DSTATE).int()}, TypeError, "^k must be float32 or .* got int32"),
    "k of another size": ({"k": torch.ones(3, TOKENS, 2, 15)}, ValueError, r"^k must have shape .*, 2, 15\)"),
    "v without a token axis": ({"v": torch.ones(3, HEADS, DIM)}, ValueError, r"^v must have shape \(B, T, HV, V\)"),
    "v of other heads": ({"v": torch.ones(3, TOKENS, 6, DIM)}, ValueError, r"^v must have shape .* got \(3, ., 6, 8\)"),
    "three heads of q": (
        {"q": torch.ones(3, TOKENS, 3, DSTATE)}, ValueError, "^q must have a number of heads that divides the 4 value",
    ),
    "a per channel": (
        {"a": torch.ones(3, TOKENS, HEADS, DSTATE)}, ValueError, r"^a must have shape \(B, T, HV\), got .* 4, 16\)",
    ),
    "b of another shape": ({"b": torch.ones(3, TOKENS, 2)}, ValueError, r"^b must have shape .* got \(3, ., 2\)"),
    "no A_log": ({"A_log": None}, TypeError, "^A_log must be a tensor, got NoneType"),
    "A_log for other heads": ({"A_log": torch.ones(3)}, ValueError, r"^A_log must have shape \(HV=4\), got \(3,\)"),
    "no dt_bias": ({"dt_bias": None}, TypeError, "^dt_bias must be a tensor, got NoneType"),
    "dt_bias per channel": (
        {"dt_bias": torch.ones(HEADS, DSTATE)}, ValueError, r"^dt_bias must have shape \(HV\), got \(4, 16\)",
    ),
    "a scale that is no number": ({"scale": "1"}, TypeError, "^scale must be a number, got '1'"),
    "use_qk_l2norm that is an int": ({"use_qk_l2norm": 1}, TypeError, "^qk_l2norm must be True or False, got 1"),
    "an output of another dtype": (
        {"output": torch.ones(3, TOKENS, HEADS, DIM).half()}, TypeError, "^out must be float32, got float16",
    ),
    "an output without a token axis": (
        {"output": torch.ones(3, HEADS, DIM)}, ValueError, r"^out must have shape .* got \(3, 4, 8\)",
    ),
    "no indices": (
        {"initial_state_indices": None}, TypeError, "^initial_state_indices must be a tensor, got NoneType",
    ),
    "16-bit indices": (
        {"initial_state_indices": ROWS.short()}, TypeError, "^initial_state_indices must be int32 or int64, got int16",
    ),
    "few indices": (
        {"initial_state_indices": ROWS[:2]}, ValueError, r"^initial_state_indices must have shape \(B=3\), got \(2,\)",
    ),
    "a table of indices": (
        {"initial_state_indices": MORE_ROWS}, ValueError, r"^initial_state_indices must have shape .* got \(3, 2\)",
    ),
    "many destinations": (
        {"output_state_indices": torch.arange(4)}, ValueError, r"^output_state_indices must have shape .* got \(4,\)",
    ),
    "destinations that are no numbers": (
        {"output_state_indices": torch.ones(3)}, TypeError, "^output_state_indices must be int32 or int64, got float32",
    ),
    "indices elsewhere": ({"initial_state_indices": ROWS.to("meta")}, ValueError, "^slots are on meta, but the state"),
    "a pool of integers": ({"initial_state": STATES.long()}, TypeError, "^state must be float32 or .* got int64"),
    "a pool that needs scales": ({"initial_state": STATES.short()}, ValueError, "^state of dtype int16 needs a scale"),
    "a pool of other heads": ({"initial_state": STATES[:, :2]}, ValueError, "^v must have shape .*HV=2"),
    "a pool with gaps in slots": (
        {"initial_state": STATES.repeat(1, 1, 1, 2)[..., ::2]}, ValueError, "^state must be contiguous within a slot",
    ),
}  # fmt: skip

OF_DECODING: Wrong = {
    "several tokens": (
        {name: value[:, [0, 0]] for name, value in make_delta_arguments(CPU).items() if name in "qkvab"},
        ValueError,
        r"^v must have one token per row, got \(3, 2, 4, 8\)",
    ),
    "no token": (
        {name: value[:, :0] for name, value in make_delta_arguments(CPU).items() if name in "qkvab"},
        ValueError,
        r"^v must have one token per row, got \(3, 0, 4, 8\)",
    ),
    "a state and a pool": ({"state": STATES[:3]}, ValueError, "^state and initial_state must not both be given"),
    "neither": (
        {"initial_state": None, "initial_state_indices": None}, ValueError, "^state or initial_state must be given",
    ),
    "indices without a pool": (
        {"initial_state": None, "state": STATES[:3]}, ValueError, "^initial_state_indices needs initial_state",
    ),
    "destinations without a pool": (
        {"initial_state": None, "initial_state_indices": None, "state": STATES[:3], "output_state_indices": ROWS},
        ValueError,
        "^output_state_indices needs initial_state, got None",
    ),
    "more states than rows": (
        {"initial_state": None, "initial_state_indices": None, "state": STATES},
        ValueError,
        r"^state must have 3 slots, as the batch has rows, got shape \(14, 4, 8, 16\)",
    ),
    "a state that is a list": (
        {"initial_state": None, "initial_state_indices": None, "state": [1.0]}, TypeError, "^state must be a tensor",
    ),
}  # fmt: skip

OF_SEVERAL_TOKENS: Wrong = {
    "a buffer and slots for every token": (
        {"intermediate_states_buffer": BUFFER, "ssm_state_indices": TABLE},
        ValueError,
        "^intermediate_states_buffer and ssm_state_indices must not both be given",
    ),
    "a pool that is a list": ({"initial_state": [1.0]}, TypeError, "^state must be a State or a tensor, got list"),
    "a flag that is an int": (
        {"disable_state_update": 0}, TypeError, "^disable_state_update must be True or False, got 0",
    ),
    "slots for few tokens": (
        {"ssm_state_indices": TABLE[:, :2]}, ValueError, r"^ssm_state_indices must have shape .*T=3\), got \(3, 2\)",
    ),
    "one slot for all tokens": (
        {"ssm_state_indices": ROWS}, ValueError, r"^ssm_state_indices must have shape \(B=3, T=3\), got \(3,\)",
    ),
    "slots that are no numbers": (
        {"ssm_state_indices": TABLE.float()}, TypeError, "^ssm_state_indices must be int32 or int64, got float32",
    ),
    "destinations of a disabled update": (
        {"output_state_indices": ROWS[:2], "disable_state_update": True},
        ValueError,
        r"^output_state_indices must have shape \(B=3\), got \(2,\)",
    ),
    "a buffer without steps": (
        {"intermediate_states_buffer": STATES}, ValueError, "^intermediate_states_buffer must have shape .*rows, steps",
    ),
    "a buffer of integers": (
        {"intermediate_states_buffer": BUFFER.short()}, TypeError, "^intermediate_states_buffer must be .* got int16",
    ),
    "a buffer of few rows": (
        {"intermediate_states_buffer": BUFFER[:2]}, ValueError, "^snapshots must have room for 3 rows",
    ),
    "a buffer of few steps": (
        {"intermediate_states_buffer": BUFFER[:, :2]}, ValueError, "^snapshots must have room for 3 tokens",
    ),
    "a buffer of other heads": (
        {"intermediate_states_buffer": BUFFER[:, :, :2]}, ValueError, r"^snapshots must be of states \(4, 8, 16\)",
    ),
    "a buffer with gaps in states": (
        {"intermediate_states_buffer": BUFFER.repeat(1, 1, 1, 1, 2)[..., ::2]}, ValueError, "^data must be contiguous",
    ),
}  # fmt: skip

DELTA_DOORS: dict[Door, Wrong] = {
    flashinfer.gated_delta_rule_decode_pretranspose: OF_DELTA_RULES | OF_DECODING,
    flashinfer.gated_delta_rule_mtp: OF_DELTA_RULES | OF_SEVERAL_TOKENS,
}
DELTA_REFUSALS = [
    pytest.param(door, *refusal, id=f"{door.__name__}: {what}")
    for door, refusals in DELTA_DOORS.items()
    for what, refusal in refusals.items()
]


@pytest.mark.parametrize(("door", "change", "error", "message"), DELTA_REFUSALS)
def test_wrong_arguments_of_delta_rules_are_refused_by_name_and_change_nothing(
    door: Door, change: Arguments, error: type[Exception], message: str
) -> None:
    several = door is flashinfer.gated_delta_rule_mtp
    arguments = make_delta_arguments(CPU, TOKENS if several else 1)
    arguments |= {"disable_state_update": False} if several else {"state": None}
    if not several:  # a token of what is there for several
        change = {name: t[:, :1] if is_for_tokens(t) else t for name, t in change.items()}
    arguments |= {"initial_state_indices": ROWS, **change}
    before = copied(arguments)
    with pytest.raises(error, match=message):
        door(**arguments)
    for name in BUFFERS:
        assert not isinstance(arguments.get(name), torch.Tensor) or torch.equal(arguments[name], before[name])


def is_for_tokens(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() >= 3 and value.shape[:2] == (3, TOKENS)


RANK = 4
STEPPED = make_mamba3_arguments(CPU, rank=RANK)  # of another call, with pools of its own
ONE_SLOT = STATES.as_strided((1, *STATES.shape[1:]), (0, *STATES.stride()[1:]))
SLOTS_IN_A_ROW, PAGES = STATES.repeat(3, 1, 1, 1), torch.ones(SLOTS, 2, HEADS, DIM, DSTATE)
OF_MAMBA3: Wrong = {
    "a state that is a list": ({"state": [1.0]}, TypeError, "^state must be a tensor, got list"),
    "a state without heads": ({"state": STATES[:, 0]}, ValueError, r"^state must have shape .* got \(14, 8, 16\)"),
    "a state of integers": ({"state": STATES.long()}, TypeError, "^state must be float32 or .* got int64"),
    "a state that needs scales": ({"state": STATES.short()}, ValueError, "^state of dtype int16 needs a scale"),
    "a transposed state": ({"state": torch.ones(SLOTS, HEADS, DSTATE, DIM).mT}, ValueError, "^ssm must be contiguous"),
    "a state with gaps in slots": (
        {"state": STATES.repeat(1, 1, 1, 2)[..., ::2]}, ValueError, "^state must be contiguous within a slot",
    ),
    "an empty state": ({"state": STATES[:0]}, ValueError, "^state must not be empty"),
    "no Bstate": ({"Bstate": None}, TypeError, "^k must be a tensor, got NoneType"),
    "Bstate of few slots": (
        {"Bstate": STEPPED["Bstate"][:3]}, ValueError, r"^k must have shape \(slots=14, .* got \(3, 4, 4, 16\)",
    ),
    "Bstate of no rank": ({"Bstate": STEPPED["Bstate"][:, :0]}, ValueError, "^k must have a rank of 1 or more"),
    "Bstate with gaps in slots": (
        {"Bstate": STEPPED["Bstate"].repeat(1, 2, 1, 1)[:, ::2]}, ValueError, "^k must be contiguous within a slot",
    ),
    "Bstate of integers": ({"Bstate": STEPPED["Bstate"].short()}, TypeError, "^k must be float32 or .* got int16"),
    "Xstate of another size": (
        {"Xstate": STEPPED["Xstate"][..., :7]}, ValueError, r"^v must have shape .* got \(14, 4, 7\)",
    ),
    "Xstate elsewhere": ({"Xstate": STEPPED["Xstate"].to("meta")}, ValueError, "^v is on meta"),
    "x that is a list": ({"x": [1.0]}, TypeError, "^x must be a tensor, got list"),
    "x of several tokens": (
        {"x": torch.ones(3, 2, HEADS, DIM)}, ValueError, r"^x must have shape \(batch, H=4, D=8\), got \(3, 2, 4, 8\)",
    ),
    "x of other heads": ({"x": torch.ones(3, 6, DIM)}, ValueError, r"^x must have shape .* got \(3, 6, 8\)"),
    "x of integers": ({"x": torch.ones(3, HEADS, DIM).int()}, TypeError, "^x must be float32 or .* got int32"),
    "no A": ({"A": None}, TypeError, "^A must be a tensor, got NoneType"),
    "A per head alone": ({"A": -torch.ones(HEADS)}, ValueError, r"^A must have shape \(batch, H\), got \(4,\)"),
    "dt of few rows": ({"dt": torch.ones(2, HEADS)}, ValueError, r"^dt must have .* got .*\(2, 4\)"),
    "dt of other heads": ({"dt": torch.ones(3, 2)}, ValueError, r"^dt must have shape .* got \(3, 2\)"),
    "trap elsewhere": (
        {"trap": torch.ones(3, HEADS, device="meta")}, ValueError, "^trap is on meta, but the state is on cpu",
    ),
    "B without ranks": (
        {"B": torch.ones(3, HEADS, DSTATE)}, ValueError, r"^B must have shape \(batch, R, G, N\), got \(3, 4, 16\)",
    ),
    "B of another rank": (
        {"B": torch.ones(3, 2, HEADS, DSTATE)}, ValueError, r"^B must have shape .*R=4, .* got \(3, 2, 4, 16\)",
    ),
    "three groups": (
        {name: torch.ones(3, RANK, 3, DSTATE) for name in "BC"}, ValueError, "^B must have a number of groups that div",
    ),
    "C of other groups": (
        {"C": torch.ones(3, RANK, 2, DSTATE)}, ValueError, r"^C must have shape .*G=4, .* got \(3, 4, 2, 16\)",
    ),
    "C of many rows": (
        {"C": torch.ones(5, RANK, HEADS, DSTATE)}, ValueError, r"^C must have .* got .*\(5, 4, 4, 16\)",
    ),
    "z of another shape": ({"z": torch.ones(3, HEADS, 7)}, ValueError, r"^z must have shape .* got \(3, 4, 7\)"),
    "zproj without z": ({"z": None}, ValueError, "^zproj needs z, got None"),
    "xproj with its heads first": (
        {"xproj": torch.ones(HEADS, 2, DIM)}, ValueError, r"^(Wx|xproj) must have shape \(R=4, .* got \(4, 2, 8\)",
    ),
    "zproj that is a list": ({"zproj": [1.0]}, TypeError, "^(Wz|zproj) must be a tensor, got list"),
    "outproj of another rank": (
        {"outproj": torch.ones(1, HEADS, DIM)}, ValueError, r"^(Wo|outproj) must have shape .* got \(1, 4, 8\)",
    ),
    "D per channel": ({"D": torch.ones(HEADS, DIM)}, ValueError, r"^D must have shape \(H=4\), got \(4, 8\)"),
    "out of another dtype": ({"out": torch.ones(3, HEADS, DIM).half()}, TypeError, "^out must be float32, got float16"),
    "out with ranks": (
        {"out": torch.ones(3, RANK, HEADS, DIM)}, ValueError, r"^out must have shape .* got \(3, 4, 4, 8\)",
    ),
    "out without ranks": (
        {"out": torch.ones(3, HEADS, DIM), "outproj": None}, ValueError, r"^out must have shape \(batch=3, R=4, H=4",
    ),
    "out of few rows": ({"out": torch.ones(2, HEADS, DIM)}, ValueError, r"^out must have .* got .*\(2, 4, 8\)"),
    "out with gaps": (
        {"out": torch.ones(3, HEADS, DIM, 2)[..., 0]}, ValueError, "^out must be contiguous along its last axis",
    ),
    "out that overlaps itself": (
        {"out": torch.ones(1, HEADS, DIM).expand(3, -1, -1)}, ValueError, "^out must not overlap itself",
    ),
    "16-bit indices": (
        {"state_batch_indices": ROWS.short()}, TypeError, "^state_batch_indices must be int32 or int64, got int16",
    ),
    "few indices": (
        {"state_batch_indices": ROWS[:2]}, ValueError, r"^state_batch_indices must have shape \(batch=3\), got \(2,\)",
    ),
    "a table of indices": (
        {"state_batch_indices": MORE_ROWS}, ValueError, r"^state_batch_indices must have shape .* got \(3, 2\)",
    ),
    "indices in a list": (
        {"state_batch_indices": [5, 9, 8]}, TypeError, "^state_batch_indices must be a tensor, got list",
    ),
    "indices elsewhere": ({"state_batch_indices": ROWS.to("meta")}, ValueError, "^state_batch_indices is on meta"),
    "more rows than slots": (
        {**{name: STEPPED[name][:2] for name in ("state", "Bstate", "Xstate")}, "state_batch_indices": None},
        ValueError,
        "^state_batch_indices must be given for a batch of 3 on 2 slots",
    ),
    "a tile that is no number": ({"tile_D": 64.0}, TypeError, "^tile_D must be an int, got 64.0"),
    "indices for a tile": ({"tile_D": ROWS}, TypeError, "^tile_D must be an int, got tensor"),
    "no warps": ({"num_warps": 0}, ValueError, "^num_warps must be from 1 to .* got 0"),
    "update_kv_state that is an int": (
        {"update_kv_state": 1}, TypeError, "^update_kv_state must be True or False, got 1",
    ),
    "a state_out that is a list": ({"state_out": [1.0]}, TypeError, "^state_out must be a tensor, got list"),
    "a state_out of few slots": (
        {"state_out": STATES[:3].clone()}, ValueError, r"^state_out must have shape \(slots=14, .* got \(3, 4, 8, 16\)",
    ),
    "a state_out of another dtype": (
        {"state_out": STATES.half()}, TypeError, "^state_out must be float32, got float16",
    ),
    "a state_out elsewhere": ({"state_out": STATES.to("meta")}, ValueError, "^state_out is on meta"),
    "a state_out with gaps in slots": (
        {"state_out": STATES.repeat(1, 1, 1, 2)[..., ::2]}, ValueError, "^state_out must be contiguous within a slot",
    ),
    "a state_out whose slots overlap": (
        {"state_out": STATES[:1].expand(SLOTS, -1, -1, -1)}, ValueError, "^state_out has overlapping slots",
    ),
    "another view of state for state_out": (
        {"state": STATES[:], "state_out": STATES[:]}, ValueError, "^state_out must not share memory with state$",
    ),
    "a state_out one slot further than state": (
        {"state": SLOTS_IN_A_ROW[:SLOTS], "state_out": SLOTS_IN_A_ROW[1 : SLOTS + 1]},
        ValueError,
        "^state_out must not share memory with state$",
    ),
    "a state_out in pages of another size": (
        {"state": SLOTS_IN_A_ROW[1::2][:SLOTS], "state_out": SLOTS_IN_A_ROW[::3]},
        ValueError,
        "^state_out must not share memory with state$",
    ),
    "a state_out that reaches into the pages of state": (
        {"state": PAGES[:, 0], "state_out": PAGES.flatten(1)[:, 7 : 7 + STATES[0].numel()].view(STATES.shape)},
        ValueError,
        "^state_out must not share memory with state$",
    ),
    "a state that reaches into the pages of state_out": (
        {"state": PAGES.flatten(1)[:, 7 : 7 + STATES[0].numel()].view(STATES.shape), "state_out": PAGES[:, 0]},
        ValueError,
        "^state_out must not share memory with state$",
    ),
    "a state_out of one slot that is state": (
        {
            **{name: STEPPED[name][:1] for name in ("Bstate", "Xstate")},
            "state": ONE_SLOT[:], "state_out": ONE_SLOT[:],
        },
        ValueError,
        "^state_out must not share memory with state$",
    ),
    "a state_out in the memory of Bstate": (
        {"state_out": PAGES[:, 1], "Bstate": PAGES[:, 1, :2].reshape(SLOTS, RANK, HEADS, DSTATE)},
        ValueError,
        "^state_out must not share memory with Bstate$",
    ),
}  # fmt: skip


@pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "elsewhere"])
@pytest.mark.parametrize(("change", "error", "message"), OF_MAMBA3.values(), ids=OF_MAMBA3)
def test_wrong_arguments_of_mamba3_step_fn_are_refused_by_name_and_change_nothing(
    change: Arguments, error: type[Exception], message: str, elsewhere: bool
) -> None:
    arguments = {**make_mamba3_arguments(CPU, rank=RANK), "state_batch_indices": ROWS, "update_kv_state": True}
    arguments |= {"state_out": torch.full_like(arguments["state"], 7.0)} if elsewhere else {}
    arguments |= {"out": torch.full_like(arguments["x"], 5.0), **change}
    before = copied(arguments)
    with pytest.raises(error, match=message):
        mamba_ssm.mamba3_step_fn(**arguments)
    for name in ("state", "Bstate", "Xstate", "state_out", "out"):
        tensor = arguments.get(name)
        assert not isinstance(tensor, torch.Tensor) or tensor.is_meta or torch.equal(tensor, before[name])
