"""The rings of a StatePool: clean when they are handed out, copied and emptied with their request, counted, wrapped."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from pools import DEVICES, EVERY_FORMAT, dirty, is_clean, is_poison, kept_by, same
from ring_pools import (
    COLS,
    DELTA,
    GROUPS,
    HEADS,
    LAYERS,
    LENGTH,
    ROWS,
    RULES,
    SHAPES,
    SLOTS,
    TOKENS,
    WINDOW,
    A,
    fill,
    fold,
    in_format,
    make_pool,
    replay,
    rings_of,
    step,
    tokens_for,
)
from torch import Tensor

import flashstate
from flashstate import DeltaRing, Ring, Slots, State, StatePool
from flashstate.models import ModelShape
from flashstate.plan import request_bytes
from flashstate.state.formats import FORMATS, decode

EVERY_RULE = pytest.mark.parametrize("rule", RULES)
OF_ONE_RULE = pytest.mark.parametrize("rule", SHAPES)


def equal(one: list[Tensor], other: list[Tensor]) -> bool:
    return all(same(a, b) and bool(a.isfinite().all()) for a, b in zip(one, other, strict=True))


# What is allocated


@OF_ONE_RULE
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_layers_have_rings_of_the_documented_shapes_which_share_cursors(kind: torch.dtype, rule: str) -> None:
    pool = make_pool(rule, ring_dtype=kind, dtype=torch.int8)
    dtypes = {"u": torch.float32, "dt": torch.float32, "decay": kind if rule == "per channel" else torch.float32}
    assert pool.has_rings
    for i in range(LAYERS):
        ring = pool.ring(i)
        assert isinstance(ring, Ring if rule == "mamba2" else DeltaRing)
        assert {name: getattr(ring, name).shape[1:] for name in ring.written} == SHAPES[rule]
        assert all(getattr(ring, name).dtype is dtypes.get(name, kind) for name in ring.written)
        assert (ring.window, ring.length, ring.longest_call) == (WINDOW, LENGTH, TOKENS)
        for cursor, first in ((ring.start, pool.ring(0).start), (ring.count, pool.ring(0).count)):
            assert (cursor.shape, cursor.dtype, cursor.data_ptr()) == ((SLOTS,), torch.int32, first.data_ptr())
    assert is_clean(pool, list(range(SLOTS)))


def test_a_ring_has_one_group_one_token_and_bfloat16_unless_asked_otherwise() -> None:
    ring = StatePool.mamba2(slots=2, layers=1, heads=3, rows=2, cols=4, window=16).ring(0)
    assert (ring.x.shape, ring.B.shape, ring.dt.shape) == ((2, 3, 17, 2), (2, 1, 17, 4), (2, 3, 17))
    assert ring.x.dtype is ring.B.dtype is torch.bfloat16
    assert ring.longest_call == 1


def test_a_ring_of_the_delta_rule_has_a_key_head_each_one_token_and_u_of_float16_unless_asked_otherwise() -> None:
    sizes = {"slots": 2, "layers": 1, "heads": 3, "value_dim": 2, "key_dim": 4, "window": 16}
    ring = StatePool.gated_delta(**sizes).ring(0)
    assert (ring.k.shape, ring.u.shape, ring.decay.shape) == ((2, 3, 17, 4), (2, 3, 17, 2), (2, 3, 17))
    assert (ring.k.dtype, ring.u.dtype, ring.longest_call) == (torch.bfloat16, torch.float16, 1)


@OF_ONE_RULE
def test_a_pool_without_a_window_has_no_rings(rule: str) -> None:
    of_rings = ["groups"] if rule == "mamba2" else ["key_heads", "per_channel", "u_dtype"]
    pool = make_pool(rule, window=0, tokens=1, **dict.fromkeys([*of_rings, "ring_dtype"]))
    assert not pool.has_rings
    pool.acquire(2)
    for call in (lambda: pool.ring(0), pool.plan, lambda: pool.commit(None), pool.folded):  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"^this pool has no rings: it was made without a window"):
            call()
    pool.write(0, 0, torch.ones(1, HEADS, ROWS, COLS))
    pool.copy(0, 1)
    assert (pool.read(0, 1) == 1).all()
    assert pool.bytes_per_slot == LAYERS * HEADS * ROWS * COLS * 4


@OF_ONE_RULE
@EVERY_FORMAT
@pytest.mark.parametrize("activations", [torch.float32, torch.bfloat16], ids=str)
def test_bytes_per_slot_are_what_plan_says(name: str, rounding: str, activations: torch.dtype, rule: str) -> None:
    of_delta = {"per_channel": True} if rule == "per channel" else {}
    shape = ModelShape(
        "mamba2" if rule == "mamba2" else "gated_delta", LAYERS, HEADS, ROWS, COLS, GROUPS, activations=activations,
        window=WINDOW, tokens=TOKENS, **of_delta,
    )  # fmt: skip
    kinds = {"ring_dtype": activations, "conv_dtype": activations, "conv_channels": shape.conv_channels}
    kinds |= {} if rule == "mamba2" else {"u_dtype": torch.float16}
    pool = in_format(name, rounding, rule, **kinds)
    kept = {part: tensor[0].nbytes for part, tensor in kept_by(pool).items()}
    planned = request_bytes(shape, FORMATS[getattr(torch, name)])
    assert planned["ring"] == sum(size for part, size in kept.items() if part.startswith(("ring.", "start", "count")))
    assert pool.bytes_per_slot == planned["total"] - (planned["seed"] if rounding == "nearest" else 0)


# Slots


@EVERY_RULE
def test_a_request_gives_the_same_whatever_its_slot_held_before(rule: str) -> None:
    """NaN in rows that are not live, of the ring and of new memory, reaches nothing."""
    pool, clean = make_pool(rule), make_pool(rule)
    pool.acquire(SLOTS)
    dirty(pool)
    pool.release([4, 2])
    slots = [pool.acquire(2).tolist(), clean.acquire(2).tolist()]
    assert slots == [[4, 2], [0, 1]]
    for ring in map(pool.ring, range(LAYERS)):
        for name in ring.written:
            getattr(ring, name)[slots[0]] = torch.nan  # no row is live
    for turn in range(6):
        tokens = tokens_for(2, TOKENS, turn)
        assert equal(replay(pool, slots[0], tokens, [2, 1]), replay(clean, slots[1], tokens, [2, 1]))
    assert is_poison(pool, [0, 1, 3, 5])


@EVERY_RULE
@EVERY_FORMAT
def test_a_clone_goes_on_as_its_original_does(name: str, rounding: str, rule: str) -> None:
    pool = in_format(name, rounding, rule)
    one, other, third = pool.acquire(3, seed=[5, 6, 7]).tolist()
    fill(pool, [one, third])
    pool.copy(one, other, keep_seed=True)
    for turn in range(6):
        tokens = {part: t[[0, 0]] for part, t in tokens_for(1, TOKENS, 10 + turn).items()}
        outputs = replay(pool, [one, other], tokens, [turn % 3 + 1] * 2)
        assert equal([y[0] for y in outputs], [y[1] for y in outputs])
        pool.advance(torch.tensor([one, other]))
        for part, tensor in kept_by(pool).items():
            assert same(tensor[[one]], tensor[[other]]), part
    assert not same(pool.layer(0).data[one], pool.layer(0).data[third])


# What write stores and read gives


@EVERY_RULE
@EVERY_FORMAT
def test_read_gives_checkpoints_which_lag_until_they_are_folded(name: str, rounding: str, rule: str) -> None:
    pool = in_format(name, rounding, rule)
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
    fold(pool, 1, slots=torch.tensor(slot), into=after)
    assert not same(after[slot], before[1])
    for i in range(LAYERS):
        fold(pool, i, slots=torch.tensor(slot))
    pool.folded(torch.tensor(slot))
    assert not pool.ring(0).count.any()
    assert not same(pool.read(1, slot), before[1])
    if name == "float32":
        assert same(pool.read(1, slot), after[slot])


@DEVICES
@EVERY_RULE
def test_write_empties_the_rings_of_its_slots_in_all_layers(rule: str, device: torch.device) -> None:
    pool = make_pool(rule, device=device)
    pool.acquire(SLOTS)
    ring = pool.ring(1)
    ring.count.copy_(torch.arange(1, SLOTS + 1))
    ring.start.copy_(torch.arange(SLOTS))
    pool.write(0, [4, 1], torch.ones(2, HEADS, ROWS, COLS, device=device))
    assert ring.count.tolist() == [1, 0, 3, 4, 0, 6]
    assert all(0 <= start < LENGTH for start in ring.start.tolist())
    pool.write(1, [], torch.ones(0, HEADS, ROWS, COLS, device=device))
    assert ring.count.tolist() == [1, 0, 3, 4, 0, 6]


@EVERY_RULE
@pytest.mark.parametrize("name", ["float32", "float16", "int8"])
def test_outputs_after_a_write_go_on_from_what_was_written(name: str, rule: str) -> None:
    """As on a slot that is new but for those states; other requests go on from where they were."""
    pool, fresh = in_format(name, "nearest", rule), in_format(name, "nearest", rule)
    held = pool.acquire(3).tolist()
    fill(pool, held)
    twin = fresh.acquire().tolist()
    states = torch.randn(LAYERS, 1, HEADS, ROWS, COLS, generator=torch.Generator().manual_seed(1))
    kept = {part: tensor[[held[0], held[2]]].clone() for part, tensor in kept_by(pool).items()}
    for i in range(LAYERS):
        pool.write(i, held[1], states[i])
        fresh.write(i, twin, states[i])
    assert all(same(tensor[[held[0], held[2]]], kept[part]) for part, tensor in kept_by(pool).items())
    assert pool.ring(0).count[held[0]] > 0
    for turn in range(6):
        tokens = tokens_for(1, TOKENS, turn)
        assert equal(replay(pool, held[1:2], tokens, [2]), replay(fresh, twin, tokens, [2]))


# Wrapped


@OF_ONE_RULE
def test_a_wrapped_pool_has_the_callers_rings_and_gives_what_an_allocated_one_does(rule: str) -> None:
    states = [State(torch.zeros(SLOTS, HEADS, ROWS, COLS)) for _ in range(LAYERS)]
    rings = rings_of(rule)
    wrapped, pool = StatePool.wrap(states, rings=rings), make_pool(rule)
    assert all(wrapped.ring(i) is ring for i, ring in enumerate(rings))
    assert wrapped.bytes_per_slot == pool.bytes_per_slot
    wrapped.release(range(SLOTS))
    for each in (wrapped, pool):
        assert each.acquire(3).tolist() == [0, 1, 2]
    for turn in range(6):
        tokens = tokens_for(2, TOKENS, turn)
        assert equal(replay(wrapped, [2, 0], tokens, [1, 3]), replay(pool, [2, 0], tokens, [1, 3]))
    for part, tensor in kept_by(wrapped).items():
        assert same(tensor, kept_by(pool)[part]), part


# With other things that a request has


class Plain:
    """The layers of a pool of both rules, with their convolutions, as steps of one token have them."""

    def __init__(self, weight: Tensor) -> None:
        self.states = torch.zeros(LAYERS, SLOTS, HEADS, ROWS, COLS)
        self.windows = torch.zeros(LAYERS, SLOTS, *weight.shape)[..., 1:]
        self.weight = weight

    def clear(self, slot: int) -> None:
        self.states[:, slot] = self.windows[:, slot] = 0

    def step(self, slots: Tensor, tokens: dict[str, Tensor]) -> list[Tensor]:
        """The outputs of all layers for a token of every row."""
        t, first, second = tokens, *self.states
        x, v = (
            flashstate.conv1d_step(w, t["x"].flatten(1), self.weight, slots=slots).view_as(t["x"]) for w in self.windows
        )
        gates = {"a": t["a"][..., 0].contiguous(), "b": t["b"], **DELTA}
        return [
            flashstate.mamba2_step(first, x, t["dt"], A, t["B"], t["C"], slots=slots),
            flashstate.gated_delta_step(second, t["q"], t["k"], v, **gates, slots=slots),
        ]


def test_one_plan_and_one_commit_serve_layers_of_both_rules_and_their_convolutions() -> None:
    """Requests come and go, and drafts are rejected: what stays gives what steps of one token give."""
    draw, weight = Random(0), torch.randn(HEADS * ROWS, 4, generator=torch.Generator().manual_seed(0))
    pool, plain = make_pool("both", conv_channels=len(weight), conv_dtype=torch.float32, drafts=TOKENS), Plain(weight)
    slots, before, folds = pool.acquire(4).tolist(), dict.fromkeys(range(SLOTS), 0), 0
    for turn in range(40):
        if turn % 5 == 4:  # a request ends, and another begins
            pool.release(slots.pop())
            slots += pool.acquire().tolist()
            before[slots[-1]] = 0
            plain.clear(slots[-1])
        draw.shuffle(slots)
        rows, tokens = torch.tensor(slots), tokens_for(len(slots), TOKENS, turn)
        plan = pool.plan(rows, TOKENS)
        windows = Slots(rows, accepted=torch.tensor([before[slot] for slot in slots]))
        outputs = []
        for i in range(LAYERS):
            convolved = flashstate.conv1d_step(pool.window(i), tokens["x"].flatten(2), weight, slots=windows)
            given = convolved.view_as(tokens["x"])
            outputs.append(step(pool, i, {**tokens, "x": given, "v": given}, plan=plan))
        accepted = [draw.randint(0, TOKENS) for _ in slots]
        pool.commit(plan, torch.tensor(accepted))
        before |= dict(zip(slots, accepted, strict=True))
        folds += int(plan.parts[0])
        for t in range(TOKENS):
            stay = [b for b, kept in enumerate(accepted) if kept > t]
            want = plain.step(rows[stay], {name: tensor[stay, t] for name, tensor in tokens.items()})
            torch.testing.assert_close([y[stay, t] for y in outputs], want)
    assert folds > 20


@EVERY_RULE
def test_padding_rows_of_a_step_touch_nothing(rule: str) -> None:
    pool = make_pool(rule, null=0)
    held = pool.acquire(3).tolist()
    fill(pool, held)
    before = {part: tensor.clone() for part, tensor in kept_by(pool).items()}
    slots = Slots(torch.tensor([0, -1, 0]), null=0)
    plan, tokens = pool.plan(slots, TOKENS), tokens_for(3, TOKENS)
    for i in range(LAYERS):
        assert not step(pool, i, tokens, plan=plan).any()
    pool.commit(plan)
    pool.folded(slots)
    assert all(same(tensor, before[part]) for part, tensor in kept_by(pool).items())


@DEVICES
@OF_ONE_RULE
def test_plans_cross_in_and_out_of_inference_mode(rule: str, device: torch.device) -> None:
    outside = make_pool(rule, device=device)
    with torch.inference_mode():
        inside = make_pool(rule, device=device)
        plans = [(pool, pool.plan(pool.acquire(2), TOKENS)) for pool in (inside, outside)]
    for pool, plan in plans:
        pool.commit(plan, torch.tensor([2, 3], device=device))
        pool.copy(1, 0)
        pool.folded(torch.tensor([0], device=device), 1)
        assert (pool.ring(1).start.tolist()[:2], pool.ring(1).count.tolist()[:2]) == ([1, 0], [2, 3])
        plan.rows.add_(0)
        pool.reset([0, 1])
    with torch.inference_mode():
        for pool, _ in plans:
            pool.commit(pool.plan(None, 1))
            assert pool.ring(0).count.tolist() == [1] * SLOTS


ANOTHER_REQUEST: dict[str, Callable[[StatePool, Tensor], Any]] = {
    "acquired": lambda pool, slot: (pool.release(slot), pool.acquire()),
    "reset": lambda pool, slot: pool.reset(slot),
    "copied to": lambda pool, slot: pool.copy(0, slot),
    "loaded": lambda pool, slot: pool.load(slot, pool.export(0)),
    "written": lambda pool, slot: pool.write(1, slot, torch.zeros(1, HEADS, ROWS, COLS, device=slot.device)),
}


@pytest.mark.parametrize("change", ANOTHER_REQUEST.values(), ids=ANOTHER_REQUEST)
def test_a_commit_leaves_slots_alone_that_have_another_request_since_the_plan(
    change: Callable[[StatePool, Tensor], Any], device: torch.device
) -> None:
    pool = make_pool(device=device)
    slots = pool.acquire(3)
    plan = pool.plan(slots, 2)
    pool.copy(torch.tensor([-1], device=device), slots[2:])  # from no slot
    change(pool, slots[1:2])
    before = pool.ring(0).count.tolist()
    with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of requests that are no longer in slot 1,"):
        pool.commit(plan)
    assert pool.ring(0).count.tolist() == before
    pool.commit(plan)
    assert pool.ring(0).count.tolist() == [2, before[1], 2, *before[3:]]


@OF_ONE_RULE
@pytest.mark.parametrize("packed", [False, True])
def test_replay_goes_by_its_plan_and_debug_finds_one_of_an_earlier_step(
    rule: str, packed: bool, device: torch.device
) -> None:
    pool, twin = (make_pool(rule, device=device) for _ in range(2))
    slots, bounds = torch.tensor([0, 1, 2]), torch.tensor([0, 2, 3, 5])
    tokens = {name: t.to(device) for name, t in tokens_for(*((5, 1) if packed else (3, 2))).items()}
    tokens = {name: t[:, 0] for name, t in tokens.items()} if packed else tokens
    outputs = []
    for one in (pool, twin):
        one.acquire(3)
        where = [(t.clone().to(device) if t is not None else None) for t in (slots, bounds)]
        at = Slots(where[0], cu_seqlens=where[1], max_len=2) if packed else where[0]
        plan = one.plan(at, None if packed else 2)
        if one is twin:  # what the plan was made of changes
            for cursor in (one.ring(0).start, one.ring(0).count):
                cursor.add_(1)
            where[0].sub_(9)
        outputs.append(step(one, 0, tokens, plan=plan))
    assert torch.equal(*outputs)
    assert all(torch.equal(getattr(pool.ring(0), part), getattr(twin.ring(0), part)) for part in pool.ring(0).written)
    with flashstate.debug(), pytest.raises(ValueError, match=r"^plan is of an earlier step: start and count of slot 0"):
        twin.commit(plan)


@OF_ONE_RULE
def test_debug_finds_steps_that_were_not_committed_and_states_that_lag(rule: str) -> None:
    pool, x = make_pool(rule), tokens_for(2, 1)
    slots = pool.acquire(2)
    with flashstate.debug():
        replay(pool, slots, x)
        plan = pool.plan(slots, 1)
        for i in range(LAYERS):
            step(pool, i, x, plan=plan)
        with pytest.raises(ValueError, match=r"^the step before was not committed, .* slots 0, 1: commit the plan"):
            step(pool, 0, x, plan=plan)
        pool.commit(plan, torch.zeros(2, dtype=torch.int32))
        replay(pool, slots, x)
        given = {name: x[name][:, 0] for name in (("x", "dt", "B", "C") if rule == "mamba2" else ("q", "k", "v", "b"))}
        plain = flashstate.mamba2_step if rule == "mamba2" else flashstate.gated_delta_step
        given |= {"A": A} if rule == "mamba2" else {"a": -x["a"][:, 0, :, 0].abs()}
        with pytest.raises(ValueError, match=r"^state lags behind its ring, which has live rows in slots 0, 1: fold"):
            plain(pool.layer(1), **given, slots=slots)
        fold(pool, 1, slots=slots)
        pool.folded(slots)
        plain(pool.layer(1), **given, slots=slots)
