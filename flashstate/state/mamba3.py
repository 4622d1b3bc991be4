"""Mamba3State: the four states of one Mamba-3 layer; Rotary: what turns its B and C."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from flashstate.errors import check_choice, check_tensor, counted
from flashstate.state.signature import Describes, describe_aligned, signature_of, unless_known
from flashstate.state.slots import Slots
from flashstate.state.state import State, as_state, check_slots_of, refuse_transposed, represented

PAIRINGS = ("interleaved", "halved")


@dataclass(frozen=True, eq=False, init=False)
class Mamba3State(Describes):
    """What one layer of Mamba-3 keeps for all slots. `mamba3_step` updates the tensors in place; this object only
    describes them.

    ssm: State, or a tensor (slots, H, D, N), in any format.
    k: (slots, R, H, N) float32, bfloat16 or float16: B of the token before, with its bias and turned.
    v: (slots, H, D) float32, bfloat16 or float16: x of the token before.
    angle: (slots, H, S) float32, in [0, 2π): what B and C are turned by; None for calls without rotary.

    The slot axis of each may have any stride; a slot itself is contiguous, but for heads of ssm, which may be apart as
    in any State. The tensors stay what they are: their dtypes, shapes and strides must not change in place.
    """

    written: ClassVar = ("k", "v", "angle")  # by ops, beside those of ssm

    ssm: State
    k: Tensor
    v: Tensor
    angle: Tensor | None = None

    def __init__(self, ssm: State | Tensor, k: Tensor, v: Tensor, angle: Tensor | None = None) -> None:
        for name, value in (("ssm", as_state(ssm, "ssm")), ("k", k), ("v", v), ("angle", angle)):
            object.__setattr__(self, name, value)
        self._check_tensors()

    @unless_known
    def _check_tensors(self) -> None:
        k, v, angle = self.k, self.v, self.angle
        refuse_transposed("ssm", self.ssm)
        slots, heads, rows, cols = self.ssm.data.shape
        device = self.ssm.data.device
        check_tensor("k", k, ("slots", "R", "H", "N"), (slots, None, heads, cols), device=device)
        check_tensor("v", v, ("slots", "H", "D"), (slots, heads, rows), device=device)
        if angle is not None:
            axes, sizes = ("slots", "H", "S"), (slots, heads, None)
            check_tensor("angle", angle, axes, sizes, dtypes=(torch.float32,), device=device)
            if not 1 <= angle.shape[2] <= cols // 2:
                raise ValueError(f"angle must have 1 to N // 2 = {cols // 2} angles per head, got {angle.shape[2]}")
        if k.shape[1] == 0:
            raise ValueError(f"k must have a rank of 1 or more, got shape {tuple(k.shape)}")
        for name, tensor in (("k", k), ("v", v), ("angle", angle)):
            if tensor is not None:
                check_slots_of(name, tensor, tensor.shape[1:])

    @cached_property
    def signature(self) -> int:
        """Stands for all that a launch depends on but the addresses and the stream."""
        angle = None if self.angle is None else describe_aligned(self.angle)
        return signature_of("mamba3", self.ssm.signature, describe_aligned(self.k), describe_aligned(self.v), angle)

    def __repr__(self) -> str:
        return represented(self, self.ssm.data)

    @property
    def layout(self) -> str:
        """Sizes of a slot and the format of its recurrent state, in words."""
        angles = "" if self.angle is None else f", {counted(self.angle.shape[2], 'angle')}"
        return f"{self.ssm.layout}, rank {self.rank}{angles}"

    @property
    def rank(self) -> int:
        return self.k.shape[1]

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of memory one slot takes: all four states, and its scales and seed, where it has them."""
        others = (tensor for tensor in (self.k, self.v, self.angle) if tensor is not None)
        return self.ssm.bytes_per_slot + sum(tensor[0].nbytes for tensor in others)

    def advance(self, slots: Slots | Tensor | None = None) -> None:
        """Move the seeds of the read slots on, as State.advance does."""
        self.ssm.advance(slots)


@dataclass(frozen=True, eq=False)
class Rotary(Describes):
    """What `mamba3_step` does to B and C before it uses them: adds a bias, and turns pairs of their columns by the
    angles of the state, which move on by tanh(angle) * dt * π.

    angle: (..., S), the same for all heads, or (..., H, S).
    bias_B, bias_C: (R, H, N), or None.
    pairing: which columns are turned together: "interleaved", 2i with 2i + 1, or "halved", i with i + N / 2; None: the
        first for rank 1, the second for others. Pairs from S on are not turned.
    """

    angle: Tensor
    _: KW_ONLY
    bias_B: Tensor | None = None
    bias_C: Tensor | None = None
    pairing: str | None = None

    def __post_init__(self) -> None:
        if self.pairing is not None:
            check_choice("pairing", self.pairing, PAIRINGS)

    def pairing_of(self, rank: int) -> str:
        """Which columns are turned together, for states of this rank."""
        return self.pairing or PAIRINGS[rank > 1]
