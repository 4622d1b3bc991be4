"""mamba2_replay over many steps: requests that come and go, strong decays, CUDA graphs, races."""

from dataclasses import dataclass, field, replace
from random import Random

import pytest
import torch
from racing import IDLE_AND_BUSY, Around, require_equal_launches
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool
from flashstate.proof import Recurrence, ReplayCase, ReplayInputs, ReplayPool, dtype, slotted
from flashstate.proof.cases.mamba2_replay import FORMS, REPLAY
from flashstate.proof.laws import require
from flashstate.proof.laws.require import all_tokens, poison
from flashstate.state.formats import PORTABLE_FORMATS

CUDA = torch.device("cuda")
RELATIVE = 1e-5  # what float32 states and activations keep to, whatever the decays


def require_relative(what: str, got: Tensor, exact: Tensor) -> None:
    """The error of every token's output, or of every row's state, beside its size."""
    error, size = ((got.double() - exact).flatten(1).norm(dim=1), exact.flatten(1).norm(dim=1))
    worst = (error / size.clamp(min=1e-30)).max().item() if len(got) else 0.0
    assert worst <= RELATIVE, f"{what}: {worst:.1e}"


# Requests that come and go

STEPS = 40
TINY = ReplayCase(0, 2, 1, 5, 16, window=8, tokens=5, slots=6)
REAL = ReplayCase(0, 16, 1, 64, 128, window=16, tokens=6, slots=24, x="bfloat16", dt="bfloat16")
LAYERS = 2


