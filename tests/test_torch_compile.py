"""mamba2_step, gated_delta_step and mamba3_step inside torch.compile, as registered ops, and without a word to the
host."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from flashstate.ops.tokens import flat_slots, flat_snapshots
from torch import Tensor

import flashstate
from flashstate import proof
from flashstate.proof import AnyCase, Case, DeltaCase, Inputs, make_inputs
from flashstate.proof.laws.tokens import TREE, make_snapshots

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
AnyStep = Case | DeltaCase
DEVICES = pytest.mark.parametrize(
    ("device", "backend"),
    [(CPU, "aot_eager"), pytest.param(CUDA, "inductor", marks=pytest.mark.gpu)],
    ids=["cpu", "gpu"],
)
MAMBA2 = Case(batch=4, heads=4, groups=2, rows=16, cols=32, format="float16", rounding="stochastic", slots=9)
GATED_DELTA = DeltaCase(4, 4, 2, 16, 32, format="float16", rounding="stochastic", slots=9)
AT_ONCE = replace(GATED_DELTA, tokens=4, qk="float16", exact=False)
CASES: dict[str, AnyStep] = {"mamba2": MAMBA2, "gated_delta": GATED_DELTA, "gated_delta at once": AT_ONCE}
SEVERAL: dict[str, AnyStep] = {
    op: replace(case, tokens=4, format="int8", cols=16)
    for op, case in (("mamba2", MAMBA2), ("gated_delta", GATED_DELTA))
}


@DEVICES
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_whole_step_of_a_model_is_one_graph(case: AnyStep, device: torch.device, backend: str) -> None:
    """A page-strided pool, State and Slots made inside, seeds moved on."""
    inputs = make_inputs(case, device)
    step, main = inputs.op.step, inputs.op.main
    size, seed = inputs.state.data[0].numel(), inputs.state.seed
    pages = torch.zeros(case.slots, size + 16, dtype=torch.float16, device=device)
    pages[:, :size] = inputs.state.data.flatten(1)

    def model_step(pages: Tensor, seed: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        data = pages[:, :size].view(case.slots, *case.state_axes)
        state = flashstate.State(data, rounding="stochastic", seed=seed, stream=1)
        rows = flashstate.Slots(slots, null=0)
        arguments = {**inputs.arguments, main: x * 2}
        y = step(state, **arguments, **inputs.options, slots=rows)
        y = y + step(state, **arguments, **inputs.options, slots=rows, update=False)
        state.advance(rows)
        return y

    runs = []
    for run in (model_step, torch.compile(model_step, fullgraph=True, backend=backend)):
        memory = [pages.clone(), seed.clone()]
        outputs = [run(*memory, inputs.main, inputs.slots) for _ in range(3)]
        runs.append([*outputs, *memory])
    for eager, compiled in zip(*runs, strict=True):
        assert torch.equal(eager, compiled)
    assert not torch.equal(runs[0][-2], pages)
    assert not torch.equal(runs[0][-1], seed)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_many_layers_share_one_compiled_function(case: AnyStep) -> None:
    """The stream of a layer is an argument of the graph, not a constant in it: twenty layers are not twenty graphs."""
    inputs = make_inputs(case, CPU)
    step = inputs.op.step

    @torch.compile(fullgraph=True, backend="aot_eager")
    def layer(data: Tensor, seed: Tensor, stream: int) -> Tensor:
        state = flashstate.State(data, rounding="stochastic", seed=seed, stream=stream)
        return step(state, **inputs.arguments, **inputs.options, slots=inputs.slots)

    for stream in range(20):
        layer(inputs.state.data, inputs.state.seed, stream)


def check_op(inputs: Inputs, slots: flashstate.Slots, snapshots: flashstate.State | None, update: bool) -> None:
    """opcheck of a registered op with what its door gives it."""
    state, a, o = inputs.state, inputs.arguments, inputs.options
    if inputs.op.main == "x":
        op = torch.ops.flashstate.mamba2_step.default
        own = (a["x"], a["dt"], a["A"], a["B"], a["C"], o["D"], o["z"], o["dt_bias"], True)
    else:
        op, at_once = torch.ops.flashstate.gated_delta_step.default, not o["exact"]
        own = (a["q"], a["k"], a["v"], a["a"], a["b"], o.get("A_log"), o.get("dt_bias"), 0.25, True, at_once)
    pool = (state.data, state.scale, state.seed, state.rounding, 10, 1)
    out = torch.empty_like(inputs.main)
    torch.library.opcheck(
        op, (*pool, *own, *flat_slots(slots), *flat_snapshots(snapshots), update, out, False)
    )  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_registered_ops_declare_what_they_write(case: AnyStep) -> None:
    inputs = make_inputs(case, CPU)
    check_op(inputs, inputs.at(), None, True)


@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_registered_ops_declare_what_they_write_with_several_tokens(case: AnyStep) -> None:
    """Also scales, snapshots and slots for every token, with packed tokens and with a tree."""
    dense, packed = make_inputs(case, CPU), make_inputs(replace(case, packed=True), CPU).fresh(extra=16)
    snapshots = make_snapshots(case, "int16", "stochastic", CPU)  # torch cannot compare float8
    check_op(dense, dense.at(parents=torch.tensor(TREE[:4]).repeat(4, 1)), snapshots, False)
    write = torch.arange(case.slots, case.slots + 16).reshape(4, 4)
    check_op(packed, packed.at(write=write), snapshots, True)


def test_the_registered_op_that_moves_seeds_on_declares_what_it_writes() -> None:
    inputs = make_inputs(MAMBA2, CPU)
    seeds = (inputs.state.seed, inputs.slots, None, None, -1)
    torch.library.opcheck(torch.ops.flashstate.advance_seeds.default, seeds)


@DEVICES
@pytest.mark.parametrize("case", SEVERAL.values(), ids=SEVERAL)
def test_speculation_is_one_graph(case: AnyStep, device: torch.device, backend: str) -> None:
    """Four tokens of a tree from a slot that was accepted, a slot for each, snapshots in another format."""
    inputs = make_inputs(case, device).fresh(extra=16)
    step = inputs.op.step
    parents = torch.tensor(TREE[:4], device=device).repeat(4, 1)
    read, accepted = inputs.slots[:, None].repeat(1, 2), torch.tensor([1, 2, 1, 2], device=device)
    write = torch.arange(case.slots, case.slots + 16, device=device).reshape(4, 4)

    def model_step(state: flashstate.State, snapshots: flashstate.State, out: Tensor) -> Tensor:
        slots = flashstate.Slots(read, accepted=accepted, write=write, parents=parents)
        y = step(state, **inputs.arguments, **inputs.options, slots=slots, snapshots=snapshots, out=out)
        state.advance(slots)
        return y * 2

    results = []
    for run in (model_step, torch.compile(model_step, fullgraph=True, backend=backend)):
        fresh, taken = inputs.fresh(), make_snapshots(case, "float16", "nearest", device)
        y = run(fresh.state, taken, torch.empty_like(inputs.main))
        results.append((y, fresh.state.data, fresh.state.scale, fresh.state.seed, taken.data))
    for eager, compiled in zip(*results, strict=True):
        assert torch.equal(eager, compiled)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_cuda_graphs_of_torch_compile_work_after_an_eager_step(case: AnyStep) -> None:
    inputs = make_inputs(case, CUDA)
    eager = inputs.fresh()
    compiled = torch.compile(lambda run: run.step() * 2, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        want = eager.step() * 2
        assert torch.equal(compiled(inputs), want)
    assert torch.equal(inputs.state.data, eager.state.data)


def mamba3_states(device: torch.device, rank: int, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """What a layer of Mamba-3 keeps in 9 slots, and its seeds."""
    generator = torch.Generator().manual_seed(rank)
    shapes = {"data": (4, 16, 32), "k": (rank, 4, 32), "v": (4, 16), "angle": (4, 8)}
    states = {name: torch.randn(9, *shape, generator=generator) for name, shape in shapes.items()}
    seed = torch.arange(9)
    states = {**states, "data": states["data"].to(dtype), "v": states["v"].half(), "angle": states["angle"] % 6}
    return {name: tensor.to(device) for name, tensor in {**states, "seed": seed}.items()}


def mamba3_inputs(device: torch.device, rank: int, *tokens: int) -> dict[str, Any]:
    """All arguments of a call but the state and slots; `tokens`: the axis behind a batch of 4, or none."""
    generator = torch.Generator().manual_seed(rank)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(device)

    lead = (4, *tokens)
    x, z = (normal(*lead, 4, 16).bfloat16() for _ in range(2))
    B, C = (normal(*lead, rank, 2, 32).bfloat16() for _ in range(2))
    A, dt, trap = (normal(*lead, 4) for _ in range(3))
    weights = {name: normal(rank, 4, 16) for name in ("Wx", "Wz", "Wo")}
    biases = {name: normal(rank, 4, 32) for name in ("bias_B", "bias_C")}
    rotary = flashstate.Rotary(normal(*lead, 8), **biases)
    arguments = {"x": x, "A": -A.abs(), "dt": dt.abs(), "trap": trap, "B": B, "C": C, **weights, "D": normal(4), "z": z}
    return {**arguments, "rotary": rotary, "trap_logit": True}


@DEVICES
@pytest.mark.parametrize("rank", [1, 4])
def test_a_whole_step_of_mamba3_is_one_graph(rank: int, device: torch.device, backend: str) -> None:
    """Mamba3State, Rotary and Slots made inside, for layers of different streams; seeds moved on."""
    torch.compiler.reset()  # else another rank makes sizes symbols, which State does not take
    inputs, slots = mamba3_inputs(device, rank), torch.tensor([7, 0, 2, -1], device=device)

    def model_step(
        data: Tensor, k: Tensor, v: Tensor, angle: Tensor, seed: Tensor, x: Tensor, turn: Tensor, stream: int
    ) -> Tensor:
        ssm = flashstate.State(data, rounding="stochastic", seed=seed, stream=stream)
        state, rows = flashstate.Mamba3State(ssm, k, v, angle), flashstate.Slots(slots, null=0)
        rotary = flashstate.Rotary(turn * 2, bias_B=inputs["rotary"].bias_B, pairing="interleaved")
        arguments = {**inputs, "x": x * 2, "rotary": rotary, "slots": rows}
        y = flashstate.mamba3_step(state, **arguments)
        kept = flashstate.mamba3_step(state, **arguments, update=False)
        plain = flashstate.mamba3_step(state, **{**arguments, "rotary": None}, update_kv=False)
        state.advance(rows)
        return torch.cat([y, kept, plain])  # a sum would be rounded less often where it is compiled

    runs = []
    for run in (model_step, torch.compile(model_step, fullgraph=True, backend=backend)):
        memory = mamba3_states(device, rank)
        outputs = [run(**memory, x=inputs["x"], turn=inputs["rotary"].angle, stream=i) for i in range(12)]
        runs.append([*outputs, *memory.values()])
    for eager, compiled in zip(*runs, strict=True):
        assert torch.equal(eager, compiled)
    before = mamba3_states(device, rank)
    for tensor, old in zip(runs[0][-len(before) :], before.values(), strict=True):
        assert not torch.equal(tensor[[7, 2]], old[[7, 2]])
        assert torch.equal(tensor[[0, 1, 3]], old[[0, 1, 3]])


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("tokens", [(), (3,)], ids=["one token", "several"])
def test_the_registered_op_of_mamba3_declares_what_it_writes(rank: int, tokens: tuple[int, ...]) -> None:
    """Also scales, and slots for every token."""
    states, inputs = (
        mamba3_states(CPU, rank, torch.int8 if tokens else torch.float16),
        mamba3_inputs(CPU, rank, *tokens),
    )
    scale, rotary = torch.ones(9, 4, 16) if tokens else None, inputs["rotary"]
    write = torch.tensor([[1, 2, -1], [3, 4, 5], [6, 7, 8], [1, 1, 1]]) if tokens else None
    slots = flashstate.Slots(torch.tensor([0, 2, 4, -1]), write=write)
    names = ("x", "A", "dt", "trap", "B", "C", "Wx", "Wz", "Wo", "D", "z")
    torch.library.opcheck(
        torch.ops.flashstate.mamba3_step.default,
        (
            states["data"], scale, states["seed"], "stochastic", 10, 1, states["k"], states["v"], states["angle"],
            *(inputs[name] for name in names), rotary.angle, rotary.bias_B, rotary.bias_C, "halved", True, True,
            *flat_slots(slots), True, torch.empty_like(inputs["x"]),
        ),
    )  # fmt: skip


REAL: dict[str, AnyCase] = {
    "mamba2": proof.CASES["mamba2_step"].real[0],
    "gated_delta": proof.CASES["gated_delta_step"].real[0],
    "mamba3": proof.CASES["mamba3_step"].real[0],
    "gated_delta at once": replace(proof.CASES["gated_delta_step"].real[0], tokens=4, exact=False),
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
