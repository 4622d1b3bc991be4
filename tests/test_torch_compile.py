"""Ops inside torch.compile, as registered ops, and without a word to the host."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from calls import BY_NAME, DELTA, DELTA_REPLAY, FORMS, MAMBA2, MAMBA3, REPLAY, arguments_of
from compiling import CPU
from torch import Tensor
from traffic import pool_of

import flashstate
from flashstate.launch.call import Given
from flashstate.ops import gated_delta_fold, mamba2_fold, rings, seeds
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.proof import AnyCase, Case, DeltaCase, Mamba3Case, make_inputs
from flashstate.proof.laws.steps import make_snapshots
from flashstate.proof.laws.tokens import TREE
from flashstate.state.formats import bits_of

CUDA = torch.device("cuda")
DEVICES = pytest.mark.parametrize(
    ("device", "backend"),
    [(CPU, "aot_eager"), pytest.param(CUDA, "inductor", marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
STOCHASTIC = {"batch": 4, "slots": 9, "format": "float16", "rounding": "stochastic"}
CASES: dict[str, AnyCase] = {
    "mamba2": replace(MAMBA2, **STOCHASTIC, dt_limit=(0.25, math.inf)),
    "gated_delta": replace(DELTA, **STOCHASTIC),
}
SEVERAL: dict[str, AnyCase] = {
    op: replace(CASES[op], tokens=4, format="int8", cols=16) for op in ("mamba2", "gated_delta")
}


def require_alike(run: Callable[..., list[Tensor]], backend: str) -> list[Tensor]:
    """What a function gives is what it gives when it is compiled; it makes all that it is given itself."""
    eager, compiled = run(lambda step: step), run(lambda step: torch.compile(step, fullgraph=True, backend=backend))
    for one, other in zip(eager, compiled, strict=True):
        assert torch.equal(bits_of(one), bits_of(other))
    return eager


@DEVICES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_whole_step_of_a_model_is_one_graph(case: AnyCase, device: torch.device, backend: str) -> None:
    """A page-strided pool, State and Slots made inside, seeds moved on."""
    inputs = make_inputs(case, device)
    step, main = inputs.op.step, inputs.op.declared.main
    size, seed = inputs.state.data[0].numel(), inputs.state.seed
    pages = torch.zeros(case.slots, size + 16, dtype=torch.float16, device=device)
    pages[:, :size] = inputs.state.data.flatten(1)

    def model_step(pages: Tensor, seed: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        data = pages[:, :size].view(case.slots, *case.state_axes)
        state = flashstate.State(data, rounding="stochastic", seed=seed, stream=1)
        rows = flashstate.Slots(slots, null=0)
        arguments = {**inputs.arguments, main: x * 2}
        y = step(state, **arguments, slots=rows)
        y = y + step(state, **arguments, slots=rows, update=False)
        state.advance(rows)
        return y

    def run(compile: Callable[..., Any]) -> list[Tensor]:
        memory, compiled = [pages.clone(), seed.clone()], compile(model_step)
        return [*(compiled(*memory, inputs.main, inputs.slots) for _ in range(3)), *memory]

    *_, written, moved = require_alike(run, backend)
    assert not torch.equal(written, pages)
    assert not torch.equal(moved, seed)


@DEVICES
def test_a_whole_step_of_mamba3_is_one_graph(device: torch.device, backend: str) -> None:
    """Mamba3State, Rotary and Slots made inside, for layers of different streams; seeds moved on."""
    case = replace(MAMBA3, **STOCHASTIC, rank=4, trap_logit=True, kv="float16")
    made = arguments_of(MAMBA3_STEP, make_inputs(case, device))
    old, turning, slots = made.pop("state"), made.pop("rotary"), torch.tensor([7, 0, 2, -1], device=device)
    made = {name: value for name, value in made.items() if name not in ("slots", "out", "update", "update_kv")}
    before = {"data": old.ssm.data, "k": old.k, "v": old.v, "angle": old.angle, "seed": old.ssm.seed}

    def model_step(
        data: Tensor, k: Tensor, v: Tensor, angle: Tensor, seed: Tensor, x: Tensor, turn: Tensor, stream: int
    ) -> Tensor:
        ssm = flashstate.State(data, rounding="stochastic", seed=seed, stream=stream)
        state, rows = flashstate.Mamba3State(ssm, k, v, angle), flashstate.Slots(slots, null=0)
        rotary = flashstate.Rotary(turn * 2, bias_B=turning.bias_B, pairing="interleaved")
        arguments = {**made, "x": x * 2, "rotary": rotary, "slots": rows}
        y = flashstate.mamba3_step(state, **arguments)
        kept = flashstate.mamba3_step(state, **arguments, update=False)
        plain = flashstate.mamba3_step(state, **{**arguments, "rotary": None}, update_kv=False)
        state.advance(rows)
        return torch.cat([y, kept, plain])  # a sum would be rounded less often where it is compiled

    def run(compile: Callable[..., Any]) -> list[Tensor]:
        memory, compiled = {name: tensor.clone() for name, tensor in before.items()}, compile(model_step)
        outputs = [compiled(**memory, x=made["x"], turn=turning.angle, stream=i) for i in range(3)]
        return [*outputs, *memory.values()]

    for tensor, of_before in zip(require_alike(run, backend)[3:], before.values(), strict=True):
        assert not torch.equal(tensor[[7, 2]], of_before[[7, 2]])
        assert torch.equal(tensor[[0, 1, 3]], of_before[[0, 1, 3]])


HALVES = {"batch": 4, "tokens": 3, "x": "float16", "slots": 7, "format": "float16", "rounding": "stochastic"}
LAYERS = (  # of one pool
    replace(REPLAY, **HALVES, bc="float16", dt="float16"),
    replace(DELTA_REPLAY, **HALVES, qk="float16"),
    replace(DELTA_REPLAY, **HALVES, qk="float16", per_channel=True),
)


def make_pool(device: torch.device) -> flashstate.StatePool:
    """Layers with rings of every kind."""
    pool = pool_of(LAYERS, device)
    pool.acquire(4, seed=7)
    return pool


@DEVICES
def test_a_whole_speculative_step_by_replay_is_one_graph(device: torch.device, backend: str) -> None:
    """Five steps, so that rings fold."""
    slots = torch.tensor([3, 0, -1, 2], dtype=torch.int32, device=device)

    def step(pool: flashstate.StatePool, given: list[dict[str, Any]], accepted: Tensor) -> Tensor:
        plan = pool.plan(slots, 3)
        y = flashstate.mamba2_replay(pool.layer(0), pool.ring(0), **given[0], plan=plan)
        for i in (1, 2):
            y = flashstate.gated_delta_replay(pool.layer(i), pool.ring(i), **{**given[i], "v": y}, plan=plan)
        pool.commit(plan, accepted)
        pool.advance(slots)
        return y

    def run(compile: Callable[..., Any]) -> list[Tensor]:
        pool, compiled, found = make_pool(device), compile(step), []
        for i in range(5):
            given = [case.make_inputs(device, i).arguments for case in LAYERS]
            found += [compiled(pool, given, torch.tensor([3, i % 4, 2, 2], device=device)), pool.layer(0).seed]
            for j in range(len(LAYERS)):
                ring = pool.ring(j)
                found += [pool.layer(j).data, *(getattr(ring, name) for name in (*ring.written, "start", "count"))]
            found = [tensor.clone() for tensor in found]
        return found

    require_alike(run, backend)


@DEVICES
@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_speculation_is_one_graph(case: AnyCase, device: torch.device, backend: str) -> None:
    """Four tokens of a tree from a slot that was accepted, a slot for each, snapshots in another format."""
    inputs = make_inputs(case, device).fresh(extra=16)
    step = inputs.op.step
    parents = torch.tensor(TREE[:4], device=device).repeat(4, 1)
    read, accepted = inputs.slots[:, None].repeat(1, 2), torch.tensor([1, 2, 1, 2], device=device)
    write = torch.arange(case.slots, case.slots + 16, device=device).reshape(4, 4)

    def model_step(state: flashstate.State, snapshots: flashstate.State, out: Tensor) -> Tensor:
        slots = flashstate.Slots(read, accepted=accepted, write=write, parents=parents)
        y = step(state, **inputs.arguments, slots=slots, snapshots=snapshots, out=out)
        state.advance(slots)
        return y * 2

    def run(compile: Callable[..., Any]) -> list[Tensor]:
        fresh, taken = inputs.fresh(), make_snapshots(case, "float16", "nearest", device)
        y = compile(model_step)(fresh.state, taken, torch.empty_like(inputs.main))
        return [y, fresh.state.data, fresh.state.scale, fresh.state.seed, taken.data]

    require_alike(run, backend)


def test_many_layers_share_one_compiled_function() -> None:
    """The stream of a layer is an argument of the graph, not a constant in it: twenty layers are not twenty graphs."""
    inputs = make_inputs(CASES["gated_delta"], CPU)
    step = inputs.op.step

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(data: Tensor, seed: Tensor, stream: int) -> Tensor:
        state = flashstate.State(data, rounding="stochastic", seed=seed, stream=stream)
        return step(state, **inputs.arguments, slots=inputs.slots)

    for stream in range(20):
        layer(inputs.state.data, inputs.state.seed, stream)


def check_registered(name: str, pieces: Any, given: Given) -> None:
    """opcheck of a registered op, with the flat arguments that a call has."""
    flat = []
    for first, *rest in (piece.path for piece in pieces):
        value = getattr(given, first)
        for part in rest:
            value = None if value is None else getattr(value, part)
        flat.append(value)
    torch.library.opcheck(getattr(torch.ops.flashstate, name).default, tuple(flat))


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, "plain") for name in FORMS),
        *(("mamba2_step", form) for form in ("a tree", "stochastic snapshots", "limited time steps")),
        *(("gated_delta_step", form) for form in ("a slot for every token", "at once")),
        *(("mamba3_step", form) for form in ("int8", "slots to choose from", "without weights")),
        *(("conv1d_step", form) for form in ("snapshots", "a ring")),
        *((name, "a plan of packed tokens") for name in ("mamba2_replay", "gated_delta_replay")),
    ],
)  # fmt: skip
def test_registered_ops_declare_what_they_write(name: str, form: str) -> None:
    op = BY_NAME[name]
    check_registered(name, op.pieces, op.checked(list(FORMS[name][form].arguments.values())))


def check_function(name: str, function: Any, *values: Any) -> None:
    """opcheck of a function that registered itself, with these arguments."""
    names = dict.fromkeys(piece.path[0] for piece in function.pieces)
    check_registered(name, function.pieces, Given(names, values))


def test_registered_functions_declare_what_they_write() -> None:
    """Folds, in place and elsewhere, seeds, and what plans and commits of rings do."""
    pool, of_four = make_pool(CPU), flashstate.Slots(torch.arange(4))
    elsewhere = flashstate.State(torch.zeros(7, 4, 16, 32))
    of_mamba2 = pool.layer(0), pool.ring(0), -torch.rand(4), of_four, None, -1, elsewhere
    check_function("mamba2_fold", mamba2_fold.fold, *of_mamba2)
    for i, gates, into in ((1, (None, None), elsewhere), (2, (torch.rand(4), torch.rand(4, 32)), None)):
        values = (pool.layer(i), pool.ring(i), *gates, True, of_four, None, -1, into)
        check_function("gated_delta_fold", gated_delta_fold.fold, *values)
    inputs = make_inputs(MAMBA2, CPU)
    check_function("advance_seeds", seeds.add_seed_step, inputs.state.seed, flashstate.Slots(inputs.slots))
    ring, slots = pool.ring(0), flashstate.Slots(torch.arange(3))
    plan, cursors = ring.plan(slots, 1), (ring.start, ring.count)
    check_function("make_plan", rings.make_plan, plan.rows, plan.parts, *cursors, ring.window, slots, 1, None)
    accepted = torch.tensor([1, 0, 1])
    of_rings = *cursors, ring.window, ring.length
    check_function("commit_plan", rings.commit_plan, *of_rings, plan.rows, accepted, torch.zeros_like(ring.count))
    check_function("drop_folded", rings.drop_folded, *cursors, ring.length, slots, None, 0)


@pytest.mark.gpu
def test_the_cuda_graphs_of_torch_compile_work_after_an_eager_step() -> None:
    inputs = make_inputs(CASES["gated_delta"], CUDA)
    eager = inputs.fresh()
    compiled = torch.compile(lambda run: run.step() * 2, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        want = eager.step() * 2
        assert torch.equal(compiled(inputs), want)
    assert torch.equal(inputs.state.data, eager.state.data)


REAL: dict[str, AnyCase] = {
    "mamba2": Case(4, 16, 1, 64, 128, x="bfloat16", bc="bfloat16", dt="bfloat16", slots=16),
    "gated_delta": DeltaCase(4, 64, 16, 128, 128, x="bfloat16", qk="bfloat16", gates="bfloat16", slots=9),
    "gated_delta at once": DeltaCase(4, 64, 16, 128, 128, x="bfloat16", qk="bfloat16", slots=9, tokens=4, exact=False),
    "mamba3": Mamba3Case(4, 48, 1, 64, 128, rank=4, x="bfloat16", bc="bfloat16", kv="bfloat16", slots=9),
}


@pytest.mark.gpu
@pytest.mark.parametrize("case", REAL.values(), ids=REAL)
def test_a_call_with_out_neither_allocates_nor_synchronises(case: AnyCase) -> None:
    inputs = make_inputs(case, CUDA)
    out = torch.empty_like(inputs.main)
    inputs.step(out=out)
    inputs.state.advance(inputs.slots)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        inputs.step(out=out)
        inputs.state.advance(inputs.slots)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
