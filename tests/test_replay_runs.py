"""Replay over many steps: requests that come and go, strong decays, CUDA graphs, races."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
import torch
from racing import IDLE_AND_BUSY, Around, busy, require_equal_launches
from torch import Tensor
from traffic import Traffic, require_relative

import flashstate
from flashstate import Slots
from flashstate.proof import AnyReplayCase, DeltaReplayCase, Recurrence, ReplayCase, ReplayInputs
from flashstate.proof.laws import require
from flashstate.proof.laws.require import all_tokens
from flashstate.proof.replaying import FORMS
from flashstate.state.formats import PORTABLE_FORMATS

CUDA = torch.device("cuda")

# Requests that come and go

STEPS = 40
COMMON = {"window": 8, "tokens": 5, "slots": 6}
TINY = ReplayCase(0, 2, 1, 5, 16, **COMMON)
TINY_GDN = DeltaReplayCase(0, 2, 1, 5, 16, **COMMON)
TINY_KDA = DeltaReplayCase(0, 1, 1, 3, 20, per_channel=True, **COMMON)
REAL = ReplayCase(0, 16, 1, 64, 128, window=16, tokens=6, slots=24, x="bfloat16", dt="bfloat16")
HALVES = {"window": 16, "tokens": 6, "slots": 24, "x": "bfloat16", "qk": "bfloat16", "gates": "bfloat16"}
REAL_GDN = DeltaReplayCase(0, 16, 4, 128, 128, **HALVES)
REAL_KDA = DeltaReplayCase(0, 8, 8, 128, 128, per_channel=True, **HALVES)


def serve(cases: Sequence[AnyReplayCase], device: torch.device) -> None:
    traffic = Traffic(cases, device)
    traffic.come(2)
    for turn in range(STEPS):
        if traffic.draw.random() < 0.2:
            traffic.go(1)
        if not traffic.held or traffic.draw.random() < 0.3:
            traffic.come(min(traffic.pool.free, 1 + traffic.slots // 8))
        if traffic.draw.random() < 0.1:
            traffic.fold_in_place()
        traffic.step(turn)
        for model in traffic.models:
            assert traffic.layers[0].count[traffic.held].tolist() == model.live[traffic.held].tolist()
    traffic.require_states(traffic.held)
    traffic.require_all()
    assert traffic.folds > 10
    flashstate.check_faults()


EXACT = {"u": "float32"}
FINE = {"x": "float32", "qk": "float32", **EXACT}
MIXED = TINY, TINY_GDN, TINY_KDA, replace(TINY_GDN, raw=False, **EXACT)  # in one pool, under one plan and one commit
SHORT = {"format": "int8", "rounding": "stochastic"}


def in_formats(cases: Sequence[AnyReplayCase], *known: tuple[str, str]) -> list[AnyReplayCase]:
    """Layers in these formats, which take turns."""
    return [case.in_format(*known[i % len(known)]) for i, case in enumerate(cases)]


SERVED = {
    **{
        f"reference, {name} {rounding}": ("reference", in_formats(MIXED, (name, rounding)), ())
        for name, rounding in PORTABLE_FORMATS[::4]
    },
    "reference, several formats": ("reference", in_formats(MIXED, *PORTABLE_FORMATS[1::3]), ()),
    "interpreter, all": ("interpreter", [replace(case, heads=1, **SHORT) for case in MIXED[:3]], "interpreted"),
    **{
        f"gpu, {rule}, {name} {rounding}": ("gpu", in_formats(cases, (name, rounding)), "gpu")
        for turn, (rule, cases) in enumerate({"Mamba-2": (REAL, REAL), "GDN and KDA": (REAL_GDN, REAL_KDA)}.items())
        for name, rounding in PORTABLE_FORMATS[2 * turn :: 4]
    },
    "gpu, all": ("gpu", in_formats((REAL, REAL_GDN, REAL_KDA), *PORTABLE_FORMATS[1::3]), "gpu"),
    "gpu, float32": (
        "gpu", [replace(REAL, x="float32", bc="float32"), replace(REAL_GDN, **FINE), replace(REAL_KDA, **FINE)], "gpu",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("device", "cases"),
    [
        pytest.param(device, cases, id=what, marks=getattr(pytest.mark, mark) if mark else ())
        for what, (device, cases, mark) in SERVED.items()
    ],
    indirect=["device"],
)
def test_forty_steps_of_any_acceptance_are_the_recurrence_while_requests_come_and_go(
    device: torch.device, cases: Sequence[AnyReplayCase]
) -> None:
    serve(cases, device)


# Strong decays

STRONG = {
    "Mamba-2": ReplayCase(4, 2, 1, 5, 16, window=8, dt_softplus=False, dt_bias=False),
    "GDN": DeltaReplayCase(4, 2, 1, 5, 16, window=8, raw=False, **EXACT),
    "KDA": DeltaReplayCase(4, 2, 2, 5, 16, window=8, raw=False, per_channel=True, **EXACT),
}


def together(values: Tensor) -> Tensor:
    """All of a step as one row: what the delta rule writes makes some outputs much smaller than what they are sums
    of."""
    return values[None]


def strengthen(decays: Tensor) -> None:
    """Make them from nearly 0 to 20 times as large as they are on average."""
    decays.copy_(decays.sign() * (decays / decays.nanmean()).pow(6).clamp(max=20))


@pytest.mark.parametrize("tokens", [1, 8])
@pytest.mark.parametrize("rule", STRONG)
def test_strong_decays_keep_float32_to_a_hundred_thousandth(rule: str, tokens: int, device: torch.device) -> None:
    """A state that is gone after a token, beside tokens that hardly move it."""
    case = replace(STRONG[rule], tokens=tokens)
    inputs = case.make_inputs(device)
    compared = torch.clone if rule == "Mamba-2" else together
    brought, kept = ("dt", inputs.state.kept["dt"]) if rule == "Mamba-2" else ("a", inputs.state.kept["decay"])
    if rule == "Mamba-2":
        inputs.arguments["A"].copy_(torch.tensor([-16.0, -1.0]))
    strengthen(kept)
    model, draw = Recurrence.of(inputs), Random(tokens)
    for turn, form in enumerate(FORMS):
        step = inputs.given(**case.make_inputs(device, seed=turn + 1).activations)
        strengthen(step.arguments[brought])
        accepted = torch.tensor([draw.randint(0, tokens) for _ in range(case.batch)], device=device)
        plan = step.plan()
        want, _ = model.step(step, accepted)
        y = all_tokens(step, replace(step, form=form).step())
        require_relative(f"output of step {turn}", compared(y), compared(want))
        step.state.ring.commit(plan, accepted)
        into = torch.zeros_like(step.state.data)
        step.fold(into=into)
        used = inputs.slots.long()
        require_relative(f"states after step {turn}", compared(into[used]), compared(model.exact[used]))


# CUDA graphs

REPLAYS = 40
PLANNED = pytest.mark.parametrize("form", FORMS[1:])  # of one kernel, and of two
MODELS = {"Mamba-2": (REAL, REAL), "all": (REAL_GDN, REAL, REAL_KDA)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("model", "name", "rounding", "form", "packed"),
    [
        ("all", "float32", "nearest", "planned", True),
        ("all", "int8", "stochastic", "parted", False),
        ("Mamba-2", "float32", "nearest", "parted", False),
        ("Mamba-2", "int8", "stochastic", "planned", True),
    ],
)
def test_a_graph_of_a_whole_step_is_the_recurrence_on_whatever_is_accepted(
    model: str, name: str, rounding: str, form: str, packed: bool
) -> None:
    """Plan, replay of all layers, commit of counts that are on the device, advance: none of it needs the host."""
    traffic, batch = Traffic(in_formats(MODELS[model], (name, rounding)), CUDA), 16
    traffic.come(traffic.slots)
    read, accepted = (torch.zeros(batch, dtype=torch.int64, device=CUDA) for _ in range(2))
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device=CUDA)
    slots = Slots(read, cu_seqlens=bounds, max_len=traffic.tokens) if packed else Slots(read)
    calls = [traffic.inputs(i, [0] * batch, [traffic.tokens] * batch, not packed, i) for i in range(len(traffic.cases))]
    calls = [replace(inputs, slots=read, form=form) for inputs in calls]
    outputs = [torch.empty_like(inputs.main) for inputs in calls]

    def step() -> None:
        plan = traffic.pool.plan(slots, None if packed else traffic.tokens)
        for inputs, out in zip(calls, outputs, strict=True):
            inputs.step(plan=plan, out=out)
        traffic.pool.commit(plan, accepted)
        traffic.pool.advance(slots)

    graph = torch.cuda.CUDAGraph()
    read.fill_(-1)  # warm-up, of padding rows alone
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    generator, draw, folds = torch.Generator(CUDA).manual_seed(1), Random(1), 0
    for turn in range(REPLAYS):
        lengths = [draw.randint(0, traffic.tokens) if packed else traffic.tokens for _ in range(batch)]
        for tensor, numbers in (
            (read, draw.sample(range(traffic.slots), batch)),
            (accepted, [draw.randint(0, n) for n in lengths]),
            (bounds, [sum(lengths[:b]) for b in range(batch + 1)]),
        ):
            tensor.copy_(torch.tensor(numbers))
        for activation in [tensor for inputs in calls for tensor in inputs.activations.values()]:
            activation.normal_(generator=generator)
        now = [replace(inputs, lengths=lengths) if packed else inputs for inputs in calls]
        folds += int(now[0].folds.sum())
        want = [model.step(inputs, accepted) for model, inputs in zip(traffic.models, now, strict=True)]
        graph.replay()
        for inputs, out, (exact, plain) in zip(now, outputs, want, strict=True):
            require.within_budget(f"output of replay {turn}", all_tokens(inputs, out), exact, plain)
            assert not packed or not out[sum(lengths) :].any()
    assert folds > REPLAYS
    assert traffic.layers[0].count.tolist() == traffic.models[0].live.tolist()
    traffic.require_states(list(range(traffic.slots)))
    traffic.require_all()
    flashstate.check_faults()


@pytest.mark.gpu
@PLANNED
@pytest.mark.parametrize("case", [REAL, REAL_GDN, REAL_KDA], ids=str)
def test_nothing_between_plan_and_commit_waits_for_the_device(case: AnyReplayCase, form: str) -> None:
    inputs = replace(case, batch=5, format="int8", rounding="stochastic", form=form).make_inputs(CUDA)
    out, accepted = torch.empty_like(inputs.main), inputs.tokens
    for mode in ("default", "error"):  # kernels compile in the first pass
        slots = inputs.at()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            plan = inputs.plan(slots)
            inputs.step(plan=plan, out=out)
            inputs.step(plan=plan)
            inputs.state.ring.commit(plan, accepted)
            inputs.state.advance(slots)
            inputs.fold(slots=slots)
            inputs.state.ring.folded(slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Races: what a program appends or folds, another one of the same launch must not have needed

RACES = {
    "one token": replace(REAL, batch=160, tokens=0, slots=170),
    "one token in 16 bits": replace(REAL, batch=160, tokens=0, slots=170, format="float16"),
    "six tokens, folded at random": replace(REAL, batch=40, slots=50, format="int8", rounding="stochastic"),
    "packed tokens, many tiles": replace(REAL, batch=12, heads=80, packed=True, slots=20, format="bfloat16"),
    "float32, a long window": replace(REAL, batch=20, tokens=16, window=64, x="float32", bc="float32", dt="float32"),
    "one token of GDN": replace(REAL_GDN, batch=160, tokens=0, slots=170, format="bfloat16"),
    "four tokens of GDN, many tiles": replace(REAL_GDN, batch=40, heads=64, tokens=4, slots=50, **SHORT),
    "packed tokens of KDA": replace(REAL_KDA, batch=20, packed=True, format="float16"),
    "float32 of KDA, a long window": replace(REAL_KDA, batch=20, tokens=16, window=64, **FINE),
}


EVERY_RACE = pytest.mark.parametrize("which", RACES)


@pytest.mark.gpu
@EVERY_RACE
def test_plans_commits_and_folds_of_equal_rings_give_equal_bytes(which: str) -> None:
    inputs = RACES[which].make_inputs(CUDA)
    slots, accepted = inputs.at(), inputs.tokens // 2

    def launch(run: ReplayInputs) -> list[Tensor]:
        pool, plan = run.state, run.plan(slots)
        run.fold(slots=inputs.slots)
        pool.ring.folded(inputs.slots)
        pool.ring.commit(plan, accepted)
        return [plan.rows, plan.parts]

    require_equal_launches(inputs, launch, busy)


@pytest.mark.gpu
@IDLE_AND_BUSY
@pytest.mark.parametrize(("which", "form"), zip(RACES, FORMS * 3, strict=True))
def test_launches_on_equal_inputs_give_equal_bytes_in_every_form(which: str, form: str, around: Around) -> None:
    inputs = replace(RACES[which], form=form).make_inputs(CUDA)
    out, slots = torch.empty_like(inputs.main), inputs.at()
    require_equal_launches(inputs, lambda run: [run.step(slots=slots, out=out.fill_(torch.nan))], around)
