"""State: the recurrent state of one layer, for all slots, in one of the formats of docs/formats.md."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from flashstate.basics import ROUNDINGS
from flashstate.errors import (
    bytes_text,
    check_choice,
    check_int,
    check_tensor,
    counted,
    dtype_name,
    no_tensor,
    too_short,
)
from flashstate.state import actions
from flashstate.state.formats import FORMATS, Format, label_of
from flashstate.state.rounding import SEED_OF_A_SLOT, SEED_STEP
from flashstate.state.signature import Describes, describe, describe_aligned, signature_of, unless_known
from flashstate.state.slots import SlotNumbers, Slots, as_slots

HARDWARE_ROUNDING = ((10, 0), (10, 3))  # compute capabilities that have cvt.rs
MOST_ROUNDS = 16  # of Philox
POOL_AXES = ("slots", "heads", "rows", "cols")
SNAPSHOT_AXES = ("batch", "T", "heads", "rows", "cols")


@dataclass(frozen=True, eq=False)
class State(Describes):
    """The state of one layer for all slots. Ops update `data` in place; this object only describes it.

    data: (slots, heads, rows, cols) float32, bfloat16, float16, int16, int8 or float8_e4m3fn; the dtype is the format.
        The slot axis may have any stride (pages of a larger cache), and with the first three dtypes the head axis too
        (every second head of a wider pool); heads themselves are contiguous. A slot reaches over fewer than 2^31
        elements. For `snapshots`: (batch, T, heads, rows, cols), any strides on the first two axes. The first three
        dtypes may also be transposed within a head, for `gated_delta_step` alone: a view of memory (slots, heads, cols,
        rows), with strides (any, any, 1, rows).
    scale: (slots, heads, rows) float32, one per row of cols, for the last three dtypes, which need it: value = stored *
        scale. For `snapshots`: (batch, T, heads, rows). Any strides outside a slot.
    rounding: how float32 results are stored: "nearest" (ties to even), "stochastic", or "stochastic_hw" (the cvt.rs
        instruction: float16 and float8 on compute capability 10.0 and 10.3 only; bytes of its own).
    rounds: rounds of Philox behind the random bits of "stochastic".
    seed: (slots,) int64, one per slot, needed for stochastic rounding; or one number for all, () or (1,): the bits of a
        slot are then drawn from it and the slot's number. Ops read seeds; only `advance` moves them. Snapshots have
        none: they are rounded with the bits of the state they are taken of.
    stream: tells layers and tensor-parallel ranks that share seeds apart; 0 to 2^32 - 1.

    The tensors stay what they are: their dtypes, shapes and strides must not change in place.
    """

    written: ClassVar = ("data", "scale")  # by ops

    data: Tensor
    scale: Tensor | None = None
    _: KW_ONLY
    rounding: str = "nearest"
    rounds: int = 10
    seed: Tensor | None = None
    stream: int = 0

    def __post_init__(self) -> None:
        check_int("rounds", self.rounds, 1, MOST_ROUNDS)
        check_int("stream", self.stream, 0, (1 << 32) - 1)
        self._check_tensors()

    @unless_known
    def _check_tensors(self) -> None:
        axes = SNAPSHOT_AXES if isinstance(self.data, Tensor) and self.data.dim() == 5 else POOL_AXES
        _check_data("data", self.data, axes)
        _check_scale(self.scale, self.data, axes)
        _check_rounding(self.data, self.rounding)
        _check_seed(self.data, self.rounding, self.seed)

    def __repr__(self) -> str:
        if self.data.dim() == len(POOL_AXES):
            return represented(self, self.data)
        return represented(self, self.data, "row", f"{counted(self.data.shape[1], 'snapshot')} of ")

    @property
    def layout(self) -> str:
        """Heads, rows and columns of a slot, and the format, in words."""
        shape = " x ".join(map(str, self.data.shape[-3:]))
        return f"{shape}, {label_of(self.format.name, self.rounding)}{', transposed' if self.transposed else ''}"

    @cached_property
    def signature(self) -> int:
        """Stands for all that a launch depends on but the addresses and the stream."""
        tensors = describe_aligned(self.data), describe(self.scale), describe(self.seed)
        return signature_of("state", *tensors, self.rounding, self.rounds)

    @property
    def format(self) -> Format:
        return FORMATS[self.data.dtype]

    @property
    def transposed(self) -> bool:
        """Whether the elements of a column are neighbours in memory, not those of a row."""
        return is_transposed(self.data)

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: its state, its scales and its seed, where it has them."""
        seed = None if self.shares_seed else self.seed
        tensors = (tensor for tensor in (self.data, self.scale, seed) if tensor is not None)
        return sum(tensor.shape[1:].numel() * tensor.element_size() for tensor in tensors)

    @property
    def shares_seed(self) -> bool:
        """Whether one seed is there for all slots."""
        return self.seed is not None and (self.seed.dim() == 0 or len(self.seed) < len(self.data))

    def seeds_of(self, slots: Tensor) -> Tensor | None:
        """The seeds of these slots, int64, if it has some; of -1 any."""
        if self.seed is None:
            return None
        return self.seed.reshape(1) + slots * SEED_OF_A_SLOT if self.shares_seed else self.seed[slots]

    def read(self, slots: SlotNumbers) -> Tensor:
        """The states in these slots, decoded: (n, heads, rows, cols) float32. Slots may repeat.

        slots: an int, a sequence of ints or an integer tensor. Numbers on the host are checked, and raise. A tensor
            on the device of the state is read there, and the host does not wait: numbers past the slots give zeros and
            set the flag that `flashstate.check_faults()` reports, negative ones give zeros. Inside `flashstate.debug()`
            numbers past the slots raise.

        For code outside torch.compile, as `write` is.
        """
        return actions.read_slots(self, slots)

    def write(self, slots: SlotNumbers, values: Tensor) -> None:
        """Store states that something else computed, a prefill say, in these slots, rounded as the state is.

        slots: distinct, and otherwise as `read` has them: a number on the device that names no slot is skipped. Inside
            `flashstate.debug()` those past the slots and those named twice raise.
        values: (n, heads, rows, cols) float32, bfloat16 or float16, of any strides.

        Stochastic rounding draws the bits of token -1, so no token of a step that follows has the same.
        """
        actions.write_slots(self, slots, values)

    def advance(self, slots: Slots | Tensor | None = None) -> None:
        """Move the seeds of the read slots on (None: of all), so that the next step draws new random bits.

        Call it once per model step, after all layers, with the slots of that step. Rows without tokens keep their
        seeds. Of a row with n slots to read all n move on, whichever was accepted: given equal seeds, they stay equal.
        A seed that all slots share moves on once, whatever the slots are. It is one small launch, and a CUDA graph
        captures it.
        """
        if self.seed is None:
            raise ValueError("advance needs a state with a seed")
        where = as_slots(slots)
        if self.shares_seed:
            self.seed.add_(SEED_STEP)
        else:
            actions.advance_seeds(self.seed, where)


