"""mamba2_replay: tokens through Mamba-2 from a checkpoint and a ring of inputs, folded in only when it is full."""

from __future__ import annotations

import math
from functools import partial
from typing import Annotated, Any, ClassVar

from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.launch.arguments import aligned
from flashstate.launch.call import Given, Op
from flashstate.launch.config import NVIDIA_WARP, Problem, TensorCoreProblem, next_power_of_2
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config
from flashstate.ops.mamba2 import check_signs
from flashstate.ops.replaying import (
    FEWEST_PARTED,
    AnyReplay,
    check_debugged_ring,
    check_replay,
    far_apart,
    place_of,
    plan_values,
    ring_values,
    rows_do,
    slots_of,
    walking,
)
from flashstate.state.ring import Plan, Ring, check_ring
from flashstate.state.slots import Slots
from flashstate.state.state import State

FEW_REPLAYED = 512  # batch x heads below which a program has one tile, and
MANY_REPLAYED = 2048  # from which on there are programs enough with many
LONGEST_ALONE = 16  # window up to which one token needs no tensor cores


def mamba2_replay(
    state: State | Tensor,
    ring: Ring,
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
    plan: Plan | None = None,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """Give the outputs of `mamba2_step` for every row of the batch, while the state is a checkpoint that lags.

    What a row continues from is its state after the live tokens of its ring. The new tokens are appended to the ring;
    only where live and new ones together are more than the window, the live ones are folded into the state first, which
    is then rounded and stored. `commit` says afterwards which new tokens stay: until then the next call overwrites
    them. See docs/ops/mamba2_replay.md.

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens and
    slots.max_len. A row has at most as many tokens as the window.

    state: State, or a tensor (slots, heads, rows, cols): the checkpoint.
    ring: of the same slots; x and B must have the dtypes of its.
    x, z: (..., heads, rows), and `out`, which the result is written to if it is given.
    dt: (..., heads); A, dt_bias: (heads,).
    B, C: (..., groups, cols), with the groups of the ring.
    D: (heads,) or (heads, rows).
    dt_limit: (lo, hi), as in `mamba2_step`. A ring keeps dt as it counts, so `mamba2_fold` needs no limit.
    plan: of this step, from `StatePool.plan`, for all layers; it has the slots. None: every row decides for itself.
    slots: Slots without write, accepted, parents and snapshot_rows, or (batch,) slot numbers; None: row b is slot b.
    update: False leaves the state and the ring as they are.

    Inputs are float32, bfloat16 or float16; the output has the dtype of x unless `out` has another. Sums are float32;
    for x of 16 bits, whatever `out` is, products are of bfloat16 operands, for float32 of float32, and so those of one
    token that is not packed, on float32 states with windows up to 16. Strides are as in `mamba2_step`. `out` must not
    overlap other arguments. Nothing is differentiable.
    """
    return MAMBA2_REPLAY.call(
        state, ring, x, dt, A, B, C, D, z, dt_bias, dt_softplus, dt_limit, plan, slots, update, out
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where the ring, the plan or the slots do not go with the rest."""
    ring, tokens = given.ring, given.tokens
    check_ring(ring, given.state)
    for name, kept in (("x", ring.x), ("B", ring.B)):
        got, want = dtype_name(getattr(given, name).dtype), dtype_name(kept.dtype)
        if got != want:
            raise TypeError(f"{name} must have the dtype of ring.{name}, {want}, got {got}")
    if given.sizes["groups"] != ring.B.shape[1]:
        raise ValueError(f"B must have the groups of ring.B, {ring.B.shape[1]}, got {given.sizes['groups']}")
    for name, axes in (("dt", len(tokens.axes) + 1), ("A", 1), ("dt_bias", 1)):
        parameter = getattr(given, name)
        if parameter is not None and parameter.dim() != axes:
            got = f"got shape {tuple(parameter.shape)}: replay is not for Mamba-1"
            raise ValueError(f"{name} must have one value per head, as Mamba-2 has, or be expanded from such, {got}")
    check_replay(given)


class ReplayProblem(AnyReplay, TensorCoreProblem):
    """What a config of replay is chosen for where tensor cores multiply."""

    @property
    def fewest_parted(self) -> int:
        """Half as many where few rows fold, those of one token, unless states of 32 bits take longest anyway."""
        return FEWEST_PARTED // 2 if self.itemsize < 4 and not self.several_tokens else super().fewest_parted

    def manageable(self, config: Config) -> bool:
        return config.block_rows < 64

    def heuristic(self, gpu: Gpu) -> Config:
        """More tiles for larger batches; where the state is only read, larger ones of 32 bits, and of less bits so few
        registers that an SM has 16 warps. Of one token few rows fold, and these are spread over many programs, which
        others leave room for. As measured on an H200, with 16 heads of 64 x 128."""
        lanes, many = self.lane_choices[0], self.batch_heads >= MANY_REPLAYED
        most = self.batch_heads >= 4 * MANY_REPLAYED
        if self.op == "mamba2_replay fold" and not self.several_tokens:
            return Config(16, 1, lanes, tiles=2 if most else 1)
        if self.op != "mamba2_replay keep":
            few = 1 if self.op != "mamba2_replay either" or self.batch_heads < FEW_REPLAYED else 4
            return Config(16, 1, lanes, tiles=8 if most else 4 if many else few)
        if self.itemsize == 4:
            return Config(32, 1, lanes, tiles=8 if many else 2)
        registers = 128 if self.warp == NVIDIA_WARP else 0
        few = 2 if self.several_tokens else 4
        return Config(16, 1, lanes, tiles=16 if most else 8 if many else few, registers=registers)


class ReplayTokenProblem(AnyReplay):
    """What a config of replay is chosen for where every row has one token, and no tensor cores are used."""

    limits: ClassVar[tuple[int, ...]] = (0, 96, 128)

    def manageable(self, config: Config) -> bool:
        return Problem.manageable(self, config)

    def heuristic(self, gpu: Gpu) -> Config:
        """Four warps, or as many as there are rows for, and no more than 64 elements in a thread; several tiles where
        the state is only read and there are programs enough. As measured on an H200, with 16 heads of 64 x 128."""
        lanes = min(self.lane_choices, key=lambda lanes: abs(math.log2(lanes / 8)))
        rows = max(1, min(64, next_power_of_2(self.rows), 4 * 64 * self.warp // self.block_cols))
        warps = max(1, min(4, rows * lanes // self.warp))
        tiles = 8 if self.op == "mamba2_replay keep" and self.batch_heads >= MANY_REPLAYED else 1
        return Config(max(rows, self.fewest_rows(Config(1, warps, lanes))), warps, lanes, tiles=tiles)


def replay_kind(longest: int, format: str, packed: bool, window: int) -> type[AnyReplay]:
    """What a problem of replay is. Tensor cores are as fast for one token of states of less than 32 bits; without them
    long windows have too much arithmetic. In packed calls, where the longest row may change from step to step, a row
    with one token does not depend on that."""
    alone = longest == 1 and format == "float32" and not packed and window <= LONGEST_ALONE
    return ReplayTokenProblem if alone else ReplayProblem


def problems(given: Given) -> tuple[Problem, ...]:
    """One kernel, or one for rows that do not fold and one for those that do."""
    state, tokens, longest = given.state, given.tokens, given.tokens.longest or 0
    kind = replay_kind(longest, state.format.name, tokens.packed, given.ring.window)
    group = state.data.shape[1] // given.B.shape[-2]
    problem = kind.of("mamba2_replay", state, tokens.batch, several_tokens=longest > 1, heads_per_group=group)
    return walking(problem, given)


def values(given: Given, problem: AnyReplay, config: Config) -> dict[str, Any]:
    """What a kernel takes of rings and of a plan, and what it does with them. Of two kernels the second does not wait
    for the first, which has other rows."""
    ring, place = given.ring, place_of(problem, given.machine)
    tiles, alone = problem.tiles(config), isinstance(problem, ReplayTokenProblem)
    one_kernel = given.plan is not None and rows_do(problem) == "either" and not alone
    fold_tiles = 1 if one_kernel and problem.itemsize < 4 else tiles
    wide = MAMBA2_REPLAY.aligned
    return {
        **ring_values(ring), **plan_values(given.plan), "HEADS_PER_GROUP": problem.heads_per_group,
        "ALIGNED": all(aligned(tensor) for tensor in (ring.x, ring.B, *(getattr(given, name) for name in wide))),
        "WIDE": any(far_apart(getattr(given, name), len(given.tokens.axes)) for name in (*wide, "dt")),
        "D_PER_ROW": given.D is not None and given.D.dim() == 2,
        "TOKENS": 1 if alone else max(8, next_power_of_2(given.tokens.longest or 0)),
        "ROWS_DO": rows_do(problem), "TILES": tiles, "FOLD_TILES": fold_tiles,
        "PLACE": place, "EARLY": place == "second",
    }  # fmt: skip


MAMBA2_REPLAY = Op(
    mamba2_replay,
    main="x",
    state_axes="slots heads rows cols",
    divides={"groups": "heads"},
    problems=problems,
    values=values,
    reference={"longest": lambda given: given.tokens.longest or 0},
    slots=slots_of,
    check=check,
    debug=partial(check_debugged_ring, check_inputs=check_signs),
    aligned=("x", "B", "C", "z", "out"),
)
