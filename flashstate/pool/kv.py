"""The layers of a pool, and what those of Mamba-3 keep beside their states: k, v and angles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flashstate.errors import ACTIVATION_DTYPES, check_int, check_tensor, describe_shape, dtype_name
from flashstate.state.mamba3 import Mamba3State
from flashstate.state.state import State

Layer = State | Mamba3State
if TYPE_CHECKING:
    from typing_extensions import TypeVar  # typing has defaults from Python 3.13 on

    LayerT = TypeVar("LayerT", bound=Layer, default=State)
else:
    from typing import TypeVar

    LayerT = TypeVar("LayerT")

AXES = {"k": ("slots", "R", "H", "N"), "v": ("slots", "H", "D"), "angle": ("slots", "H", "S")}
TURN = 2 * math.pi


def ssm_of(layer: Layer) -> State:
    """The recurrent state of a layer."""
    return layer.ssm if isinstance(layer, Mamba3State) else layer


def kv_of(layer: Layer) -> dict[str, Tensor]:
    """What a layer keeps beside that, by name; nothing if it is not of Mamba-3."""
    if not isinstance(layer, Mamba3State):
        return {}
    kept = {"k": layer.k, "v": layer.v}
    return kept if layer.angle is None else {**kept, "angle": layer.angle}


@torch.inference_mode(False)  # else only inference mode could change them
def allocate_kv(states: Sequence[State], rank: int, angles: int, dtype: torch.dtype) -> list[Tensor]:
    """k, v and, unless there are none, angles for layers of these states: zeros, (layers, slots, ...) each."""
    slots, heads, rows, cols = states[0].data.shape
    check_int("rank", rank, 1, (1 << 31) - 1)
    check_int("angles", angles, 0, cols // 2)
    if dtype not in ACTIVATION_DTYPES:
        got = dtype_name(dtype) if isinstance(dtype, torch.dtype) else repr(dtype)
        raise TypeError(f"kv_dtype must be {' or '.join(map(dtype_name, ACTIVATION_DTYPES))}, got {got}")
    shapes = [((rank, heads, cols), dtype), ((heads, rows), dtype), ((heads, angles), torch.float32)]
    return [
        torch.zeros(len(states), slots, *shape, dtype=kind, device=states[0].data.device)
        for shape, kind in shapes[: 3 if angles else 2]
    ]


def as_kept(layer: Mamba3State, count: int, k: Tensor, v: Tensor, angle: Tensor | None) -> list[tuple[Tensor, Tensor]]:
    """Tensors of a layer, and what so many slots of each will hold: copies in its dtype. Raises unless all fit."""
    kept = kv_of(layer)
    given = {"k": k, "v": v} if angle is None else {"k": k, "v": v, "angle": angle}
    if angle is not None and layer.angle is None:
        raise ValueError("angle is not for a layer without angles")
    if angle is None and layer.angle is not None:
        shape = describe_shape(AXES["angle"], (count, *layer.angle.shape[1:]))
        raise ValueError(f"a layer with angles needs angle: {shape} float32")
    for name, tensor in kept.items():
        dtypes = (torch.float32,) if name == "angle" else ACTIVATION_DTYPES
        sizes = (count, *tensor.shape[1:])
        check_tensor(name, given[name], AXES[name], sizes, dtypes=dtypes, device=tensor.device)
    if angle is not None:
        given["angle"] = _wrapped(angle)
    return [(tensor, given[name].to(tensor.dtype, copy=True)) for name, tensor in kept.items()]


def _wrapped(angle: Tensor) -> Tensor:
    """Angles in [0, 2π); what rounds up to 2π in float32 is 0."""
    within = torch.remainder(angle.double(), TURN).float()
    return within.masked_fill(within >= TURN, 0.0)
