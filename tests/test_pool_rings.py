"""The rings of a StatePool: clean when they are handed out, copied and emptied with their request, counted, wrapped."""

import pytest
import torch
from pools import CPU, CUDA, EVERY_FORMAT, POISON, memory_of, same
from ring_pools import (
    COLS,
    GROUPS,
    HEADS,
    LAYERS,
    LENGTH,
    ROWS,
    SHAPES,
    SLOTS,
    TOKENS,
    WINDOW,
    A,
    dirty,
    fill,
    in_format,
    in_pages,
    is_clean,
    is_poison,
    make_pool,
    parts_of,
    replay,
    rings_of,
    tokens_for,
)
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.models import ModelShape
from flashstate.plan import request_bytes, ring_bytes
from flashstate.state.formats import FORMATS, decode

DEVICES = pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(same(a, b) and bool(a.isfinite().all()) for a, b in zip(one, other, strict=True))


# What is allocated


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_have_rings_of_the_documented_shapes_which_share_cursors(kind: torch.dtype) -> None:
    pool = make_pool(ring_dtype=kind, dtype=torch.int8)
    assert pool.has_rings
    for i in range(LAYERS):
        ring = pool.ring(i)
        assert ring is pool.ring(i)
        assert {name: getattr(ring, name).shape[1:] for name in SHAPES} == SHAPES
        assert (ring.x.dtype, ring.B.dtype, ring.dt.dtype) == (kind, kind, torch.float32)
        assert (ring.window, ring.length, ring.longest_call) == (WINDOW, LENGTH, TOKENS)
        for cursor, first in ((ring.start, pool.ring(0).start), (ring.count, pool.ring(0).count)):
            assert (cursor.shape, cursor.dtype, cursor.data_ptr()) == ((SLOTS,), torch.int32, first.data_ptr())
    assert is_clean(pool, list(range(SLOTS)))
    places = [tensor.data_ptr() for tensor in parts_of(pool).values()]
    assert len(set(places)) == len(places)


def test_a_ring_has_one_group_one_token_and_bfloat16_unless_asked_otherwise() -> None:
    ring = StatePool.mamba2(slots=2, layers=1, heads=3, rows=2, cols=4, window=16).ring(0)
    assert (ring.x.shape, ring.B.shape, ring.dt.shape) == ((2, 3, 17, 2), (2, 1, 17, 4), (2, 3, 17))
    assert ring.x.dtype is ring.B.dtype is torch.bfloat16
    assert ring.longest_call == 1


def test_a_pool_without_a_window_has_no_rings() -> None:
    pool = make_pool(window=0, tokens=1)
    assert not pool.has_rings
    pool.acquire(2)
    for call in (lambda: pool.ring(0), pool.plan, lambda: pool.commit(None), pool.folded):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^this pool has no rings: it was made without a window"):
            call()
    pool.write(0, 0, torch.ones(1, HEADS, ROWS, COLS))
    pool.copy(0, 1)
    assert (pool.read(0, 1) == 1).all()
    assert pool.bytes_per_slot == LAYERS * HEADS * ROWS * COLS * 4


@EVERY_FORMAT
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_per_slot_are_all_that_was_allocated_and_what_plan_says(
    name: str, rounding: str, activations: torch.dtype
) -> None:
    shape = ModelShape(
        "mamba2", LAYERS, HEADS, ROWS, COLS, GROUPS, activations=activations, window=WINDOW, tokens=TOKENS
    )
    kinds = {"ring_dtype": activations, "conv_dtype": activations, "conv_channels": shape.conv_channels}
    pool = in_format(name, rounding, **kinds)
    windows = [pool.window(i) for i in range(LAYERS)]
    kept = [*parts_of(pool).values(), *windows]
    assert pool.bytes_per_slot == sum(tensor[0].nbytes for tensor in kept)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept}
    assert sum(storages.values()) == SLOTS * pool.bytes_per_slot
    states = [pool.layer(i) for i in range(LAYERS)]
    seed = states[0].seed
    of_states = sum(state.bytes_per_slot for state in states) - (0 if seed is None else (LAYERS - 1) * seed[0].nbytes)
    of_windows = sum(window[0].nbytes for window in windows)
    assert ring_bytes(shape) == pool.bytes_per_slot - of_states - of_windows
    planned = request_bytes(shape, FORMATS[getattr(torch, name)])
    assert pool.bytes_per_slot == planned.total - (planned.seed if rounding == "nearest" else 0)


# Slots


