"""What all replays have: what their cases are made of, and shapes of calls. The laws: test_laws.py."""

from dataclasses import replace

import pytest
import torch
from implementations import KERNELS
from obeying import values_of

from flashstate.launch import Config, override
from flashstate.ops import replaying as op
from flashstate.proof import CASES, AnyReplayCase, DeltaReplayCase, ReplayCase, slotted
from flashstate.proof.laws import LAWS, require
from flashstate.proof.replaying import FORMS, parted
from flashstate.state.formats import FORMATS

CPU = torch.device("cpu")
EVERY = [case for cases in CASES.values() for case in (*cases.odd, *cases.real) if isinstance(case, AnyReplayCase)]
SMALL = {
    "Mamba-2": ReplayCase(3, 1, 1, 5, 16),
    "GDN": DeltaReplayCase(3, 1, 1, 5, 16),
    "KDA": DeltaReplayCase(3, 1, 1, 5, 16, per_channel=True),
}
EVERY_RULE = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
EVERY_FORM = pytest.mark.parametrize(("small", "form"), zip(SMALL.values(), FORMS, strict=True), ids=SMALL)


# What cases are made of


@pytest.mark.parametrize("case", dict.fromkeys(values_of(case)["shape"] for case in EVERY), ids=str)
def test_rows_of_a_case_fold_and_do_not_and_its_rings_wrap(case: AnyReplayCase) -> None:
    _, groups, _, _ = case.measured_axes
    inputs = replace(case, batch=min(case.batch, 8), heads=groups, rows=1).make_inputs(CPU)
    pool, slots = inputs.state, inputs.slots.long()
    assert {False, True} == set(inputs.folds.tolist())
    last = pool.start[slots] + pool.count[slots]
    assert (last > pool.ring.length).any() or case.window == 1
    assert (pool.count[slots] + inputs.tokens == case.window).any()
    for tensor in pool.kept.values():
        rows = tensor.transpose(1, 2)
        assert rows[pool.live_rows].isfinite().all()
        assert rows[~pool.live_rows].isnan().all()
    assert not (pool.live_rows & inputs.appended_rows).any()


@EVERY_RULE
def test_parted_calls_are_those_of_two_kernels_and_only_inside(small: AnyReplayCase) -> None:
    before = op.FEWEST_PARTED, op.MOST_PER_PROCESSOR
    with parted():
        assert len(op.forms_of(small.problem, True)) == 2
        assert len(op.forms_of(small.problem, False)) == 1
    assert before == (op.FEWEST_PARTED, op.MOST_PER_PROCESSOR)
    assert len(op.forms_of(small.problem, True)) == 1


# Programs of several tiles


@EVERY_FORM
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_programs_of_several_tiles_give_what_those_of_one_give(
    small: AnyReplayCase, form: str, device: torch.device
) -> None:
    """Of rows that fold and of others."""
    case = replace(small, rows=128, tokens=2, window=4, form=form)

    def results(tiles: int) -> list[torch.Tensor]:
        inputs = case.make_inputs(device)
        with override(Config(16, 1, 4, tiles=tiles)):
            y = inputs.step()
        return [y, *slotted(inputs.state).values()]

    want = results(1)
    for tiles in (2, 8):  # which rows that fold and others share alike, and not
        for got, alone in zip(results(tiles), want, strict=True):
            require.equal_bytes(f"with {tiles} tiles", got, alone)


# Shapes of calls


@EVERY_FORM
def test_one_token_with_an_axis_of_its_own_is_one_without(
    form: str, small: AnyReplayCase, device: torch.device
) -> None:
    case = replace(small, batch=3, tokens=1, window=8, x="float16", format="float16", form=form)
    inputs = case.make_inputs(device)
    without = inputs.fresh().of_tokens(0)
    assert without.main.dim() == 3
    require.equal_bytes("output", without.step(), inputs.step()[:, 0])
    require.equal_states("the pool", without.state, inputs.state)


@EVERY_FORM
def test_tokens_past_the_most_that_a_row_may_have_give_zero_and_are_not_replayed(
    form: str, small: AnyReplayCase, device: torch.device
) -> None:
    """Of a packed row of four tokens where there is room for two, the first two count."""
    case = replace(small, batch=2, tokens=4, packed=True, window=4, slots=2, form=form)  # of four and three tokens
    inputs = case.make_inputs(device)
    inputs.state.count.copy_(torch.tensor([2, 3]))
    inputs.state.start.zero_()
    inputs.state.fill_dead_rows()
    cut = inputs.fresh()
    y = cut.per_row(cut.step(slots=cut.at(max_len=2)))
    for row in range(2):
        alone = inputs.fresh().dense_row(row).of_tokens(slice(0, 2))
        require.equal_bytes(f"output of row {row}", y[row][:2], alone.step()[0])
        assert not y[row][2:].any()
        require.equal_states(f"row {row}", cut.state, alone.state, inputs.slots[row : row + 1].long())


@EVERY_FORM
def test_rows_without_tokens_do_nothing(form: str, small: AnyReplayCase, device: torch.device) -> None:
    inputs = replace(small, batch=3, tokens=2, window=4, form=form).make_inputs(device)
    before = inputs.fresh()
    none = replace(inputs.changed(lambda t: t.flatten(0, 1)), lengths=[0, 0, 0])
    assert not none.step(slots=none.at(max_len=2)).any()
    require.equal_states("the pool", inputs.state, before.state)


# Folds before a call


@pytest.mark.parametrize(("name", "per_channel"), [(fmt.name, i % 2 == 0) for i, fmt in enumerate(FORMATS.values())])
def test_a_ring_folded_before_a_call_of_the_delta_rule_gives_all_bits_of_one_that_the_call_folds(
    per_channel: bool, name: str, device: torch.device
) -> None:
    """Every bit of a sum shows in outputs and u of float32."""
    case = DeltaReplayCase(3, 1, 1, 5, 40, tokens=2, u="float32", window=4, per_channel=per_channel, format=name)
    LAWS["a ring that is folded before a call gives the bytes of one that the call folds"](case, device)
