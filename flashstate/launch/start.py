"""Starting a kernel: the one place from which launches leave."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# Contraction would save an instruction per element in a sum, but what it contracts differs between compiled variants: a
# token of a tree would not give the bytes it gives in a chain. FMAs are written where they are meant.
FP_FUSION = False


def start(
    kernel: Any,
    grid: tuple[int, ...],
    device: torch.device,
    arguments: Sequence[Any],
    constants: Mapping[str, Any],
    num_warps: int,
) -> Any:
    """Launch `kernel` on the current stream of a device; returns what Triton compiled for it."""
    with torch.cuda.device(device) if device.type == "cuda" else torch.no_grad():
        return kernel[grid](*arguments, **constants, num_warps=num_warps, enable_fp_fusion=FP_FUSION)
