"""mamba2_replay: an independent model, what its cases are made of, shapes of calls. The laws: test_laws.py."""

import math
from dataclasses import replace

import pytest
import torch
from obeying import shape_of, silent_on

from flashstate.ops import replaying as op
from flashstate.proof import CASES, Recurrence, ReplayCase
from flashstate.proof.laws import require
from flashstate.proof.replaying import FORMS, parted

CPU = torch.device("cpu")
ODD, REAL = CASES["mamba2_replay"].odd, CASES["mamba2_replay"].real
EVERY_FORM = pytest.mark.parametrize("form", FORMS)


def test_laws_of_other_slots_and_of_states_between_tokens_do_not_speak_of_it() -> None:
    assert [words.split()[:3] for words in silent_on("mamba2_replay")] == [
        ["a", "separate", "write"],
        ["a", "write", "slot"],
        ["T", "tokens", "at"],
        ["a", "state", "written"],
        ["snapshots", "hold", "the"],
        ["a", "row", "with"],
        ["a", "token", "of"],
        ["a", "token", "whose"],
    ]


# What cases are made of


@pytest.mark.parametrize("case", dict.fromkeys(map(shape_of, (*ODD, *REAL))), ids=str)
def test_rows_of_a_case_fold_and_do_not_and_its_rings_wrap(case: ReplayCase) -> None:
    inputs = replace(case, batch=min(case.batch, 8), heads=case.groups, rows=1).make_inputs(CPU)
    pool, slots = inputs.state, inputs.slots.long()
    assert {False, True} == set(inputs.folds.tolist())
    last = pool.start[slots] + pool.count[slots]
    assert (last > pool.ring.length).any() or case.window == 1
    assert (pool.count[slots] + inputs.tokens == case.window).any()
    for tensor in (pool.x, pool.B, pool.dt):
        rows = tensor.transpose(1, 2)
        assert rows[pool.live_rows].isfinite().all()
        assert rows[~pool.live_rows].isnan().all()
    assert not (pool.live_rows & inputs.appended_rows).any()


def test_parted_calls_are_those_of_two_kernels_and_only_inside() -> None:
    before = op.SMALL, op.MOST_PER_PROCESSOR
    with parted():
        assert len(op.forms_of(ReplayCase().problem, True)) == 2
        assert len(op.forms_of(ReplayCase().problem, False)) == 1
    assert before == (op.SMALL, op.MOST_PER_PROCESSOR)
    assert len(op.forms_of(ReplayCase().problem, True)) == 1


# The recurrence with loops


def one_row(s: list[float], tokens: list[tuple[float, float, list[float]]], A: float) -> list[float]:
    """A row of a state after tokens, each with its x, its time step and its B, in Python's floats."""
    for x, dt, B in tokens:
        s = [value * math.exp(dt * A) + dt * x * b for value, b in zip(s, B, strict=True)]
    return s


MODELLED = [
    ReplayCase(4, 4, 2, 3, 5, tokens=3, window=8),
    ReplayCase(5, 2, 1, 2, 4, tokens=2, packed=True, D="row", dt_softplus=False, window=5, spare=2),
    ReplayCase(4, 2, 2, 3, 4, D=None, z=False, dt_bias=False, window=16, x="float16"),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_reference_equals_the_recurrence_written_with_loops(case: ReplayCase) -> None:
    inputs = case.make_inputs(CPU)
    model, pool, given = Recurrence.of(inputs), inputs.state, inputs.arguments
    y = iter(model.step(inputs, torch.zeros_like(inputs.tokens))[0])
    for b, slot in enumerate(inputs.slots.tolist()):
        rows = [(int(pool.start[slot]) + j) % pool.ring.length for j in range(int(pool.count[slot]))]
        tokens = [inputs.token(torch.tensor([b]), t) for t in range(inputs.row_lengths[b])]
        for token in tokens:
            out = next(y)
            for h in range(case.heads):
                g, A = h // (case.heads // case.groups), float(given["A"][h])
                bias = float(given["dt_bias"][h]) if case.dt_bias else 0.0
                sizes = [float(each["dt"][0, h]) + bias for each in tokens]
                sizes = [math.log1p(math.exp(dt)) for dt in sizes] if case.dt_softplus else sizes
                until = next(i for i, each in enumerate(tokens) if each is token) + 1
                for d in range(case.rows):
                    brought = [
                        (float(pool.x[slot, h, r, d]), float(pool.dt[slot, h, r]), pool.B[slot, g, r].tolist())
                        for r in rows
                    ]
                    brought += [
                        (float(each["x"][0, h, d]), dt, each["B"][0, g].tolist())
                        for each, dt in zip(tokens[:until], sizes[:until], strict=True)
                    ]
                    s = one_row(pool.data[slot, h, d].tolist(), brought, A)
                    want = math.fsum(value * c for value, c in zip(s, token["C"][0, g].tolist(), strict=True))
                    if case.D is not None:
                        skip = given["D"].reshape(case.heads, -1).expand(-1, case.rows)
                        want += float(skip[h, d]) * float(token["x"][0, h, d])
                    if case.z:
                        z = float(token["z"][0, h, d])
                        want *= z / (1 + math.exp(-z))
                    assert math.isclose(float(out[h, d]), want, rel_tol=1e-9, abs_tol=1e-11)
    assert next(y, None) is None


# Shapes of calls


@EVERY_FORM
def test_one_token_with_an_axis_of_its_own_is_one_without(form: str, device: torch.device) -> None:
    case = ReplayCase(3, 1, 1, 5, 16, tokens=1, window=8, x="float16", format="float16", form=form)
    inputs = case.make_inputs(device)
    without = inputs.fresh().of_tokens(0)
    assert without.main.dim() == 3
    require.equal_bytes("output", without.step(), inputs.step()[:, 0])
    require.equal_states("the pool", without.state, inputs.state)


@EVERY_FORM
def test_tokens_past_the_most_that_a_row_may_have_give_zero_and_are_not_replayed(
    form: str, device: torch.device
) -> None:
    """Of a packed row of four tokens where there is room for two, the first two count."""
    case = ReplayCase(2, 1, 1, 5, 16, tokens=4, packed=True, window=4, slots=2, form=form)  # of four and three tokens
    inputs = case.make_inputs(device)
    inputs.state.count.copy_(torch.tensor([2, 3]))
    inputs.state.start.zero_()
    for tensor in (inputs.state.x, inputs.state.B, inputs.state.dt):
        tensor.nan_to_num_(0.5)
    cut = inputs.fresh()
    y = cut.per_row(cut.step(slots=cut.at(max_len=2)))
    for row in range(2):
        alone = inputs.fresh().dense_row(row).of_tokens(slice(0, 2))
        require.equal_bytes(f"output of row {row}", y[row][:2], alone.step()[0])
        assert not y[row][2:].any()
        require.equal_states(f"row {row}", cut.state, alone.state, inputs.slots[row : row + 1].long())


@EVERY_FORM
def test_rows_without_tokens_do_nothing(form: str, device: torch.device) -> None:
    inputs = ReplayCase(3, 1, 1, 5, 16, tokens=2, window=4, form=form).make_inputs(device)
    before = inputs.fresh()
    none = replace(inputs.changed(lambda t: t.flatten(0, 1)), lengths=[0, 0, 0])
    assert not none.step(slots=none.at(max_len=2)).any()
    require.equal_states("the pool", inputs.state, before.state)
