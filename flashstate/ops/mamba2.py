"""mamba2_step: tokens through the selective state update of Mamba-1 and Mamba-2."""

from __future__ import annotations

from typing import Annotated, Any

from torch import Tensor

from flashstate.launch.call import Given, Op, one_kernel
from flashstate.launch.config import Problem
from flashstate.launch.start import kernel_in
from flashstate.launch.table import Config
from flashstate.ops.at_once import AtOnceProblem, check_at_once, goes_at_once, room_at_once, tabled_at_once
from flashstate.ops.debug import check_debugged, check_each, debugging
from flashstate.reference.mamba2 import time_steps
from flashstate.state.slots import Slots
from flashstate.state.state import State

NOT_POSITIVE = "not be above 0, as A = -exp(A_log); A_log itself may have been given"


def mamba2_step(
    state: State | Tensor,
    x: Annotated[Tensor, "tokens heads | rows"],
    dt: Annotated[Tensor, "tokens heads | [rows]"],
    A: Annotated[Tensor, "| heads [rows cols]"],
    B: Annotated[Tensor, "tokens groups | cols"],
    C: Annotated[Tensor, "tokens groups | cols"],
    *,
    D: Annotated[Tensor, "| heads [rows]"] | None = None,
    z: Annotated[Tensor, "tokens heads | rows"] | None = None,
    dt_bias: Annotated[Tensor, "| heads [rows]"] | None = None,
    dt_softplus: bool = True,
    dt_limit: tuple[float, float] | None = None,
    exact: bool = True,
    slots: Slots | Tensor | None = None,
    snapshots: State | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Step every row of the batch by its tokens; update the state in place and return the outputs.

    Per row and head, token by token, in float32, with the head's group of B and C::

        dt = softplus(dt + dt_bias)         softplus only with dt_softplus
        dt = clamp(dt, lo, hi)              only with dt_limit=(lo, hi)
        s  = s * exp(dt * A) + (dt * x) ⊗ B
        y  = s C + D * x
        y  = y * silu(z)                    only with z

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: State, or a tensor (slots, heads, rows, cols).
    x, z: (..., heads, rows), and `out`, which the result is written to if it is given.
    dt: (..., heads), or per channel (..., heads, rows).
    A: (heads,), or (heads, rows, cols).
    B, C: (..., groups, cols), where groups divides heads.
    D, dt_bias: (heads,) or (heads, rows).
    dt_limit: (lo, hi), either of which may be infinite, for models with a time_step_limit; a dt that is NaN stays NaN.
    exact: False lets several tokens go through tensor cores at once: the same result but for rounding, for calls that
        store no state but the last. It needs B and C of bfloat16 or of float16, one A, dt and dt_bias per head, and 16
        tokens per row at most. One token per row is not affected.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b.
    snapshots: State, or a tensor (batch or more, T or more, heads, rows, cols): receives the state after every token.
    update: False leaves the pool as it is.
    early: True lets the kernel start, and read the state, before the kernel in front of it on the stream has ended; it
        waits for that one before it reads x, dt, B, C and z. For calls behind `conv1d_step`: the kernel in front must
        not write the pool, its seeds, the slots or the parameters. Nothing changes but the time, and that only on GPUs
        of NVIDIA of compute capability 9.0 and above.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of x unless `out` has another.
    Token, head and group axes of activations may have any stride; dt, A, D and dt_bias may be expanded from one value
    per head. `out` may be x itself, unless tokens form a tree, and must not overlap other arguments. Nothing is
    differentiable.
    """
    return MAMBA2_STEP.call(
        state, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, exact, slots, snapshots, update, out, early
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where tokens cannot go through tensor cores at once."""
    if not goes_at_once(given):
        return
    for name, axes in (("dt", len(given.tokens.axes)), ("A", 0), ("dt_bias", 0)):
        tensor = getattr(given, name)
        if tensor is not None and tensor.dim() > axes + 1:
            raise ValueError(f"exact=False needs {name} with one value per head, got shape {tuple(tensor.shape)}")
    check_at_once(given, "B", "C")


def check_signs(given: Given) -> None:
    """Inside debug(), raise where states would grow: A above 0, or time steps below."""
    if debugging():
        check_each("A", given.A, lambda A: A <= 0, NOT_POSITIVE)
        dt, bias = given.dt.float(), None if given.dt_bias is None else given.dt_bias.float()
        dt = dt[..., None] if dt.dim() == len(given.tokens.axes) + 1 else dt  # of rows, or of one for all
        bias = bias[:, None] if bias is not None and bias.dim() == 1 else bias
        steps = time_steps(dt, bias, given.dt_softplus, given.dt_limit)
        check_each("dt", steps, lambda dt: dt >= 0, "not be below 0 where it counts, as exp(dt * A) decays", given)


def check_debugged_step(given: Given) -> None:
    """Inside debug(), raise where the numbers in slots, or the signs of A and dt, are wrong."""
    check_debugged(given)
    check_signs(given)


def mamba2_kind(at_once: bool, longest: int) -> tuple[type[Problem], str]:
    """What a problem of Mamba-2 is, and the op that tables have it under."""
    return (AtOnceProblem, tabled_at_once("mamba2", longest)) if at_once else (Problem, "mamba2_step")


def problems(given: Given) -> tuple[Problem]:
    """One kernel steps all tokens."""
    return one_kernel(given, *mamba2_kind(goes_at_once(given), given.tokens.longest or 0))


def kernel(given: Given, problem: Problem) -> Any:
    """Tokens at once have a kernel of their own."""
    return kernel_in("mamba2_at_once") if isinstance(problem, AtOnceProblem) else MAMBA2_STEP.own_kernel


def values(given: Given, problem: Problem, config: Config) -> dict[str, Any]:
    """Which axes inputs have, and for how many tokens at once there is room."""
    return {
        "HEADS_PER_GROUP": given.state.data.shape[1] // given.B.shape[-2],
        "A_PER_ELEMENT": given.A.dim() == 3,
        "DT_PER_ROW": given.dt.dim() == len(given.tokens.axes) + 2,
        "BIAS_PER_ROW": given.dt_bias is not None and given.dt_bias.dim() == 2,
        "D_PER_ROW": given.D is not None and given.D.dim() == 2,
        "TOKENS": room_at_once(given.tokens.longest or 0),
    }


MAMBA2_STEP = Op(
    mamba2_step,
    main="x",
    state_axes="slots heads rows cols",
    divides={"groups": "heads"},
    problems=problems,
    kernel=kernel,
    values=values,
    reference={"at_once": goes_at_once},
    check=check,
    debug=check_debugged_step,
    aligned=("x", "B", "C", "z", "out"),
)
