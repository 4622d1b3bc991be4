"""Mixers of Mamba-2: Mamba-2 itself, Bamba, Nemotron-H, Falcon-H1, Granite-MoE-Hybrid and Zamba2."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.integrations.transformers.mixers.parameters import decay, derived
from flashstate.integrations.transformers.mixers.rms import rms
from flashstate.integrations.transformers.mixers.tokens import check_silu, masked
from flashstate.ops.mamba2_fold import mamba2_fold
from flashstate.pool.pool import StatePool
from flashstate.state.ring import Ring
from flashstate.state.state import State

UNLIMITED = (0.0, math.inf)  # a limit of time steps that clamps nothing


class Mamba2:
    """Kind of the mixers that have one decay per head and read everything from one projection."""

    def sizes(self, mixer: Any) -> Sizes:
        check_silu(mixer)
        return Sizes(mixer.conv_dim, mixer.conv_kernel_size, (mixer.num_heads, mixer.head_dim, mixer.ssm_state_size))

    def view(self, recurrent: Tensor) -> Tensor:
        return recurrent

    def forward(self, mixer: Any, hidden: Tensor, memory: Memory, mask: Tensor | None, prompt: bool) -> Tensor:
        A = derived(mixer, decay, mixer.A_log)  # here: `select` reads it before a kernel in front of it has ended
        headed, grouped = (mixer.num_heads, mixer.head_dim), (mixer.n_groups, mixer.ssm_state_size)
        inner, outer = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
        z, xBC, dt = project(mixer, masked(hidden, mask)).split([inner, mixer.conv_dim, mixer.num_heads], dim=-1)
        xBC = masked(memory.convolve(xBC, mixer.conv1d.weight, mixer.conv1d.bias, "silu"), mask)
        x, B, C = xBC.split([inner, outer, outer], dim=-1)
        y = memory.select(
            x.unflatten(-1, headed), dt, A, B.unflatten(-1, grouped), C.unflatten(-1, grouped),
            D=mixer.D, z=None if norms_first(mixer) else z.unflatten(-1, headed),
            dt_bias=mixer.dt_bias, dt_limit=limit(mixer) if prompt else None,
        )  # fmt: skip
        return mixer.out_proj(normalised(mixer, y.flatten(-2), z).to(hidden.dtype))

    def pool(self, mixer: Any, dtype: torch.dtype, **given: Any) -> StatePool:
        return StatePool.mamba2(
            heads=mixer.num_heads, rows=mixer.head_dim, cols=mixer.ssm_state_size, groups=mixer.n_groups, dtype=dtype,
            **given,
        )  # fmt: skip

    def fold(self, mixer: Any, state: State, ring: Ring, slots: Tensor) -> None:
        mamba2_fold(state, ring, derived(mixer, decay, mixer.A_log), slots=slots)


def project(mixer: Any, hidden: Tensor) -> Tensor:
    """The mixer's projection of its tokens; Falcon-H1 multiplies what goes into it and what comes out."""
    if not hasattr(mixer, "mup_vector"):
        return mixer.in_proj(hidden)
    return mixer.in_proj(hidden * mixer.ssm_in_multiplier) * mixer.mup_vector


def limit(mixer: Any) -> tuple[float, float] | None:
    """Where the mixer clamps time steps of a prompt; None: nowhere."""
    low, high = mixer.time_step_limit
    return None if (low, high) == UNLIMITED else (low, high)


def has_norm(mixer: Any) -> bool:
    """Whether the mixer normalises its outputs, which Falcon-H1 may not."""
    return getattr(mixer, "mamba_rms_norm", True)


def norms_first(mixer: Any) -> bool:
    """Whether outputs are normalised before they are gated, which only Falcon-H1 may do."""
    return has_norm(mixer) and getattr(mixer.norm, "norm_before_gate", False)


def normalised(mixer: Any, y: Tensor, z: Tensor) -> Tensor:
    """Outputs behind the mixer's norm: they are gated by z already, or here, after it."""
    if not has_norm(mixer):
        return y
    norm, groups = mixer.norm, norm_groups(mixer.norm)
    parts = groups, y.shape[-1] // groups
    weight = norm.weight if groups == 1 else norm.weight.view(parts)
    gate = z.unflatten(-1, parts) if norms_first(mixer) else None
    return rms(y.unflatten(-1, parts), weight, norm.variance_epsilon, gate).flatten(-2)


def norm_groups(norm: Any) -> int:
    """Into how many groups of channels, each normalised by itself, a norm divides them."""
    if hasattr(norm, "n_groups"):
        return norm.n_groups
    channels = norm.weight.shape[0]
    return channels // getattr(norm, "group_size", channels)  # before 5.23 some classes have no such name


MAMBA2 = Mamba2()