def represented(layer: Any, data: Tensor, one: str = "slot", each: str = "") -> str:
    """Describe a State or Mamba3State in one line, without reading its tensors. `one`: an entry of their first axis;
    `each`: the things each such entry has."""
    entries, size = counted(len(data), one), bytes_text(layer.bytes_per_slot)
    return f"{type(layer).__name__}({entries} of {each}{layer.layout}, {size} per {one}, {data.device})"


def as_state(state: State | Tensor, name: str = "state") -> State:
    """What ops accept as `state`: a State, or a bare tensor, which means State(tensor)."""
    if isinstance(state, State):
        if state.data.dim() == len(POOL_AXES):
            return state
        raise ValueError(f"{name} must have data (slots, heads, rows, cols), got {tuple(state.data.shape)}")
    if isinstance(state, Tensor):
        _check_bare(name, state, POOL_AXES)
        return State(state)
    raise TypeError(f"{name} must be a State or a tensor, got {no_tensor(state)}")


def as_snapshots(snapshots: State | Tensor, state: State) -> State:
    """What ops accept as `snapshots`: a State of rank 5, or a bare tensor, rounded as the state is if it can be."""
    if isinstance(snapshots, Tensor):
        _check_bare("snapshots", snapshots, SNAPSHOT_AXES)
        known = FORMATS[snapshots.dtype].roundings
        wanted = (state.rounding, "nearest" if state.rounding == "nearest" else "stochastic", "nearest")
        snapshots = State(snapshots, rounding=next(rounding for rounding in wanted if rounding in known))
    if not isinstance(snapshots, State):
        raise TypeError(f"snapshots must be a State or a tensor, got {type(snapshots).__name__}")
    if snapshots.data.dim() != len(SNAPSHOT_AXES):
        shape = tuple(snapshots.data.shape)
        raise ValueError(f"snapshots must have data (batch, T, heads, rows, cols), got {shape}")
    if snapshots.rounding != "nearest" and state.seed is None:
        raise ValueError(f"snapshots with rounding={snapshots.rounding!r} need a state with a seed, got seed=None")
    return replace(snapshots, rounds=state.rounds, stream=state.stream)


