"""Traffic on a pool with rings: requests come and go, drafts are accepted or not, beside the recurrence in float64."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch import Tensor

import flashstate
from flashstate import State, StatePool
from flashstate.proof import AnyReplayCase, Recurrence, ReplayInputs, dtype, slotted
from flashstate.proof.inputs import Source
from flashstate.proof.laws import require
from flashstate.proof.laws.require import all_tokens, poison
from flashstate.proof.replaying import FORMS
from flashstate.state.formats import encode

RELATIVE = 1e-5  # what float32 states and activations keep to, whatever the decays


def require_relative(what: str, got: Tensor, exact: Tensor) -> None:
    """The error of every token's output, or of every row's state, beside its size."""
    error, size = ((got.double() - exact).flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1))
    worst = (error / size.clamp(min=1e-30)).max().item() if len(got) else 0.0
    assert worst <= RELATIVE, f"{what}: {worst:.1e}"


def strengthen(decays: Tensor) -> None:
    """Make them from nearly 0 to 20 times as large as they are on average."""
    decays.copy_(decays.sign() * (decays / decays.mean()).pow(6).clamp(max=20))


def exactly(case: AnyReplayCase) -> bool:
    """Whether nothing in a layer has fewer bits than float32."""
    return {getattr(case, name, "float32") for name in ("format", "x", "qk", "u")} == {"float32"}


def pool_of(cases: Sequence[AnyReplayCase], device: torch.device) -> StatePool:
    """A pool with a layer for each case, whose rings share cursors."""
    first, states, rings = cases[0], [], []
    start, count = (torch.zeros(first.slots, dtype=torch.int32, device=device) for _ in range(2))
    seed = torch.zeros(first.slots, dtype=torch.int64, device=device)
    for i, case in enumerate(cases):
        data, scale = encode(torch.zeros(first.slots, *case.state_axes, device=device), dtype(case.format))
        states.append(State(data, scale, rounding=case.rounding, seed=seed, stream=i))
        kept = case.kept_tokens(Source(device, i), first.window + first.tokens)
        rings.append(case.pool.kind(**kept, start=start, count=count, window=first.window))
    pool = StatePool.wrap(states, rings=rings, seed=2)
    pool.release(torch.arange(first.slots))
    return pool


@dataclass
class Traffic:
    """A pool, the requests in it, and what the recurrence has for every layer, each of which has a case of its own.
    Slots, the window and tokens are those of all."""

    cases: Sequence[AnyReplayCase]
    device: torch.device
    draw: Random = field(default_factory=lambda: Random(5))
    strong: bool = False  # whether states are gone after some tokens, beside others that hardly move them

    def __post_init__(self) -> None:
        self.slots, self.tokens = self.cases[0].slots, self.cases[0].tokens
        self.pool = pool_of(self.cases, self.device)
        self.layers = [case.pool.of(self.pool.layer(i), self.pool.ring(i)) for i, case in enumerate(self.cases)]
        self.parameters = [self.tokens_of(case, 1, seed) for seed, case in enumerate(self.cases)]
        self.models: list[Recurrence] = []
        for case in self.cases:
            zero = torch.zeros(self.slots, *case.state_axes, device=self.device)
            live = torch.zeros(self.slots, dtype=torch.int64, device=self.device)
            self.models.append(Recurrence(zero.double(), zero, live))
        self.held: list[int] = []
        self.folds = 0
        self.found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for layer in self.layers:  # what nobody holds must not get out
            poison(layer, torch.arange(self.slots, device=self.device))

    def tokens_of(self, case: AnyReplayCase, count: int, seed: int) -> ReplayInputs:
        """So many tokens, on one axis, and parameters."""
        one = replace(case, batch=count, tokens=0, slots=max(count, 1), window=1)
        return one.make_inputs(self.device, seed)

    def come(self, count: int) -> None:
        """Requests, of which every other one has a state that a prefill left."""
        for slot in self.pool.acquire(count).tolist():
            self.held.append(slot)
            for i, model in enumerate(self.models):
                model.forget(torch.tensor([slot]))
                if slot % 2:
                    axes, generator = self.cases[i].state_axes, torch.Generator().manual_seed(slot + i)
                    states = torch.randn(1, *axes, generator=generator)
                    self.pool.write(i, slot, states.to(self.device))
                    model.plain[slot] = self.pool.read(i, slot)[0]
                    model.exact[slot] = model.plain[slot].double()

    def go(self, count: int) -> None:
        for slot in self.draw.sample(self.held, min(count, len(self.held))):
            self.require_states([slot])
            self.pool.release(slot)
            self.held.remove(slot)
            for layer in self.layers:
                poison(layer, torch.tensor([slot], device=self.device))

    def inputs(self, i: int, read: list[int], lengths: list[int], dense: bool, seed: int) -> ReplayInputs:
        """A call of layer i with new tokens and its own parameters."""
        tokens = self.tokens_of(self.cases[i], sum(lengths), seed)
        found = self.parameters[i].given(**tokens.activations)
        if self.strong and sum(lengths):
            strengthen(found.arguments["dt" if "dt" in found.arguments else "a"])
        slots = torch.tensor(read, dtype=torch.int64, device=self.device)
        inputs = ReplayInputs(found.op, self.layers[i], found.arguments, slots, lengths)
        if dense:
            inputs = replace(inputs.changed(lambda t: t.unflatten(0, (len(read), lengths[0]))), lengths=None)
        return inputs

    def serve(self) -> None:
        """Requests come and go, and some are folded, as a server does before it hands a state to someone else."""
        if self.draw.random() < 0.2:
            self.go(1)
        if not self.held or self.draw.random() < 0.3:
            self.come(min(self.pool.free, 1 + self.slots // 8))
        if self.draw.random() < 0.1:
            self.fold_in_place()

    def accepted(self, lengths: list[int]) -> list[int]:
        return [self.draw.choice([0, n, self.draw.randint(0, n)]) for n in lengths]

    def step(self, turn: int) -> None:
        """One step of the model for some of the requests, of any length, of which any tokens are accepted."""
        draw, most = self.draw, self.tokens
        read = draw.sample(self.held, draw.randint(1, len(self.held)))
        dense = turn % 4 == 3
        lengths = [draw.randint(1, most)] * len(read) if dense else [draw.randint(0, most) for _ in read]
        kept = self.accepted(lengths)
        accepted = torch.tensor(kept, dtype=torch.int64, device=self.device)
        calls = [self.inputs(i, read, lengths, dense, 100 * turn + i) for i in range(len(self.cases))]
        plan = calls[0].plan(calls[0].at(**{} if dense else {"max_len": most}))
        for i, inputs in enumerate(calls):
            planned = replace(inputs, form=FORMS[1 + turn % 2])
            self.require_step(f"step {turn}, layer {i}", planned, plan, i, accepted)
        self.folds += int(calls[0].folds.sum())
        self.pool.commit(plan, accepted)
        self.pool.advance(calls[0].at())
        for layer in self.layers:  # tokens that were not accepted are gone
            layer.spoil_dead_rows()

    def require_step(self, what: str, inputs: ReplayInputs, plan: flashstate.Plan, i: int, accepted: Tensor) -> None:
        data, kept = inputs.state.data.clone(), inputs.slots[~inputs.folds]
        y, plain = self.models[i].step(inputs, accepted)
        got = all_tokens(inputs, inputs.step(plan=plan))
        self.note(i, "outputs", got, y, plain)
        require.equal_bytes(f"states that {what} does not fold", inputs.state.data[kept], data[kept])

    def require_states(self, slots: list[int]) -> None:
        """The states after the live tokens of these requests are those of the recurrence; nothing changes."""
        where = torch.tensor(slots, device=self.device)
        for i, (layer, model) in enumerate(zip(self.layers, self.models, strict=True)):
            before = {name: tensor.clone() for name, tensor in slotted(layer).items()}
            into = State(torch.full(layer.data.shape, torch.nan, device=self.device))
            replace(self.parameters[i], state=layer).fold(slots=where, into=into)
            self.note(i, "states", into.data[where], model.exact[where], model.plain[where])
            for name, tensor in slotted(layer).items():
                require.equal_bytes(name, tensor, before[name])

    def note(self, i: int, what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
        """Keep what was found: budgets are for all of it together, because those of a few numbers are a matter of
        luck."""
        if exactly(self.cases[i]):
            whole = self.strong and "q" in self.cases[i].op.tensors  # what is written makes some outputs small sums
            require_relative(what, *((got[None], exact[None]) if whole else (got, exact)))
        self.found.setdefault(f"{what} of layer {i}", []).append((got, exact, plain.clone()))

    def require_all(self) -> None:
        """All outputs, the states of all requests, and how many tokens they have since the last fold."""
        self.require_states(self.held)
        for layer, model in zip(self.layers, self.models, strict=True):
            assert layer.count[self.held].tolist() == model.live[self.held].tolist()
        flashstate.check_faults()
        for what, found in self.found.items():
            require.within_budget(what, *(torch.cat(parts) for parts in zip(*found, strict=True)))

    def fold_in_place(self) -> None:
        slot = torch.tensor([self.draw.choice(self.held)], device=self.device)
        for i, (layer, model) in enumerate(zip(self.layers, self.models, strict=True)):
            call = replace(self.parameters[i], state=layer, slots=slot)
            stored = model.stored(call)
            if layer.count[slot] > 0:  # else it is not rounded again
                model.plain[slot] = stored
            model.live[slot] = 0
            call.fold(slots=slot)
        self.pool.folded(slot)
