"""What doors of rules give besides outputs and states in place: trees, states of every token, layouts."""

import inspect

import pytest
import torch
from models_of_conv1d import parents_of
from peer_calls import REFERENCE_AND_GPU, copied, equal_bytes
from peer_delta import DECODING
from peer_rules import VLLM_RULE
from peer_sglang import SGLANG_CONV, TREE

from flashstate.compat.flashinfer import gated_delta_rule_decode
from flashstate.compat.trees import parents_from


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
