"""mamba2_fold and gated_delta_fold: the state after live tokens of a ring is that of the recurrence, in place and in
any other State."""

from dataclasses import replace

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
EVERY_RULE = pytest.mark.parametrize("small", SMALL.values(), ids=SMALL)
SOME_FORMATS = pytest.mark.parametrize(
    ("name", "rounding"), [("float32", "nearest"), ("float16", "stochastic"), ("int8", "stochastic")]
)


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


MAMBA2, GDN, KDA = SMALL.values()
CASES = [
    *(MAMBA2, GDN),
    replace(MAMBA2, rows=17, cols=20, window=20, x="float16", spare=3),
    replace(KDA, rows=17, cols=20, window=20, qk="float16", gates="float16", spare=3),
    replace(MAMBA2, heads=4, groups=2, cols=96, window=5, bc="float16"),
    replace(GDN, heads=4, cols=96, window=5, qk="float16", raw=False),
    replace(MAMBA2, heads=1, rows=3, window=64, x="float16", parameters="float16"),
    replace(GDN, heads=1, rows=3, window=64, qk="float16", parameters="float16", u="float32"),
    replace(KDA, heads=4, cols=7, window=5, qk_l2norm=False, u="float32"),
    replace(KDA, heads=1, key_heads=1, rows=3, window=64, raw=False, qk="float16"),
]
ONE_CHANNEL = replace(KDA, cols=1, qk_l2norm=False)
IN_TURN = [(CASES[i % len(CASES)], known) for i, known in enumerate(PORTABLE_FORMATS * 2)]
IN_TURN += [(ONE_CHANNEL, known) for known in (("float32", "nearest"), ("int8", "stochastic"))]


@pytest.mark.parametrize("case", [case.in_format(*known) for case, known in IN_TURN], ids=str)
def test_a_fold_into_another_state_is_the_recurrence_at_every_live_count_and_changes_nothing(
    case: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(case, device)
    before, into = inputs.fresh(), nan_state(inputs)
    inputs.fold(into=into)
    require.within_budget("states", into.data, *states_after(inputs, inputs.state.count))
    require.equal_states("the pool", inputs.state, before.state)
    require.equal_bytes("a state without live tokens", into.data[0], decode(before.state.data, before.state.scale)[0])


REAL = {
    "Mamba-2": ReplayCase(4, 16, 1, 64, 128, x="bfloat16"),
    "GDN": DeltaReplayCase(4, 16, 4, 128, 128, qk="bfloat16"),
    "KDA": DeltaReplayCase(4, 8, 8, 128, 128, qk="bfloat16", gates="bfloat16", per_channel=True),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("rule", "name", "rounding", "window"),
    [
        (rule, *known, (8, 16, 64)[(i + j) % 3])
        for i, rule in enumerate(REAL)
        for j, known in enumerate(PORTABLE_FORMATS)
    ],
)
def test_compiled_folds_of_real_shapes_are_the_recurrence_at_every_live_count(
    name: str, rounding: str, window: int, rule: str
) -> None:
    case = replace(REAL[rule], format=name, rounding=rounding, window=window)
    inputs = at_every_count(case, torch.device("cuda"))
    (exact, plain), pool = states_after(inputs, inputs.state.count), inputs.state
    finely, alike, run = nan_state(inputs), nan_state(inputs, name, rounding), inputs.fresh()
    inputs.fold(into=finely)
    require.within_budget("states", finely.data, exact, plain)
    inputs.fold(into=alike)  # which may take products of fewer terms where the format has fewer bits
    slots = torch.arange(len(exact), device=exact.device)
    rounded = decode(*encoded(plain, pool, pool, slots, BEFORE_THE_FIRST_TOKEN))
    require.within_budget("rounded states", decode(alike.data, alike.scale), exact, rounded)
    run.fold()
    live = pool.count.nonzero()[:, 0]
    require.equal_states("checkpoints", run.state, alike, live)


def require_in_place_as_into(inputs: ReplayInputs, states: Tensor) -> None:
    """Checkpoints folded in place are the encoding of these states, or as they were; rings stay."""
    run, slots = inputs.fresh(), inputs.state.count.nonzero()[:, 0]
    run.fold()
    pool = run.state
    require.stored("checkpoints", pool, slots, states[slots], pool, slots, BEFORE_THE_FIRST_TOKEN)
    none = (inputs.state.count == 0).nonzero()[:, 0]
    require.equal_states("a row without live tokens", pool, inputs.state, none)
    require.equal_states("rings", pool, inputs.state, besides=("data", "scale"))


@SOME_FORMATS
@EVERY_RULE
def test_a_fold_in_place_stores_the_same_rounded_and_rows_without_tokens_keep_their_bytes(
    name: str, rounding: str, small: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, format=name, rounding=rounding), device)
    into = nan_state(inputs)
    inputs.fold(into=into)
    require_in_place_as_into(inputs, into.data)


