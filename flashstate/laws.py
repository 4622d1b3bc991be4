"""The laws every op obeys, as functions of a case and a device. tests/ and `flashstate check` run the same ones."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from flashstate.launch import override, uses_kernels, valid_configs
from flashstate.state.faults import check_faults
from flashstate.state.rounding import SEED_STEP
from flashstate.state.slots import Slots
from flashstate.testing import Case, Inputs, error_ratio, make_inputs, oracle

Law = Callable[[Case, torch.device], None]
LAWS: dict[str, Law] = {}
SCOPES: dict[str, Scope] = {}


@dataclass(frozen=True)
class Scope:
    """What a law speaks of: every implementation, "kernels" or "cuda" only, and which cases."""

    needs: str
    includes: Callable[[Case], bool]


class LawBroken(AssertionError):  # noqa: N818  (a verdict, not an error)
    """A law does not hold."""


def law(words: str, *, needs: str = "", includes: Callable[[Case], bool] = lambda case: True) -> Callable[[Law], Law]:
    """Add a function to LAWS under the words that say what holds."""

    def add(check: Law) -> Law:
        LAWS[words], SCOPES[words] = check, Scope(needs, includes)
        return check

    return add


def laws_for(device: torch.device) -> dict[str, Law]:
    """The laws that say something on this device: the reference has no configs, and a CPU no graphs and streams."""
    there = {"", "cuda", "kernels"} if device.type == "cuda" else {"", "kernels"} if uses_kernels(device) else {""}
    return {words: check for words, check in LAWS.items() if SCOPES[words].needs in there}


def pairs(laws: Iterable[str], cases: Iterable[Case]) -> list[tuple[str, Case]]:
    """Every law with every case it speaks of."""
    return [(words, case) for words, case in itertools.product(laws, cases) if SCOPES[words].includes(case)]


def require(condition: bool, message: str) -> None:
    if not condition:
        raise LawBroken(message)


def require_equal_bytes(what: str, got: Tensor, want: Tensor) -> None:
    """Raise unless both hold the same bytes; a NaN equals any NaN."""
    require(got.shape == want.shape and got.dtype == want.dtype, f"{what}: {got.shape} {got.dtype} is not comparable")
    integers = {2: torch.int16, 4: torch.int32}[got.element_size()]
    differs = (got.view(integers) != want.view(integers)) & ~(got.isnan() & want.isnan())
    require(not bool(differs.any()), f"{what}: {int(differs.sum())} of {got.numel()} elements differ")


def require_within_budget(what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
    ratio = error_ratio(got, exact, plain)
    require(ratio <= 1.0, f"{what} is {ratio:.2f} times its error budget away from float64")


def rest_of(inputs: Inputs) -> Tensor:
    """The slots no row of the batch reads."""
    slots = torch.arange(inputs.state.data.shape[0], device=inputs.slots.device)
    return slots[~torch.isin(slots, inputs.slots.long())]


@law("output and state are as close to float64 as float32 and the format allow")
def close_to_float64(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    want = oracle(inputs)
    y = inputs.step()
    require_within_budget("the output", y, want.y, want.y_plain)
    require_within_budget("the state", inputs.state.data[inputs.slots.long()].float(), want.state, want.state_plain)


@law("permuting the rows of a batch permutes the results")
def permutation(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    shuffled = inputs.fresh()
    order = torch.randperm(case.batch, generator=torch.Generator().manual_seed(1)).to(device)
    y, y_shuffled = inputs.step(), _rows(shuffled, order).step()
    require_equal_bytes("outputs", y_shuffled, y[order])
    require_equal_bytes("states", shuffled.state.data, inputs.state.data)


def _rows(inputs: Inputs, rows: Tensor) -> Inputs:
    """The same pool with some rows of the batch, in some order."""
    arguments = {name: t if name == "A" else t[rows] for name, t in inputs.arguments.items()}
    options = {name: t[rows] if name == "z" else t for name, t in inputs.options.items()}
    return replace(inputs, arguments=arguments, options=options, slots=inputs.slots[rows])


@law("a row does not depend on its neighbours or on the batch size")
def independence(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    for row in {0, case.batch - 1}:
        alone, together = inputs.fresh(), inputs.fresh()
        y_alone = _rows(alone, torch.tensor([row], device=device)).step()
        y = together.step()
        slot = int(inputs.slots[row])
        require_equal_bytes(f"output of row {row}", y_alone[0], y[row])
        require_equal_bytes(f"state of row {row}", alone.state.data[slot], together.state.data[slot])


@law("the launch config does not change a byte", needs="kernels")
def configs_agree(case: Case, device: torch.device) -> None:
    inputs = make_inputs(replace(case, x="float32"), device)  # a float32 output shows every bit of a sum
    first, y_first = None, None
    for config in valid_configs(case.problem):
        again = inputs.fresh()
        with override(config):
            y = again.step()
        if first is None or y_first is None:
            first, y_first = again, y
        require_equal_bytes(f"output with {config}", y, y_first)
        require_equal_bytes(f"state with {config}", again.state.data, first.state.data)


@law("five launches on equal inputs give equal bytes")
def repeatable(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    runs = [inputs.fresh() for _ in range(5)]
    outputs = [run.step() for run in runs]
    for run, y in zip(runs[1:], outputs[1:], strict=True):
        require_equal_bytes("output", y, outputs[0])
        require_equal_bytes("state", run.state.data, runs[0].state.data)


@law("slots that no row writes keep their bytes, and NaN in them stays there")
def untouched_slots(case: Case, device: torch.device) -> None:
    clean, inputs = make_inputs(case, device), make_inputs(case, device)
    rest = rest_of(inputs)
    inputs.state.data[rest] = torch.nan
    y, y_clean = inputs.step(), clean.step()
    require_equal_bytes("output", y, y_clean)
    require_equal_bytes("state", inputs.state.data[inputs.slots.long()], clean.state.data[inputs.slots.long()])
    require(bool(inputs.state.data[rest].isnan().all()), "a slot outside the batch was written")


@law("a padding row gives zero and touches nothing, even with a valid write slot")
def padding(case: Case, device: torch.device) -> None:
    for null, hole in ((-1, -1), (-1, -7), (0, 0), (1 << 40, case.slots + 3)):
        inputs = make_inputs(case, device)
        inputs.slots[inputs.slots == null] = hole  # that slot is no request's where it is the null slot
        inputs.slots[0] = hole
        before = inputs.state.data.clone()
        inputs.arguments["x"][0] = torch.nan
        free = rest_of(inputs)
        write = inputs.slots.clone()
        write[0] = free[0] if len(free) else hole
        y = inputs.step(slots=Slots(inputs.slots, write=write, null=null))
        dead = inputs.slots == hole
        require(bool((y[dead] == 0).all()), f"output of a padding row (slot {hole}, null {null}) is not zero")
        live = torch.isin(torch.arange(case.slots, device=device), inputs.slots[~dead])
        require_equal_bytes("slots outside the batch", inputs.state.data[~live], before[~live])
        require(not bool(y.isnan().any()), "NaN left a padding row")
        _require_fault("read" if hole >= case.slots else None)


def _require_fault(kind: str | None) -> None:
    """The fault flag is set for slots past the pool, and for nothing else."""
    try:
        check_faults()
    except IndexError as error:
        require(kind is not None and kind in str(error), f"unexpected fault: {error}")
    else:
        require(kind is None, f"a {kind} slot past the pool went unnoticed")


@law("NaN in a row's input shows in that row and nowhere else")
def nan_is_local(case: Case, device: torch.device) -> None:
    for name in ("x", "dt", "B", "C"):
        inputs = make_inputs(case, device)
        clean = inputs.fresh()
        inputs.arguments = {**inputs.arguments, name: inputs.arguments[name].clone()}
        inputs.arguments[name][0] = torch.nan
        y, y_clean = inputs.step(), clean.step()
        require(bool(y[0].isnan().all()), f"NaN in {name} was hidden")
        require_equal_bytes("the other rows", y[1:], y_clean[1:])
        rest = rest_of(inputs)
        require_equal_bytes("slots outside the batch", inputs.state.data[rest], clean.state.data[rest])
        if name != "C":
            require(
                bool(inputs.state.data[int(inputs.slots[0])].isnan().all()), f"NaN in {name} did not reach the state"
            )


@law("a separate write slot receives the state, and the read slot keeps its own")
def separate_write(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    in_place, rest = inputs.fresh(), rest_of(inputs)
    rows = torch.arange(min(case.batch, len(rest)), device=device)
    moved = _rows(inputs.fresh(), rows)
    y, y_moved = _rows(in_place, rows).step(), moved.step(slots=Slots(moved.slots, write=rest[rows]))
    require_equal_bytes("output", y_moved, y)
    read = moved.slots.long()
    require_equal_bytes("written slots", moved.state.data[rest[rows]], in_place.state.data[read])
    require_equal_bytes("read slots", moved.state.data[read], inputs.state.data[read])


@law("a write slot that is null, negative or past the pool is not written")
def skipped_write(case: Case, device: torch.device) -> None:
    for null, hole in ((-1, -1), (-1, -9), (1 << 40, 1 << 40), (-1, case.slots)):
        inputs = make_inputs(case, device)
        kept, want = inputs.fresh(), inputs.step()
        before = kept.state.data.clone()
        write = torch.full_like(inputs.slots.long(), hole)
        y = kept.step(slots=Slots(kept.slots, write=write, null=null))
        require_equal_bytes("output", y, want)
        require_equal_bytes(f"state (write slot {hole}, null {null})", kept.state.data, before)
        _require_fault("write" if hole == case.slots else None)


@law("update=False gives the same output and leaves the pool as it is")
def update_false(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    before = inputs.state.data.clone()
    y_kept = inputs.step(update=False)
    require_equal_bytes("state", inputs.state.data, before)
    require_equal_bytes("output", y_kept, inputs.step())


@law("without slots, row b is slot b")
def default_slots(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    given, left_out = inputs.fresh(), inputs.fresh()
    y = given.step(slots=torch.arange(case.batch, device=device))
    require_equal_bytes("output", left_out.step(slots=None), y)
    require_equal_bytes("state", left_out.state.data, given.state.data)


@law("`out` is filled and returned, whatever its strides")
def given_out(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    want = inputs.fresh().step()
    x = inputs.arguments["x"]
    buffer = torch.full((case.batch, 2, case.heads, case.rows + 3), torch.nan, dtype=x.dtype, device=device)
    out = buffer[:, 1, :, 1 : case.rows + 1]
    require(inputs.step(out=out) is out, "the result is not `out`")
    require_equal_bytes("out", out, want)
    require(
        bool(buffer[:, 0].isnan().all() and buffer[..., case.rows + 1 :].isnan().all()), "memory around out changed"
    )


@law("strided activations and expanded parameters change nothing")
def strided_activations(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    views = inputs.fresh()
    for name in ("x", "B", "C"):
        views.arguments = {**views.arguments, name: _view_into_projection(views.arguments[name])}
    views.arguments["dt"] = views.arguments["dt"].t().contiguous().t()[..., None].expand(-1, -1, case.rows)
    views.arguments["A"] = views.arguments["A"][:, None, None].expand(-1, case.rows, case.cols)
    if case.z:
        views.options = {**views.options, "z": _view_into_projection(views.options["z"])}
    if case.dt_bias:
        views.options = {**views.options, "dt_bias": views.options["dt_bias"][:, None].expand(-1, case.rows)}
    if case.D == "head":
        views.options = {**views.options, "D": views.options["D"][:, None].expand(-1, case.rows)}
    table = torch.stack([views.slots, views.slots.flip(0)], dim=1)
    y = views.step(slots=table[:, 0])
    require_equal_bytes("output", y, inputs.step())
    require_equal_bytes("state", views.state.data, inputs.state.data)


def _view_into_projection(tensor: Tensor) -> Tensor:
    """The same values as a slice of wider rows, one element off alignment, NaN around them."""
    batch, heads, width = tensor.shape
    wide = torch.full((batch, 2 * heads, width + 3), torch.nan, dtype=tensor.dtype, device=tensor.device)
    wide[:, heads:, 1 : width + 1] = tensor
    return wide[:, heads:, 1 : width + 1]


@law("page-strided and unaligned pools work, and nothing between the pages is touched")
def paged_pool(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    want = oracle(inputs)
    size = inputs.state.data[0].numel()
    for offset, gap in ((0, 16), (0, 5), (1, 3)):
        pages = torch.full((case.slots * (size + gap) + offset,), torch.nan, device=device).to(inputs.state.data.dtype)
        data = pages[offset:].view(case.slots, size + gap)[:, :size].view(inputs.state.data.shape)
        data.copy_(inputs.state.data)
        paged, dense = replace(inputs, state=replace(inputs.state, data=data)), inputs.fresh()
        y = paged.step()
        dense.step()
        require_within_budget(f"output with offset {offset}, gap {gap}", y, want.y, want.y_plain)
        require_equal_bytes(f"state with offset {offset}, gap {gap}", data, dense.state.data)
        between = pages[offset:].view(case.slots, size + gap)[:, size:]
        require(bool(between.isnan().all() and pages[:offset].isnan().all()), "memory between slots was written")


@law(
    "stochastic rounding draws other bits after advance and in another stream, and advance moves only its slots",
    includes=lambda case: case.rounding == "stochastic",
)
def seeds_decide(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    base, stepped, streamed = inputs.fresh(), inputs.fresh(), inputs.fresh()
    streamed.state = replace(streamed.state, stream=streamed.state.stream + 1)
    stepped.state.advance(stepped.slots)
    rest = rest_of(inputs)
    moved = _seeds(stepped) != _seeds(inputs)
    require(not bool(moved[rest].any()) and bool(moved[inputs.slots.long()].all()), "advance moved the wrong seeds")
    for run in (base, stepped, streamed):
        run.step()
    for name, other in (("after advance", stepped), ("in another stream", streamed)):
        same = (other.state.data == base.state.data)[inputs.slots.long()].flatten(1).all(1)
        require(not bool(same.any()), f"the bytes {name} are the same")


def _seeds(inputs: Inputs) -> Tensor:
    assert inputs.state.seed is not None
    return inputs.state.seed


@law("a CUDA graph draws fresh random bits at every replay", needs="cuda")
def graph_replays_draw_fresh_bits(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    eager = inputs.fresh()
    out = torch.empty_like(inputs.arguments["x"])

    def one_step(run: Inputs) -> None:
        run.step(out=out)
        run.state.advance(run.slots)

    one_step(inputs.fresh())  # compiles
    torch.cuda.synchronize(device)
    before, seeds = inputs.state.data.clone(), _seeds(inputs).clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one_step(inputs)
    for replays in range(1, 4):
        graph.replay()
        replayed = out.clone()
        one_step(eager)
        require_equal_bytes("output of a replay", replayed, out)
        require_equal_bytes("state after a replay", inputs.state.data, eager.state.data)
        moved = _seeds(inputs)[inputs.slots.long()] - seeds[inputs.slots.long()]
        require(bool((moved == _wrapped(replays * SEED_STEP)).all()), f"seeds did not move on by {replays} steps")
    _require_other_bits(graph, inputs, before)


def _require_other_bits(graph: torch.cuda.CUDAGraph, inputs: Inputs, before: Tensor) -> None:
    """Two replays from the same state store different bytes, where rounding is stochastic."""
    stored = []
    for _ in range(2):
        inputs.state.data.copy_(before)
        graph.replay()
        stored.append(inputs.state.data.clone())
    fresh = inputs.state.rounding == "nearest" or not torch.equal(*stored)
    require(fresh, "two replays from the same state drew the same bits")


def _wrapped(number: int) -> int:
    """The number as 64-bit arithmetic has it."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


@law("a second stream works", needs="cuda")
def second_stream_works(case: Case, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    other = inputs.fresh()
    want = inputs.step()
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = other.step()
    torch.cuda.current_stream(device).wait_stream(stream)
    require_equal_bytes("output", got, want)
    require_equal_bytes("state", other.state.data, inputs.state.data)
