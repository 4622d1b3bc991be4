"""What SGLang's layers call: its state update, its convolution and its delta rules, over flashstate.compat.sglang."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashstate.compat import sglang as compat
from flashstate.compat.delta import check_absent
from flashstate.integrations.reports import failure
from flashstate.integrations.sglang import upstream

logger = logging.getLogger("flashstate.sglang")


@functools.cache
def say(message: str) -> None:
    """Log a message the first time that it is said."""
    logger.info(message)


def named(call: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, whose errors say in which call flashstate failed, and for which layer."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            number = upstream.layer_of(sys._getframe(1))
            layer = "a layer without a number" if number is None else f"layer {number}"
            raise failure(call, layer, error) from error

    return run


causal_conv1d_update = named("causal_conv1d_update", compat.causal_conv1d_update)


class StateUpdate:
    """selective_state_update of Mamba layers, with the rounding that the server was started with."""

    name = upstream.NAME

    def __init__(self, *, enable_stochastic_rounding: bool = False, cache_philox_rounds: int = 0) -> None:
        update = functools.partial(
            compat.selective_state_update, enable_stochastic_rounding=enable_stochastic_rounding,
            cache_philox_rounds=cache_philox_rounds,
        )  # fmt: skip
        self._update = named("selective_state_update", update)
        upstream.bind(causal_conv1d_update, upstream.CONV_OF_MAMBA)
        rounded = "stochastically but for those of drafts" if enable_stochastic_rounding else "to nearest"
        say(f"flashstate is active: Mamba states, rounded {rounded}, and convolutions")

    def __call__(self, *tensors: Tensor, **options: Any) -> None:
        """Step the states of a layer; the arguments are those of flashstate.compat.sglang.selective_state_update."""
        self._update(*tensors, **options)


class DeltaRule:
    """The kernel of GDN layers: packed decodes, decodes of rows with bounds, and verification of drafts and trees."""

    layers, per_channel = "GDN", False
    packed_rule = staticmethod(compat.fused_recurrent_gated_delta_rule_packed_decode)
    supports_packed_decode = True
    supports_strided_target_verify_qkv = True

    def __init__(self, modes: tuple[str, ...]) -> None:
        """modes: which of decode and verify this kernel is for."""
        for call in ("packed_decode", "decode", "target_verify"):
            setattr(self, call, named(f"{self.layers} {call}", getattr(self, call)))
        say(f"flashstate is active: {self.layers} {' and '.join(modes)}, and convolutions")

    def packed_decode(
        self, mixed_qkv: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor, scale: float,
        ssm_states: Tensor, cache_indices: Tensor, num_v_heads: int, head_v_dim: int, **others: Any,
    ) -> Tensor:  # fmt: skip
        """Step every row of a projection by its token; return outputs (1, batch, HV, V). others: None, all of them."""
        check_absent("there are neither rings nor bounds of gates", **others)
        out = mixed_qkv.new_empty(len(mixed_qkv), 1, num_v_heads, head_v_dim)
        b = b if b.dim() == 2 else b.reshape(len(mixed_qkv), num_v_heads)  # of KDA (1, batch, HV)
        self.packed_rule(
            mixed_qkv, a, b, A_log, dt_bias, scale, ssm_states, out, cache_indices, use_qk_l2norm_in_kernel=True
        )
        return out.transpose(0, 1)

    def decode(self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, **more: Any) -> Tensor:
        """Step every row by its tokens (1, tokens, heads, size), between bounds; return outputs like v."""
        return self._step(q, k, v, a, b, **more)

    def target_verify(
        self, A_log: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *,
        stable_rows: bool = False, **more: Any,
    ) -> Tensor:  # fmt: skip
        """Outputs of drafted tokens, whose states go to the buffer and not to the pool.

        stable_rows: rows of the buffer are those of requests; intermediate_state_indices name them either way.
        """
        return self._step(q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, disable_state_update=True, **more)

    def _step(
        self, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, *, A_log: Tensor, dt_bias: Tensor,
        ssm_states: Tensor, cache_indices: Tensor, query_start_loc: Tensor, **more: Any,
    ) -> Tensor:  # fmt: skip
        """Step rows between bounds, in as many of these slots as there are rows; padded batches have more."""
        return compat.fused_sigmoid_gating_delta_rule_update(
            A_log, a, dt_bias, 1.0, 20.0, q, k, v, b, ssm_states, cache_indices[: len(query_start_loc) - 1],
            use_qk_l2norm_in_kernel=True, cu_seqlens=query_start_loc, is_kda=self.per_channel, **more,
        )  # fmt: skip


class KimiDeltaRule(DeltaRule):
    """The kernel of KDA layers; those whose gates have a lower bound are left to SGLang's own kernel, `stock`."""

    layers, per_channel = "KDA", True
    packed_rule = staticmethod(compat.fused_recurrent_kda_packed_decode)

    def __init__(self, modes: tuple[str, ...], stock: Any) -> None:
        super().__init__(modes)
        for call in ("decode", "target_verify"):
            setattr(self, call, left_if_bounded(call, getattr(self, call), getattr(stock, call)))


def left_if_bounded(call: str, ours: Callable[..., Tensor], stock: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Our function, and SGLang's where a lower bound of gates is given."""

    def chosen(*args: Any, lower_bound: float | None = None, **kwargs: Any) -> Tensor:
        if lower_bound is None:
            return ours(*args, **kwargs)
        say(f"flashstate leaves KDA {call} to SGLang: gated_delta_step has no gate with a lower bound")
        return stock(*args, lower_bound=lower_bound, **kwargs)

    return chosen


def delta_kernels() -> dict[str, Callable[[tuple[str, ...]], Any]]:
    """Makers of the kernels of GDN and KDA layers; that of KDA is of SGLang's class too, which its dispatcher asks."""
    stock = upstream.triton_kda_kernel()
    kimi = type("FlashstateKDAKernel", (KimiDeltaRule, stock), {})
    return {"GDN": DeltaRule, "KDA": lambda modes: kimi(modes, stock())}
