"""What pools keep per request: allocated for all layers at once, and its slots, by their numbers, filled and copied."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flashstate.errors import INDEX_DTYPES, LARGEST_INT32, check_dtype, check_int, check_tensor
from flashstate.launch import uses_kernels
from flashstate.launch.arguments import as_bytes
from flashstate.ops.conv1d import LARGEST_WIDTH, SMALLEST_WIDTH
from flashstate.state.formats import FORMATS
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.ring import LARGEST_WINDOW, Ring
from flashstate.state.state import State

SlotNumbers = int | Sequence[int] | Tensor
Memory = list[tuple[Tensor, int]]  # tensors with the slots on their first axis, and what fills them in a clean slot


@dataclass(frozen=True)
class Allocator:
    """Makes tensors of all layers, for all slots, and notes them as memory."""

    layers: int
    slots: int
    device: torch.device | str | None
    memory: Memory = field(default_factory=list)

    @torch.inference_mode(False)  # else only inference mode could change them
    def __call__(self, *shape: int, dtype: torch.dtype, clean: int = 0, layers: int | None = None) -> Tensor:
        """(layers, slots, ...), all 0, or all 1 if that is what a clean slot has."""
        filled = torch.ones if clean else torch.zeros
        tensor = filled(layers or self.layers, self.slots, *shape, dtype=dtype, device=self.device)
        self.memory.append((as_bytes(tensor).transpose(0, 1), clean))
        return tensor

    @torch.inference_mode(False)  # else only inference mode could change them
    def states(self, sizes: dict[str, int], dtype: torch.dtype, rounding: str, rounds: int, stream: int) -> list[State]:
        """States of zeros, one per layer, which share seeds if they need some. `sizes`: of a slot."""
        for name, size in {"slots": self.slots, "layers": self.layers, **sizes}.items():
            check_int(name, size, 1, LARGEST_INT32)
        check_int("stream", stream, 0, (1 << 32) - self.layers)
        check_dtype("dtype", dtype, tuple(FORMATS))
        heads, rows, cols = sizes.values()
        data = self(heads, rows, cols, dtype=dtype)
        uses_kernels(data.device)  # refuses devices that no op runs on
        scale = self(heads, rows, dtype=torch.float32, clean=1) if FORMATS[dtype].scaled else [None] * self.layers
        seed = None if rounding == "nearest" else torch.zeros(self.slots, dtype=torch.int64, device=self.device)
        return [
            State(data[i], scale[i], rounding=rounding, rounds=rounds, seed=seed, stream=stream + i)
            for i in range(self.layers)
        ]

    def mamba3(self, states: Sequence[State], rank: int, angles: int, dtype: torch.dtype) -> list[Mamba3State]:
        """Layers of Mamba-3 with these states, and with k, v and, unless there are none, angles of zeros."""
        _, heads, rows, cols = states[0].data.shape
        check_int("rank", rank, 1, LARGEST_INT32)
        check_int("angles", angles, 0, cols // 2)
        check_dtype("kv_dtype", dtype)
        kept = [self(rank, heads, cols, dtype=dtype), self(heads, rows, dtype=dtype)]
        if angles:
            kept.append(self(heads, angles, dtype=torch.float32))
        return [Mamba3State(*of_layer) for of_layer in zip(states, *kept, strict=True)]

    def windows(self, channels: int, width: int, drafts: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Windows of zeros, (slots, channels, length) each, with room to roll back so many tokens; or none."""
        check_int("conv_channels", channels, 0, LARGEST_INT32)
        check_int("conv_width", width, SMALLEST_WIDTH, LARGEST_WIDTH)
        check_int("drafts", drafts, 0, LARGEST_INT32)
        if drafts and not channels:
            raise ValueError(f"drafts are for windows: conv_channels must be given too, got drafts={drafts}")
        check_dtype("conv_dtype", dtype)
        return self(width - 1 + drafts, channels, dtype=dtype).transpose(2, 3).unbind() if channels else ()

    @torch.inference_mode(False)  # else only inference mode could change them
    def rings(self, states: Sequence[State], window: int, tokens: int, groups: int, dtype: torch.dtype) -> list[Ring]:
        """Empty rings for layers of these states, which share cursors; none without a window."""
        check_int("window", window, 0, LARGEST_WINDOW)
        if window == 0 and tokens != 1:
            raise ValueError(f"tokens are for rings: window must be given too, got tokens={tokens}")
        if window == 0:
            return []
        _, heads, rows, cols = states[0].data.shape
        check_int("tokens", tokens, 1, window)
        check_int("groups", groups, 1, heads)
        if heads % groups:
            raise ValueError(f"groups must divide the {heads} heads, got {groups}")
        check_dtype("ring_dtype", dtype)
        length = window + tokens
        x, B = self(heads, length, rows, dtype=dtype), self(groups, length, cols, dtype=dtype)
        dt = self(heads, length, dtype=torch.float32)
        start, count = (self(dtype=torch.int32, layers=1)[0] for _ in range(2))
        return [Ring(*of_layer, start, count, window) for of_layer in zip(x, B, dt, strict=True)]


def copy_slots(tensor: Tensor, sources: list[int], targets: list[int]) -> None:
    """Copy slots of a tensor that has them on its first axis; those that are also overwritten are read before."""
    put(tensor, targets, [tensor[slot].clone() if slot in targets else tensor[slot] for slot in sources])


def put(tensor: Tensor, slots: list[int], values: Sequence[Tensor]) -> None:
    """One launch per slot. Where deterministic algorithms are asked for, indexed assignment copies the whole of a
    strided tensor, and in some versions of torch it waits for the device."""
    for slot, value in zip(slots, values, strict=True):
        tensor[slot].copy_(value)


def as_numbers(name: str, numbers: SlotNumbers) -> list[int]:
    """What methods accept as numbers of slots, as a list; a tensor on a GPU is waited for."""
    if isinstance(numbers, Tensor):
        numbers = numbers[None] if numbers.dim() == 0 else numbers  # what a loop over acquired slots gives
        check_tensor(name, numbers, ("slots",), (None,), dtypes=INDEX_DTYPES)
        return numbers.tolist()
    if isinstance(numbers, Sequence) and not isinstance(numbers, (str, bytes)):
        return list(numbers)
    if isinstance(numbers, int):
        return [numbers]
    raise TypeError(f"{name} must be an int, a sequence of ints or an integer tensor, got {type(numbers).__name__}")
