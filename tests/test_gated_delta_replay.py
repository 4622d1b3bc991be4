"""gated_delta_replay: an independent model, and what a ring keeps of u. The laws: test_laws.py; what all replays have:
test_replays.py."""

import math
import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from traffic import require_relative

from flashstate.proof import DeltaReplayCase, Recurrence, ReplayInputs
from flashstate.proof.laws.require import all_tokens

CPU = torch.device("cpu")


# The recurrence with loops, in Python's floats

LARGEST = 65504.0  # of float16
Vector = list[float]
Matrix = list[Vector]  # (rows, cols)


class Brought(NamedTuple):
    """What a token brings to a head: its key, with its length, the decay of every column, and what it writes."""

    k: Vector
    decay: Vector
    v: Vector
    beta: float
    q: Vector


def dot(a: Vector, b: Vector) -> float:
    return math.fsum(x * y for x, y in zip(a, b, strict=True))


def unit(vector: Vector) -> Vector:
    return [x / math.sqrt(dot(vector, vector) + 1e-6) for x in vector]


def in_half(value: float) -> float:
    """To the nearest float16, of two the even one; no value is too large."""
    (rounded,) = struct.unpack("<e", struct.pack("<e", min(max(value, -LARGEST), LARGEST)))
    return rounded


def decayed(s: Matrix, decay: Vector) -> Matrix:
    return [[value * d for value, d in zip(row, decay, strict=True)] for row in s]


def with_outer(s: Matrix, u: Vector, k: Vector) -> Matrix:
    return [
        [value + u_row * k_col for value, k_col in zip(row, k, strict=True)] for row, u_row in zip(s, u, strict=True)
    ]


def stepped(s: Matrix, token: Brought, half: bool) -> tuple[Vector, Vector, Matrix]:
    """The output of a token, its u, rounded to float16 before it is used or not at all, and the state after it."""
    s = decayed(s, token.decay)
    u = [token.beta * (v - dot(row, token.k)) for row, v in zip(s, token.v, strict=True)]
    u = [in_half(value) for value in u] if half else u
    s = with_outer(s, u, token.k)
    return [dot(row, token.q) for row in s], u, s


def decay_of(a: Vector, A_log: float | None, bias: Vector) -> Vector:
    """alpha of what a call brings."""
    if A_log is None:
        return [math.exp(value) for value in a]
    return [math.exp(-math.exp(A_log) * math.log1p(math.exp(x + y))) for x, y in zip(a, bias, strict=True)]


class OneHead(NamedTuple):
    """A head of a row of the batch, as loops see it: what its ring has, and what its tokens bring."""

    case: DeltaReplayCase
    inputs: ReplayInputs
    row: int
    head: int

    def channels(self, values: torch.Tensor) -> Vector:
        """A value for every column."""
        found = values.double().flatten().tolist()
        return found if len(found) > 1 else found * self.case.cols

    def decay(self, a: torch.Tensor) -> Vector:
        given = self.inputs.arguments
        A_log = None if given["A_log"] is None else float(given["A_log"][self.head])
        bias = torch.zeros(1) if given["dt_bias"] is None else given["dt_bias"][self.head]
        return decay_of(self.channels(a), A_log, self.channels(bias))

    def key(self, k: torch.Tensor) -> Vector:
        key_head = self.head * self.case.key_heads // self.case.heads
        values = k[key_head].double().tolist()
        return unit(values) if self.case.qk_l2norm else values

    @property
    def checkpoint(self) -> Matrix:
        """After the live rows of the ring."""
        pool, slot = self.inputs.state, int(self.inputs.slots[self.row])
        s = pool.data[slot, self.head].double().tolist()
        for j in range(int(pool.count[slot])):
            at = (int(pool.start[slot]) + j) % pool.ring.length
            decay = pool.decay[slot, self.head, at]
            alpha = self.decay(decay) if self.case.per_channel else self.channels(decay.double().exp())
            s = with_outer(decayed(s, alpha), pool.u[slot, self.head, at].tolist(), self.key(pool.k[slot, :, at]))
        return s

    @property
    def tokens(self) -> Iterator[Brought]:
        case = self.case
        for t in range(self.inputs.row_lengths[self.row]):
            token = {n: v[0] for n, v in self.inputs.token(torch.tensor([self.row]), t).items() if n in "qkvab"}
            beta = float(token["b"][self.head])
            if case.raw if case.b_logit is None else case.b_logit:
                beta = 1 / (1 + math.exp(-beta))
            scale = case.cols**-0.5 if case.scale is None else case.scale
            q = [value * scale for value in self.key(token["q"])]
            v = token["v"][self.head].double().tolist()
            yield Brought(self.key(token["k"]), self.decay(token["a"][self.head]), v, beta, q)


def by_loops(case: DeltaReplayCase, inputs: ReplayInputs, half: bool) -> torch.Tensor:
    """Outputs (tokens, HV, V) and, below them, u: (2, tokens, HV, V)."""
    found = []
    for row in range(case.batch):
        heads = []
        for head in range(case.heads):
            one = OneHead(case, inputs, row, head)
            s, of_head = one.checkpoint, []
            for token in one.tokens:
                y, u, s = stepped(s, token, half)
                of_head.append((y, u))
            heads.append(torch.tensor(of_head, dtype=torch.float64).reshape(-1, 2, case.rows))
        found.append(torch.stack(heads, 2))  # (T, 2, HV, V)
    return torch.cat(found).transpose(0, 1)


