"""StatePool: requests that come and go in any order have the states that they would have on their own."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from pools import CPU, POISON, bytes_of, dirty, gaps_are_poison, in_pages, make_pool, same, seed_of, tensors_of
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.launch import interpreted
from flashstate.state.formats import PORTABLE_FORMATS, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits


@dataclass
class Request:
    """A request as it would be on its own: single-slot states that no pool has seen, and its seed."""

    states: list[State]
    seed: Tensor | None  # (1,)

    @classmethod
    def new(cls, pool: StatePool, slot: int) -> "Request":
        """A clean request with the seed that the pool gave this slot."""
        layers = [pool.layer(i) for i in range(pool.layers)]
        seed = None if layers[0].seed is None else layers[0].seed[slot : slot + 1].clone()
        states = [
            replace(
                layer,
                data=torch.zeros_like(layer.data[:1].contiguous()),
                scale=None if layer.scale is None else torch.ones_like(layer.scale[:1].contiguous()),
                seed=None if layer.seed is None else seed,
            )
            for layer in layers
        ]
        return cls(states, seed)

    def take(self, i: int, data: Tensor, scale: Tensor | None) -> None:
        """Make these the state of layer i."""
        bytes_of(self.states[i].data).copy_(bytes_of(data))
        if scale is not None:
            self.states[i].scale.copy_(scale)


def copy_of(state: State) -> State:
    return replace(state, data=state.data.clone(), scale=None if state.scale is None else state.scale.clone())


class Requests(RuleBasedStateMachine):
    """A pool under requests in any order, beside the same requests each on its own: they never differ by a bit."""

    implementation: ClassVar[Callable[[], Any]] = contextlib.nullcontext

    @initialize(
        formats=st.tuples(*[st.sampled_from(PORTABLE_FORMATS)] * 2),
        kind=st.sampled_from(["own", "null inside", "pages"]),
    )
    def make(self, formats: tuple[tuple[str, str], tuple[str, str]], kind: str) -> None:
        null = 2 if kind == "null inside" else -1
        if kind == "pages":
            self.pool = StatePool.wrap(in_pages(list(formats), 6, (2, 3, 5), CPU), seed=0)
            self.pool.release(range(6))
        else:
            self.pool = make_pool(*formats[0], null=null)
        dirty(self.pool)
        self.requests: dict[int, Request] = {}
        self.acquire(3, None)

    def some(self, data: st.DataObject, repeat: bool = False, size: int | None = None) -> list[int]:
        """Slots that are held."""
        slots = st.sampled_from(sorted(self.requests))
        return data.draw(st.lists(slots, unique=not repeat, min_size=size or 1, max_size=size or 3), label="slots")

    @rule(n=st.integers(1, 3), seed=st.none() | st.integers(-(1 << 63), (1 << 63) - 1))
    def acquire(self, n: int, seed: int | None) -> None:
        if n > self.pool.free:
            with pytest.raises(RuntimeError, match=r"^acquire needs"):
                self.pool.acquire(n, seed)
            return
        others = [None if request.seed is None else request.seed.item() for request in self.requests.values()]
        for slot in self.pool.acquire(n, seed).tolist():
            assert slot not in (*self.requests, self.pool.null)
            self.requests[slot] = request = Request.new(self.pool, slot)
            if request.seed is not None:
                assert request.seed == seed if seed is not None else request.seed not in others

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        slots = self.some(data)
        self.pool.release(slots)
        for slot in slots:
            del self.requests[slot]
            for tensor in tensors_of(self.pool):
                tensor[slot : slot + 1].view(torch.uint8).fill_(POISON)
            with pytest.raises(ValueError, match=f"^slots must be held, but slot {slot} is free"):
                self.pool.release(slot)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        slots = self.some(data)
        self.pool.reset(slots)
        self.requests.update({slot: Request.new(self.pool, slot) for slot in slots})

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), keep_seed=st.booleans())
    def copy(self, data: st.DataObject, keep_seed: bool) -> None:
        targets = self.some(data)
        sources = self.some(data, repeat=True, size=len(targets))
        self.pool.copy(sources, targets, keep_seed)
        clones = [[(s.data, s.scale) for s in self.requests[source].states] for source in sources]
        seeds = [self.requests[source].seed for source in sources]
        for target, clone, seed in zip(targets, clones, seeds, strict=True):
            self.requests[target] = request = Request.new(self.pool, target)
            assert not keep_seed or seed is None or torch.equal(seed, request.seed)
            for i, (state, scale) in enumerate(clone):
                request.take(i, state, scale)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1), number=st.integers(0, 99), half=st.booleans())
    def write(self, data: st.DataObject, i: int, number: int, half: bool) -> None:
        slots = self.some(data)
        values = torch.randn(len(slots), 2, 3, 5, generator=torch.Generator().manual_seed(number))
        values = values.half() if half else values
        with self.implementation():
            self.pool.write(i, slots, values)
        for slot, value in zip(slots, values.split(1), strict=True):
            request, state = self.requests[slot], self.requests[slot].states[i]
            random = None
            if state.rounding == "stochastic":
                random = random_bits(request.seed, (2, 3, 5), -1, state.stream, state.rounds, state.data.dtype)
            request.take(i, *encode(value.float(), state.data.dtype, random))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1), number=st.integers(0, 99), elsewhere=st.booleans())
    def step(self, data: st.DataObject, i: int, number: int, elsewhere: bool) -> None:
        """Rows in some slots and one padding row; the new states go back, or to other slots that are held."""
        slots = self.some(data)
        others = [slot for slot in sorted(self.requests) if slot not in slots]
        targets = others[: len(slots)] if elsewhere and len(others) >= len(slots) else slots
        arguments = step_arguments(len(slots) + 1, number)
        padding = self.pool.null
        where = Slots(
            torch.tensor([*slots, padding]),
            write=None if targets is slots else torch.tensor([*targets, padding]),
            null=self.pool.null,
        )
        with self.implementation():
            y = flashstate.mamba2_step(self.pool.layer(i), **arguments, slots=where)
        assert not y[-1].any()
        for row, (slot, target) in enumerate(zip(slots, targets, strict=True)):
            alone = self.requests[slot].states[i]
            alone = alone if target == slot else copy_of(alone)
            own = {name: t if name == "A" else t[row : row + 1] for name, t in arguments.items()}
            with self.implementation():
                assert same(flashstate.mamba2_step(alone, **own), y[row : row + 1])
            self.requests[target].take(i, alone.data, alone.scale)

    @precondition(lambda self: len(self.requests) >= 3)
    @rule(data=st.data(), i=st.integers(0, 1), number=st.integers(0, 99), accepted=st.integers(0, 3))
    def speculate(self, data: st.DataObject, i: int, number: int, accepted: int) -> None:
        """Three tokens from the slot of three that was accepted, if any; the state after each goes to one of them."""
        slots = self.some(data, size=3)
        arguments = {name: t if name == "A" else t[None] for name, t in step_arguments(3, number).items()}
        table = torch.tensor([slots])
        where = Slots(table, accepted=torch.tensor([accepted]), write=table)
        with self.implementation():
            y = flashstate.mamba2_step(self.pool.layer(i), **arguments, slots=where)
        if not accepted:
            assert not y.any()
            return
        source, after = self.requests[slots[accepted - 1]].states[i], []
        for t in range(3):
            alone = copy_of(source)
            tokens = {name: value if name == "A" else value[:, : t + 1] for name, value in arguments.items()}
            with self.implementation():
                assert same(flashstate.mamba2_step(alone, **tokens), y[:, : t + 1])
            after.append(alone)
        for target, alone in zip(slots, after, strict=True):
            self.requests[target].take(i, alone.data, alone.scale)

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), everyone=st.booleans())
    def advance(self, data: st.DataObject, everyone: bool) -> None:
        slots = sorted(self.requests) if everyone else self.some(data)
        with self.implementation():
            self.pool.advance(None if everyone else torch.tensor([*slots, self.pool.null]))
        for slot in slots:
            seed = self.requests[slot].seed
            if seed is not None:
                seed += SEED_STEP

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), i=st.integers(0, 1))
    def read(self, data: st.DataObject, i: int) -> None:
        slots = self.some(data, repeat=True)
        with self.implementation():
            values = self.pool.read(i, slots)
        states = [self.requests[slot].states[i] for slot in slots]
        assert values.isfinite().all()
        assert same(values, torch.cat([decode(state.data, state.scale) for state in states]))

    @invariant()
    def every_request_is_as_on_its_own_and_the_rest_is_poison(self) -> None:
        for i in range(self.pool.layers):
            layer = self.pool.layer(i)
            for name in ("data", "scale"):
                tensor = getattr(layer, name)
                if tensor is not None:
                    want = bytes_of(torch.empty_like(tensor, memory_format=torch.contiguous_format)).fill_(POISON)
                    for slot, request in self.requests.items():
                        want[slot] = bytes_of(getattr(request.states[i], name))[0]
                    assert torch.equal(bytes_of(tensor), want)
        for slot, request in self.requests.items():
            assert request.seed is None or seed_of(self.pool)[slot] == request.seed
        assert self.pool.free == 6 - (self.pool.null >= 0) - len(self.requests)
        assert gaps_are_poison(self.pool)


def step_arguments(batch: int, number: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(number)
    shapes = {"x": (batch, 2, 3), "dt": (batch, 2), "A": (2,), "B": (batch, 1, 5), "C": (batch, 1, 5)}
    arguments = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {**arguments, "A": -arguments["A"].abs()}


class InterpretedRequests(Requests):
    implementation = staticmethod(interpreted)


@pytest.mark.parametrize(
    ("machine", "examples", "steps"),
    [(Requests, 60, 30), pytest.param(InterpretedRequests, 4, 12, marks=pytest.mark.interpreted)],
)
def test_requests_live_in_a_pool_as_on_their_own(machine: type[Requests], examples: int, steps: int) -> None:
    run_state_machine_as_test(
        machine,
        settings=settings(
            deadline=None, derandomize=True, print_blob=True, max_examples=examples, stateful_step_count=steps,
            phases=(Phase.generate, Phase.shrink),
            suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
        ),
    )  # fmt: skip
