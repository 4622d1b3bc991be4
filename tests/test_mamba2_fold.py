"""mamba2_fold: the state after live tokens of a ring is that of the recurrence, in place and in any other State."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import flashstate
from flashstate import Slots, State
from flashstate.proof import ReplayCase, ReplayInputs, dtype, encoded, slotted
from flashstate.proof.laws import require
from flashstate.proof.laws.require import poison
from flashstate.proof.laws.steps import PAGE_FILL, in_pages
from flashstate.reference.mamba2_replay import BEFORE_THE_FIRST_TOKEN, replayed
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, bits_of, decode, encode

SMALL = ReplayCase(2, 2, 1, 5, 16, window=8, tokens=2)
SOME_FORMATS = pytest.mark.parametrize(
    ("name", "rounding"), [("float32", "nearest"), ("float16", "stochastic"), ("int8", "stochastic")]
)


def at_every_count(case: ReplayCase, device: torch.device) -> ReplayInputs:
    """A pool whose slots have 0, 1, ... live tokens, up to the window, in rings that begin anywhere; else NaN."""
    inputs = replace(case, slots=case.window + 1).make_inputs(device)
    pool = inputs.state
    for tensor in (pool.x, pool.B, pool.dt):
        tensor.nan_to_num_(0.5)
    pool.count.copy_(torch.arange(case.window + 1))
    for tensor in (pool.x, pool.B, pool.dt):
        tensor.transpose(1, 2)[~pool.live_rows] = torch.nan
    return inputs


def states_after(inputs: ReplayInputs, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of all slots after so many of their live tokens, in float64 and in float32."""
    pool = inputs.state
    slots, states = torch.arange(len(pool.count), device=count.device), decode(pool.data, pool.scale)
    given = (slots, pool.start.long(), count.long(), inputs.arguments["A"])
    exact, plain = (replayed(pool.ring, s, *given) for s in (states.double(), states))
    return exact, plain


def fold(inputs: ReplayInputs, **options: Any) -> None:
    flashstate.mamba2_fold(inputs.state.state, inputs.state.ring, inputs.arguments["A"], **options)


def nan_state(
    inputs: ReplayInputs, name: str = "float32", rounding: str = "nearest", slots: int | None = None
) -> State:
    """Like the checkpoints, in any format, full of NaN where it can hold it."""
    shape = (slots or len(inputs.state.data), *inputs.state.data.shape[1:])
    data, scale = encode(torch.ones(shape, device=inputs.slots.device), dtype(name))
    seed = None if rounding == "nearest" else torch.zeros(shape[0], dtype=torch.int64, device=data.device)
    into = State(data, scale, rounding=rounding, seed=seed)
    poison(into, torch.arange(shape[0], device=data.device))
    return into


CASES = [
    SMALL,
    replace(SMALL, rows=17, cols=20, window=20, x="float16", spare=3),
    replace(SMALL, heads=4, groups=2, cols=96, window=5, bc="float16"),
    replace(SMALL, heads=1, rows=3, window=64, x="float16", parameters="float16"),
]


