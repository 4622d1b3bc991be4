"""mamba2_step on random problems equals a loop over rows, and rounding keeps its promises for every float32."""

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashstate
from flashstate import Slots
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.formats import PORTABLE_FORMATS, decode, encode
from flashstate.state.rounding import random_bits
from flashstate.testing import Case, Inputs, error_ratio, interpreted, make_inputs

CPU = torch.device("cpu")
COMMON = settings(
    deadline=None,
    derandomize=True,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)


@dataclass(frozen=True)
class Situation:
    """A problem, and where everything lies: the pool inside a larger buffer, the rows on its slots."""

    case: Case
    seed: int
    offset: int  # elements before the pool
    gap: int  # elements between slots
    read: tuple[int, ...]
    write: tuple[int, ...] | None
    null: int
    update: bool
    given_out: bool

    def inside(self, slot: int) -> bool:
        return 0 <= slot < self.case.slots and slot != self.null

    def past(self, slot: int) -> bool:
        return slot >= self.case.slots and slot != self.null

    @property
    def live(self) -> list[int]:
        return [row for row, slot in enumerate(self.read) if self.inside(slot)]

    def target(self, row: int) -> int:
        return self.read[row] if self.write is None else self.write[row]

    @property
    def written(self) -> list[int]:
        """The live rows whose state is stored."""
        return [row for row in self.live if self.update and self.inside(self.target(row))]


@st.composite
def situations(draw: st.DrawFn, rows: int, cols: int, dtypes: tuple[str, ...]) -> Situation:
    batch, groups, heads_per_group = draw(st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)))
    name, rounding = draw(st.sampled_from(PORTABLE_FORMATS))
    dtype = st.sampled_from(dtypes)
    case = Case(
        batch=batch,
        heads=groups * heads_per_group,
        groups=groups,
        rows=draw(st.integers(1, rows)),
        cols=draw(st.integers(1, cols)),
        format=name,
        rounding=rounding,
        x=draw(dtype),
        bc=draw(dtype),
        dt=draw(dtype),
        parameters=draw(dtype),
        D=draw(st.sampled_from([None, "head", "row"])),
        z=draw(st.booleans()),
        dt_bias=draw(st.booleans()),
        dt_softplus=draw(st.booleans()),
        index=draw(st.sampled_from(["int32", "int64"])),
        slots=2 * batch + 1 + draw(st.integers(0, 3)),
    )
    order = draw(st.permutations(range(case.slots)))
    null = draw(st.sampled_from([-1, order[-1], 1 << 20]))
    update = draw(st.sampled_from([True, True, True, False]))
    return Situation(
        case,
        seed=draw(st.integers(0, 1 << 16)),
        offset=draw(st.integers(0, 3)),
        gap=draw(st.integers(0, 9)),
        read=draw(slot_numbers(order[:batch], case.slots, null)),
        write=draw(st.none() | slot_numbers(order[batch : 2 * batch], case.slots, null)) if update else None,
        null=null,
        update=update,
        given_out=draw(st.booleans()),
    )


def slot_numbers(own: list[int], slots: int, null: int) -> st.SearchStrategy[tuple[int, ...]]:
    """A number for every row: mostly its own slot, else null, negative or past the pool."""
    no_slot = st.sampled_from([null, -1, -5, slots, slots + 4, 1 << 30])
    return st.tuples(*[st.just(slot) | st.just(slot) | no_slot for slot in own])


@dataclass
class Expected:
    """What the model says, one entry per row and slot: exactly, and in float32 and the formats."""

    y: Tensor
    y_plain: Tensor
    state: Tensor
    state_plain: Tensor


def model(inputs: Inputs, rows_and_slots: list[tuple[int, int]]) -> Expected:
    """Rows of the batch one by one, each on its own, on these slots."""
    state, x = inputs.state, inputs.arguments["x"]
    entries = []
    for row, slot in rows_and_slots:
        arguments: dict[str, Any] = {"D": None, "z": None, "dt_bias": None, **inputs.arguments, **inputs.options}
        for name in ("x", "dt", "B", "C", "z"):
            arguments[name] = None if arguments[name] is None else arguments[name][row : row + 1]
        before = state.data[slot : slot + 1]
        y, after = mamba2_token(before.double(), **arguments)
        y_plain, after_plain = mamba2_token(before.float(), **arguments)
        random = None
        if state.rounding == "stochastic":
            assert state.seed is not None
            seed, shape = state.seed[slot : slot + 1], after.shape[1:]
            random = random_bits(seed, shape, token=0, stream=state.stream, rounds=state.rounds)
        stored = decode(encode(after_plain, state.data.dtype, random))
        entries.append((y, y_plain.to(x.dtype), after, stored))
    return Expected(*map(torch.cat, zip(*entries, strict=True)))


