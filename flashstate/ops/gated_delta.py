"""gated_delta_step: tokens through the gated delta rule of Gated DeltaNet and KDA."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from torch import Tensor

from flashstate.launch.call import Given, Op, one_kernel
from flashstate.launch.config import POWERS, Problem, TiledProblem
from flashstate.launch.environment import Gpu
from flashstate.launch.start import kernel_in
from flashstate.launch.table import Config
from flashstate.ops.at_once import AtOnceProblem, check_at_once, goes_at_once, room_at_once, tabled_at_once
from flashstate.ops.debug import check_debugged, check_each, debugging
from flashstate.state.signature import ACCESS_BYTES
from flashstate.state.slots import Slots
from flashstate.state.state import State


def gated_delta_step(
    state: State | Tensor,
    q: Annotated[Tensor, "tokens H | K"],
    k: Annotated[Tensor, "tokens H | K"],
    v: Annotated[Tensor, "tokens HV | V"],
    a: Annotated[Tensor, "tokens HV | [K]"],
    b: Annotated[Tensor, "tokens HV |"],
    *,
    A_log: Annotated[Tensor, "| HV"] | None = None,
    dt_bias: Annotated[Tensor, "| HV [K]"] | None = None,
    b_logit: bool | None = None,
    scale: float | None = None,
    qk_l2norm: bool = True,
    exact: bool = True,
    slots: Slots | Tensor | None = None,
    snapshots: State | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Step every row of the batch by its tokens; update the state in place and return the outputs.

    Per row and value head, token by token, in float32, with the head's q and k::

        alpha = exp(-exp(A_log) * softplus(a + dt_bias))    exp(a) without A_log
        beta  = sigmoid(b)                                  only with b_logit, else b itself
        k     = k / sqrt(sum(k^2) + 1e-6)                   both only with qk_l2norm
        q     = q / sqrt(sum(q^2) + 1e-6) * scale
        s     = s * alpha
        u     = beta * (v - s k)
        s     = s + u ⊗ k
        o     = s q

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: State, or a tensor (slots, HV, V, K). Those of float32, bfloat16 and float16 may also be (slots, HV, K, V) in
        memory, given as a transposed view.
    q, k: (..., H, K), where H divides HV.
    v: (..., HV, V), and `out`, which the result is written to if it is given.
    a: (..., HV), or per channel (..., HV, K), as KDA has it.
    b: (..., HV).
    A_log: (HV,); None: a is the logarithm of alpha.
    dt_bias: (HV,), or with a per channel (HV, K); only with A_log.
    b_logit: whether b is the logit of beta, or beta itself; None: with A_log it is.
    scale: of q; None: 1 / sqrt(K).
    exact: False lets several tokens go through tensor cores at once: the same result but for rounding, for calls that
        store no state but the last. It needs q and k of bfloat16 or of float16, one a per head, and 16 tokens per row
        at most. One token per row is not affected.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b.
    snapshots: State, or a tensor (batch or more, T or more, HV, V, K): receives the state after every token. They may
        be transposed as a state may.
    update: False leaves the pool as it is.
    early: True lets the kernel start, and read the state, before the kernel in front of it on the stream has ended; it
        waits for that one before it reads q, k, v, a and b. What that one must not write: see `mamba2_step`.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of v unless `out` has another. Token
    and head axes of activations may have any stride; a and dt_bias may be expanded from one value per head. `out` may
    be v itself, unless tokens form a tree, and must not overlap other arguments. Nothing is differentiable.
    """
    return GATED_DELTA_STEP.call(
        state, q, k, v, a, b, A_log, dt_bias, b_logit, scale, qk_l2norm, exact, slots, snapshots, update, out, early
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where gates do not go together, or tokens cannot go through tensor cores at once."""
    per_channel = check_gates(given)
    if goes_at_once(given):
        if per_channel:
            shape = tuple(given.a.shape)
            raise ValueError(f"exact=False needs one a per head, not one per channel, got shape {shape}")
        check_at_once(given, "q", "k")


def check_gates(given: Given) -> bool:
    """Whether there is an a per channel; raises where gates do not go together."""
    per_channel: bool = given.a.dim() > len(given.tokens.axes) + 1
    if given.dt_bias is not None and given.A_log is None:
        raise ValueError("dt_bias must come with A_log: without it a is the logarithm of the decay itself")
    if given.dt_bias is not None and given.dt_bias.dim() == 2 and not per_channel:
        shape = tuple(given.dt_bias.shape)
        raise ValueError(f"dt_bias must have shape (HV={shape[0]}) where a has one value per head, got {shape}")
    return per_channel


def check_decays(given: Given) -> None:
    """Inside debug(), raise where states would grow: a above 0 where it is the logarithm of the decay."""
    if debugging() and given.A_log is None:
        must = "not be above 0 without A_log, as the logarithm of a decay"
        check_each("a", given.a, lambda a: a <= 0, must, given)


def check_debugged_step(given: Given) -> None:
    """Inside debug(), raise where the numbers in slots, or decays, are wrong."""
    check_debugged(given)
    check_decays(given)


class DeltaProblem(TiledProblem):
    """What a config of the gated delta rule is chosen for where every row has one token."""

    def heuristic(self, gpu: Gpu) -> Config:
        """Several tiles where arithmetic is the bottleneck, so that they share what the token brings: 8-bit formats and
        stochastic rounding, in accesses so wide that tiles come through shared memory."""
        config = super().heuristic(gpu)
        wide = self.vector * self.itemsize == ACCESS_BYTES and not self.transposed
        arithmetic = self.itemsize == 1 or self.rounding != "nearest"
        return self.in_many_tiles(config) if wide and arithmetic else config


class DeltaTokensProblem(Problem):
    """What a config of the gated delta rule is chosen for where tokens are stepped one after the other. A token brings
    twice as much as one of Mamba-2: four together were not faster on an H200 at any batch, and compiled for a minute.
    """

    limits_always: ClassVar[bool] = True
    knob_values: ClassVar[tuple[int, ...]] = POWERS[:2]

    def most_together(self, config: Config) -> int:
        return max(1, super().most_together(config) // 4)


def delta_kind(several: bool, at_once: bool, longest: int) -> tuple[type[Problem], str]:
    """What a problem of the gated delta rule is, and the op that tables have it under."""
    if at_once:
        return AtOnceProblem, tabled_at_once("gated_delta", longest)
    return DeltaTokensProblem if several else DeltaProblem, "gated_delta_step"


def problems(given: Given) -> tuple[Problem]:
    """One kernel steps all tokens."""
    kind, op = delta_kind(not given.tokens.one_token, goes_at_once(given), given.tokens.longest or 0)
    return one_kernel(given, kind, op)


def kernel(given: Given, problem: Problem) -> Any:
    """Tokens at once, one token, or one after the other have each their kernel."""
    if isinstance(problem, AtOnceProblem):
        return kernel_in("gated_delta_at_once")
    return kernel_in("gated_delta_one_token") if given.tokens.one_token else GATED_DELTA_STEP.own_kernel


def values(given: Given, problem: Problem, config: Config) -> dict[str, Any]:
    """Which axes gates have, how queries are scaled, and for how many tokens at once there is room."""
    return {
        **({"SNAPSHOT_VECTOR": problem.vector} if given.snapshots is None else {}), **gate_values(given),
        "HEADS_PER_GROUP": given.state.data.shape[1] // given.q.shape[-2],
        "TOKENS": room_at_once(given.tokens.longest or 0),
    }  # fmt: skip


def gate_values(given: Given) -> dict[str, Any]:
    """Which axes gates have, and how queries are scaled."""
    return {
        "q_scale": given.state.data.shape[-1] ** -0.5 if given.scale is None else float(given.scale),
        "B_LOGIT": given.A_log is not None if given.b_logit is None else given.b_logit,
        "PER_CHANNEL": given.a.dim() == len(given.tokens.axes) + 2,
        "BIAS_PER_CHANNEL": given.dt_bias is not None and given.dt_bias.dim() == 2,
    }


GATED_DELTA_STEP = Op(
    gated_delta_step,
    main="v",
    state_axes="slots HV V K",
    divides={"H": "HV"},
    words={"H": "heads", "HV": "value heads"},
    problems=problems,
    kernel=kernel,
    values=values,
    reference={"at_once": goes_at_once},
    check=check,
    debug=check_debugged_step,
    aligned=("q", "k", "v", "out"),
    aliases={"b": "beta"},
    transposed=True,
)
