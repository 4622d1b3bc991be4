"""Functions that several kernels need: softplus, sigmoid, silu, a choice between tuples."""

import triton
import triton.language as tl


@triton.jit
def softplus(x):
    """log(1 + exp(x)), the identity above 20. Where exp(x) < 1 the bits that 1 + exp(x) lost are added back."""
    e = tl.exp(x)
    w = 1.0 + e
    log1p = tl.log(w) + tl.where(e < 1.0, e - (w - 1.0), 0.0)
    return tl.where(x > 20.0, x, log1p)


@triton.jit
def sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit
def either(choose_first, first, second):
    """The values of one tuple or of the other."""
    chosen = ()
    for k in tl.static_range(len(first)):
        chosen = chosen + (tl.where(choose_first, first[k], second[k]),)
    return chosen
