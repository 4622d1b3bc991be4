"""SGLang's gated delta rules, of sglang.kernels.ops.attention; flashstate.compat.sglang has them too."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashstate.compat import delta, shapes, trees
from flashstate.errors import check_flag, check_int
from flashstate.launch.doors import remembering
from flashstate.state.slots import MOST_TOKENS, Slots

NO_SLOT = -1


@remembering(main="v")
def fused_sigmoid_gating_delta_rule_update(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float,
    softplus_threshold: float,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    b: Tensor,
    initial_state_source: Tensor,
    initial_state_indices: Tensor,
    scale: float | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    is_kda: bool = False,
    lower_bound: float | None = None,
    disable_state_update: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
    cache_ring: bool = False,
    replayssm_rawv: Any = None,
    replayssm_rawk: Any = None,
    replayssm_g: Any = None,
    replayssm_beta: Any = None,
    match_cutedsl_decode: bool = False,
) -> Tensor:
    """Step every row by its tokens, with raw gates; update the state in place, and return the outputs.

    q, k are (B, T, H, K), v (B, T, HV, V), a, b (B, T, HV) or (B * T, HV), with is_kda a also per channel, and
    initial_state_source is (slots, HV, V, K). The buffer receives the state after every token. docs/compat.md has the
    other arguments, and says what differs from SGLang.
    """
    delta.check_softplus(softplus_beta=softplus_beta, softplus_threshold=softplus_threshold)
    delta.check_absent("gated_delta_step has no such gate", lower_bound=lower_bound)
    delta.check_absent("bytes are those of gated_delta_step", match_cutedsl_decode=match_cutedsl_decode)
    delta.check_absent(
        "there is no ring to write", cache_ring=cache_ring, replayssm_rawv=replayssm_rawv,
        replayssm_rawk=replayssm_rawk, replayssm_g=replayssm_g, replayssm_beta=replayssm_beta,
    )  # fmt: skip
    check_flag("is_kda", is_kda)
    pool = _in_order(shapes.with_these_axes("initial_state_source", initial_state_source, *delta.STATE_AXES), k, v)
    HV, K = pool.shape[1::2]
    delta.check_tokens(q, k, v, pool)
    channels, shape = (K,) if is_kda else (), v.shape
    a, b = delta.gate_of("a", a, v, HV, *channels), delta.gate_of("b", b, v, HV)
    if cu_seqlens is not None:  # (B, T, ...) are B * T tokens in a row
        q, k, v, a, b = (tensor.reshape(1, -1, *tensor.shape[2:]) for tensor in (q, k, v, a, b))
    y = _step(
        pool, initial_state_indices, q, k, v, a, b, delta.rows_of_tokens(v, cu_seqlens), disable_state_update,
        intermediate_states_buffer, intermediate_state_indices, cache_steps, retrieve_parent_token, scale=scale,
        qk_l2norm=use_qk_l2norm_in_kernel, A_log=delta.of_heads("A_log", A_log, HV),
        dt_bias=delta.of_heads("dt_bias", dt_bias, HV, *channels),
    )  # fmt: skip
    return y.reshape(shape)


def _in_order(pool: Tensor, k: Any, v: Any) -> Tensor:
    """Return the pool with axes V and K behind its heads, also where they are declared as K and V.

    SGLang reads memory in the order (V, K) whatever the axes of the pool are called.
    """
    sizes = [t.shape[-1] for t in (k, v) if isinstance(t, Tensor) and t.dim() > 0]
    swapped = [*pool.shape[2:]] == sizes != sizes[::-1] and pool.stride()[2:] == (sizes[1], 1)
    return pool.flatten(2).unflatten(2, sizes[::-1]) if swapped else pool


@remembering(main="v")
def fused_recurrent_gated_delta_rule_update(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor | None = None,
    scale: float | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = False,
    disable_state_update: bool = False,
    disable_output_calculation: bool = False,
    intermediate_states_buffer: Tensor | None = None,
    intermediate_state_indices: Tensor | None = None,
    cache_steps: int | None = None,
    retrieve_parent_token: Tensor | None = None,
) -> Tensor:
    """Step every row by its tokens; update the state in place, and return the outputs.

    q, k are (B, T, H, K), v (B, T, HV, V), g (B, T, HV) the logarithm of the decay, beta (B, T, HV), and
    initial_state_source is (slots, HV, V, K). docs/compat.md has the other arguments, and says what differs from
    SGLang.
    """
    check_flag("disable_output_calculation", disable_output_calculation)
    HV = delta.state_of("initial_state_source", initial_state_source).shape[1]
    rows = delta.rows_of(q, k, v, cu_seqlens, initial_state_source)
    return _step(
        initial_state_source, initial_state_indices, q, k, v, delta.gate_of("g", g, v, HV),
        delta.one_gate(v, 1.0) if beta is None else delta.gate_of("beta", beta, v, HV), rows,
        disable_state_update, intermediate_states_buffer, intermediate_state_indices, cache_steps,
        retrieve_parent_token, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
    )  # fmt: skip


@remembering(main="mixed_qkv")
def fused_recurrent_gated_delta_rule_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:
    """Step every row by one token; update the state in place, fill `out`, and return both.

    mixed_qkv (B, 2 * H * K + HV * V) has q, k and v side by side, a and b are (B, HV), initial_state is (slots, HV, V,
    K) and out (B, 1, HV, V). A row with a negative index gives zero. docs/compat.md says what differs from SGLang.
    """
    return delta.packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel,
        per_channel=False, null=NO_SLOT,
    )  # fmt: skip


@remembering(main="mixed_qkv")
def fused_recurrent_kda_packed_decode(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    scale: float,
    initial_state: Tensor,
    out: Tensor,
    ssm_state_indices: Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    lower_bound: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Step every row by one token of KDA; update the state in place, fill `out`, and return both.

    As fused_recurrent_gated_delta_rule_packed_decode, with a (B, HV * K) and dt_bias (HV * K,): a decay for every
    channel. docs/compat.md says what differs from SGLang.
    """
    delta.check_absent("gated_delta_step has no such gate", lower_bound=lower_bound)
    return delta.packed_decode(
        mixed_qkv, a, b, A_log, dt_bias, scale, initial_state, out, ssm_state_indices, use_qk_l2norm_in_kernel,
        per_channel=True, null=NO_SLOT,
    )  # fmt: skip