def require_within_budget(got: Tensor, entries: list[int], exact: Tensor, plain: Tensor) -> None:
    """`got` is some entries of the model. The others are there for the budget, which few values would leave to luck."""
    filled = plain.clone()
    filled[entries] = got
    assert error_ratio(filled, exact, plain) <= 1.0


def require_same_bytes_but_few(got: Tensor, plain: Tensor) -> None:
    """A 16-bit format hides the last bits of float32, so equal random bits give equal bytes, but for a few in 1000."""
    assert (got != plain).sum() <= 1 + got.numel() // 100


def in_pages(inputs: Inputs, situation: Situation) -> tuple[Inputs, Tensor]:
    """The inputs with their pool inside a buffer of random values, and that buffer."""
    data = inputs.state.data
    stride = data[0].numel() + situation.gap
    buffer = torch.randn(situation.offset + len(data) * stride, generator=torch.Generator().manual_seed(1))
    buffer = buffer.to(data.dtype)
    pool = buffer.as_strided(data.shape, (stride, *data.stride()[1:]), situation.offset)
    pool.copy_(data)
    return replace(inputs, state=replace(inputs.state, data=pool)), buffer


def indices(numbers: tuple[int, ...] | None, situation: Situation) -> Tensor | None:
    return None if numbers is None else torch.tensor(numbers, dtype=getattr(torch, situation.case.index))


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def require_the_model(situation: Situation) -> None:
    """Outputs and stored states are within budget, and every other byte is as the loop leaves it."""
    faults_found()
    inputs, buffer = in_pages(make_inputs(situation.case, CPU, situation.seed), situation)
    state, live, written = inputs.state, situation.live, situation.written
    dead = [row for row in range(situation.case.batch) if row not in live]
    inputs.arguments["x"][dead] = torch.nan
    inputs.arguments["B"][dead] = torch.nan
    all_slots = [(row, slot) for row in live for slot in range(situation.case.slots)]
    want = model(inputs, [(row, situation.read[row]) for row in live] + all_slots) if live else None
    memory, seed = buffer.clone(), state.seed.clone()
    slots = Slots(indices(situation.read, situation), write=indices(situation.write, situation), null=situation.null)
    out = torch.full_like(inputs.arguments["x"], torch.nan) if situation.given_out else None

    y = inputs.step(slots=slots, update=situation.update, out=out)

    assert out is None or y is out
    assert y.dtype == inputs.arguments["x"].dtype
    assert (y[dead] == 0).all()
    if want:
        require_within_budget(y[live], list(range(len(live))), want.y, want.y_plain)
    if written:
        targets, entries = [situation.target(row) for row in written], [live.index(row) for row in written]
        stored = decode(state.data[targets])
        require_within_budget(stored, entries, want.state, want.state_plain)
        if state.data.dtype != torch.float32:
            require_same_bytes_but_few(stored, want.state_plain[entries])
        state.data[targets] = memory.as_strided(state.data.shape, state.data.stride(), situation.offset)[targets]
    assert equal_bytes(buffer, memory)
    assert torch.equal(state.seed, seed)
    assert faults_found() == expected_faults(situation)
    assert faults_found() == []


def expected_faults(situation: Situation) -> list[str]:
    """What sets the flag: slots past the pool that are not null, read, or written by a live row."""
    read = any(map(situation.past, situation.read))
    write = any(situation.past(situation.target(row)) for row in situation.live)
    return ["read"] * read + ["write"] * write


def faults_found() -> list[str]:
    try:
        flashstate.check_faults()
    except IndexError as error:
        return [kind for kind in ("read", "write") if f"{kind} slot" in str(error)]
    return []


@settings(COMMON, max_examples=100)
@given(situations(rows=40, cols=70, dtypes=("float32", "bfloat16", "float16")))
def test_reference_equals_a_loop_over_rows(situation: Situation) -> None:
    require_the_model(situation)


