"""ops/norms.py: the norm that CUDA graphs of decode steps launch, in the interpreter, and compiled."""

import pytest
import torch
from asking import spilled_bytes
from compiling import collected, compile_launch
from torch import Tensor

from flashstate.ops.norms import rms_norm
from flashstate.reference import norms as reference
from flashstate.testing import interpreted


def inputs(rows: int, heads: int, n: int, per_head: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x and a gate, which are parts of projections, and a weight."""
    torch.manual_seed(0)
    projected, gates = torch.randn(rows, heads, 3 * n).to(dtype), torch.randn(rows, heads, 2 * n).to(dtype)
    weight = torch.randn(heads, n) if per_head else torch.randn(n)
    return projected[..., :n], gates[..., n:], weight.to(dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("shape", "per_head", "gated", "silu"),  # the shape: rows, heads, n
    [((3, 1, 20), False, True, True), ((2, 4, 16), True, True, False), ((5, 2, 33), True, False, True)],
)
def test_the_kernel_gives_what_the_reference_gives(
    shape: tuple[int, int, int], per_head: bool, gated: bool, silu: bool
) -> None:
    x, z, weight = inputs(*shape, per_head, torch.float32)
    gate = z if gated else None
    with interpreted():
        y = rms_norm(x, weight, 1e-5, gate, silu=silu)
    precise = [None if tensor is None else tensor.double() for tensor in (x, weight, gate)]
    truth = in_float64(precise[0], precise[1], 1e-5, precise[2], silu)
    ours, theirs = ((found - truth).abs().max() for found in (y, reference.rms_norm(x, weight, 1e-5, gate, silu=silu)))
    resolution = torch.finfo(torch.float32).eps * truth.abs().max()
    assert theirs <= 4 * resolution
    assert ours <= 4 * theirs + resolution


def in_float64(x: Tensor, weight: Tensor, eps: float, gate: Tensor | None, silu: bool) -> Tensor:
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    if gate is None:
        return y
    return y * torch.sigmoid(gate) * (gate if silu else 1)


@pytest.mark.compiled
@pytest.mark.parametrize(("architecture", "shape"), [(90, (1, 1, 5120)), ("gfx942", (4, 32, 128))])
def test_the_kernel_compiles_without_spills(architecture: int | str, shape: tuple[int, int, int]) -> None:
    x, gate, weight = inputs(*shape, False, torch.bfloat16)
    with collected(architecture) as launches:
        rms_norm(x, weight, 1e-5, gate)
    (launch,) = launches
    assert spilled_bytes(compile_launch(launch, architecture)) == 0
