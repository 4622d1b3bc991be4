"""mamba2_fold and gated_delta_fold: the state after live tokens of a ring is that of the recurrence, in place and in
any other State."""

from dataclasses import replace

import implementations
import pytest
import torch
from torch import Tensor

from flashstate import Slots, State
from flashstate.proof import AnyReplayCase, DeltaReplayCase, ReplayCase, ReplayInputs, dtype, encoded, slotted
from flashstate.proof.laws import require
from flashstate.proof.laws.require import poison
from flashstate.proof.laws.steps import PAGE_FILL, in_pages
from flashstate.reference.rings import BEFORE_THE_FIRST_TOKEN
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS, bits_of, decode, encode

SMALL = {
    "Mamba-2": ReplayCase(2, 2, 1, 5, 16, window=8, tokens=2),
    "GDN": DeltaReplayCase(2, 2, 1, 5, 16, window=8, tokens=2),
    "KDA": DeltaReplayCase(2, 2, 2, 5, 16, window=8, tokens=2, per_channel=True),
}
MAMBA2, GDN, KDA = SMALL.values()
EVERY_RULE = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
WITHOUT_A_GPU = pytest.mark.parametrize("device", implementations.ALL[:2], indirect=True)  # where real shapes are met


def at_every_count(case: AnyReplayCase, device: torch.device) -> ReplayInputs:
    """A pool whose slots have 0, 1, ... live tokens, up to the window, in rings that begin anywhere; else NaN."""
    inputs = replace(case, slots=case.window + 1).make_inputs(device)
    pool = inputs.state
    pool.fill_dead_rows()
    pool.count.copy_(torch.arange(case.window + 1))
    pool.spoil_dead_rows()
    return inputs


def states_after(inputs: ReplayInputs, count: Tensor) -> tuple[Tensor, Tensor]:
    """Of all slots after so many of their live tokens, in float64 and in float32."""
    states = decode(inputs.state.data, inputs.state.scale)
    return inputs.after(states.double(), count), inputs.after(states, count)


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
    MAMBA2,
    GDN,
    replace(MAMBA2, rows=17, cols=20, window=20, x="float16", spare=3),
    replace(KDA, rows=17, cols=20, window=20, qk="float16", gates="float16", spare=3),
    replace(MAMBA2, heads=4, groups=2, cols=96, window=5, bc="float16"),
    replace(GDN, heads=4, cols=96, window=5, qk="float16", raw=False),
    replace(MAMBA2, heads=1, rows=3, window=64, x="float16", parameters="float16"),
    replace(GDN, heads=1, rows=3, window=64, qk="float16", parameters="float16", u="float32"),
    replace(KDA, heads=4, cols=7, window=5, qk_l2norm=False, u="float32"),
    replace(KDA, heads=1, key_heads=1, rows=3, window=64, raw=False, qk="float16"),
    replace(KDA, cols=1, qk_l2norm=False),
]
IN_TURN = [case.in_format(*known) for case, known in zip(CASES, PORTABLE_FORMATS, strict=True)]