def _step(
    pool: Any, indices: Any, q: Tensor, k: Tensor, v: Tensor, a: Tensor, b: Tensor, rows: delta.Rows,
    frozen: bool, buffer: Tensor | None, buffer_rows: Tensor | None, cache_steps: int | None, tree: Tensor | None,
    **more: Any,
) -> Tensor:  # fmt: skip
    """The outputs. frozen: the pool stays as it is. tree: parents."""
    check_flag("disable_state_update", frozen)
    if cache_steps is not None:
        check_int("cache_steps", cache_steps, 0, MOST_TOKENS)
    batch, bounds = rows
    shapes.check_indices("initial_state_indices", indices, device=pool.device, batch=batch)
    snapshots = delta.snapshots_of(buffer)
    steps = _most_tokens(v, bounds, buffer, cache_steps, tree)
    slots = verify_slots(indices.contiguous(), steps, frozen, buffer_rows, tree, NO_SLOT, bounds)
    return delta.delta_step(
        pool, q, k, v, a, b, packed=bounds is not None, slots=slots, update=not frozen,
        snapshots=snapshots, **more,
    )  # fmt: skip


def _most_tokens(v: Tensor, bounds: Tensor | None, buffer: Tensor | None, cache_steps: int | None, tree: Any) -> int:
    """The most tokens that a row has; of packed rows without a buffer and a tree nobody asks."""
    if bounds is None:
        return v.shape[1]
    if cache_steps:
        return cache_steps
    if buffer is not None:
        return buffer.shape[1]
    return shapes.with_these_axes("retrieve_parent_token", tree, "batch", "T").shape[1] if tree is not None else 0


def verify_slots(
    read: Tensor, steps: int, frozen: bool, snapshot_rows: Any, tree: Any, null: int, bounds: Tensor | None = None
) -> Slots:
    """Where rows of up to so many tokens live: padding starts from a zero state, and a tree has no last state."""
    batch = len(read)
    if tree is not None and not frozen:
        raise ValueError("retrieve_parent_token needs disable_state_update=True: a tree has no last state")
    return Slots(
        read, snapshot_rows=shapes.list_of("intermediate_state_indices", snapshot_rows, batch), cu_seqlens=bounds,
        parents=trees.parents_of("retrieve_parent_token", tree, batch, steps, read.device),
        max_len=steps if bounds is not None and steps else None, null=null, padding="fresh",
    )  # fmt: skip
