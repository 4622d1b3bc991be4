"""mamba3_step: tokens through the trapezoidal state update of Mamba-3, SISO and MIMO."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from flashstate.errors import check_contiguous, check_row_contiguous, check_tensor
from flashstate.launch.arguments import row_stride, token_strides
from flashstate.launch.call import Given, Op, one_kernel, refuse_grad
from flashstate.launch.config import MOST_UNROLLED, Problem, TensorCoreProblem, next_power_of_2
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config
from flashstate.ops.debug import FINITE, check_debugged, check_each, check_finite, debugging
from flashstate.ops.mamba2 import NOT_POSITIVE
from flashstate.reference import mamba3 as reference
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.slots import Slots

AHEAD = (0, 64, 128, 256, 512)  # programs behind one that asks for the states of another


def mamba3_step(
    state: Mamba3State,
    x: Annotated[Tensor, "tokens H | D"],
    A: Annotated[Tensor, "tokens H |"],
    dt: Annotated[Tensor, "tokens H |"],
    trap: Annotated[Tensor, "tokens H |"],
    B: Annotated[Tensor, "tokens R G | N"],
    C: Annotated[Tensor, "tokens R G | N"],
    *,
    Wx: Annotated[Tensor, "| R H D"] | None = None,
    Wz: Annotated[Tensor, "| R H D"] | None = None,
    Wo: Annotated[Tensor, "| R H D"] | None = None,
    D: Annotated[Tensor, "| H"] | None = None,
    z: Annotated[Tensor, "tokens H | D"] | None = None,
    rotary: Rotary | None = None,
    trap_logit: bool = False,
    update_kv: bool = True,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Step every row of the batch by its tokens; update all four states in place and return the outputs.

    Per row and head, token by token, in float32, with the head's group of B and C; r counts ranks::

        trap  = sigmoid(trap)                                   only with trap_logit
        angle = (angle + tanh(rotary.angle) * dt * π) mod 2π    these lines only with rotary
        B[r]  = rotate(B[r] + bias_B[r], angle)
        C[r]  = rotate(C[r] + bias_C[r], angle)
        B     = B, rounded to the dtype of state.k
        alpha, beta, gamma = exp(A * dt), (1 - trap) * dt * alpha, trap * dt
        s     = s * alpha + sum over r of (gamma * x * Wx[r]) ⊗ B[r] + (beta * v * Wx[r]) ⊗ k[r]
        y[r]  = s C[r] + D * x * Wx[r]
        y[r]  = y[r] * silu(z * Wz[r])                          only with z
        y     = sum over r of y[r] * Wo[r]                      only with Wo
        k, v  = B, x                                            what the next token sees as k and v

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens.

    state: Mamba3State, of H heads with D rows and N columns, and of rank R; R = 1 is SISO.
    x, z: (..., H, D). The output has the shape of x; of rank above 1 without Wo it is (..., R, H, D).
    A, dt, trap: (..., H).
    B, C: (..., R, G, N), where G divides H.
    Wx, Wz, Wo: (R, H, D); None: ones, of Wo also no sum.
    D: (H,).
    rotary: Rotary; None: B and C come with their bias and turned, and state.angle is left alone.
    update_kv: False leaves state.k and state.v to the caller.
    slots: Slots, or (batch,) slot numbers; None: row b is slot b. They must not have parents.
    update: False leaves all four states as they are.
    out: what the result is written to.

    Inputs are float32, bfloat16 or float16, each its own; the output has the dtype of x unless `out` has another; of
    rank above 1 it is as exact as the dtype of x asks, whatever `out` is. Token, rank, head and group axes of
    activations may have any stride. `out` may be x itself, if it has its shape, and must not overlap other arguments.
    Nothing is differentiable.
    """
    return MAMBA3_STEP.call(
        state, x, A, dt, trap, B, C, Wx, Wz, Wo, D, z, rotary, trap_logit, update_kv, slots, update, out
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where weights, angles or slots do not go with the rest; say which axes the output has."""
    if given.Wz is not None and given.z is None:
        raise ValueError("Wz must come with z, which it multiplies")
    if given.rotary is not None:
        check_rotary(given)
    if given.slots is not None and given.slots.parents is not None:
        raise ValueError("slots must not have parents: mamba3_step has no draft trees")
    given.out_axes = ("R", "H", "D") if given.Wo is None and given.state.rank > 1 else ("H", "D")


def check_rotary(given: Given) -> None:
    """Raise unless B and C can be turned by it."""
    rotary, state, tokens = given.rotary, given.state, given.tokens
    if not isinstance(rotary, Rotary):
        raise TypeError(f"rotary must be a Rotary or None, got {type(rotary).__name__}")
    _, H, _, N = state.ssm.data.shape
    device = state.k.device
    if state.angle is None:
        raise ValueError("rotary needs a state with angle: Mamba3State(ssm, k, v, angle)")
    if N % 2:
        raise ValueError(f"rotary needs an even number of columns, got N = {N}")
    S = state.angle.shape[2]
    shapes = [((*tokens.axes, "H", "S"), (*tokens.sizes, H, S)), ((*tokens.axes, "S"), (*tokens.sizes, S))]
    if isinstance(rotary.angle, Tensor) and rotary.angle.dim() == len(tokens.axes) + 1:
        shapes.reverse()
    check_tensor("rotary.angle", rotary.angle, *shapes[0], device=device, also=shapes[1])
    check_row_contiguous("rotary.angle", rotary.angle)
    refuse_grad("mamba3_step", "rotary.angle", rotary.angle)
    for name, bias in (("rotary.bias_B", rotary.bias_B), ("rotary.bias_C", rotary.bias_C)):
        if bias is not None:
            check_tensor(name, bias, ("R", "H", "N"), (state.rank, H, N), device=device)
            check_contiguous(name, bias)


def check_debugged_step(given: Given) -> None:
    """Inside debug(), raise where the numbers in slots, or the signs of A and dt, are wrong."""
    check_debugged(given)
    if debugging():
        check_each("A", given.A, lambda A: A <= 0, NOT_POSITIVE, given)
        check_each("dt", given.dt, lambda dt: dt >= 0, "not be below 0, as exp(A * dt) decays", given)
        if given.rotary is not None:
            check_each("rotary.angle", given.rotary.angle, torch.isfinite, FINITE, given)
            check_finite({"rotary.bias_B": given.rotary.bias_B, "rotary.bias_C": given.rotary.bias_C})


class AnyHead(Problem):
    """What a config of Mamba-3 is chosen for. A program has all rows of a head, which share what it overwrites."""

    limits: ClassVar[tuple[int, ...]] = (0, 96, 128, 168)
    limits_always: ClassVar[bool] = True
    knob: ClassVar[str] = "ahead"
    knob_values: ClassVar[tuple[int, ...]] = AHEAD

    def programs(self, config: Config) -> int:
        return self.batch_heads


class HeadProblem(AnyHead):
    """What a config of Mamba-3 of rank 1 is chosen for."""

    def lanes_of(self, warps: int) -> list[int]:
        """How many threads may share a row of a tile that so many warps have. A chunk with a column for every thread
        makes the compiler give threads other rows than those they load: twice the instructions, or five times. The
        fewest, where all chunks have."""
        return [lanes for lanes in self.lane_choices if self.chunk(lanes) < warps * self.warp] or self.lane_choices[:1]

    def manageable(self, config: Config) -> bool:
        return config.lanes in self.lanes_of(config.num_warps) and super().manageable(config)

    def heuristic(self, gpu: Gpu) -> Config:
        """As few tiles as there can be, of 64 elements in a thread or fewer, and 8 warps at most."""
        rows = max(1, min(64, next_power_of_2(self.rows), 8 * 64 * self.warp // self.block_cols))
        warps = min(8, max(1, rows * self.block_cols // (64 * self.warp)))
        lanes = min(self.heuristic_lanes(gpu), self.lanes_of(warps)[-1])
        warps = min(warps, max(1, rows * lanes // self.warp))
        return Config(max(rows, self.fewest_rows(Config(1, warps, lanes))), warps, lanes, ahead=AHEAD[2])


class RankProblem(AnyHead, TensorCoreProblem):
    """What a config of Mamba-3 of higher rank is chosen for, where tensor cores multiply with the vectors of all ranks.
    Every warp has 16 rows of a tile, or a multiple."""

    def valid(self, config: Config) -> bool:
        rows = config.block_rows in self.row_choices and config.block_rows % (16 * config.num_warps) == 0
        return self.knows(config) and rows

    def manageable(self, config: Config) -> bool:
        return self.per_thread(config) <= MOST_UNROLLED or (config.block_rows, config.num_warps) == (16, 1)

    def heuristic(self, gpu: Gpu) -> Config:
        """As few tiles as can be, of 64 rows of 128 columns at most: float32 outputs need one in shared memory."""
        warps = min(4, max(1, next_power_of_2(self.rows) // 16), max(1, 512 // self.block_cols))
        return Config(16 * warps, warps, self.lane_choices[0], ahead=AHEAD[2])


def mamba3_kind(rank: int, turned: bool) -> tuple[type[Problem], str]:
    """What a problem of Mamba-3 is, and its op in tables: turned columns take registers, and so other configs."""
    return HeadProblem if rank == 1 else RankProblem, f"mamba3_step rank {rank}{' turned' if turned else ''}"


def values(given: Given, problem: Problem, config: Config) -> dict[str, Any]:
    """What kernels take of the four states, of what turns B and C, and of an output that may have ranks."""
    state, tokens, rotary, out = given.state, given.tokens, given.rotary, given.out
    angle, theta = getattr(rotary, "angle", None), None if rotary is None else state.angle
    per_head = angle is not None and angle.dim() == len(tokens.axes) + 2
    ranks = out.dim() - len(tokens.axes) - 2
    of_angle = token_strides(angle, len(tokens.axes), tokens.packed, int(per_head))
    of_out = token_strides(out, len(tokens.axes), tokens.packed, ranks + 1)
    from_table = given.slots is not None and given.slots.accepted is not None
    return {
        "k_ptr": state.k, "v_ptr": state.v, "theta_ptr": theta, "angle_ptr": angle,
        "bias_B_ptr": getattr(rotary, "bias_B", None), "bias_C_ptr": getattr(rotary, "bias_C", None),
        "k_stride": state.k.stride(0), "v_stride": state.v.stride(0), "theta_stride": row_stride(theta),
        "angle_b": of_angle[0], "angle_t": of_angle[1], "angle_h": of_angle[2] if per_head else 0,
        "out_b": of_out[0], "out_t": of_out[1], "out_r": of_out[2] if ranks else 0, "out_h": of_out[-1],
        "HEADS_PER_GROUP": state.ssm.data.shape[1] // given.B.shape[-2], "RANK": state.rank,
        "ANGLES": 0 if theta is None else theta.shape[2], "PAIRING": pairing_of(given),
        "STORES": "last" if tokens.one_token and given.stores == "every" else given.stores,  # one column
        "STORES_KV": given.update_kv, "AHEAD": 0 if from_table else config.ahead,
    }  # fmt: skip


def pairing_of(given: Given) -> str:
    """Which columns are turned together."""
    return "none" if given.rotary is None else given.rotary.pairing_of(given.state.rank)


def parameters_of(given: Given) -> reference.Parameters:
    """What all tokens share, for the reference."""
    biases = getattr(given.rotary, "bias_B", None), getattr(given.rotary, "bias_C", None)
    weights = given.Wx, given.Wz, given.Wo, given.D
    return reference.Parameters(*weights, *biases, pairing_of(given), given.trap_logit)


MAMBA3_STEP = Op(
    mamba3_step,
    main="x",
    state_axes="slots H D N",
    sizes=lambda state: {"R": state.rank},
    divides={"G": "H"},
    words={"G": "groups", "H": "heads"},
    problems=lambda given: one_kernel(given, *mamba3_kind(given.state.rank, given.rotary is not None)),
    values=values,
    reference={"angle": lambda given: getattr(given.rotary, "angle", None), "parameters": parameters_of},
    check=check,
    debug=check_debugged_step,
    ignored=("snapshot_rows",),
    like_main="Wo is not None or state.rank == 1",
)
