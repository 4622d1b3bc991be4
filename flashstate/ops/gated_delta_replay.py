"""gated_delta_replay: tokens through the gated delta rule from a checkpoint and a ring of what tokens added to it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from torch import Tensor

from flashstate.errors import dtype_name
from flashstate.launch.arguments import aligned
from flashstate.launch.call import Given, Op
from flashstate.launch.config import NVIDIA_WARP, Problem, TensorCoreProblem, next_power_of_2
from flashstate.launch.environment import Gpu
from flashstate.launch.table import Config
from flashstate.ops.gated_delta import check_decays, check_gates, gate_values
from flashstate.ops.replaying import (
    MOST_PER_PROCESSOR,
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
from flashstate.state.ring import DeltaRing, Plan, check_ring
from flashstate.state.slots import Slots
from flashstate.state.state import State

FEW_TOKENS = 4  # whose corrections take few registers; up to eight are unrolled
SHORT_WINDOW = 16  # there is always room for so many tokens
FEW = 256  # batch x heads below which a program has one small tile, and
MANY = 1024  # from which on there are programs enough with several
# Tiles of rows that fold, at least, in a kernel of their own: fewer would share too little, above all with decays per
# channel. In a kernel for all rows they are single ones, unless other rows have no more than these: then all are shared
# out alike, and programs need not wait for what a plan counts.
FEW_TILES, FEW_TILES_PER_CHANNEL = 2, 4
REGISTERS = 65536  # of an SM


def gated_delta_replay(
    state: State | Tensor,
    ring: DeltaRing,
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
    plan: Plan | None = None,
    slots: Slots | Tensor | None = None,
    update: bool = True,
    out: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Give the outputs of `gated_delta_step` for every row of the batch, while the state is a checkpoint that lags.

    What a row continues from is its state after the live rows of its ring. The new tokens are appended to the ring;
    only where live and new ones together are more than the window, the live ones are folded into the state first, which
    is then rounded and stored, and the new tokens go on from what was stored. `commit` says afterwards which new tokens
    stay: until then the next call overwrites them. Every u is rounded to the dtype of ring.u before anything uses it,
    so that later tokens correct the state that the ring stands for. See docs/ops/gated_delta_replay.md.

    Token axes, written (...): (batch,) for one token per row, (batch, T), or (tokens,) packed with slots.cu_seqlens and
    slots.max_len. A row has at most as many tokens as the window.

    state: State, or a tensor (slots, HV, V, K): the checkpoint.
    ring: of the same slots.
    q, k: (..., H, K), both of the dtype of ring.k, with its H.
    v: (..., HV, V), and `out`, which the result is written to if it is given.
    a: (..., HV), or per channel (..., HV, K), as ring.decay has it; then it has the dtype of that, and is not expanded.
    b: (..., HV).
    A_log, dt_bias, b_logit, scale, qk_l2norm: as in `gated_delta_step`.
    plan: of this step, from `StatePool.plan`, for all layers; it has the slots. None: every row decides for itself.
    slots: Slots without write, accepted, parents and snapshot_rows, or (batch,) slot numbers; None: row b is slot b.
    update: False leaves the state and the ring as they are.
    early: True lets the kernel start before the kernel in front of it on the stream has ended; it waits for that one
        before it reads q, k, v, a and b. What that one must not write: see `mamba2_step`; nor the ring and the plan.

    Inputs are float32, bfloat16 or float16, each its own but q and k; the output has the dtype of v unless `out` has
    another. Sums are float32; for k of 16 bits products are of operands with 16 bits or more, for float32 of float32.
    Strides are as in `gated_delta_step`. `out` must not overlap other arguments. Nothing is differentiable.
    """
    return GATED_DELTA_REPLAY.call(
        state, ring, q, k, v, a, b, A_log, dt_bias, b_logit, scale, qk_l2norm, plan, slots, update, out, early
    )  # fmt: skip


def check(given: Given) -> None:
    """Raise where the gates, the ring, the plan or the slots do not go with the rest."""
    ring = given.ring
    check_ring(ring, given.state, kind=DeltaRing)
    if ring.per_channel:
        given.a = with_channels(given)
    per_channel = check_gates(given)
    if per_channel and not ring.per_channel:
        has, got = "(slots, HV, length, K)", tuple(ring.decay.shape)
        raise ValueError(f"ring.decay must have shape {has} where a has one value per channel, got {got}")
    named = {"q": "k", "k": "k", **({"a": "decay"} if per_channel else {})}
    for name, kept in named.items():
        got_dtype, want = dtype_name(getattr(given, name).dtype), dtype_name(getattr(ring, kept).dtype)
        if got_dtype != want:
            raise TypeError(f"{name} must have the dtype of ring.{kept}, {want}, got {got_dtype}")
    if given.sizes["H"] != ring.k.shape[1]:
        raise ValueError(f"k must have the heads of ring.k, {ring.k.shape[1]}, got {given.sizes['H']}")
    check_replay(given, "v")


def with_channels(given: Given) -> Tensor:
    """a with the axis of channels, which is dropped where it is expanded, and where there is one channel."""
    a: Tensor = given.a
    if a.dim() > len(given.tokens.axes) + 1:
        return a
    if given.sizes["K"] > 1:
        got = "got one per head, or one that is expanded over K"
        raise ValueError(f"a must have a value of its own for every channel, as ring.decay has, {got}")
    return a[..., None]


