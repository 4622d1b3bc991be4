"""Mixers of the gated delta rule: Gated DeltaNet (Qwen3-Next, Qwen3.5, Olmo-Hybrid) and KDA (Kimi-Linear,
Bailing-Hybrid, GLM-5-Next)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import silu

from flashstate.integrations.transformers.memory import Memory, Sizes
from flashstate.integrations.transformers.mixers.parameters import derived
from flashstate.integrations.transformers.mixers.rms import rms
from flashstate.integrations.transformers.mixers.tokens import check_silu, masked
from flashstate.ops.gated_delta_fold import gated_delta_fold
from flashstate.pool.pool import StatePool
from flashstate.state.ring import DeltaRing
from flashstate.state.state import State


class Projected(NamedTuple):
    """What a mixer projects its tokens to."""

    qkv: Tensor  # (batch, T, channels), before the convolution
    z: Tensor  # (batch, T, ...), which gates the output
    a: Tensor  # (batch, T, HV), or per channel (batch, T, HV, K)
    b: Tensor  # (batch, T, HV)
    b_logit: bool = True  # whether beta is the sigmoid of b, and not b itself


class Delta(ABC):
    """What Gated DeltaNet and KDA share: everything but projections, gates and the shape of a state.

    activation: of z, which outputs are multiplied with behind their norm.
    per_channel: whether every column of a state has a decay of its own.
    """

    activation: Callable[[Tensor], Tensor]
    per_channel: bool

    @abstractmethod
    def heads(self, mixer: Any) -> tuple[int, int, int]:
        """HV, V and K of the mixer's states."""

    @abstractmethod
    def gates(self, mixer: Any) -> dict[str, Any]:
        """A_log and dt_bias, from which decays are made; none where projections are decays already."""

    @abstractmethod
    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        """What the mixer projects its tokens to."""

    def sizes(self, mixer: Any) -> Sizes:
        check_silu(mixer)
        return Sizes(mixer.conv_dim, mixer.conv_kernel_size, self.heads(mixer))

    def view(self, recurrent: Tensor) -> Tensor:
        return recurrent.mT

    def forward(self, mixer: Any, hidden: Tensor, memory: Memory, mask: Tensor | None, prompt: bool) -> Tensor:
        heads, rows, columns = self.heads(mixer)
        qkv, z, a, b, b_logit = self.project(mixer, masked(hidden, mask))
        keys = (mixer.conv_dim - heads * rows) // 2
        qkv = memory.convolve(qkv, mixer.conv1d.weight, mixer.conv1d.bias, "silu")
        q, k, v = qkv.split([keys, keys, heads * rows], dim=-1)
        q, k, v = q.unflatten(-1, (-1, columns)), k.unflatten(-1, (-1, columns)), v.unflatten(-1, (heads, rows))
        o = memory.correct(q, k, v, a, b, b_logit=b_logit, **self.gates(mixer))
        norm = one_of(mixer, "norm", "o_norm")
        z = z.unflatten(-1, (-1, rows))
        o = rms(o.view(z.shape), norm.weight, norm.variance_epsilon, z, self.activation)
        return one_of(mixer, "out_proj", "o_proj")(o.flatten(2))

    def pool(self, mixer: Any, dtype: torch.dtype, **given: Any) -> StatePool:
        heads, rows, columns = self.heads(mixer)
        finely = dtype in (torch.float32, torch.int16)
        return StatePool.gated_delta(
            heads=heads, value_dim=rows, key_dim=columns, key_heads=(mixer.conv_dim - heads * rows) // (2 * columns),
            per_channel=self.per_channel, dtype=dtype,
            u_dtype=torch.float32 if finely else torch.float16,  # no less than states have
            **given,
        )  # fmt: skip

    def fold(self, mixer: Any, state: State, ring: DeltaRing, slots: Tensor) -> None:
        gated_delta_fold(state, ring, slots=slots, **self.gates(mixer))


class GatedDelta(Delta):
    """Kind of Gated DeltaNet, which has one decay per head."""

    activation, per_channel = staticmethod(silu), False

    def heads(self, mixer: Any) -> tuple[int, int, int]:
        return mixer.num_v_heads, mixer.head_v_dim, mixer.head_k_dim

    def gates(self, mixer: Any) -> dict[str, Any]:
        return {"A_log": mixer.A_log, "dt_bias": mixer.dt_bias}

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        if hasattr(mixer, "in_proj_qkvz"):
            return Projected(*interleaved(mixer, hidden))
        if hasattr(mixer, "in_proj_qkv"):
            qkv, z = mixer.in_proj_qkv(hidden), mixer.in_proj_z(hidden)
            return Projected(qkv, z, mixer.in_proj_a(hidden), mixer.in_proj_b(hidden))
        qkv, z, a, b = joined(mixer, hidden), mixer.g_proj(hidden), mixer.a_proj(hidden), mixer.b_proj(hidden)
        if mixer.allow_neg_eigval:
            return Projected(qkv, z, a, 2 * b.sigmoid(), b_logit=False)
        return Projected(qkv, z, a, b)