@DEVICES
@EVERY_FORMAT
def test_an_acquired_slot_has_an_empty_ring_of_zeros_and_others_stay(
    name: str, rounding: str, device: torch.device
) -> None:
    pool = in_format(name, rounding, device=device)
    dirty(pool)
    slots = pool.acquire(3).tolist()
    assert is_clean(pool, slots)
    assert is_poison(pool, [3, 4, 5])
    dirty(pool)
    pool.release(slots[1])
    assert is_poison(pool, list(range(SLOTS)))  # what is released is cleared when it is handed out
    assert pool.acquire().tolist() == [slots[1]]
    assert is_clean(pool, [slots[1]])
    pool.reset(slots[2])
    assert is_clean(pool, slots[1:])
    assert is_poison(pool, [slots[0], 3, 4, 5])


def test_a_request_gives_the_same_whatever_its_slot_held_before() -> None:
    """NaN in rows that are not live, of the ring and of new memory, reaches nothing."""
    pool, clean = make_pool(), make_pool()
    pool.acquire(SLOTS)
    dirty(pool)
    pool.release([4, 2])
    slots = [pool.acquire(2).tolist(), clean.acquire(2).tolist()]
    assert slots == [[4, 2], [0, 1]]
    for ring in map(pool.ring, range(LAYERS)):
        for tensor in (ring.x, ring.B, ring.dt):
            tensor[slots[0]] = torch.nan  # no row is live
    for turn in range(6):
        tokens = tokens_for(2, TOKENS, turn)
        assert equal(replay(pool, slots[0], tokens, [2, 1]), replay(clean, slots[1], tokens, [2, 1]))
    assert is_poison(pool, [0, 1, 3, 5])


@DEVICES
@EVERY_FORMAT
@pytest.mark.parametrize("keep_seed", [False, True])
def test_copy_clones_rings_and_cursors_and_reads_before_it_writes(
    name: str, rounding: str, keep_seed: bool, device: torch.device
) -> None:
    pool = in_format(name, rounding, device=device, ring_dtype=torch.bfloat16)
    pool.acquire(SLOTS, seed=range(SLOTS))
    generator = torch.Generator().manual_seed(0)
    for part, tensor in parts_of(pool).items():
        if part != "seed":  # all bytes, so that a number is none that another tensor has
            memory = memory_of(tensor)
            memory.copy_(torch.randint(128, memory.shape, generator=generator, dtype=torch.uint8))
    before = {part: tensor.clone() for part, tensor in parts_of(pool).items()}
    src, dst = [1, 0, 0, 4], [0, 1, 2, 4]  # a swap, a fan-out, a copy onto itself
    pool.copy(src, dst, keep_seed=keep_seed)
    for part, tensor in parts_of(pool).items():
        if part != "seed":
            assert same(tensor[dst], before[part][src]), part
            assert same(tensor[[3, 5]], before[part][[3, 5]]), part
        elif keep_seed:
            assert tensor.tolist() == [1, 0, 0, 3, 4, 5]
        else:
            assert not set(tensor[dst].tolist()) & set(range(SLOTS))


@EVERY_FORMAT
def test_a_clone_goes_on_as_its_original_does(name: str, rounding: str) -> None:
    pool = in_format(name, rounding)
    one, other, third = pool.acquire(3, seed=[5, 6, 7]).tolist()
    fill(pool, [one, third])
    pool.copy(one, other, keep_seed=True)
    for turn in range(6):
        tokens = {part: t if part == "A" else t[[0, 0]] for part, t in tokens_for(1, TOKENS, 10 + turn).items()}
        outputs = replay(pool, [one, other], tokens, [turn % 3 + 1] * 2)
        assert equal([y[0] for y in outputs], [y[1] for y in outputs])
        pool.advance(torch.tensor([one, other]))
        for part, tensor in parts_of(pool).items():
            assert same(tensor[[one]], tensor[[other]]), part
    assert not same(pool.layer(0).data[one], pool.layer(0).data[third])


# What write stores and read gives


@EVERY_FORMAT
def test_read_gives_checkpoints_which_lag_until_they_are_folded(name: str, rounding: str) -> None:
    pool = in_format(name, rounding)
    slot = pool.acquire().tolist()
    states = torch.randn(1, HEADS, ROWS, COLS, generator=torch.Generator().manual_seed(3))
    for i in range(LAYERS):
        pool.write(i, slot, states)
    before = [pool.read(i, slot) for i in range(LAYERS)]
    replay(pool, slot, tokens_for(1, TOKENS))
    for i in range(LAYERS):
        data, scale = pool.layer(i).data[slot], pool.layer(i).scale
        assert same(pool.read(i, slot), decode(data, None if scale is None else scale[slot]))
        assert same(pool.read(i, slot), before[i])
    after = pool.layer(1).data.clone().float()
    flashstate.mamba2_fold(pool.layer(1), pool.ring(1), A, slots=torch.tensor(slot), into=after)
    assert not same(after[slot], before[1])
    for i in range(LAYERS):
        flashstate.mamba2_fold(pool.layer(i), pool.ring(i), A, slots=torch.tensor(slot))
    pool.folded(torch.tensor(slot))
    assert not pool.ring(0).count.any()
    assert not same(pool.read(1, slot), before[1])
    if name == "float32":
        assert same(pool.read(1, slot), after[slot])


