"""gated_delta_replay: a model token by token, and what a ring keeps of u. The laws: test_laws.py; what all replays
have: test_replays.py."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from traffic import require_relative

from flashstate.proof import DeltaReplayCase, Recurrence, ReplayInputs
from flashstate.proof.laws.require import all_tokens
from flashstate.reference.gated_delta import gated_delta_token, log_decay, normalised

CPU = torch.device("cpu")
LARGEST = 65504.0  # of float16
PARAMETERS = ("A_log", "dt_bias", "b_logit", "scale", "qk_l2norm")


def token_by_token(case: DeltaReplayCase, inputs: ReplayInputs, half: bool) -> tuple[Tensor, Tensor]:
    """Outputs and u (tokens, HV, V) of all tokens, from checkpoints and the live rows of rings, in float64; u is
    rounded to float16 before it is used, or not at all."""
    pool, given, found = inputs.state, inputs.arguments, list[Tensor]()
    parameters = {name: given[name] for name in PARAMETERS}

    def keep(u: Tensor) -> Tensor:
        found.append(u.clamp(-LARGEST, LARGEST).half().double() if half else u)
        return found[-1]

    def after_row(s: Tensor, slot: int, row: int) -> Tensor:
        k, decay = pool.k[slot, :, row].double(), pool.decay[slot, :, row].double()
        k = (normalised(k) if case.qk_l2norm else k).repeat_interleave(case.heads // case.key_heads, 0)
        log_alpha = log_decay(decay, given["A_log"], given["dt_bias"]) if case.per_channel else decay[:, None]
        return s * log_alpha.exp()[:, None] + pool.u[slot, :, row].double()[..., None] * k[:, None]

    outputs = []
    for b, slot in enumerate(inputs.slots.tolist()):
        s = pool.data[slot].double()
        for j in range(int(pool.count[slot])):
            s = after_row(s, slot, (int(pool.start[slot]) + j) % pool.ring.length)
        s = s[None]
        for t in range(inputs.row_lengths[b]):
            token = {name: value for name, value in inputs.token(torch.tensor([b]), t).items() if name in "qkvab"}
            y, s = gated_delta_token(s, **token, **parameters, kept=keep)
            outputs.append(y)
    return torch.cat(outputs), torch.cat(found)


MODELLED = [
    DeltaReplayCase(4, 4, 2, 3, 5, tokens=5, window=8),
    DeltaReplayCase(5, 2, 1, 2, 4, tokens=2, packed=True, raw=False, b_logit=True, window=5, spare=2),
    DeltaReplayCase(4, 2, 2, 3, 4, per_channel=True, window=16, x="float16", qk_l2norm=False, scale=0.7),
    DeltaReplayCase(4, 2, 1, 3, 4, per_channel=True, bias_per_head=True, b_logit=False, tokens=4, window=8),
    DeltaReplayCase(4, 2, 2, 2, 5, per_channel=True, raw=False, tokens=3, window=8),
    DeltaReplayCase(4, 2, 2, 3, 1, per_channel=True, raw=False, tokens=3, window=8, qk_l2norm=False),
]


@pytest.mark.parametrize("case", MODELLED, ids=str)
def test_the_oracle_equals_the_recurrence_written_with_loops(case: DeltaReplayCase) -> None:
    inputs = case.make_inputs(CPU)
    y, _ = Recurrence.of(inputs).step(inputs, torch.zeros_like(inputs.tokens))
    torch.testing.assert_close(y, token_by_token(case, inputs, half=False)[0], rtol=1e-9, atol=1e-11)


NEAR_TIES = 0.05  # the share of numbers that float32 may round to the other side


def require_rounded(what: str, got: Tensor, exact: Tensor) -> None:
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
    y, u = token_by_token(case, on_cpu, half=True)
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
