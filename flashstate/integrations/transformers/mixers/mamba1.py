"""Mixers of Mamba-1: Mamba itself, Falcon-Mamba, Jamba and Zamba."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.integrations.transformers.mixers.parameters import decay, derived
from flashstate.integrations.transformers.mixers.tokens import check_silu, masked


class Mamba1:
    """Kind of the mixers that have a decay per element and a time step per channel.

    Zamba's have heads, each with projections of its own. The others have one head of all channels.
    """

    def sizes(self, mixer: Any) -> Sizes:
        check_silu(mixer)
        heads, rows = heads_of(mixer)
        return Sizes(mixer.intermediate_size, mixer.conv_kernel_size, (heads, rows, mixer.ssm_state_size))

    def view(self, recurrent: Tensor) -> Tensor:
        return recurrent.unsqueeze(1) if recurrent.dim() == 3 else recurrent

    def forward(self, mixer: Any, hidden: Tensor, memory: Memory, mask: Tensor | None, prompt: bool) -> Tensor:
        heads = heads_of(mixer)
        A = derived(mixer, decay, mixer.A_log)  # here: `select` reads it before a kernel in front of it has ended
        x, z = halves(mixer, mixer.in_proj(masked(hidden, mask)))
        x = masked(memory.convolve(x, mixer.conv1d.weight, mixer.conv1d.bias, "silu"), mask).unflatten(-1, heads)
        sizes = [mixer.time_step_rank, mixer.ssm_state_size, mixer.ssm_state_size]
        dt, B, C = normalised(mixer, *select_parameters(mixer, x).split(sizes, dim=-1))
        dt, bias = time_steps(mixer, dt)
        y = memory.select(
            x, dt, A.view(*heads, -1), B, C, D=mixer.D.view(heads), z=z.unflatten(-1, heads),
            dt_bias=None if bias is None else bias.view(heads),
        )  # fmt: skip
        return mixer.out_proj(y.flatten(-2))


def heads_of(mixer: Any) -> tuple[int, int]:
    """How many heads the mixer has, and how many channels each."""
    heads = getattr(mixer, "n_mamba_heads", 1)
    return heads, mixer.intermediate_size // heads


def halves(mixer: Any, projected: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs of the convolution, and gates; Zamba's projection has them in turn."""
    if not hasattr(mixer, "n_mamba_heads"):
        x, z = projected.chunk(2, dim=-1)
        return x, z
    x, z = projected.unflatten(-1, (-1, 2)).unbind(-1)
    return x, z.contiguous()  # `select` wants channels side by side


def select_parameters(mixer: Any, x: Tensor) -> Tensor:
    """What time steps, B and C are taken from, (batch, T, heads, ...)."""
    if hasattr(mixer, "x_proj"):
        return mixer.x_proj(x)
    return per_head(x, mixer.x_proj_weight)


def normalised(mixer: Any, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What Falcon-Mamba, whose norms have no weights, and Jamba make of dt, B and C."""
    if not hasattr(mixer, "dt_layernorm"):
        return dt, B, C
    norms = mixer.dt_layernorm, mixer.b_layernorm, mixer.c_layernorm
    dt, B, C = (normed(norm, tokens) for norm, tokens in zip(norms, (dt, B, C), strict=True))
    return dt, B, C


def normed(norm: Any, tokens: Tensor) -> Tensor:
    """Tokens behind a norm of their last axis, with its weight if that is a parameter."""
    if hasattr(norm, "eps"):
        return rms_norm(tokens, tokens.shape[-1:], eps=norm.eps)
    return rms_norm(tokens, tokens.shape[-1:], norm.weight, norm.variance_epsilon)


def time_steps(mixer: Any, dt: Tensor) -> tuple[Tensor, Tensor | None]:
    """Time steps per channel, (batch, T, heads, rows), and the bias that they lack."""
    if not hasattr(mixer, "dt_proj"):
        return per_head(dt, mixer.dt_proj_weight), mixer.dt_proj_bias
    if hasattr(mixer.config, "_is_quantized"):  # its weight is no matrix
        return mixer.dt_proj(dt), None
    return linear(dt, mixer.dt_proj.weight), mixer.dt_proj.bias


def per_head(tokens: Tensor, weight: Tensor) -> Tensor:
    """Tokens (batch, T, heads, in) by weights (heads, out, in)."""
    return torch.einsum("bthi,hoi->btho", tokens, weight)


MAMBA1 = Mamba1()