@dataclass
class Traffic:
    """A pool, the requests in it, and what the recurrence has for every layer."""

    case: ReplayCase
    device: torch.device
    draw: Random = field(default_factory=lambda: Random(5))

    def __post_init__(self) -> None:
        case, slots = self.case, self.case.slots
        self.pool = StatePool.mamba2(
            slots=slots, layers=LAYERS, heads=case.heads, rows=case.rows, cols=case.cols, dtype=dtype(case.format),
            rounding=case.rounding, seed=2, window=case.window, tokens=case.tokens, groups=case.groups,
            ring_dtype=dtype(case.x), device=self.device,
        )  # fmt: skip
        self.layers = [ReplayPool.of(self.pool.layer(i), self.pool.ring(i)) for i in range(LAYERS)]
        self.parameters = [self.tokens_of(1, seed) for seed in range(LAYERS)]
        zero = torch.zeros(slots, *case.state_axes, device=self.device)
        live = torch.zeros(slots, dtype=torch.int64, device=self.device)
        self.models = [Recurrence(zero.double(), zero.clone(), live.clone()) for _ in range(LAYERS)]
        self.held: list[int] = []
        self.folds = 0
        self.found: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        for layer in self.layers:  # what nobody holds must not get out
            poison(layer, torch.arange(slots, device=self.device))

    def tokens_of(self, count: int, seed: int) -> ReplayInputs:
        """So many tokens, on one axis, and parameters."""
        one = replace(self.case, batch=count, tokens=0, slots=max(count, 1), window=1)
        return one.make_inputs(self.device, seed)

    def come(self, count: int) -> None:
        """Requests, of which every other one has a state that a prefill left."""
        for slot in self.pool.acquire(count).tolist():
            self.held.append(slot)
            for i, model in enumerate(self.models):
                model.forget(torch.tensor([slot]))
                if slot % 2:
                    states = torch.randn(1, *self.case.state_axes, generator=torch.Generator().manual_seed(slot + i))
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
        tokens = self.tokens_of(sum(lengths), seed)
        found = self.parameters[i].given(**tokens.activations)
        slots = torch.tensor(read, dtype=torch.int64, device=self.device)
        inputs = ReplayInputs(REPLAY, self.layers[i], found.arguments, slots, lengths)
        if dense:
            inputs = replace(inputs.changed(lambda t: t.unflatten(0, (len(read), lengths[0]))), lengths=None)
        return inputs

    def step(self, turn: int) -> None:
        """One step of the model for some of the requests, of any length, of which any tokens are accepted."""
        draw, case = self.draw, self.case
        read = draw.sample(self.held, draw.randint(1, len(self.held)))
        dense = turn % 4 == 3
        lengths = [draw.randint(1, case.tokens)] * len(read) if dense else [draw.randint(0, case.tokens) for _ in read]
        kept = [draw.choice([0, n, draw.randint(0, n)]) for n in lengths]
        accepted = torch.tensor(kept, dtype=torch.int64, device=self.device)
        calls = [self.inputs(i, read, lengths, dense, 100 * turn + i) for i in range(LAYERS)]
        plan = calls[0].plan(calls[0].at(**{} if dense else {"max_len": case.tokens}))
        for i, inputs in enumerate(calls):
            planned = replace(inputs, form=FORMS[1 + turn % 2])
            self.require_step(f"step {turn}, layer {i}", planned, plan, self.models[i], accepted)
        self.folds += int(calls[0].folds.sum())
        self.pool.commit(plan, accepted)
        self.pool.advance(calls[0].at())
        for layer in self.layers:  # tokens that were not accepted are gone
            for tensor in (layer.x, layer.B, layer.dt):
                tensor[read] = torch.where(self.live_of(layer, tensor)[read], tensor[read], torch.nan)

    def live_of(self, layer: ReplayPool, tensor: Tensor) -> Tensor:
        live = layer.live_rows[:, None]
        return live.reshape(*live.shape, *(1,) * (tensor.dim() - live.dim()))

    def require_step(
        self, what: str, inputs: ReplayInputs, plan: flashstate.Plan, model: Recurrence, accepted: Tensor
    ) -> None:
        data, kept = inputs.state.data.clone(), inputs.slots[~inputs.folds]
        y, plain = model.step(inputs, accepted)
        got = all_tokens(inputs, inputs.step(plan=plan))
        self.note("outputs", got, y, plain)
        require.equal_bytes(f"states that {what} does not fold", inputs.state.data[kept], data[kept])

    def require_states(self, slots: list[int]) -> None:
        """The states after the live tokens of these requests are those of the recurrence; nothing changes."""
        where = torch.tensor(slots, device=self.device)
        for i, (layer, model) in enumerate(zip(self.layers, self.models, strict=True)):
            before = {name: tensor.clone() for name, tensor in slotted(layer).items()}
            into = State(torch.full(layer.data.shape, torch.nan, device=self.device))
            A = self.parameters[i].arguments["A"]
            flashstate.mamba2_fold(layer.state, layer.ring, A, slots=where, into=into)
            self.note("states", into.data[where], model.exact[where], model.plain[where])
            for name, tensor in slotted(layer).items():
                require.equal_bytes(name, tensor, before[name])

    def note(self, what: str, got: Tensor, exact: Tensor, plain: Tensor) -> None:
        """Keep what was found: budgets are for all of it together, because those of a few numbers are a matter of
        luck."""
        if (self.case.format, self.case.x) == ("float32", "float32"):
            require_relative(what, got, exact)
        self.found.setdefault(what, []).append((got, exact, plain.clone()))

    def require_all(self) -> None:
        for what, found in self.found.items():
            require.within_budget(what, *(torch.cat(parts) for parts in zip(*found, strict=True)))

    def fold_in_place(self) -> None:
        """What a server does before it hands a state to someone else."""
        slot = torch.tensor([self.draw.choice(self.held)], device=self.device)
        for i, (layer, model) in enumerate(zip(self.layers, self.models, strict=True)):
            stored = model.stored(replace(self.parameters[i], state=layer, slots=slot))
            if layer.count[slot] > 0:  # else it is not rounded again
                model.plain[slot] = stored
            model.live[slot] = 0
            flashstate.mamba2_fold(layer.state, layer.ring, self.parameters[i].arguments["A"], slots=slot)
        self.pool.folded(slot)