@pytest.mark.parametrize(
    "case",
    [
        replace(CASES[i % len(CASES)], format=name, rounding=rounding)
        for i, (name, rounding) in enumerate(PORTABLE_FORMATS)
    ],
    ids=str,
)
def test_a_fold_into_another_state_is_the_recurrence_at_every_live_count_and_changes_nothing(
    case: ReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(case, device)
    before, into = inputs.fresh(), nan_state(inputs)
    fold(inputs, into=into)
    require.within_budget("states", into.data, *states_after(inputs, inputs.state.count))
    require.equal_states("the pool", inputs.state, before.state)
    require.equal_bytes("a state without live tokens", into.data[0], decode(before.state.data, before.state.scale)[0])


@pytest.mark.gpu
@pytest.mark.parametrize("window", [8, 16, 64])
@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_compiled_folds_of_real_shapes_are_the_recurrence_at_every_live_count(
    name: str, rounding: str, window: int
) -> None:
    case = ReplayCase(4, 16, 1, 64, 128, x="bfloat16", format=name, rounding=rounding, window=window)
    inputs = at_every_count(case, torch.device("cuda"))
    (exact, plain), pool = states_after(inputs, inputs.state.count), inputs.state
    finely, alike, run = nan_state(inputs), nan_state(inputs, name, rounding), inputs.fresh()
    fold(inputs, into=finely)
    require.within_budget("states", finely.data, exact, plain)
    fold(inputs, into=alike)  # which may take products of fewer terms where the format has fewer bits
    slots = torch.arange(len(exact), device=exact.device)
    rounded = decode(*encoded(plain, pool, pool, slots, BEFORE_THE_FIRST_TOKEN))
    require.within_budget("rounded states", decode(alike.data, alike.scale), exact, rounded)
    fold(run)
    live = pool.count.nonzero()[:, 0]
    require.equal_states("checkpoints", run.state, alike, live)


def require_in_place_as_into(inputs: ReplayInputs, states: Tensor) -> None:
    """Checkpoints folded in place are the encoding of these states, or as they were; rings stay."""
    run, slots = inputs.fresh(), inputs.state.count.nonzero()[:, 0]
    fold(run)
    pool = run.state
    require.stored("checkpoints", pool, slots, states[slots], pool, slots, BEFORE_THE_FIRST_TOKEN)
    none = (inputs.state.count == 0).nonzero()[:, 0]
    require.equal_states("a row without live tokens", pool, inputs.state, none)
    require.equal_states("rings", pool, inputs.state, besides=("data", "scale"))


@SOME_FORMATS
def test_a_fold_in_place_stores_the_same_rounded_and_rows_without_tokens_keep_their_bytes(
    name: str, rounding: str, device: torch.device
) -> None:
    inputs = at_every_count(replace(SMALL, format=name, rounding=rounding), device)
    into = nan_state(inputs)
    fold(inputs, into=into)
    require_in_place_as_into(inputs, into.data)


@pytest.mark.parametrize(("name", "rounding"), [known for known in PORTABLE_FORMATS if known[0] != "float32"])
def test_into_any_format_goes_the_encoding_of_the_state_with_the_bits_of_its_slot(
    name: str, rounding: str, device: torch.device
) -> None:
    kinds = {"format": "float16", "rounding": "stochastic"} if FORMATS[dtype(name)].scaled else {}
    inputs = at_every_count(replace(SMALL, window=4, **kinds), device)
    exact, into = nan_state(inputs), nan_state(inputs, name, rounding)
    fold(inputs, into=exact)
    fold(inputs, into=into)
    slots = torch.arange(len(exact.data), device=device)
    require.stored("into", into, slots, exact.data, inputs.state, slots, BEFORE_THE_FIRST_TOKEN)


@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
@SOME_FORMATS
def test_some_of_the_live_tokens_can_be_folded_the_oldest_first(
    name: str, rounding: str, index: torch.dtype, device: torch.device
) -> None:
    inputs = at_every_count(replace(SMALL, format=name, rounding=rounding), device)
    some = inputs.state.count.long() * torch.tensor([0, 1, 1, 2, 1, 2, 1, 3, 2], device=device) // 3
    for given, count in ((some.to(index), some), (2, inputs.state.count.clamp(max=2))):
        into = nan_state(inputs)
        fold(inputs, into=into, tokens=given)
        require.within_budget("states", into.data, *states_after(inputs, count))
        require.fault("tokens to fold" if isinstance(given, int) else None)  # two of one, or of none
        run = inputs.fresh()
        fold(run, tokens=given)
        slots = count.nonzero()[:, 0]
        require.stored("checkpoints", run.state, slots, into.data[slots], run.state, slots, BEFORE_THE_FIRST_TOKEN)
        require.fault("tokens to fold" if isinstance(given, int) else None)


@pytest.mark.parametrize("some", [None, 3], ids=["all tokens", "some"])
def test_what_is_folded_in_place_and_dropped_from_rings_changes_no_later_output(
    some: int | None, device: torch.device
) -> None:
    case = replace(SMALL, batch=4, slots=5)
    inputs = case.make_inputs(device)
    inputs.state.count[inputs.slots[3].long()] = 0
    slots = inputs.slots[:3]
    inputs.state.count[slots.long()] = torch.tensor([8, 5, 3], dtype=torch.int32, device=device)
    for tensor in (inputs.state.x, inputs.state.B, inputs.state.dt):
        tensor.nan_to_num_(0.5)
    ahead = inputs.fresh()
    fold(ahead, slots=slots, tokens=some)
    ahead.state.ring.folded(slots, some)
    assert ahead.state.count[slots.long()].tolist() == [0 if some is None else n - some for n in (8, 5, 3)]
    exact, plain = states_after(inputs, inputs.state.count)
    now, later = nan_state(inputs), nan_state(inputs)
    fold(inputs, into=now)
    fold(ahead, into=later)
    for state in (now, later):
        require.within_budget("states after all tokens", state.data, exact, plain)


# Slots


def test_rows_fold_into_the_slots_they_name_and_nothing_else_is_touched(device: torch.device) -> None:
    inputs = at_every_count(replace(SMALL, format="int8", rounding="stochastic"), device)
    everywhere = nan_state(inputs)
    fold(inputs, into=everywhere)
    read = torch.tensor([7, -1, 3, 8, 0, 5], device=device)
    write = torch.tensor([9, 2, 11, -1, 0, 4], device=device)
    into = nan_state(inputs, slots=12)
    before = bits_of(into.data).clone()
    fold(inputs, slots=Slots(read, write=write, null=5), into=into)  # the last row is padding
    require.fault(None)
    for source, target in ((7, 9), (3, 11), (0, 0)):
        require.equal_bytes(f"slot {source}", into.data[target], everywhere.data[source])
    others = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 10], device=device)
    assert torch.equal(bits_of(into.data)[others], before[others])
    same = nan_state(inputs)
    fold(inputs, slots=read, into=same)
    for slot in (7, 3, 8, 0, 5):
        require.equal_bytes(f"slot {slot}", same.data[slot], everywhere.data[slot])
    assert same.data[torch.tensor([1, 2, 4, 6], device=device)].isnan().all()


