"""Replay behind other libraries' signatures: wrong calls are refused by name, and steps in a row are the recurrence."""

from typing import Any

import pytest
import torch
from peer_calls import CPU, Door
from peer_replay import BUFFERED, CHECKPOINTING, LENGTH, TRACKED, replay_arguments
from test_compat_refusals import refuses

import flashstate
from flashstate import Ring
from flashstate.compat import vllm

RIGHT = {CHECKPOINTING: "3 tokens", TRACKED: "one token", BUFFERED: "in place"}
EVERY: list[tuple[str, Any]] = [  # what a message starts with, and arguments, or what becomes of them
    ("x_cache must be a tensor, got NoneType", lambda a: {"x_cache": None}),
    ("x_cache must have shape (slots=14, heads=4, length, dim=8), got", lambda a: {"x_cache": a["x_cache"][:, :2]}),
    ("x_cache must be contiguous within a head", lambda a: {"x_cache": a["x_cache"].mT.contiguous().mT}),
    ("B_cache must have shape (slots=14, groups, length=7, dstate=16)", lambda a: {"B_cache": a["B_cache"][:, :, 1:]}),
    ("dt_cache must be float32, got bfloat16", lambda a: {"dt_cache": a["dt_cache"].bfloat16()}),
    ("x must have the dtype of ring.x, float32, got bfloat16", lambda a: {"x": a["x"].bfloat16()}),
    ("dt must have one value per head", lambda a: {"dt": a["dt"].clone()}),
    ("A must have one value per head", lambda a: {"A": a["A"].clone()}),
    ("out must", lambda a: {"out": a["out"][..., :4]}),
]
OF_RINGS: list[tuple[str, Any]] = [
    ("state must", lambda a: {"state": a["state"][0]}),
    ("ring_start must be int32, got int64", lambda a: {"ring_start": a["ring_start"].long()}),
    ("ring_start and prev_num_accepted_tokens must be two", lambda a: {"ring_start": a["prev_num_accepted_tokens"]}),
    ("max_seqlen is for packed tokens", {"max_seqlen": 3}),
    ("max_seqlen must be given with cu_seqlens", {"cu_seqlens": torch.tensor([0, 1])}),
]
WRONG: dict[Door, list[tuple[str, Any]]] = {
    CHECKPOINTING: [
        *OF_RINGS,
        ("x_cache must have 8 to 68 rows, for a window beside 4 tokens", {"tokens": (3, 4)}),
        ("algorithm must be one of auto, monolith, two-kernel, got 'fast'", {"algorithm": "fast"}),
        ("algorithm 'two-kernel' needs cb_scaled, cumAdt_vec, cb_old, got None", {"algorithm": "two-kernel"}),
        ("cb_scaled, cumAdt_vec, cb_old must be given together, got cb_old alone", {"cb_old": torch.ones(1)}),
        ("state_scale must be given where state is int8, got None", lambda a: {"state": a["state"].to(torch.int8)}),
        ("rand_seed must be one int64 number", {"rand_seed": torch.ones(2)}),
        ("philox_rounds must be from 1 to 16, got 0", {"rand_seed": torch.tensor([3]), "philox_rounds": 0}),
        ("state_batch_indices must have shape (batch=3)", {"state_batch_indices": [1, 2]}),
        ("pad_slot_id must be an int, got None", {"pad_slot_id": None}),
        (
            "x must have shape (one=1, tokens, heads=4, dim=8), got (3, 3, 4, 8)",
            {"cu_seqlens": torch.tensor([0, 1]), "max_seqlen": 3},
        ),
    ],
    TRACKED: [
        *OF_RINGS,
        ("logical_window must be 6, the 7 rows of x_cache without 1 of new tokens, got 5", {"logical_window": 5}),
        ("update_trackers is for one token per row, got 3", {"tokens": (3, 3)}),
        ("update_trackers must be True or False, got 1", {"update_trackers": 1}),
    ],
    BUFFERED: [
        ("x_cache must have shape (slots, heads, max_cache_len=9, dim)", {"max_cache_len": 9}),
        ("write_pos must be a tensor, got NoneType", lambda a: {"write_pos": None}),
        ("write_pos must have 3 entries or more", lambda a: {"write_pos": a["write_pos"][:2]}),
        ("is_flush must be bool or int8, got int64", lambda a: {"is_flush": a["is_flush"].long()}),
        ("max_cache_len must be from 1 to 64, got 65", {"max_cache_len": 65}),
    ],
}  # fmt: skip
ALL_WRONG = [(door, *wrong) for door, table in WRONG.items() for wrong in (*EVERY, *table)]


@pytest.mark.parametrize(("door", "message", "change"), ALL_WRONG, ids=[f"{d.name}-{m}" for d, m, _ in ALL_WRONG])
def test_wrong_calls_are_refused_by_name(door: Door, message: str, change: Any) -> None:
    right, made = door.calls[RIGHT[door]], not callable(change)
    given = door.arguments({**right, **change} if made else right)
    given |= {} if made else change(given)
    refuses(door, given, (TypeError, ValueError), "^" + "".join(f"[{c}]" if c in "()." else c for c in message))


def test_a_buffer_is_filled_and_flushed_as_vllm_counts() -> None:
    """Fifteen tokens of three rows, one after the other: outputs have the bytes of selective_state_update, and so has
    the state wherever a buffer is flushed, because nothing is rounded in between."""
    stepped, buffered = BUFFERED.arguments("in place"), BUFFERED.arguments("in place")
    drawn = {name: buffered[name] for name in ("x", "B")}
    for name in ("x_cache", "B_cache", "dt_cache", "max_cache_len", "bc_pre", "write_pos", "is_flush"):
        del stepped[name]
    for t in range(2 * LENGTH + 1):
        token = {name: tensor.roll(t, 0) for name, tensor in drawn.items()}
        at = torch.full((3,), t % LENGTH, dtype=torch.int32)
        buffered |= {**token, "write_pos": at, "is_flush": (at == LENGTH - 1).to(torch.int8)}
        y = vllm.selective_state_update_replayssm_output_only(**buffered)
        assert torch.equal(y, vllm.selective_state_update(**{**stepped, **token}))
        if t % LENGTH == LENGTH - 1:
            assert torch.equal(buffered["state"], stepped["state"])


def test_padding_rows_of_an_output_that_was_not_given_are_zero() -> None:
    given = BUFFERED.arguments("a table, the null block")
    y = BUFFERED.function(**{**given, "out": None})
    assert y.shape == given["x"].shape
    assert y.flatten(1).any(1).tolist() == [True, False, True]


def test_debug_finds_a_ring_as_long_as_its_window_that_was_not_folded_in_time() -> None:
    given = replay_arguments(CPU, tokens=(2,), gate=False)
    start, count = torch.zeros(2, 14, dtype=torch.int32)
    ring = Ring(given["x_cache"], given["B_cache"], given["dt_cache"], start, count, LENGTH, folds_by_hand=True)
    tokens = {name: given[name] for name in ("x", "dt", "B", "C", "D", "A")}
    assert ring.longest_call == LENGTH
    with flashstate.debug():
        count[:2] = LENGTH - 1
        flashstate.mamba2_replay(given["state"], ring, **tokens)
        count[1] = LENGTH
        with pytest.raises(ValueError, match=r"ring.count at most 6, as .* in slot 1 they are 0 and 7"):
            flashstate.mamba2_replay(given["state"], ring, **tokens)