def serve(case: ReplayCase, device: torch.device) -> None:
    traffic = Traffic(case, device)
    traffic.come(2)
    for turn in range(STEPS):
        if traffic.draw.random() < 0.2:
            traffic.go(1)
        if not traffic.held or traffic.draw.random() < 0.3:
            traffic.come(min(traffic.pool.free, 1 + traffic.case.slots // 8))
        if traffic.draw.random() < 0.1:
            traffic.fold_in_place()
        traffic.step(turn)
        assert traffic.layers[0].count[traffic.held].tolist() == traffic.models[0].live[traffic.held].tolist()
    traffic.require_states(traffic.held)
    traffic.require_all()
    assert traffic.folds > 10
    flashstate.check_faults()


SERVED = [
    *[
        pytest.param("reference", replace(TINY, format=name, rounding=rounding))
        for name, rounding in PORTABLE_FORMATS[::2]
    ],
    *[
        pytest.param("interpreter", replace(TINY, heads=1, **kinds), marks=pytest.mark.interpreted)
        for kinds in ({}, {"format": "int8", "rounding": "stochastic", "x": "float16", "bc": "float16"})
    ],
    *[
        pytest.param("gpu", replace(REAL, format=name, rounding=rounding), marks=pytest.mark.gpu)
        for name, rounding in PORTABLE_FORMATS
    ],
    pytest.param("gpu", replace(REAL, x="float32", bc="float32", dt="float32"), marks=pytest.mark.gpu),
]


@pytest.mark.parametrize(("device", "case"), SERVED, indirect=["device"], ids=str)
def test_forty_steps_of_any_acceptance_are_the_recurrence_while_requests_come_and_go(
    device: torch.device, case: ReplayCase
) -> None:
    serve(case, device)


# Strong decays


@pytest.mark.parametrize("tokens", [1, 3, 8])
def test_strong_decays_keep_float32_to_a_hundred_thousandth(tokens: int, device: torch.device) -> None:
    """A state that is gone after a token, beside tokens that hardly move it: dt from nearly 0 to 20."""
    case = ReplayCase(4, 2, 1, 5, 16, tokens=tokens, window=8, dt_softplus=False, dt_bias=False)
    inputs = case.make_inputs(device)
    inputs.arguments["A"].copy_(torch.tensor([-16.0, -1.0]))
    inputs.state.dt.pow_(6).mul_(4).clamp_(max=20)
    model, draw = Recurrence.of(inputs), Random(tokens)
    for turn in range(6):
        step = inputs.given(**case.make_inputs(device, seed=turn + 1).activations)
        step.arguments["dt"].abs_().pow_(6).mul_(4).clamp_(max=20)
        accepted = torch.tensor([draw.randint(0, tokens) for _ in range(case.batch)], device=device)
        plan, form = step.plan(), FORMS[turn % len(FORMS)]
        want, _ = model.step(step, accepted)
        require_relative(f"output of step {turn}", all_tokens(step, replace(step, form=form).step()), want)
        step.state.ring.commit(plan, accepted)
        into = torch.zeros_like(step.state.data)
        flashstate.mamba2_fold(step.state.state, step.state.ring, step.arguments["A"], into=into)
        used = inputs.slots.long()
        require_relative(f"states after step {turn}", into[used], model.exact[used])


# CUDA graphs

REPLAYS = 200
PLANNED = pytest.mark.parametrize("form", FORMS[1:])  # of one kernel, and of two


@pytest.mark.gpu
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@PLANNED
@pytest.mark.parametrize(("name", "rounding"), [("float32", "nearest"), ("int8", "stochastic")])
def test_a_graph_of_a_whole_step_is_the_recurrence_on_whatever_is_accepted(
    name: str, rounding: str, form: str, packed: bool
) -> None:
    """Plan, replay of all layers, commit of counts that are on the device, advance: none of it needs the host."""
    batch, case = 16, replace(REAL, format=name, rounding=rounding)
    traffic = Traffic(case, CUDA)
    traffic.come(case.slots)
    read, accepted = (torch.zeros(batch, dtype=torch.int64, device=CUDA) for _ in range(2))
    bounds = torch.zeros(batch + 1, dtype=torch.int32, device=CUDA)
    slots = Slots(read, cu_seqlens=bounds, max_len=case.tokens) if packed else Slots(read)
    calls = [traffic.inputs(i, [0] * batch, [case.tokens] * batch, not packed, i) for i in range(LAYERS)]
    calls = [replace(inputs, slots=read, form=form) for inputs in calls]
    outputs = [torch.empty_like(inputs.main) for inputs in calls]

    def step() -> None:
        plan = traffic.pool.plan(slots, None if packed else case.tokens)
        for inputs, out in zip(calls, outputs, strict=True):
            inputs.step(plan=plan, out=out)
        traffic.pool.commit(plan, accepted)
        traffic.pool.advance(slots)

    graph = torch.cuda.CUDAGraph()
    read.fill_(-1)  # warm-up, of padding rows alone
    step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        step()
    generator, draw, folds = torch.Generator(CUDA).manual_seed(1), Random(1), 0
    for turn in range(REPLAYS):
        lengths = [draw.randint(0, case.tokens) if packed else case.tokens for _ in range(batch)]
        for tensor, numbers in (
            (read, draw.sample(range(case.slots), batch)),
            (accepted, [draw.randint(0, n) for n in lengths]),
            (bounds, [sum(lengths[:b]) for b in range(batch + 1)]),
        ):
            tensor.copy_(torch.tensor(numbers))
        for activation in [tensor for inputs in calls for tensor in inputs.activations.values()]:
            activation.normal_(generator=generator)
        now = [replace(inputs, lengths=lengths) if packed else inputs for inputs in calls]
        folds += int(now[0].folds.sum())
        want = [model.step(inputs, accepted) for model, inputs in zip(traffic.models, now, strict=True)]
        graph.replay()
        for inputs, out, (exact, plain) in zip(now, outputs, want, strict=True):
            require.within_budget(f"output of replay {turn}", all_tokens(inputs, out), exact, plain)
            assert not packed or not out[sum(lengths) :].any()
    assert folds > REPLAYS
    assert traffic.layers[0].count.tolist() == traffic.models[0].live.tolist()
    traffic.require_states(list(range(case.slots)))
    traffic.require_all()
    flashstate.check_faults()


@pytest.mark.gpu
@PLANNED
def test_nothing_between_plan_and_commit_waits_for_the_device(form: str) -> None:
    inputs = replace(REAL, batch=5, format="int8", rounding="stochastic", form=form).make_inputs(CUDA)
    out, accepted = torch.empty_like(inputs.main), inputs.tokens
    for mode in ("default", "error"):  # kernels compile in the first pass
        slots = inputs.at()
        torch.cuda.set_sync_debug_mode(mode)
        try:
            plan = inputs.plan(slots)
            inputs.step(plan=plan, out=out)
            inputs.step(plan=plan)
            inputs.state.ring.commit(plan, accepted)
            inputs.state.advance(slots)
            flashstate.mamba2_fold(inputs.state.state, inputs.state.ring, inputs.arguments["A"], slots=slots)
            inputs.state.ring.folded(slots)
        finally:
            torch.cuda.set_sync_debug_mode("default")


# Races: what a program appends or folds, another one of the same launch must not have needed

RACES = {
    "one token": replace(REAL, batch=160, tokens=0, slots=170),
    "one token in 16 bits": replace(REAL, batch=160, tokens=0, slots=170, format="float16"),
    "six tokens, folded at random": replace(REAL, batch=40, slots=50, format="int8", rounding="stochastic"),
    "packed tokens, many tiles": replace(REAL, batch=12, heads=80, packed=True, slots=20, format="bfloat16"),
    "float32, a long window": replace(REAL, batch=20, tokens=16, window=64, x="float32", bc="float32", dt="float32"),
}


EVERY_RACE = pytest.mark.parametrize("which", RACES)


@pytest.mark.gpu
@IDLE_AND_BUSY
@EVERY_RACE
def test_plans_commits_and_folds_of_equal_rings_give_equal_bytes(which: str, around: Around) -> None:
    inputs = RACES[which].make_inputs(CUDA)
    slots, accepted = inputs.at(), inputs.tokens // 2

    def launch(run: ReplayInputs) -> list[Tensor]:
        pool, plan = run.state, run.plan(slots)
        flashstate.mamba2_fold(pool.state, pool.ring, inputs.arguments["A"], slots=inputs.slots)
        pool.ring.folded(inputs.slots)
        pool.ring.commit(plan, accepted)
        return [plan.rows, plan.parts]

    require_equal_launches(inputs, launch, around)


@pytest.mark.gpu
@IDLE_AND_BUSY
@pytest.mark.parametrize("form", FORMS)
@EVERY_RACE
def test_launches_on_equal_inputs_give_equal_bytes_in_every_form(which: str, form: str, around: Around) -> None:
    inputs = replace(RACES[which], form=form).make_inputs(CUDA)
    out, slots = torch.empty_like(inputs.main), inputs.at()
    require_equal_launches(inputs, lambda run: [run.step(slots=slots, out=out.fill_(torch.nan))], around)