def _check_data(name: str, data: Tensor, axes: tuple[str, ...]) -> None:
    check_tensor(name, data, axes, (None,) * len(axes), dtypes=tuple(FORMATS))
    if 0 in (data.shape if axes == POOL_AXES else data.shape[-3:]):  # an empty batch has empty snapshots
        raise ValueError(f"{name} must not be empty, got shape {tuple(data.shape)}")
    if data.shape[0] >= 1 << 31:  # kernels keep the number of a slot in 32 bits
        raise ValueError(f"{name} must have fewer than 2^31 {axes[0]}, got {data.shape[0]}")
    if is_transposed(data):
        if FORMATS[data.dtype].scaled:
            why = f"because its rows have scales, got strides {data.stride()}"
            raise ValueError(f"{name} of dtype {dtype_name(data.dtype)} must not be transposed within a slot, {why}")
        data = data.transpose(-2, -1)
    if head_stride(data) is None:
        check_slots_of(name, data, data.shape[-3:])
    elif FORMATS[data.dtype].scaled:
        words = _not_dense(name, data, data.shape[-3:])
        raise ValueError(f"{words}; only heads of formats without scales may be apart")
    else:
        check_slots_of(name, data, data.shape[-2:], "head")
    reach = (data.shape[-3] - 1) * data.stride(-3) + data.shape[-2:].numel()
    if reach >= 1 << 31:
        raise ValueError(f"{name} must have slots that reach over fewer than 2^31 elements, got {reach}")


def head_stride(data: Tensor) -> int | None:
    """Elements from head to head, where heads are apart from each other; None where they lie side by side."""
    heads, rows, cols = data.shape[-3:]
    return None if heads == 1 or data.stride(-3) == rows * cols else data.stride(-3)


def is_transposed(data: Tensor) -> bool:
    """Whether heads of (rows, cols) lie in memory as (cols, rows) only: of one row or column as both."""
    rows, cols = data.shape[-2:]
    return min(rows, cols) > 1 and data.stride()[-2:] == (1, rows)


def refuse_transposed(name: str, state: State) -> None:
    """Raise where a state is transposed, for an op that steps along rows in memory."""
    if state.transposed:
        words = _not_dense(name, state.data, state.data.shape[-2:], "head")
        raise ValueError(f"{words}; only gated_delta_step takes transposed states")


def _dense_strides(block: torch.Size) -> list[int]:
    return [block[axis + 1 :].numel() for axis in range(len(block))]


