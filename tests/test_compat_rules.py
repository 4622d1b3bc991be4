"""What doors of rules give besides outputs and states in place: trees, states of every token, layouts."""

import inspect
from functools import partial
from typing import Any

import pytest
import torch
from launchers import Launcher, launcher
from models_of_conv1d import parents_of
from peer_calls import REFERENCE_AND_GPU, Door, copied, equal_bytes
from peer_delta import DECODING, SEVERAL
from peer_rules import SGLANG_RULE, VLLM_DECAYS, VLLM_RULE
from peer_selective import FLASHINFER, VLLM
from peer_sglang import SGLANG_CONV, TREE

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


@REFERENCE_AND_GPU
def test_a_convolution_writes_the_parents_of_its_tree(device: torch.device) -> None:
    arguments = SGLANG_CONV.arguments("a tree, channels first", device)
    SGLANG_CONV.function(**arguments)
    written = arguments["retrieve_parent_token"]
    tables = {name: torch.tensor(table) for name, table in TREE.items()}
    assert written.tolist() == [[0, *parents_of(tables, b)[1:]] for b in range(len(written))]


@REFERENCE_AND_GPU
def test_an_output_lies_in_memory_as_x_does(device: torch.device) -> None:
    arguments = SGLANG_CONV.arguments("windows, channels first", device)
    arguments["x"] = arguments["x"].mT.contiguous().mT
    assert SGLANG_CONV.function(**arguments).stride() == arguments["x"].stride()


@REFERENCE_AND_GPU
def test_states_of_every_token_are_new_where_they_do_not_stay_in_place(device: torch.device) -> None:
    arguments = VLLM_RULE.arguments("several tokens", device)
    before, in_place = copied(arguments), copied(arguments)
    y, states = VLLM_RULE.function(**arguments, inplace_final_state=False)
    assert equal_bytes(arguments["initial_state"], before["initial_state"])
    assert equal_bytes(y, VLLM_RULE.function(**in_place)[0])
    slots = arguments["ssm_state_indices"].long()
    assert equal_bytes(states.unflatten(0, y.shape[:2])[:, -1], in_place["initial_state"][slots])


def test_flashinfer_keeps_states_of_every_token_alone_where_the_last_would_go_where_it_was_read() -> None:
    """As its bfloat16 kernel does, which asks whether both lists are one tensor."""
    arguments = SEVERAL.arguments("every token, 3 tokens")
    wanted = SEVERAL.results(copied(arguments))
    got = SEVERAL.results({**arguments, "output_state_indices": arguments["initial_state_indices"]})
    assert all(equal_bytes(got[name], tensor) for name, tensor in wanted.items())


@REFERENCE_AND_GPU
def test_sglang_reads_states_in_the_order_v_k_whatever_their_axes_are_called(device: torch.device) -> None:
    arguments = SGLANG_RULE.arguments("several tokens", device)
    pool = arguments["initial_state_source"]
    named = {**arguments, "initial_state_source": pool.clone().reshape(*pool.shape[:2], *pool.shape[:1:-1])}
    assert equal_bytes(SGLANG_RULE.function(**arguments), SGLANG_RULE.function(**named))
    assert equal_bytes(pool.flatten(), named["initial_state_source"].flatten())


@pytest.mark.parametrize(
    ("door", "call"),
    [
        *[(FLASHINFER, f"float16, in place, {form}") for form in ("several tokens", "packed")],
        (VLLM, "float16, packed in place"),
        *[(DECODING, f"in order, {n}") for n in ("3 tokens", "update disabled, 2 tokens")],
        (SEVERAL, "elsewhere, 3 tokens"),
        *[(door, call) for door in (VLLM_RULE, VLLM_DECAYS) for call in ("packed", "several tokens")],
    ],
)
def test_several_tokens_go_through_tensor_cores_at_once_for_callers_who_ask_for_it(
    door: Door, call: Any, launcher: Launcher
) -> None:
    """A partial function can be put in the place of a peer's."""
    call = {**door.calls[call], "x_dtype": torch.float16}
    for exact, function in ((True, door.function), (False, partial(door.function, exact=False))):
        for _ in range(2):
            function(**door.arguments(call))
        assert launcher.ordinary[-1].kernel.__name__.endswith("at_once_kernel") != exact
    assert launcher.counts == (2, 2)
    with pytest.raises(TypeError, match=r"^exact must be True or False, got 0$"):
        door.function(**door.arguments(call), exact=0)


@REFERENCE_AND_GPU
def test_flashinfer_decodes_states_of_either_layout(device: torch.device) -> None:
    """The order of sums is another, and so are the last bits."""
    rows = DECODING.arguments("in order, int32", device)
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


def test_the_signature_of_flashinfer_for_the_other_layout_is_its_own() -> None:
    names = "q, k, v, state, A_log, a, dt_bias, b, scale=None, output=None, use_qk_l2norm=True, backend='auto'"
    wanted = inspect.signature(gated_delta_rule_decode).parameters.values()
    assert names == ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in wanted)