@dataclass(frozen=True)
class DeltaReplayProblem(AnyReplay, TensorCoreProblem):
    """What a config of replay of the delta rule is chosen for."""

    per_channel: bool = False  # decays, so that a program prepares much more for its tiles
    many_tokens: bool = False  # more than FEW_TOKENS
    long_window: bool = False  # longer than SHORT_WINDOW

    def manageable(self, config: Config) -> bool:
        return config.block_rows < 64

    def tiles(self, config: Config) -> int:
        """Tiles of a program: of one head, as far as its tiles can be shared out so."""
        return math.gcd(config.tiles, -(-self.rows // config.block_rows))

    def programs(self, config: Config) -> int:
        """Where registers are limited, no more programs walk along a plan than an SM has room for at a time: others
        would start when these have ended, with as much to do."""
        programs = super().programs(config)
        if not (self.most_programs and config.registers):
            return programs
        at_a_time = REGISTERS // (NVIDIA_WARP * config.num_warps * config.registers)
        return min(programs, max(1, self.most_programs * at_a_time // MOST_PER_PROCESSOR))

    def heuristic(self, gpu: Gpu) -> Config:
        """As measured on an H200, with 64 heads of 128 x 128, and with 32 for decays per channel: where one kernel
        decides for every row, programs of more rows for larger batches."""
        lanes, does = self.lane_choices[0], rows_do(self)
        if does == "either":
            rows = 16 if self.batch_heads < FEW else 32
            return Config(rows, 1, lanes, tiles=4 if self.batch_heads >= MANY else 1)
        rows, tiles, registers = self.tiles_that_keep if does == "keep" else self.tiles_that_fold
        return Config(rows, 1, lanes, tiles=tiles, registers=registers if self.warp == NVIDIA_WARP else 0)

    @property
    def crowded(self) -> bool:
        """Whether what tiles share takes so many registers that a limit would not leave enough for a tile."""
        return self.many_tokens or self.long_window or self.cols > 128

    @property
    def tiles_that_keep(self) -> tuple[int, int, int]:
        """Rows of a tile, tiles of a program and its registers, where states are only read: so few registers that an SM
        has 12 warps, or 16, unless that is too few."""
        if self.itemsize == 4:
            return (16, 8, 0) if self.crowded or self.per_channel else (16, 4, 128)
        if self.crowded or (self.per_channel and self.itemsize == 1):
            return 32, 4, 0
        if self.per_channel:
            return 16, 8, 128
        return 32, 4, 128 if self.itemsize == 1 and not self.several_tokens else 168

    @property
    def tiles_that_fold(self) -> tuple[int, int, int]:
        """Rows of a tile, tiles of a program where many rows fold, and its registers, where states are stored too.
        Random bits and scales of 16 bits take registers as well."""
        many = self.crowded or self.per_channel or self.rounding != "nearest" or self.format == "int16"
        if many or self.itemsize == 4:
            return 16, 8, 0
        return (32, 4, 0) if self.itemsize == 2 and self.several_tokens else (16, 8, 168)


def problems(given: Given) -> tuple[Problem, ...]:
    """One kernel, or one for rows that do not fold and one for those that do."""
    state, tokens = given.state, given.tokens
    several, group = (tokens.longest or 0) > 1, state.data.shape[1] // given.k.shape[-2]
    name, kind = replay_kind(given.ring.per_channel, tokens.longest or 0, given.ring.window)
    more = {"several_tokens": several, "heads_per_group": group, **kind}
    return walking(DeltaReplayProblem.of(name, state, tokens.batch, **more), given)


def replay_kind(per_channel: bool, longest: int, window: int) -> tuple[str, dict[str, bool]]:
    """What tables call the op, and what a problem says of its kernels, which need other configs with a decay per
    channel, and where they have room for more than a few tokens, or for long windows."""
    many = longest > FEW_TOKENS
    name = f"gated_delta_replay{'_many' if many else ''}{' per channel' if per_channel else ''}"
    return name, {"per_channel": per_channel, "many_tokens": many, "long_window": window > SHORT_WINDOW}


def values(given: Given, problem: DeltaReplayProblem, config: Config) -> dict[str, Any]:
    """What a kernel takes of rings and of a plan, and what it does with them. Of two kernels the second does not wait
    for the first, which has other rows."""
    ring, place, wide = given.ring, place_of(problem, given.machine), GATED_DELTA_REPLAY.aligned
    early, tiles = given.early and given.machine.overlaps, problem.tiles(config)
    one_kernel = given.plan is not None and rows_do(problem) == "either"
    few = FEW_TILES_PER_CHANNEL if problem.per_channel else FEW_TILES
    fold_tiles = 1 if one_kernel and tiles > few else tiles
    rows = [ring.k, ring.u, *(getattr(given, name) for name in wide), *([ring.decay] if ring.per_channel else [])]
    return {
        **ring_values(ring), **plan_values(given.plan), **gate_values(given),
        "HEADS_PER_GROUP": problem.heads_per_group, "ALIGNED": all(aligned(tensor) for tensor in rows),
        "A_ALIGNED": ring.per_channel and aligned(given.a),
        "WIDE": any(far_apart(getattr(given, name), len(given.tokens.axes)) for name in (*wide, "a", "b")),
        "TOKENS": next_power_of_2(max(1, given.tokens.longest or 0)), "ROWS_DO": rows_do(problem),
        "TILES": tiles, "FOLD_TILES": fold_tiles, "FEWEST_TILES": min(fold_tiles, few),
        "PLACE": place, "EARLY": early or place == "second", "WAITS": early and place != "second",
    }  # fmt: skip


GATED_DELTA_REPLAY = Op(
    gated_delta_replay,
    main="v",
    state_axes="slots HV V K",
    divides={"H": "HV"},
    words={"H": "heads", "HV": "value heads"},
    problems=problems,
    values=values,
    reference={"longest": lambda given: given.tokens.longest or 0},
    slots=slots_of,
    check=check,
    debug=partial(check_debugged_ring, check_inputs=check_decays),
    aligned=("q", "k", "v", "out"),
    aligned_each=("a",),
    aliases={"b": "beta"},
)