@pytest.mark.parametrize(("name", "rounding"), [known for known in PORTABLE_FORMATS if known[0] != "float32"])
@pytest.mark.parametrize("rule", ["Mamba-2", "GDN or KDA"])
def test_into_any_format_goes_the_encoding_of_the_state_with_the_bits_of_its_slot(
    rule: str, name: str, rounding: str, device: torch.device
) -> None:
    small = SMALL.get(rule, KDA if rounding == "nearest" else GDN)
    kinds = {"format": "float16", "rounding": "stochastic"} if FORMATS[dtype(name)].scaled else {}
    inputs = at_every_count(replace(small, window=4, **kinds), device)
    exact, into = nan_state(inputs), nan_state(inputs, name, rounding)
    inputs.fold(into=exact)
    inputs.fold(into=into)
    slots = torch.arange(len(exact.data), device=device)
    require.stored("into", into, slots, exact.data, inputs.state, slots, BEFORE_THE_FIRST_TOKEN)


@SOME_FORMATS
@EVERY_RULE
def test_some_of_the_live_tokens_can_be_folded_the_oldest_first(
    name: str, rounding: str, small: AnyReplayCase, device: torch.device
) -> None:
    index = torch.int32 if rounding == "nearest" else torch.int64
    inputs = at_every_count(replace(small, format=name, rounding=rounding), device)
    some = inputs.state.count.long() * torch.tensor([0, 1, 1, 2, 1, 2, 1, 3, 2], device=device) // 3
    for given, count in ((some.to(index), some), (2, inputs.state.count.clamp(max=2))):
        into = nan_state(inputs)
        inputs.fold(into=into, tokens=given)
        require.within_budget("states", into.data, *states_after(inputs, count))
        require.fault("tokens to fold" if isinstance(given, int) else None)  # two of one, or of none
        run = inputs.fresh()
        run.fold(tokens=given)
        slots = count.nonzero()[:, 0]
        require.stored("checkpoints", run.state, slots, into.data[slots], run.state, slots, BEFORE_THE_FIRST_TOKEN)
        require.fault("tokens to fold" if isinstance(given, int) else None)


@pytest.mark.parametrize("some", [None, 3], ids=["all tokens", "some"])
@EVERY_RULE
def test_what_is_folded_in_place_and_dropped_from_rings_changes_no_later_output(
    some: int | None, small: AnyReplayCase, device: torch.device
) -> None:
    case = replace(small, batch=4, slots=5)
    inputs = case.make_inputs(device)
    inputs.state.count[inputs.slots[3].long()] = 0
    slots = inputs.slots[:3]
    inputs.state.count[slots.long()] = torch.tensor([8, 5, 3], dtype=torch.int32, device=device)
    inputs.state.fill_dead_rows()
    ahead = inputs.fresh()
    ahead.fold(slots=slots, tokens=some)
    ahead.state.ring.folded(slots, some)
    assert ahead.state.count[slots.long()].tolist() == [0 if some is None else n - some for n in (8, 5, 3)]
    exact, plain = states_after(inputs, inputs.state.count)
    now, later = nan_state(inputs), nan_state(inputs)
    inputs.fold(into=now)
    ahead.fold(into=later)
    for state in (now, later):
        require.within_budget("states after all tokens", state.data, exact, plain)


# Slots