def test_slots_past_the_pool_are_faults_and_not_folded(device: torch.device) -> None:
    inputs = at_every_count(SMALL, device)
    before, into = inputs.fresh(), nan_state(inputs)
    read = torch.tensor([3, 50], device=device)
    fold(inputs, slots=read, into=into)
    require.fault("read")
    assert into.data[torch.arange(len(into.data), device=device) != 3].isnan().all()
    fold(inputs, slots=Slots(read[:1], write=torch.tensor([50], device=device)), into=into)
    require.fault("write")
    fold(inputs, slots=read[1:])
    require.fault("read")
    require.equal_states("the pool", inputs.state, before.state)


@pytest.mark.parametrize(("offset", "gap"), [(0, 16), (0, 5), (1, 3)])
def test_page_strided_and_unaligned_pools_rings_and_targets_are_folded(
    offset: int, gap: int, device: torch.device
) -> None:
    inputs = at_every_count(replace(SMALL, window=4, format="float16"), device)
    pages = {n: in_pages(t, offset, gap) for n, t in slotted(inputs.state).items() if t.dim() > 1}
    paged = replace(inputs, state=replace(inputs.state, **{name: view for name, (view, _) in pages.items()}))
    target, memory = in_pages(torch.ones(5, *SMALL.state_axes, device=device), offset, gap)
    fold(paged, into=target)
    require.within_budget("states", target, *states_after(inputs, inputs.state.count))
    fold(paged)
    require.equal_states("rings", paged.state, inputs.state, besides=("data", "scale"))
    for where in (memory, *(bits for _, bits in pages.values())):
        assert (where[offset:].view(5, -1)[:, -gap:] == PAGE_FILL).all()
        assert (where[:offset] == PAGE_FILL).all()


@pytest.mark.parametrize("form", ["in place", "into"])
def test_five_folds_of_equal_rings_give_equal_bytes_and_rows_do_not_depend_on_each_other(
    form: str, device: torch.device
) -> None:
    inputs = at_every_count(replace(SMALL, window=4, format="bfloat16", rounding="stochastic"), device)

    def folded(slots: Tensor | None) -> Tensor:
        run = inputs.fresh()
        into = nan_state(run, "int8", "stochastic") if form == "into" else None
        fold(run, slots=slots, into=into)
        require.equal_states("rings", run.state, inputs.state, besides=("data", "scale"))
        return bits_of(run.state.data if into is None else into.data)

    first = folded(None)
    for _ in range(4):
        assert torch.equal(folded(None), first)
    for slot in range(5):
        assert torch.equal(folded(torch.tensor([slot], device=device))[slot], first[slot])


def test_an_empty_batch_folds_nothing(device: torch.device) -> None:
    inputs = at_every_count(SMALL, device)
    before = inputs.fresh()
    fold(inputs, slots=torch.zeros(0, dtype=torch.int64, device=device))
    require.equal_states("the pool", inputs.state, before.state)


@pytest.mark.parametrize("tokens", [0, 3], ids=["one token", "several tokens"])
def test_a_ring_whose_heads_lie_apart_gives_the_bytes_of_one_whose_heads_do_not(
    tokens: int, device: torch.device
) -> None:
    """Replay, and then a fold; nothing between heads is touched."""
    inputs = ReplayCase(2, 2, 2, 4, 16, slots=5, window=4, tokens=tokens).make_inputs(device)
    apart, wide = inputs.fresh(), {}
    for name in ("x", "B", "dt"):
        tensor = getattr(apart.state, name)  # (slots, heads or groups, length, ...)
        wide[name] = torch.cat([tensor, torch.full_like(tensor[:, :, :1], 7.0)], 2)
    apart.state = replace(apart.state, **{name: tensor[:, :, :-1] for name, tensor in wide.items()})
    outputs = []
    for run in (inputs, apart):
        outputs.append(run.step())
        fold(run, slots=inputs.slots)
    assert torch.equal(*outputs)
    require.equal_states("", inputs.state, apart.state)
    assert all((tensor[:, :, -1] == 7).all() for tensor in wide.values())