@DEVICES
def test_write_empties_the_rings_of_its_slots_in_all_layers(device: torch.device) -> None:
    pool = make_pool(device=device)
    pool.acquire(SLOTS)
    ring = pool.ring(1)
    ring.count.copy_(torch.arange(1, SLOTS + 1))
    ring.start.copy_(torch.arange(SLOTS))
    pool.write(0, [4, 1], torch.ones(2, HEADS, ROWS, COLS, device=device))
    assert ring.count.tolist() == [1, 0, 3, 4, 0, 6]
    assert all(0 <= start < LENGTH for start in ring.start.tolist())
    pool.write(1, [], torch.ones(0, HEADS, ROWS, COLS, device=device))
    assert ring.count.tolist() == [1, 0, 3, 4, 0, 6]


@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_outputs_after_a_write_go_on_from_what_was_written(name: str) -> None:
    """As on a slot that is new but for those states; other requests go on from where they were."""
    pool, fresh = in_format(name, "nearest"), in_format(name, "nearest")
    held = pool.acquire(3).tolist()
    fill(pool, held)
    twin = fresh.acquire().tolist()
    states = torch.randn(LAYERS, 1, HEADS, ROWS, COLS, generator=torch.Generator().manual_seed(1))
    kept = {part: tensor[[held[0], held[2]]].clone() for part, tensor in parts_of(pool).items()}
    for i in range(LAYERS):
        pool.write(i, held[1], states[i])
        fresh.write(i, twin, states[i])
    assert all(same(tensor[[held[0], held[2]]], kept[part]) for part, tensor in parts_of(pool).items())
    assert pool.ring(0).count[held[0]] > 0
    for turn in range(6):
        tokens = tokens_for(1, TOKENS, turn)
        assert equal(replay(pool, held[1:2], tokens, [2]), replay(fresh, twin, tokens, [2]))


# Wrapped


def test_a_wrapped_pool_has_the_callers_rings_and_gives_what_an_allocated_one_does() -> None:
    states = [State(torch.zeros(SLOTS, HEADS, ROWS, COLS)) for _ in range(LAYERS)]
    rings = rings_of(SHAPES)
    wrapped, pool = StatePool.wrap(states, rings=rings), make_pool()
    assert all(wrapped.ring(i) is ring for i, ring in enumerate(rings))
    assert wrapped.bytes_per_slot == pool.bytes_per_slot
    wrapped.release(range(SLOTS))
    for each in (wrapped, pool):
        assert each.acquire(3).tolist() == [0, 1, 2]
    for turn in range(6):
        tokens = tokens_for(2, TOKENS, turn)
        assert equal(replay(wrapped, [2, 0], tokens, [1, 3]), replay(pool, [2, 0], tokens, [1, 3]))
    for part, tensor in parts_of(wrapped).items():
        assert same(tensor, parts_of(pool)[part]), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_rings_take_turns_with_states_in_pages_and_nothing_between_is_touched(dtype: torch.dtype) -> None:
    pages = torch.full((SLOTS, 4096), POISON, dtype=torch.uint8)
    start, count = (torch.full((SLOTS,), -1, dtype=torch.int32) for _ in range(2))
    layers = [in_pages(pages, first, dtype, (start, count)) for first in (8, 2048)]
    pool = StatePool.wrap([state for state, _ in layers], rings=[ring for _, ring in layers])
    plain = make_pool(dtype=dtype, ring_dtype=torch.bfloat16)
    assert pool.bytes_per_slot == plain.bytes_per_slot
    kept = torch.zeros(4096, dtype=torch.bool)
    for part, tensor in parts_of(pool).items():
        if part not in ("start", "count"):
            first = tensor.storage_offset() * tensor.element_size()
            kept[first : first + tensor[0].nbytes] = True
    pool.release([2, 3, 5])
    assert pool.acquire(2).tolist() == [2, 3]
    assert is_clean(pool, [2, 3])
    assert (pages[[0, 1, 4, 5]] == POISON).all()
    assert start.tolist() == count.tolist() == [-1, -1, 0, 0, -1, -1]
    twins = plain.acquire(2).tolist()
    for turn in range(6):
        tokens = {part: t if part in ("A", "dt") else t.bfloat16() for part, t in tokens_for(2, TOKENS, turn).items()}
        assert equal(replay(pool, [3, 2], tokens, [1, 3]), replay(plain, twins, tokens, [1, 3]))
    pool.copy(3, 4)
    assert torch.equal(pages[4, kept], pages[3, kept])
    assert (start[4], count[4]) == (start[3], count[3])
    assert (pages[[0, 1, 5]] == POISON).all()
    assert (pages[:, ~kept] == POISON).all()