@EVERY_RULE
def test_rows_fold_into_the_slots_they_name_and_nothing_else_is_touched(
    small: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, format="int8", rounding="stochastic"), device)
    everywhere = nan_state(inputs)
    inputs.fold(into=everywhere)
    read = torch.tensor([7, -1, 3, 8, 0, 5], device=device)
    write = torch.tensor([9, 2, 11, -1, 0, 4], device=device)
    into = nan_state(inputs, slots=12)
    before = bits_of(into.data).clone()
    inputs.fold(slots=Slots(read, write=write, null=5), into=into)  # the last row is padding
    require.fault(None)
    for source, target in ((7, 9), (3, 11), (0, 0)):
        require.equal_bytes(f"slot {source}", into.data[target], everywhere.data[source])
    others = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8, 10], device=device)
    assert torch.equal(bits_of(into.data)[others], before[others])
    same = nan_state(inputs)
    inputs.fold(slots=read, into=same)
    for slot in (7, 3, 8, 0, 5):
        require.equal_bytes(f"slot {slot}", same.data[slot], everywhere.data[slot])
    assert same.data[torch.tensor([1, 2, 4, 6], device=device)].isnan().all()


@EVERY_RULE
def test_slots_past_the_pool_are_faults_and_not_folded(small: AnyReplayCase, device: torch.device) -> None:
    inputs = at_every_count(small, device)
    before, into = inputs.fresh(), nan_state(inputs)
    read = torch.tensor([3, 50], device=device)
    inputs.fold(slots=read, into=into)
    require.fault("read")
    assert into.data[torch.arange(len(into.data), device=device) != 3].isnan().all()
    inputs.fold(slots=Slots(read[:1], write=torch.tensor([50], device=device)), into=into)
    require.fault("write")
    inputs.fold(slots=read[1:])
    require.fault("read")
    require.equal_states("the pool", inputs.state, before.state)


@pytest.mark.parametrize(("offset", "gap"), [(0, 16), (0, 5), (1, 3)])
@EVERY_RULE
def test_page_strided_and_unaligned_pools_rings_and_targets_are_folded(
    offset: int, gap: int, small: AnyReplayCase, device: torch.device
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


@EVERY_RULE
def test_checkpoints_and_what_they_are_folded_into_may_take_turns_in_pages(
    small: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, window=4), device)
    data = inputs.state.data
    pages = torch.stack([data, torch.full_like(data, torch.nan)], 1)
    replace(inputs, state=replace(inputs.state, data=pages[:, 0])).fold(into=pages[:, 1])
    require.within_budget("states", pages[:, 1], *states_after(inputs, inputs.state.count))
    require.equal_bytes("checkpoints", pages[:, 0], data)


@pytest.mark.parametrize("form", ["in place", "into"])
@EVERY_RULE
def test_five_folds_of_equal_rings_give_equal_bytes_and_rows_do_not_depend_on_each_other(
    form: str, small: AnyReplayCase, device: torch.device
) -> None:
    inputs = at_every_count(replace(small, window=4, format="bfloat16", rounding="stochastic"), device)

    def folded(slots: Tensor | None) -> Tensor:
        run = inputs.fresh()
        into = nan_state(run, "int8", "stochastic") if form == "into" else None
        run.fold(slots=slots, into=into)
        require.equal_states("rings", run.state, inputs.state, besides=("data", "scale"))
        return bits_of(run.state.data if into is None else into.data)

    first = folded(None)
    for _ in range(4):
        assert torch.equal(folded(None), first)
    for slot in range(5):
        assert torch.equal(folded(torch.tensor([slot], device=device))[slot], first[slot])


@EVERY_RULE
def test_an_empty_batch_folds_nothing(small: AnyReplayCase, device: torch.device) -> None:
    inputs = at_every_count(small, device)
    before = inputs.fresh()
    inputs.fold(slots=torch.zeros(0, dtype=torch.int64, device=device))
    require.equal_states("the pool", inputs.state, before.state)


@pytest.mark.parametrize("tokens", [0, 3], ids=["one token", "several tokens"])
@EVERY_RULE
def test_a_ring_whose_heads_lie_apart_gives_the_bytes_of_one_whose_heads_do_not(
    tokens: int, small: AnyReplayCase, device: torch.device
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