@pytest.mark.interpreted
@settings(COMMON, max_examples=15)
@given(situations(rows=9, cols=35, dtypes=("float32", "float16")))
def test_interpreted_kernel_equals_a_loop_over_rows(situation: Situation) -> None:
    with interpreted():
        require_the_model(situation)


HALF = (torch.float16, torch.bfloat16)
DTYPES = pytest.mark.parametrize("dtype", HALF, ids=str)
LIMITS = {torch.float16: 2.0**16, torch.bfloat16: torch.inf}  # from here on a value is too large by a whole step

any_float32 = st.floats(width=32) | st.integers(0, 0xFFFFFFFF).map(
    lambda bits: torch.tensor(bits).to(torch.uint32).view(torch.float32).item()
)
edges = [s * v for v in (65504.0, 65520.0, 65535.996, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25) for s in (-1.0, 1.0)]
values_and_bits = st.lists(
    st.tuples(any_float32 | st.sampled_from(edges), st.integers(0, 0xFFFF) | st.sampled_from([0, 0x1FFF, 0xFFFF])),
    min_size=1,
    max_size=60,
)


def every_value(dtype: torch.dtype) -> Tensor:
    """All values of a 16-bit format in order, infinities included, in float64."""
    codes = torch.arange(1 << 16).to(torch.uint16).view(dtype).double()
    return codes[~codes.isnan()].unique()


GRIDS = {dtype: every_value(dtype) for dtype in HALF}


def neighbours(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The largest value of the format that is not above `v`, and the smallest that is not below."""
    grid = GRIDS[dtype]
    return grid[torch.searchsorted(grid, v.double(), right=True) - 1], grid[torch.searchsorted(grid, v.double())]


def split(pairs: list[tuple[float, int]]) -> tuple[Tensor, Tensor]:
    values, bits = zip(*pairs, strict=True)
    return torch.tensor(values, dtype=torch.float32), torch.tensor(bits)


@settings(COMMON, max_examples=150)
@given(pairs=values_and_bits)
@DTYPES
def test_stochastic_rounding_gives_a_neighbour_and_makes_no_infinity(
    dtype: torch.dtype, pairs: list[tuple[float, int]]
) -> None:
    v, random = split(pairs)
    stored = encode(v, dtype, random)
    assert stored.dtype == dtype
    assert torch.equal(stored.isnan(), v.isnan())
    v, stored = v[~v.isnan()], stored[~v.isnan()]
    got, size = decode(stored).double(), v.double().abs()
    low, high = neighbours(v, dtype)
    assert ((got == low) | (got == high)).all()
    assert torch.equal(got.isinf(), size >= LIMITS[dtype])
    assert torch.equal(stored.signbit(), v.signbit())


@settings(COMMON, max_examples=150)
@given(pairs=values_and_bits)
@DTYPES
def test_rounding_keeps_what_the_format_holds(dtype: torch.dtype, pairs: list[tuple[float, int]]) -> None:
    v, random = split(pairs)
    held = v[~v.isnan()].to(dtype)
    for bits in (None, random[~v.isnan()]):
        assert equal_bytes(encode(held.float(), dtype, bits), held)


@settings(COMMON, max_examples=150)
@given(pairs=values_and_bits)
@DTYPES
def test_nearest_is_torchs_cast_and_the_nearer_neighbour(dtype: torch.dtype, pairs: list[tuple[float, int]]) -> None:
    v, _ = split(pairs)
    stored = encode(v, dtype)
    assert equal_bytes(stored, v.to(dtype))
    inside = v.abs() <= torch.finfo(dtype).max
    v, got = v[inside].double(), decode(stored)[inside].double()
    low, high = neighbours(v, dtype)
    assert torch.equal((got - v).abs(), torch.minimum(v - low, high - v))


@settings(COMMON, max_examples=100)
@given(pairs=values_and_bits)
def test_float32_keeps_every_byte(pairs: list[tuple[float, int]]) -> None:
    v, _ = split(pairs)
    assert equal_bytes(decode(encode(v, torch.float32)), v)


@DTYPES
def test_decoding_is_exact_for_every_code(dtype: torch.dtype) -> None:
    grid = GRIDS[dtype]
    assert torch.equal(decode(grid.to(dtype)).double(), grid)
