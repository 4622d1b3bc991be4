"""State: the recurrent state of one layer, for all slots, in one of the formats of docs/formats.md."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from flashstate.errors import check_int, check_tensor
from flashstate.state.formats import FORMATS, ROUNDINGS, Format
from flashstate.state.slots import Slots, as_slots

HARDWARE_ROUNDING = ((10, 0), (10, 3))  # compute capabilities that have cvt.rs


@dataclass(frozen=True, eq=False)
class State:
    """The state of one layer for all slots. Ops update `data` in place; this object only describes it.

    data: (slots, heads, rows, cols) float32, bfloat16 or float16; the dtype is the format. The slot axis may have any
        stride (pages of a larger cache); a slot itself is contiguous and holds fewer than 2^31 elements.
    rounding: how float32 results are stored: "nearest" (ties to even), "stochastic", or "stochastic_hw" (the cvt.rs
        instruction: float16 on compute capability 10.0 and 10.3 only; bytes of its own).
    rounds: rounds of Philox behind the random bits of "stochastic".
    seed: (slots,) int64, one per slot, needed for stochastic rounding. Ops read seeds; only `advance` moves them.
    stream: tells layers and tensor-parallel ranks that share seeds apart; 0 to 2^32 - 1.
    """

    data: Tensor
    _: KW_ONLY
    rounding: str = "nearest"
    rounds: int = 10
    seed: Tensor | None = None
    stream: int = 0

    def __post_init__(self) -> None:
        _check_data("data", self.data)
        _check_rounding(self.data, self.rounding, self.rounds, self.seed, self.stream)

    @property
    def format(self) -> Format:
        return FORMATS[self.data.dtype]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: its state, and its seed where it has one."""
        return self.data[0].numel() * self.data.element_size() + (8 if self.seed is not None else 0)

    def advance(self, slots: Slots | Tensor | None = None) -> None:
        """Move the seeds of the read slots on (None: of all), so that the next step draws new random bits.

        Call it once per model step, after all layers. It is one small launch, and a CUDA graph captures it.
        """
        from flashstate.ops.seeds import advance_seeds

        if self.seed is None:
            raise ValueError("advance needs a state with a seed")
        advance_seeds(self.seed, as_slots(slots))


def as_state(state: State | Tensor) -> State:
    """What ops accept as `state`: a State, or a bare tensor, which means State(tensor)."""
    if isinstance(state, State):
        return state
    if isinstance(state, Tensor):
        _check_data("state", state)
        return State(state)
    raise TypeError(f"state must be a State or a tensor, got {type(state).__name__}")


def _check_data(name: str, data: Tensor) -> None:
    check_tensor(name, data, ("slots", "heads", "rows", "cols"), (None,) * 4, dtypes=tuple(FORMATS))
    slots, heads, rows, cols = data.shape
    if 0 in data.shape:
        raise ValueError(f"{name} must not be empty, got shape {tuple(data.shape)}")
    slot_size = heads * rows * cols
    if slot_size >= 1 << 31:
        raise ValueError(f"{name} must have fewer than 2^31 elements per slot, got {slot_size}")
    dense = (slot_size, rows * cols, cols, 1)
    if any(
        size > 1 and got != want for size, got, want in zip(data.shape[1:], data.stride()[1:], dense[1:], strict=True)
    ):
        raise ValueError(
            f"{name} must be contiguous within a slot: strides (any, {dense[1]}, {dense[2]}, 1), got {data.stride()}"
        )
    if slots > 1 and data.stride(0) < slot_size:
        raise ValueError(f"{name} has overlapping slots: slot stride {data.stride(0)}, slot size {slot_size}")


def _check_rounding(data: Tensor, rounding: str, rounds: int, seed: Tensor | None, stream: int) -> None:
    if rounding not in ROUNDINGS:
        raise ValueError(f"rounding must be one of {', '.join(ROUNDINGS)}, got {rounding!r}")
    fmt = FORMATS[data.dtype]
    if rounding not in fmt.roundings:
        raise ValueError(f"rounding={rounding!r} is not for {fmt.name}, which has {', '.join(fmt.roundings)}")
    check_int("rounds", rounds, 1, 16)
    check_int("stream", stream, 0, (1 << 32) - 1)
    if seed is None:
        if rounding != "nearest":
            raise ValueError(f"rounding={rounding!r} needs seed: (slots,) int64, one per slot")
        return
    check_tensor("seed", seed, ("slots",), (data.shape[0],), dtypes=(torch.int64,), device=data.device)
    if not seed.is_contiguous():
        raise ValueError(f"seed must be contiguous, got stride {seed.stride(0)}")
    if rounding == "stochastic_hw":
        _check_hardware_rounding(data.device)


def _check_hardware_rounding(device: torch.device) -> None:
    if device.type != "cuda" or torch.version.cuda is None:
        raise ValueError(
            f"rounding='stochastic_hw' needs an NVIDIA GPU of compute capability 10.0 or 10.3, got {device}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability not in HARDWARE_ROUNDING:
        got = ".".join(map(str, capability))
        raise ValueError(
            f"rounding='stochastic_hw' needs compute capability 10.0 or 10.3, {device} has {got}; use 'stochastic'"
        )
