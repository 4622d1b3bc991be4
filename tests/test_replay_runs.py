"""Replay over many steps: requests that come and go, also with strong decays, CUDA graphs, races."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle

import pytest
import torch
from racing import busy, require_equal_launches
from torch import Tensor
from traffic import Traffic

from flashstate import Slots
from flashstate.proof import AnyReplayCase, DeltaReplayCase, ReplayCase, ReplayInputs
from flashstate.proof.laws.require import all_tokens
from flashstate.proof.replaying import FORMS
from flashstate.state.formats import PORTABLE_FORMATS

CUDA = torch.device("cuda")
EXACT = {"u": "float32"}
FINE = {"x": "float32", "qk": "float32", **EXACT}
SHORT = {"format": "int8", "rounding": "stochastic"}


def in_formats(cases: Sequence[AnyReplayCase], *known: tuple[str, str]) -> list[AnyReplayCase]:
    """Layers in these formats, which take turns."""
    return [case.in_format(*known[i % len(known)]) for i, case in enumerate(cases)]


# Requests that come and go, of a pool of all rules, under one plan and one commit

COMMON = {"window": 8, "tokens": 5, "slots": 6}
TINY = ReplayCase(0, 2, 1, 5, 16, **COMMON)
TINY_GDN = DeltaReplayCase(0, 2, 1, 5, 16, **COMMON)
TINY_KDA = DeltaReplayCase(0, 1, 1, 3, 20, per_channel=True, **COMMON)
MIXED = TINY, TINY_GDN, TINY_KDA, replace(TINY_GDN, raw=False, **EXACT)
STRONG = replace(TINY, dt_softplus=False, dt_bias=False), *(replace(case, raw=False, **EXACT) for case in MIXED[1:3])
SMALL = [replace(case, heads=1, window=4, tokens=4, **SHORT) for case in MIXED[:3]]
MARKS = {"reference": (), "interpreter": pytest.mark.interpreted, "gpu": pytest.mark.gpu}
SERVED = {
    "float32": ("reference", 40, MIXED),
    "several formats": ("reference", 40, in_formats(MIXED, *PORTABLE_FORMATS[1::3])),
    "strong decays": ("reference", 40, STRONG),
    "interpreter": ("interpreter", 20, SMALL),
    "strong decays, interpreter": ("interpreter", 8, STRONG),
    "strong decays, gpu": ("gpu", 40, STRONG),
}


@pytest.mark.parametrize(
    ("device", "steps", "cases", "strong"),
    [pytest.param(*row, "strong" in what, id=what, marks=MARKS[row[0]]) for what, row in SERVED.items()],
    indirect=["device"],
)
def test_steps_of_any_acceptance_are_the_recurrence_while_requests_come_and_go(
    device: torch.device, steps: int, cases: Sequence[AnyReplayCase], strong: bool
) -> None:
    traffic = Traffic(cases, device, strong=strong)
    traffic.come(2)
    for turn in range(steps):
        traffic.serve()
        traffic.step(turn)
    traffic.require_all()
    assert traffic.folds >= steps // 5


REAL = ReplayCase(0, 16, 1, 64, 128, window=16, tokens=6, slots=24, x="bfloat16", dt="bfloat16")
HALVES = {"window": 16, "tokens": 6, "slots": 24, "x": "bfloat16", "qk": "bfloat16", "gates": "bfloat16"}
REAL_GDN = DeltaReplayCase(0, 16, 4, 128, 128, **HALVES)
REAL_KDA = DeltaReplayCase(0, 8, 8, 128, 128, per_channel=True, **HALVES)
IN_HALVES = REAL_GDN, REAL, REAL_KDA
FINELY = replace(REAL_GDN, **FINE), replace(REAL, x="float32", bc="float32"), replace(REAL_KDA, **FINE)
SHORTER = {"window": 8, "tokens": 4}  # compiles in half of the time
BATCH, REPLAYS = 16, 40


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("cases", "form", "packed"),
    [(in_formats(IN_HALVES, *PORTABLE_FORMATS[2::3]), "planned", True), (FINELY, "parted", False)],
    ids=["several formats", "float32"],
)
def test_a_graph_of_a_whole_step_is_the_recurrence_on_whatever_is_accepted(
    cases: Sequence[AnyReplayCase], form: str, packed: bool
) -> None:
    """Plan, replay of all layers, commit of counts that are on the device, advance: none of it needs the host."""
    traffic = Traffic([replace(case, **SHORTER) for case in cases], CUDA)
    traffic.come(traffic.slots)
    read, accepted = (torch.zeros(BATCH, dtype=torch.int64, device=CUDA) for _ in range(2))
    bounds, most = torch.zeros(BATCH + 1, dtype=torch.int32, device=CUDA), traffic.tokens
    slots = Slots(read, cu_seqlens=bounds, max_len=most) if packed else Slots(read)
    calls = [traffic.inputs(i, [0] * BATCH, [most] * BATCH, not packed, i) for i in range(len(cases))]
    calls = [replace(inputs, slots=read, form=form) for inputs in calls]
    outputs = [torch.empty_like(inputs.main) for inputs in calls]

    def step() -> None:
        plan = traffic.pool.plan(slots, None if packed else most)
        for inputs, out in zip(calls, outputs, strict=True):
            inputs.step(plan=plan, out=out)
        traffic.pool.commit(plan, accepted)
        traffic.pool.advance(slots)

    read.fill_(-1)  # padding rows alone
    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            step()
            calls[0].fold(slots=read)
            traffic.pool.folded(read)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    generator, draw, folds = torch.Generator(CUDA).manual_seed(1), traffic.draw, 0
    for _ in range(REPLAYS):
        traffic.serve()
        traffic.come(max(0, BATCH - len(traffic.held)))
        lengths = [draw.randint(0, most) if packed else most for _ in range(BATCH)]
        for tensor, numbers in (
            (read, draw.sample(traffic.held, BATCH)),
            (accepted, traffic.accepted(lengths)),
            (bounds, [sum(lengths[:b]) for b in range(BATCH + 1)]),
        ):
            tensor.copy_(torch.tensor(numbers))
        for activation in [tensor for inputs in calls for tensor in inputs.activations.values()]:
            activation.normal_(generator=generator)
        now = [replace(inputs, lengths=lengths) if packed else inputs for inputs in calls]
        folds += int(now[0].folds.sum())
        want = [model.step(inputs, accepted) for model, inputs in zip(traffic.models, now, strict=True)]
        graph.replay()
        for i, (inputs, out, (exact, plain)) in enumerate(zip(now, outputs, want, strict=True)):
            traffic.note(i, "outputs", all_tokens(inputs, out), exact, plain)
            assert not packed or not out[sum(lengths) :].any()
        for layer in traffic.layers:
            layer.spoil_dead_rows()
    assert folds > REPLAYS
    traffic.require_all()


# Races: what a program appends or folds, another one of the same launch must not have needed

RACES = {
    "one token": replace(REAL, batch=160, tokens=0, slots=170),
    "six tokens, folded at random": replace(REAL, batch=40, slots=50, **SHORT),
    "packed tokens, many tiles": replace(REAL, batch=12, heads=80, packed=True, slots=20, format="bfloat16"),
    "float32, a long window": replace(REAL, batch=20, tokens=16, window=32, x="float32", bc="float32", dt="float32"),
    "one token of GDN": replace(REAL_GDN, batch=160, tokens=0, slots=170, format="bfloat16"),
    "four tokens of GDN, many tiles": replace(REAL_GDN, batch=40, heads=64, tokens=4, slots=50, **SHORT),
    "packed tokens of KDA": replace(REAL_KDA, batch=20, packed=True, format="float16"),
    "float32 of KDA, a long window": replace(REAL_KDA, batch=20, tokens=16, window=32, **FINE),
}


@pytest.mark.gpu
@pytest.mark.parametrize(("which", "form"), [*zip(RACES, cycle(FORMS), strict=False)])
def test_launches_on_equal_inputs_give_equal_bytes_in_every_form(which: str, form: str) -> None:
    inputs = replace(RACES[which], form=form).make_inputs(CUDA)
    out, slots, accepted = torch.empty_like(inputs.main), inputs.at(), inputs.tokens // 2

    def launch(run: ReplayInputs) -> list[Tensor]:
        """A step and its commit, and then a fold of what is live."""
        ring, plan = run.state.ring, run.plan(slots)
        run.step(plan=plan, out=out.fill_(torch.nan)) if form != "decided" else run.step(slots=slots, out=out)
        ring.commit(plan, accepted)
        run.fold(slots=inputs.slots)
        ring.folded(inputs.slots)
        return [out, plan.rows, plan.parts]

    require_equal_launches(inputs, launch, busy)