# With other things that a request has


def test_a_request_has_a_window_and_a_ring_and_both_come_clean_and_are_copied() -> None:
    pool = make_pool(conv_channels=7, drafts=2)
    assert (pool.has_windows, pool.has_rings, pool.drafts) == (True, True, 2)
    one, other = pool.acquire(2).tolist()
    pool.window(1)[one] = 3.0
    fill(pool, [one])
    pool.copy(one, other)
    assert (pool.window(1)[other] == 3).all()
    assert pool.ring(0).count[other] == pool.ring(0).count[one] > 0
    pool.reset(other)
    assert not pool.window(1)[other].any()
    assert is_clean(pool, [other])
    assert (pool.window(1)[one] == 3).all()
    windows = [torch.zeros(SLOTS, 7, 5) for _ in range(LAYERS)]
    states = [State(torch.zeros(SLOTS, HEADS, ROWS, COLS)) for _ in range(LAYERS)]
    wrapped = StatePool.wrap(states, windows=windows, drafts=2, rings=rings_of(SHAPES))
    assert wrapped.bytes_per_slot == pool.bytes_per_slot + LAYERS * 7 * 5 * 2  # windows of twice the width
    assert wrapped.window(1) is windows[1]


def test_padding_rows_of_a_step_touch_nothing() -> None:
    pool = make_pool(null=0)
    held = pool.acquire(3).tolist()
    fill(pool, held)
    before = {part: tensor.clone() for part, tensor in parts_of(pool).items()}
    slots = Slots(torch.tensor([0, -1, 0]), null=0)
    plan, tokens = pool.plan(slots, TOKENS), tokens_for(3, TOKENS)
    for i in range(LAYERS):
        assert not flashstate.mamba2_replay(pool.layer(i), pool.ring(i), **tokens, plan=plan).any()
    pool.commit(plan)
    pool.folded(slots)
    assert all(same(tensor, before[part]) for part, tensor in parts_of(pool).items())


@DEVICES
def test_a_pool_crosses_in_and_out_of_inference_mode(device: torch.device) -> None:
    outside = make_pool(device=device)
    with torch.inference_mode():
        inside = make_pool(device=device)
        plans = []
        for pool in (inside, outside):
            slots = pool.acquire(2)
            pool.write(0, [0], torch.ones(1, HEADS, ROWS, COLS, device=device))
            plans.append(pool.plan(slots, TOKENS))
            pool.commit(plans[-1])
    for pool, plan in zip((inside, outside), plans, strict=True):
        pool.commit(plan, torch.tensor([2, 3], device=device))
        pool.copy(1, 0)
        assert pool.ring(1).count.tolist() == [3, 3, 0, 0, 0, 0]
        pool.folded(torch.tensor([0], device=device), 1)
        pool.write(1, [1], torch.ones(1, HEADS, ROWS, COLS, device=device))
        assert (pool.ring(1).start.tolist()[:2], pool.ring(1).count.tolist()[:2]) == ([1, 0], [2, 0])
        plan.rows.add_(0)
        pool.reset([0, 1])
    with torch.inference_mode():
        for pool in (inside, outside):
            pool.commit(pool.plan(None, 1))
            assert pool.ring(0).count.tolist() == [1] * SLOTS


@pytest.mark.gpu
def test_nothing_waits_for_the_device_when_slots_are_ints() -> None:
    pool, states = make_pool(device=CUDA), torch.ones(1, HEADS, ROWS, COLS, device=CUDA)
    for mode in ("default", "error"):  # kernels compile in the first pass
        torch.cuda.set_sync_debug_mode(mode)
        try:
            slots = pool.acquire(3)
            pool.commit(pool.plan(slots, TOKENS))
            pool.write(1, [2], states)
            pool.copy([0, 2], [2, 1])
            pool.folded(slots)
            pool.reset(2)
            pool.release([0, 1, 2])
        finally:
            torch.cuda.set_sync_debug_mode("default")
