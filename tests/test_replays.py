"""What all replays have: forms, tiles and shapes of calls. The laws: test_laws.py."""

from dataclasses import replace

import implementations
import pytest
import torch

import flashstate
from flashstate import StatePool
from flashstate.launch import Config, override
from flashstate.ops import replaying as op
from flashstate.proof import AnyReplayCase, DeltaReplayCase, ReplayCase, slotted
from flashstate.proof.laws import LAWS, require
from flashstate.proof.replaying import CURSORS, FORMS, parted

SMALL = {
    "Mamba-2": ReplayCase(3, 1, 1, 5, 16),
    "GDN": DeltaReplayCase(3, 1, 1, 5, 16),
    "KDA": DeltaReplayCase(3, 1, 1, 5, 16, per_channel=True),
}
EVERY_FORM = pytest.mark.parametrize(("small", "form"), [*zip(SMALL.values(), FORMS, strict=True)], ids=SMALL)
WITHOUT_A_GPU = pytest.mark.parametrize("device", implementations.ALL[:2], indirect=True)  # where laws meet real shapes


def test_parted_calls_are_those_of_two_kernels_and_only_inside() -> None:
    for small in SMALL.values():
        with parted():
            assert [len(op.forms_of(small.problem, planned)) for planned in (True, False)] == [2, 1]
        assert len(op.forms_of(small.problem, True)) == 1


@pytest.mark.interpreted
@EVERY_FORM
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
def test_programs_of_several_tiles_give_what_those_of_one_give(
    small: AnyReplayCase, form: str, device: torch.device
) -> None:
    """Of rows that fold and of others, which share tiles alike, and not."""
    case, found = replace(small, rows=48, tokens=2, window=4, form=form), []
    for tiles in (1, 2, 4):
        inputs = case.make_inputs(device)
        with override(Config(16, 1, 4, tiles=tiles)):
            found.append([inputs.step(), *slotted(inputs.state).values()])
    for other in found[1:]:
        for got, alone in zip(other, found[0], strict=True):
            require.equal_bytes("with several tiles", got, alone)


@WITHOUT_A_GPU
@EVERY_FORM
def test_tokens_past_the_most_that_a_row_may_have_give_zero_and_are_not_replayed(
    form: str, small: AnyReplayCase, device: torch.device
) -> None:
    """Of a packed row of four tokens where there is room for two, the first two count; of a row without, none; and of a
    row that ends past all tokens those that are there."""
    case = replace(small, batch=2, tokens=4, packed=True, window=4, slots=2, form=form)  # of four and three tokens
    inputs = case.make_inputs(device)
    inputs.state.count.copy_(torch.tensor([2, 3]))
    inputs.state.start.zero_()
    inputs.state.fill_dead_rows()
    cut, none = inputs.fresh(), replace(inputs.fresh(), lengths=[0, 0])
    y = cut.per_row(cut.step(slots=cut.at(max_len=2)))
    for row in range(2):
        alone = inputs.fresh().dense_row(row).of_tokens(slice(0, 2))
        require.equal_bytes(f"output of row {row}", y[row][:2], alone.step()[0])
        assert not y[row][2:].any()
        require.equal_states(f"row {row}", cut.state, alone.state, inputs.slots[row : row + 1].long())
    assert not none.step(slots=none.at(max_len=2)).any()
    require.equal_states("the pool", none.state, inputs.state)
    kept, out = inputs.fresh(), torch.full_like(inputs.main, 7.0)
    read = torch.where(torch.arange(2, device=device) == 1, -1, inputs.slots)
    y = kept.per_row(kept.step(slots=kept.at(read=read, max_len=2, padding="keep"), out=out))
    assert not y[0][2:].any()
    assert (y[1] == 7).all()
    past, right = inputs.fresh(), inputs.fresh()
    ends = [past.at(cu_seqlens=past.slots.new_tensor([0, 8, end]), max_len=4) for end in (1 << 30, 9)]
    y, want = (run.step(slots=end, plan=run.plan(end)) for run, end in zip((past, right), ends, strict=True))
    require.equal_bytes("output of the token that is there", y, want)
    folded = (past.state.data != inputs.state.data).flatten(1).any(1)
    assert folded[inputs.slots.long()].tolist() == [True, True]  # as its plan says, and so its commit


