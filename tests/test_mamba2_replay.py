"""mamba2_replay: the laws on every implementation, an independent model, what cases are made of."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from obeying import by_shape, by_turns, format_of, gpu_pairs, laws, require_all_met
from torch import Tensor

from flashstate.ops import mamba2_replay as op
from flashstate.proof import (
    ODD_REPLAY_CASES,
    ODD_REPLAY_SHAPES,
    REAL_REPLAY_CASES,
    Recurrence,
    ReplayCase,
    ReplayInputs,
    interpreted,
    slotted,
)
from flashstate.proof.laws import REPLAY_LAWS, SCOPES, pairs
from flashstate.proof.laws.replay import FORMS, call, parted
from flashstate.proof.laws.require import require_equal_bytes, require_equal_states
from flashstate.state.formats import PORTABLE_FORMATS

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
FIRST = ACCURACY, ALL_CONFIGS = next(iter(REPLAY_LAWS)), "the launch config does not change a byte of a replay"
GROUPS = [
    ODD_REPLAY_CASES[i : i + len(ODD_REPLAY_SHAPES)] for i in range(0, len(ODD_REPLAY_CASES), len(ODD_REPLAY_SHAPES))
]
FORM_OF = dict(zip(ODD_REPLAY_CASES, len(PORTABLE_FORMATS) * list(ODD_REPLAY_SHAPES), strict=True))
OTHERS = [words for words in laws("", "kernels", among=REPLAY_LAWS) if words != ACCURACY]
ON_THE_REFERENCE = pairs([ACCURACY], ODD_REPLAY_CASES) + by_turns(
    [words for words in OTHERS if words != ALL_CONFIGS], GROUPS
)
# One token of float32 states has a way of its own, without tensor cores; not so with a long window, or packed.
ONE_TOKEN = (
    *ODD_REPLAY_SHAPES["one token"],
    ReplayCase(5, 4, 2, 33, 20, tokens=1, x="float16", D="row"),
    ReplayCase(3, 2, 1, 16, 96, bc="float16", index="int64", window=15, spare=1),
    ReplayCase(5, 1, 1, 17, 16, tokens=1, packed=True, x="float16", D="row", window=8),
)
IN_THE_INTERPRETER = pairs([ACCURACY], ODD_REPLAY_CASES) + by_turns(OTHERS, GROUPS, turns=6)  # which is slow
IN_THE_INTERPRETER += [pair for pair in by_turns(OTHERS, [ONE_TOKEN]) if pair not in IN_THE_INTERPRETER]
ON_A_GPU = gpu_pairs(by_shape(REAL_REPLAY_CASES), lambda case: case.heads <= 16, REPLAY_LAWS, FIRST)
ON_A_GPU += [pair for pair in by_turns(REPLAY_LAWS, [REAL_REPLAY_CASES[:1], ONE_TOKEN]) if pair not in ON_A_GPU]


def test_every_law_meets_every_format_and_every_form_without_a_gpu() -> None:
    assert {(FORM_OF[case], *format_of(case)) for case in ODD_REPLAY_CASES} == {
        (form, *known) for form in ODD_REPLAY_SHAPES for known in PORTABLE_FORMATS
    }
    kinds = (format_of, FORM_OF.__getitem__)
    spoken = laws("", among=REPLAY_LAWS)
    require_all_met(spoken, ON_THE_REFERENCE, ODD_REPLAY_CASES, *kinds, fewest=len(PORTABLE_FORMATS))


def test_every_law_is_tried_in_the_interpreter_and_every_form_and_format_there_by_several() -> None:
    assert {words for words, _ in IN_THE_INTERPRETER} == {ACCURACY, *OTHERS}
    for kind_of, kinds in ((FORM_OF.__getitem__, set(ODD_REPLAY_SHAPES)), (format_of, set(PORTABLE_FORMATS))):
        met = Counter(kind_of(case) for words, case in IN_THE_INTERPRETER if words != ACCURACY and case in FORM_OF)
        assert met.keys() == kinds
        assert min(met.values()) >= 2


def test_every_law_meets_every_format_and_every_shape_on_a_gpu() -> None:
    spoken = [words for words in REPLAY_LAWS if words != ALL_CONFIGS]
    require_all_met(spoken, ON_A_GPU, REAL_REPLAY_CASES, format_of)
    assert {ACCURACY, *OTHERS} <= {words for words, _ in ON_A_GPU}
    assert len(ON_A_GPU) == len(set(ON_A_GPU))


@pytest.mark.parametrize(("words", "case"), ON_THE_REFERENCE, ids=str)
def test_reference_obeys(words: str, case: ReplayCase) -> None:
    REPLAY_LAWS[words](case, CPU)


@pytest.mark.interpreted
@pytest.mark.parametrize(("words", "case"), IN_THE_INTERPRETER, ids=str)
def test_interpreted_kernel_obeys(words: str, case: ReplayCase) -> None:
    with interpreted():
        REPLAY_LAWS[words](case, CPU)


@pytest.mark.gpu
@pytest.mark.parametrize(("words", "case"), ON_A_GPU, ids=str)
def test_compiled_kernel_obeys(words: str, case: ReplayCase) -> None:
    REPLAY_LAWS[words](case, CUDA)


# What cases are made of


@pytest.mark.parametrize("case", [cases[0] for cases in by_shape(ODD_REPLAY_CASES + REAL_REPLAY_CASES)], ids=str)
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


@pytest.mark.parametrize("case", dict.fromkeys(ODD_REPLAY_CASES), ids=str)
def test_counted_bytes_are_those_of_all_tensors_of_a_call_and_of_rows_of_rings(case: ReplayCase) -> None:
    inputs = case.make_inputs(CPU)
    tokens, slots, pool = sum(case.lengths), inputs.slots.long(), inputs.state
    used = {name: t[:tokens] if case.packed else t for name, t in inputs.activations.items()}
    given = {**inputs.arguments, **inputs.options, **used, "slots": inputs.slots}
    others = sum(t.nbytes for t in given.values() if isinstance(t, Tensor)) + pool.start[slots].nbytes * 2
    y = inputs.fresh().step()
    others += (y[:tokens] if case.packed else y).nbytes + (8 * case.batch if case.rounding == "stochastic" else 0)
    states = sum(tensor[slots].nbytes for tensor in (pool.data, pool.scale) if tensor is not None)
    stored = states // case.batch * int(inputs.folds.sum())
    rows = int(pool.count[slots][inputs.tokens > 0].sum()) + tokens
    of_row = sum(tensor[0].transpose(0, 1)[0].nbytes for tensor in (pool.x, pool.B, pool.dt))
    for stores in (0, 1, 3):
        assert case.counted_bytes(stores) == states + stores * stored + rows * of_row + others


def test_the_laws_of_replay_speak_of_its_cases_alone() -> None:
    assert pairs(REPLAY_LAWS, [ReplayCase(), ReplayCase().as_step]) == [
        (words, ReplayCase()) for words in REPLAY_LAWS if SCOPES[words].includes(ReplayCase())
    ]


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
    model, pool, given = Recurrence.of(inputs), inputs.state, {**inputs.arguments, **inputs.options}
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


@pytest.mark.parametrize("form", FORMS)
def test_one_token_with_an_axis_of_its_own_is_one_without(form: str, device: torch.device) -> None:
    inputs = ReplayCase(3, 1, 1, 5, 16, tokens=1, window=8, x="float16", format="float16").make_inputs(device)
    without = inputs.fresh().of_tokens(0)
    assert without.main.dim() == 3
    require_equal_bytes("output", call(form, without), call(form, inputs)[:, 0])
    require_equal_states("the pool", without.state, inputs.state)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_past_the_most_that_a_row_may_have_give_zero_and_are_not_replayed(
    form: str, device: torch.device
) -> None:
    """Of a packed row of four tokens where there is room for two, the first two count."""
    case = ReplayCase(2, 1, 1, 5, 16, tokens=4, packed=True, window=4, slots=2)  # of four and of three tokens
    inputs = case.make_inputs(device)
    inputs.state.count.copy_(torch.tensor([2, 3]))
    inputs.state.start.zero_()
    for tensor in (inputs.state.x, inputs.state.B, inputs.state.dt):
        tensor.nan_to_num_(0.5)
    cut = inputs.fresh()
    y = cut.per_row(call(form, cut, max_len=2))
    for row in range(2):
        alone = inputs.fresh().dense_row(row).of_tokens(slice(0, 2))
        require_equal_bytes(f"output of row {row}", y[row][:2], alone.step()[0])
        assert not y[row][2:].any()
        require_equal_states(f"row {row}", cut.state, alone.state, inputs.slots[row : row + 1].long())


@pytest.mark.parametrize("form", FORMS)
def test_an_empty_batch_and_rows_without_tokens_do_nothing(form: str, device: torch.device) -> None:
    inputs = ReplayCase(3, 1, 1, 5, 16, tokens=2, window=4).make_inputs(device)
    before = inputs.fresh()
    empty = inputs.of_rows(torch.arange(0, device=device))
    assert call(form, empty).shape == (0, 2, 1, 5)
    none = replace(inputs.changed(lambda t: t.flatten(0, 1)), lengths=[0, 0, 0])
    assert not call(form, none, max_len=2).any()
    require_equal_states("the pool", inputs.state, before.state)


# Large


def far_apart(tensor: Tensor, stride: int) -> Tensor:
    """The same values with that stride on the first axis."""
    memory = torch.empty((len(tensor) - 1) * stride + tensor[0].numel(), dtype=tensor.dtype, device=tensor.device)
    view = memory.as_strided(tensor.shape, (stride, *tensor.stride()[1:]))
    view.copy_(tensor)
    return view


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS)
def test_pools_and_rings_past_2_31_elements_work(form: str) -> None:
    """Slots of all of them are as far from each other as those of the largest."""
    case = replace(REAL_REPLAY_CASES[0], format="bfloat16", tokens=3, batch=3, slots=4)
    small = case.make_inputs(CUDA)
    kept = {name: t for name, t in slotted(small.state).items() if t.dim() > 1}
    far = {name: far_apart(tensor, (1 << 30) + 64) for name, tensor in kept.items()}
    large = replace(small, state=replace(small.state, **far))
    require_equal_bytes("output", call(form, large), call(form, small))
    require_equal_states("the pool", large.state, small.state)


@pytest.mark.gpu
@pytest.mark.parametrize("axis", ["batch", "token"])
def test_activations_past_2_31_elements_work(axis: str) -> None:
    inputs: ReplayInputs = ReplayCase(2, 2, 1, 16, 16, tokens=3, window=8, x="float16").make_inputs(CUDA)
    x, stride = inputs.main, (1 << 30) + 64
    far = torch.empty(3 * stride, dtype=x.dtype, device=CUDA)
    strides = (2 * stride, 32, 16, 1) if axis == "batch" else (32, stride, 16, 1)
    view = far.as_strided(x.shape, strides)
    view.copy_(x)
    want = inputs.fresh().step()
    require_equal_bytes("output", inputs.step(x=view), want)
