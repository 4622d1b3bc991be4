"""Adapters beside their outputs and states in place: trees, states of every token, layouts, several tokens at once."""

from functools import partial
from typing import Any

import pytest
import torch
from launchers import Launcher, launcher
from models_of_conv1d import parents_of
from peer_calls import CPU, SLOTS, Adapter, copied, equal_bytes
from peer_conv1d import SGLANG_CONV, TREE
from peer_replay import BUFFERED, LENGTH, replay_arguments
from peer_rules import DECODING, SEVERAL, SGLANG_RULE, VLLM_DECAYS, VLLM_RULE
from peer_selective import FLASHINFER, VLLM
from test_compat_contracts import signature_of

import flashstate
from flashstate import Ring
from flashstate.compat import vllm
from flashstate.compat.flashinfer import gated_delta_rule_decode
from flashstate.compat.trees import parents_from

__all__ = ["launcher"]  # a fixture


def test_parents_are_found_of_first_children_and_next_siblings() -> None:
    """In rows of siblings of every length, and with 0 for the root and for what nothing names."""
    random = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 5, 9, 17):
        parents = [[int(torch.randint(t, (), generator=random)) for t in range(1, tokens)] for _ in range(4)]
        tables = torch.full((2, 4, tokens), -1)
        for b, row in enumerate(parents):
            last: dict[int, int] = {}  # of each parent, the child before
            for t, parent in enumerate(row, 1):
                tables[1 if parent in last else 0, b, last.get(parent, parent)] = t
                last[parent] = t
        assert parents_from(*tables).tolist() == [[0, *row] for row in parents]


def test_a_convolution_writes_the_parents_of_its_tree_and_its_output_lies_in_memory_as_x_does() -> None:
    arguments = SGLANG_CONV.arguments("a tree, channels last")
    arguments["x"] = arguments["x"].mT.contiguous().mT
    assert SGLANG_CONV.function(**arguments).stride() == arguments["x"].stride()
    written = arguments["retrieve_parent_token"]
    tables = {name: torch.tensor(table) for name, table in TREE.items()}
    assert written.tolist() == [[0, *parents_of(tables, b)[1:]] for b in range(len(written))]


def test_states_of_every_token_are_new_where_they_do_not_stay_in_place() -> None:
    arguments = VLLM_RULE.arguments("several tokens")
    before, in_place = copied(arguments), copied(arguments)
    y, states = VLLM_RULE.function(**arguments, inplace_final_state=False)
    assert equal_bytes(arguments["initial_state"], before["initial_state"])
    assert equal_bytes(y, VLLM_RULE.function(**in_place)[0])
    slots = arguments["ssm_state_indices"].long()
    assert equal_bytes(states.unflatten(0, y.shape[:2])[:, -1], in_place["initial_state"][slots])


def test_flashinfer_keeps_states_of_every_token_alone_where_the_last_would_go_where_it_was_read() -> None:
    """As its bfloat16 kernel does, which asks whether both lists are one tensor."""
    arguments = SEVERAL.arguments("every token")
    wanted = SEVERAL.results(copied(arguments))
    got = SEVERAL.results({**arguments, "output_state_indices": arguments["initial_state_indices"]})
    assert all(equal_bytes(got[name], tensor) for name, tensor in wanted.items())


def test_sglang_reads_states_in_the_order_v_k_whatever_their_axes_are_called() -> None:
    arguments = SGLANG_RULE.arguments("several tokens, bfloat16")
    pool = arguments["initial_state_source"]
    named = {**arguments, "initial_state_source": pool.clone().reshape(*pool.shape[:2], *pool.shape[:1:-1])}
    assert equal_bytes(SGLANG_RULE.function(**arguments), SGLANG_RULE.function(**named))
    assert equal_bytes(pool.flatten(), named["initial_state_source"].flatten())


READ = {"initial_state_indices": [12, 7, 9]}


@pytest.mark.parametrize(
    ("adapter", "call"),
    [
        (FLASHINFER, {"tokens": (3, 3), "state_batch_indices": [5, 9, 8]}),
        (FLASHINFER, {"lengths": [3, 1, 2], "cache_steps": 3, "state_batch_indices": [5, 9, 8]}),
        (VLLM, {"lengths": [3, 1, 2], "state_batch_indices": [5, 9, 8]}),
        (DECODING, {**READ, "shape": (3, 2), "disable_state_update": 1, "state": None}),
        (SEVERAL, {**READ, "shape": (3, 3), "disable_state_update": False}),
        *[(adapter, VLLM_DECAYS.calls[call]) for adapter in (VLLM_RULE, VLLM_DECAYS)
          for call in ("packed", "several tokens")],
    ],
)  # fmt: skip
def test_several_tokens_go_through_tensor_cores_at_once_for_callers_who_ask_for_it(
    adapter: Adapter, call: Any, launcher: Launcher
) -> None:
    """A partial function can be put in the place of a peer's."""
    call = {**call, "x_dtype": torch.float16, "state_dtype": torch.float16}
    for exact, function in ((True, adapter.function), (False, partial(adapter.function, exact=False))):
        for _ in range(2):
            function(**adapter.arguments(call))
        assert launcher.ordinary[-1].kernel.__name__.endswith("at_once_kernel") != exact
    assert launcher.counts == (2, 2)
    with pytest.raises(TypeError, match=r"^exact must be True or False, got 0$"):
        adapter.function(**adapter.arguments(call), exact=0)


def test_flashinfer_decodes_states_of_either_layout() -> None:
    """The order of sums is another, and so are the last bits."""
    rows = DECODING.arguments("in order")
    columns = copied(rows) | {"state": rows["state"].mT.contiguous()}
    y, state = gated_delta_rule_decode(**columns)
    wanted, _ = DECODING.function(**rows)
    assert state is columns["state"]
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state.mT, rows["state"])
    for wrong, words in (
        ({"v": rows["v"].expand(-1, 2, -1, -1)}, "^v must have one token per row, got shape"),
        ({"state": columns["state"][:2]}, "^state must have 3 slots, as the batch has rows, got shape"),
        ({"backend": "rubin"}, "^backend must be"),
    ):
        with pytest.raises(ValueError, match=words):
            gated_delta_rule_decode(**columns | wrong)
    names = "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, backend='auto'"
    assert signature_of(gated_delta_rule_decode) == names


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
    given = BUFFERED.arguments("a table, the null block, bfloat16")
    y = BUFFERED.function(**{**given, "out": None})
    assert y.shape == given["x"].shape
    assert y.flatten(1).any(1).tolist() == [True, False, True]


def test_debug_finds_a_ring_as_long_as_its_window_that_was_not_folded_in_time() -> None:
    given = replay_arguments(CPU, tokens=(2,), gate=False)
    start, count = torch.zeros(2, SLOTS, dtype=torch.int32)
    ring = Ring(given["x_cache"], given["B_cache"], given["dt_cache"], start, count, LENGTH, folds_by_hand=True)
    tokens = {name: given[name] for name in ("x", "dt", "B", "C", "D", "A")}
    assert ring.longest_call == LENGTH
    with flashstate.debug():
        count[:2] = LENGTH - 1
        flashstate.mamba2_replay(given["state"], ring, **tokens)
        count[1] = LENGTH
        with pytest.raises(ValueError, match=r"ring.count at most 6, as .* in slot 1 they are 0 and 7"):
            flashstate.mamba2_replay(given["state"], ring, **tokens)