@WITHOUT_A_GPU
@pytest.mark.parametrize(("name", "per_channel"), [("float32", True), ("float16", False), ("int8", True)])
def test_a_ring_folded_before_a_call_of_the_delta_rule_gives_all_bits_of_one_that_the_call_folds(
    per_channel: bool, name: str, device: torch.device
) -> None:
    """Every bit of a sum shows in outputs and u of float32."""
    case = DeltaReplayCase(3, 1, 1, 5, 40, tokens=2, u="float32", window=4, per_channel=per_channel, format=name)
    LAWS["a ring that is folded before a call gives the bytes of one that the call folds"](case, device)


@WITHOUT_A_GPU
def test_a_call_folds_with_the_bits_of_a_fold(device: torch.device) -> None:
    case = ReplayCase(3, 1, 1, 5, 16, tokens=2, window=4, x="float16", format="float16", rounding="stochastic")
    inputs = case.make_inputs(device)
    ahead, slots = inputs.fresh(), inputs.slots[inputs.folds]
    ahead.fold(slots=slots)
    inputs.step()
    require.equal_states("the pool", inputs.state, ahead.state, slots.long(), besides=(*inputs.state.kept, *CURSORS))


# Plans that are not of this step

CASES = ReplayCase(3, 2, 1, 3, 5, window=4), DeltaReplayCase(3, 2, 1, 3, 5, raw=False, window=4)
EITHER = pytest.mark.parametrize("case", CASES, ids=["mamba2", "gated_delta"])


@EITHER
def test_replay_goes_by_its_plan_and_debug_finds_one_of_an_earlier_step(
    case: AnyReplayCase, device: torch.device
) -> None:
    case = replace(case, tokens=2, packed=isinstance(case, ReplayCase))
    (inputs, plan), (twin, other) = ((made, made.plan()) for made in (case.make_inputs(device) for _ in range(2)))
    for numbers in (twin.state.start, twin.state.count, twin.slots):  # what the plan was made of
        numbers.add_(1)
    require.equal_bytes("output", twin.step(plan=other), inputs.step(plan=plan))
    for name, kept in {**inputs.state.kept, "data": inputs.state.data}.items():
        require.equal_bytes(name, getattr(twin.state, name), kept)
    with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of an earlier step: start and count of slot "):
        twin.state.ring.commit(other)


@EITHER
def test_debug_finds_steps_that_were_not_committed_and_states_that_lag(case: AnyReplayCase) -> None:
    first, last = (case.make_inputs(torch.device("cpu")) for _ in range(2))
    last.state = replace(last.state, **{name: getattr(first.state, name) for name in ("start", "count", "seed")})
    StatePool.wrap([layer.state.state for layer in (first, last)], rings=[layer.state.ring for layer in (first, last)])
    ring, plain = first.state.ring, getattr(flashstate, case.op.declared.name.replace("replay", "step"))

    def step_without_ring() -> None:
        plain(last.state.state, **last.arguments, slots=last.slots)

    with flashstate.debug():
        for accepted in (None, torch.zeros(3, dtype=torch.int32)):
            plan = first.plan()
            for layer in (first, last):
                layer.step(plan=plan)
            with pytest.raises(ValueError, match=r"^the step before was not committed, .* slots .*: commit the plan"):
                first.step(plan=plan)
            ring.commit(plan, accepted)
        with pytest.raises(ValueError, match=r"^state lags behind its ring, which has live rows in slots? .*: fold"):
            step_without_ring()
        last.fold(slots=last.slots)
        ring.folded(last.slots)
        step_without_ring()
        before = first.plan()
        last.step(plan=before)
        with pytest.raises(ValueError, match=r"^the step before was not committed, .* slots .*: commit its plan, and "):
            step_without_ring()  # though no row of its ring is live yet
        ring.commit(before)
        plan = first.plan()
        first.step(plan=plan)
        with pytest.raises(
            ValueError, match=r"^plan is of an earlier step: the step in slot \d began at start and count "
        ):
            ring.commit(before)
        ring.commit(plan)
        assert ring.count[first.slots.long()].tolist() == [2, 2, 2]