REAL = (
    ReplayCase(4, 16, 1, 64, 128, x="bfloat16"),
    DeltaReplayCase(4, 16, 4, 128, 128, qk="bfloat16"),
    DeltaReplayCase(4, 8, 8, 128, 128, qk="bfloat16", gates="bfloat16", per_channel=True),
)
REAL_IN_TURN = [
    replace(REAL[i % 3], window=(8, 16, 64)[i // 3 % 3]).in_format(*known) for i, known in enumerate(PORTABLE_FORMATS)
]
SMALL_AND_REAL = [
    *((case, "reference") for case in IN_TURN),
    *(pytest.param(case, "interpreter", marks=pytest.mark.interpreted) for case in IN_TURN),
    *(pytest.param(case, "gpu", marks=pytest.mark.gpu) for case in REAL_IN_TURN),
]


@pytest.mark.parametrize(("case", "device"), SMALL_AND_REAL, indirect=["device"], ids=str)
def test_a_fold_is_the_recurrence_at_every_live_count_and_changes_nothing_else(
    case: AnyReplayCase, device: torch.device
) -> None:
    """Into another State, which rings and checkpoints survive, and in place, where rows without tokens stay."""
    inputs = at_every_count(case, device)
    into, run, pool = nan_state(inputs), inputs.fresh(), inputs.fresh().state
    exact, plain = states_after(inputs, pool.count)
    inputs.fold(into=into)
    require.within_budget("states", into.data, exact, plain)
    require.equal_states("the pool", inputs.state, pool)
    require.equal_bytes("a state without live tokens", into.data[0], decode(pool.data, pool.scale)[0])
    run.fold()  # which may take products of fewer terms where the format has fewer bits
    slots = torch.arange(len(exact), device=device)
    rounded = decode(*encoded(plain, pool, pool, slots, BEFORE_THE_FIRST_TOKEN))
    require.within_budget("checkpoints", decode(run.state.data, run.state.scale)[1:], exact[1:], rounded[1:])
    require.equal_states("no live tokens", run.state, pool, slots[:1])
    require.equal_states("rings", run.state, pool, besides=("data", "scale"))


def require_stored(what: str, stored: State, states: Tensor, inputs: ReplayInputs, slots: Tensor) -> None:
    """Slots hold the encoding of states, with the bits of these slots of the pool."""
    require.stored(what, stored, slots, states[slots], inputs.state, slots, BEFORE_THE_FIRST_TOKEN)


@WITHOUT_A_GPU
@pytest.mark.parametrize("number", range(1, len(PORTABLE_FORMATS)), ids=map("-".join, PORTABLE_FORMATS[1:]))
def test_into_any_format_goes_the_encoding_of_the_state_with_the_bits_of_its_slot(
    number: int, device: torch.device
) -> None:
    (name, rounding), small = PORTABLE_FORMATS[number], (MAMBA2, GDN, KDA)[number % 3]
    kinds = {"format": "float16", "rounding": "stochastic"} if FORMATS[dtype(name)].scaled else {}
    inputs = at_every_count(replace(small, window=4, **kinds), device)
    exact, into = nan_state(inputs), nan_state(inputs, name, rounding)
    inputs.fold(into=exact)
    inputs.fold(into=into)
    require_stored("into", into, exact.data, inputs, torch.arange(len(exact.data), device=device))


@pytest.mark.parametrize(
    ("small", "index"),
    [
        (MAMBA2.in_format("float16", "stochastic"), torch.int64), (GDN, torch.int32),
        (KDA.in_format("int8", "stochastic"), torch.int64),
    ],
    ids=SMALL,
)  # fmt: skip
def test_some_of_the_live_tokens_can_be_folded_the_oldest_first(
    small: AnyReplayCase, index: torch.dtype, device: torch.device
) -> None:
    inputs = at_every_count(small, device)
    some = inputs.state.count.long() * torch.tensor([0, 1, 1, 2, 1, 2, 1, 3, 2], device=device) // 3
    for given, count in ((some.to(index), some), (2, inputs.state.count.clamp(max=2))):
        fault = "tokens to fold" if isinstance(given, int) else None  # two of one, or of none
        into, run = nan_state(inputs), inputs.fresh()
        inputs.fold(into=into, tokens=given)
        require.within_budget("states", into.data, *states_after(inputs, count))
        require.fault(fault)
        run.fold(tokens=given)
        require_stored("checkpoints", run.state, into.data, run, count.nonzero()[:, 0])
        require.fault(fault)


# Slots and memory


@EVERY_RULE
def test_rows_fold_into_the_slots_they_name_and_nothing_else_is_touched(
    small: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, format="int8", rounding="stochastic"), device)
    before = inputs.fresh()

    def there(*numbers: int) -> Tensor:
        return torch.tensor(numbers, device=device)

    everywhere = nan_state(inputs)
    inputs.fold(into=everywhere)
    into, same = nan_state(inputs, slots=12), nan_state(inputs)
    untouched = bits_of(into.data).clone()
    slots = Slots(there(7, -1, 3, 8, 0, 5, 50, 2), write=there(9, 2, 11, -1, 0, 4, 6, 50), null=5)
    inputs.fold(slots=slots, into=into)
    require.fault("read")  # of slot 50, and then of its other use
    for source, target in ((7, 9), (3, 11), (0, 0)):
        require.equal_bytes(f"slot {source}", into.data[target], everywhere.data[source])
    others = there(1, 2, 3, 4, 5, 6, 7, 8, 10)
    assert torch.equal(bits_of(into.data)[others], untouched[others])
    inputs.fold(slots=there(7, -1, 3, 8, 0, 5), into=same)
    for slot in (7, 3, 8, 0, 5):
        require.equal_bytes(f"slot {slot}", same.data[slot], everywhere.data[slot])
    assert same.data[there(1, 2, 4, 6)].isnan().all()
    for nothing in (there(50), there(-1), slots.read[:0]):
        inputs.fold(slots=nothing)
        require.fault("read" if 50 in nothing.tolist() else None)
    require.equal_states("the pool", inputs.state, before.state)


@pytest.mark.parametrize(("small", "offset", "gap"), [(MAMBA2, 0, 16), (GDN, 0, 5), (KDA, 1, 3)], ids=SMALL)
def test_page_strided_and_unaligned_pools_rings_and_targets_are_folded(
    small: AnyReplayCase, offset: int, gap: int, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, window=4, format="float16"), device)
    pages = {n: in_pages(t, offset, gap) for n, t in slotted(inputs.state).items() if t.dim() > 1}
    paged = replace(inputs, state=replace(inputs.state, **{name: view for name, (view, _) in pages.items()}))
    target, memory = in_pages(torch.ones(5, *small.state_axes, device=device), offset, gap)
    paged.fold(into=target)
    require.within_budget("states", target, *states_after(inputs, inputs.state.count))
    paged.fold()
    require.equal_states("rings", paged.state, inputs.state, besides=("data", "scale"))
    for where in (memory, *(bits for _, bits in pages.values())):
        assert (where[offset:].view(5, -1)[:, -gap:] == PAGE_FILL).all()
        assert (where[:offset] == PAGE_FILL).all()
    both = torch.stack([inputs.state.data, torch.full_like(inputs.state.data, torch.nan)], 1)  # which take turns
    replace(inputs, state=replace(inputs.state, data=both[:, 0])).fold(into=both[:, 1])
    require.equal_bytes("what they are folded from", both[:, 0], inputs.state.data)
    assert both[:, 1].isfinite().all()


@pytest.mark.parametrize(("small", "tokens"), [(replace(MAMBA2, groups=2), 0), (GDN, 3), (KDA, 0)], ids=SMALL)
def test_a_ring_whose_heads_lie_apart_gives_the_bytes_of_one_whose_heads_do_not(
    small: AnyReplayCase, tokens: int, device: torch.device
) -> None:
    """Replay, and then a fold; nothing between heads is touched."""
    inputs = replace(small, rows=4, slots=5, window=4, tokens=tokens).make_inputs(device)
    apart, wide = inputs.fresh(), {}
    for name, tensor in apart.state.kept.items():  # (slots, heads, groups or key heads, length, ...)
        wide[name] = torch.cat([tensor, torch.full_like(tensor[:, :, :1], 7.0)], 2)
    apart.state = replace(apart.state, **{name: tensor[:, :, :-1] for name, tensor in wide.items()})
    outputs = []
    for run in (inputs, apart):
        outputs.append(run.step())
        run.fold(slots=inputs.slots)
    assert torch.equal(*outputs)
    require.equal_states("", inputs.state, apart.state)
    assert all((tensor[:, :, -1] == 7).all() for tensor in wide.values())