MODELLED = [
    DeltaReplayCase(4, 4, 2, 3, 5, tokens=3, window=8),
    DeltaReplayCase(5, 2, 1, 2, 4, tokens=2, packed=True, raw=False, b_logit=True, window=5, spare=2),
    DeltaReplayCase(4, 2, 2, 3, 4, per_channel=True, window=16, x="float16", qk_l2norm=False, scale=0.7),
    DeltaReplayCase(4, 2, 1, 3, 4, per_channel=True, bias_per_head=True, b_logit=False, tokens=4, window=8),
    DeltaReplayCase(4, 2, 2, 2, 5, per_channel=True, raw=False, tokens=3, window=8),
    DeltaReplayCase(4, 2, 1, 3, 1, per_channel=True, window=8),
    DeltaReplayCase(4, 2, 2, 3, 1, per_channel=True, raw=False, tokens=3, window=8, qk_l2norm=False),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_the_oracle_equals_the_recurrence_written_with_loops(case: DeltaReplayCase) -> None:
    inputs = case.make_inputs(CPU)
    y, _ = Recurrence.of(inputs).step(inputs, torch.zeros_like(inputs.tokens))
    torch.testing.assert_close(y, by_loops(case, inputs, half=False)[0], rtol=1e-9, atol=1e-11)


NEAR_TIES = 0.05  # the share of numbers that float32 may round to the other side


def require_rounded(what: str, got: torch.Tensor, exact: torch.Tensor) -> None:
    """Numbers of float16 are those expected, but for a few that are neighbours: the exact ones were nearly ties."""
    steps = (got.view(torch.int16).int() - exact.half().view(torch.int16).int()).abs()
    assert steps.max() <= 1, f"{what}: {steps.max()} steps of float16"
    assert (steps > 0).double().mean() <= NEAR_TIES, f"{what}: {(steps > 0).sum()} of {steps.numel()} are others"


@pytest.mark.parametrize(("case", "size"), [*zip(MODELLED[:4], (1.0, 1e6, 1e6, 1.0), strict=True)], ids=str)
def test_u_is_rounded_and_saturates_before_anything_uses_it(
    case: DeltaReplayCase, size: float, device: torch.device
) -> None:
    """Some are too large for float16. Rounding alone changes outputs by far more than float32 arithmetic does."""
    case = replace(case, x="float32")
    inputs = case.make_inputs(device)
    inputs.arguments["v"] *= size
    pool, slots = inputs.state, inputs.slots.tolist()
    on_cpu = case.make_inputs(CPU)
    on_cpu.arguments["v"] *= size
    y, u = by_loops(case, on_cpu, half=True)
    require_relative("output", all_tokens(inputs, inputs.step()).cpu(), y)
    kept = []
    for slot, tokens in zip(slots, inputs.row_lengths, strict=True):
        first = int(pool.start[slot] + pool.count[slot])
        kept += [pool.u[slot, :, (first + t) % pool.ring.length] for t in range(tokens)]
    require_rounded("u in the ring", torch.stack(kept).cpu(), u)


# Tokens that are no numbers, and decays that leave nothing

PLAIN = DeltaReplayCase(3, 2, 1, 5, 16, window=16, raw=False, b_logit=False, u="float32")
GATES = {"GDN": PLAIN, "KDA": replace(PLAIN, key_heads=2, per_channel=True)}


@pytest.mark.parametrize(
    ("gates", "tokens", "value"), [("GDN", 1, math.nan), ("KDA", 4, math.inf), ("GDN", 9, math.nan)]
)
def test_a_token_that_is_no_number_changes_nothing_of_those_before_it(
    gates: str, tokens: int, value: float, device: torch.device
) -> None:
    """So that it leaves no trace where it is rejected."""
    case = replace(GATES[gates], tokens=tokens)
    clean, wrong = case.make_inputs(device), case.make_inputs(device)
    for tensor in wrong.activations.values():
        tensor[:, -1] = value
    y = clean.step()
    assert torch.equal(wrong.step()[:, :-1], y[:, :-1])
    for run in (clean, wrong):
        plan = run.plan()
        run.state.ring.commit(plan, torch.full((case.batch,), tokens - 1, device=device))
        run.fold()
    slots = clean.slots.long()
    assert bool(clean.state.data[slots].isfinite().all())
    assert torch.equal(wrong.state.data[slots], clean.state.data[slots])


@pytest.mark.parametrize(("gates", "tokens"), [("KDA", 1), ("GDN", 3), ("KDA", 9)])
def test_a_decay_of_zero_forgets_all_that_was_before(gates: str, tokens: int, device: torch.device) -> None:
    """In this call, in the next one, which has it in the ring, and in a fold."""
    case = replace(GATES[gates], tokens=tokens)
    inputs = case.make_inputs(device)
    inputs.activations["a"].view(case.batch, tokens, case.heads, -1)[:, tokens // 2, :, ::2] = -math.inf
    model, accepted = Recurrence.of(inputs), torch.full((case.batch,), tokens, device=device)
    for turn in range(3):
        step = inputs if turn == 0 else inputs.given(**case.make_inputs(device, seed=turn).activations)
        plan = step.plan()
        want, _ = model.step(step, accepted)
        require_relative(f"output of step {turn}", all_tokens(step, step.step()), want)
        step.state.ring.commit(plan, accepted)
    into = torch.zeros_like(inputs.state.data)
    inputs.fold(into=into)
    used = inputs.slots.long()
    require_relative("states", into[used], model.exact[used])