class Kda(Delta):
    """Kind of KDA, which has one decay per head and column of the state."""

    activation, per_channel = staticmethod(torch.sigmoid), True

    def heads(self, mixer: Any) -> tuple[int, int, int]:
        return mixer.num_heads, mixer.head_dim, mixer.head_dim

    def gates(self, mixer: Any) -> dict[str, Any]:
        forget = mixer.forget_gate
        if lower_bound(forget) is not None:
            return {}
        return {"A_log": forget.A_log.flatten(), "dt_bias": forget.dt_bias.view(mixer.num_heads, mixer.head_dim)}

    def project(self, mixer: Any, hidden: Tensor) -> Projected:
        forget = mixer.forget_gate
        z, b = low_rank(mixer, "g", hidden), mixer.b_proj(hidden)
        a, bound = low_rank(forget, "f", hidden).unflatten(-1, (mixer.num_heads, mixer.head_dim)), lower_bound(forget)
        if bound is not None:
            a = bound * torch.sigmoid(scaled(forget, a))
        return Projected(joined(mixer, hidden), z, a, b)


def one_of(mixer: Any, *names: str) -> Any:
    """The submodule that has one of these names."""
    return next(getattr(mixer, name) for name in names if hasattr(mixer, name))


def joined(mixer: Any, hidden: Tensor) -> Tensor:
    """Three projections, (batch, T, channels), of which one convolution is fewer kernels than three are."""
    return torch.cat([mixer.q_proj(hidden), mixer.k_proj(hidden), mixer.v_proj(hidden)], dim=-1)


def interleaved(mixer: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, z, a and b of a mixer whose projections have them for one key head after the other."""
    heads, keys, values = mixer.num_k_heads, mixer.head_k_dim, mixer.value_dim // mixer.num_k_heads
    qkvz = mixer.in_proj_qkvz(hidden)
    z = qkvz.unflatten(-1, (heads, -1))[..., -values:]  # (batch, T, H, HV / H * V), not copied
    channels = qkv_channels if torch.compiler.is_compiling() else kept_channels
    qkv = qkvz.index_select(-1, channels(heads, keys, values, qkvz.device))  # one kernel; a cat of q, k and v is four
    ba = mixer.in_proj_ba(hidden).unflatten(-1, (heads, 2, -1))
    b, a = ba.transpose(-3, -2).flatten(-2).unbind(-2)  # (batch, T, HV) each
    return qkv, z, a, b


def qkv_channels(heads: int, keys: int, values: int, device: torch.device) -> Tensor:
    """Which channels of an interleaved projection are q of all heads, then k, then v; a head of the projection has
    `keys` of q and of k, and `values` of v and of z."""
    channels = torch.arange(heads * 2 * (keys + values), device=device).view(heads, -1)
    q, k, v, _ = channels.split([keys, keys, values, values], dim=-1)
    return torch.cat([q.flatten(), k.flatten(), v.flatten()])


@cache
def kept_channels(heads: int, keys: int, values: int, device: torch.device) -> Tensor:
    """The channels that `qkv_channels` gives, made once for projections of one shape on a device."""
    with torch.inference_mode(False):
        return qkv_channels(heads, keys, values, device)


def low_rank(module: Any, letter: str, hidden: Tensor) -> Tensor:
    """A projection that some models have whole, and others as the product of two."""
    if hasattr(module, f"{letter}_proj"):
        return getattr(module, f"{letter}_proj")(hidden)
    return getattr(module, f"{letter}_b_proj")(getattr(module, f"{letter}_a_proj")(hidden))


def lower_bound(forget: Any) -> float | None:
    """What logarithms of decays stay above; None: they are those of Gated DeltaNet."""
    if hasattr(forget, "safe_gate"):
        return forget.lower_bound if forget.safe_gate else None
    return getattr(forget, "safe_gate_lower_bound", None)


def scaled(forget: Any, a: Tensor) -> Tensor:
    """exp(A_log) * (a + dt_bias) in float32, (batch, T, HV, K)."""
    return torch.addcmul(derived(forget, shift, forget.A_log, forget.dt_bias), derived(forget, rate, forget.A_log), a)


def rate(A_log: Tensor) -> Tensor:
    """exp(A_log), (HV, 1)."""
    return torch.exp(A_log.float())[:, None]


def shift(A_log: Tensor, dt_bias: Tensor) -> Tensor:
    """exp(A_log) * dt_bias, (HV, K)."""
    return rate(A_log) * dt_bias.float().view(len(A_log), -1)


GATED_DELTA, KDA = GatedDelta(), Kda()