def _not_dense(name: str, tensor: Tensor, block: torch.Size, what: str = "slot") -> str:
    wanted = ", ".join(["any"] * (tensor.dim() - len(block)) + list(map(str, _dense_strides(block))))
    return f"{name} must be contiguous within a {what}: strides ({wanted}), got {tensor.stride()}"


def check_slots_of(name: str, tensor: Tensor, block: torch.Size, what: str = "slot") -> None:
    """Raise unless every slot (the last axes) is contiguous, and slots do not overlap; or heads, as `what` says."""
    outer = tensor.dim() - len(block)
    strides = tensor.stride()[outer:]
    if any(size > 1 and got != want for size, got, want in zip(block, strides, _dense_strides(block), strict=True)):
        raise ValueError(_not_dense(name, tensor, block, what))
    short = too_short(tensor.stride()[:outer], tensor.shape[:outer], block.numel()) if tensor.numel() else None
    if short is not None:
        stride, least = short
        found = "slots" if what == "slot" else f"slots or {what}s"
        raise ValueError(f"{name} has overlapping {found}: an axis of stride {stride}, which must be {least} or more")


def _check_scale(scale: Tensor | None, data: Tensor, axes: tuple[str, ...]) -> None:
    fmt = FORMATS[data.dtype]
    if not fmt.scaled:
        if scale is not None:
            raise ValueError(f"scale is not for {fmt.name}, whose values are stored as they are")
        return
    if scale is None:
        raise ValueError(f"{fmt.name} needs scale: ({', '.join(axes[:-1])}) float32, one per row")
    check_tensor("scale", scale, axes[:-1], tuple(data.shape[:-1]), dtypes=(torch.float32,), device=data.device)
    check_slots_of("scale", scale, scale.shape[-2:])


def _check_bare(name: str, data: Tensor, axes: tuple[str, ...]) -> None:
    _check_data(name, data, axes)
    fmt = FORMATS[data.dtype]
    if fmt.scaled:
        raise ValueError(f"{name} of dtype {fmt.name} needs a scale: pass State(data, scale)")


def _check_rounding(data: Tensor, rounding: str) -> None:
    check_choice("rounding", rounding, ROUNDINGS)
    fmt = FORMATS[data.dtype]
    if rounding not in fmt.roundings:
        raise ValueError(f"rounding={rounding!r} is not for {fmt.name}, which has {', '.join(fmt.roundings)}")
    if rounding == "stochastic_hw":
        _check_hardware_rounding(data.device)


def _check_seed(data: Tensor, rounding: str, seed: Tensor | None) -> None:
    if data.dim() == len(SNAPSHOT_AXES):
        if seed is not None:
            raise ValueError("seed is not for snapshots, which use the bits of the state they are taken of")
        return
    if seed is None:
        if rounding != "nearest":
            raise ValueError(f"rounding={rounding!r} needs seed: (slots,) int64, one per slot, or one number for all")
        return
    one = isinstance(seed, Tensor) and tuple(seed.shape) in ((), (1,))
    sizes = tuple(seed.shape) if one else (data.shape[0],)
    axes = ("slots",)[: len(sizes)]
    check_tensor("seed", seed, axes, sizes, dtypes=(torch.int64,), device=data.device, also=((), ()))
    if not seed.is_contiguous():
        raise ValueError(f"seed must be contiguous, got stride {seed.stride(0)}")


def _check_hardware_rounding(device: torch.device) -> None:
    needs, capability = "rounding='stochastic_hw' needs", actions.nvidia_capability(device)
    if capability is None:
        raise ValueError(f"{needs} an NVIDIA GPU of compute capability 10.0 or 10.3, got {device}")
    if capability not in HARDWARE_ROUNDING:
        got = ".".join(map(str, capability))
        raise ValueError(f"{needs} compute capability 10.0 or 10.3, {device} has {got}; use 'stochastic'")
