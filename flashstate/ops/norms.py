"""rms_norm: the norms around mixers as one launch each, for CUDA graphs of decode steps."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flashstate.launch import uses_kernels
from flashstate.launch.config import next_power_of_2
from flashstate.launch.start import Launch, check_programs, kernel_in, start
from flashstate.reference import norms as reference

ELEMENTS_OF_A_WARP = 512  # that are summed; not tuned


@torch.no_grad()
def rms_norm(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None, *, silu: bool = True) -> Tensor:
    """The norm of every head of every row, (rows, heads, n), in float32, rounded once to the dtype of x.

    x: (rows, heads, n) float32, bfloat16 or float16, any strides but that of the last axis, which is 1.
    weight: (n,), or (heads, n), contiguous.
    gate: as x; outputs are multiplied with silu(gate), or without `silu` with sigmoid(gate).

    It takes what the caller has checked. The host works longer for it than for the norm of torch, and the GPU a third
    as long on few rows: it is for graphs.
    """
    if not uses_kernels(x.device):
        return reference.rms_norm(x, weight, eps, gate, silu=silu)
    rows, heads, n = x.shape
    check_programs("x", rows * heads, f"{rows} rows of {heads} heads")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gate_strides = (0, 0) if gate is None else gate.stride()[:2]
    block = next_power_of_2(n)
    values = {
        "x_ptr": x, "weight_ptr": weight, "gate_ptr": gate, "out_ptr": out, "x_row": x.stride(0), "x_head": x.stride(1),
        "gate_row": gate_strides[0], "gate_head": gate_strides[1], "eps": eps, "HEADS": heads, "N": n, "BLOCK_N": block,
        "WEIGHT_PER_HEAD": weight.dim() == 2, "SILU": silu,
        "ALIGNMENT": math.gcd(*(alignment(tensor) for tensor in (x, weight, out, gate) if tensor is not None)),
    }  # fmt: skip
    warps = min(max(block // ELEMENTS_OF_A_WARP, 1), 8)
    start(Launch(kernel_in("norms", "rms_norm"), (rows * heads,), x.device, values, num_warps=warps))
    return out


def alignment(tensor: Tensor) -> int:
    """Bytes, up to 16, that all rows and heads of a tensor begin at multiples of."""
    steps = (tensor.shape[-1], *tensor.stride()[:-1])
    return math.gcd(16, tensor.data_ptr(), *(step * tensor.element_size() for step in steps))
