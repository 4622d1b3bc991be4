"""Facts about SGLang 0.5.23, with the files and lines of its package that show them.

A tree of its sources is compared with them where there is one (FLASHSTATE_SGLANG_SOURCES).
"""

from peer_conv1d import SGLANG_CONV
from peer_rules import PACKED_DECODE, SGLANG_RULE
from peer_selective import SGLANG_STATE

VERSION = "0.5.23"
LINEAR, MAMBA = "srt/layers/attention/linear", "srt/layers/attention/mamba"
GDN, KDA = f"{LINEAR}/gdn_backend.py", f"{LINEAR}/kda_backend.py"
MIXER, MIXER1 = f"{MAMBA}/mamba.py", f"{MAMBA}/mamba1.py"
DISPATCH = "kernels/ops/mamba/triton_ops/ssu_dispatch.py"

# Functions that doors of flashstate.compat.sglang stand in for, as tests of doors have them.
SIGNATURES = {
    ("kernels/ops/mamba/causal_conv1d_triton.py", "causal_conv1d_update"): SGLANG_CONV.signature,
    ("kernels/ops/mamba/triton_ops/mamba_ssm.py", "selective_state_update"): SGLANG_STATE.signature,
    ("kernels/ops/attention/linear/fused_sigmoid_gating_recurrent.py", "fused_sigmoid_gating_delta_rule_update"): (
        SGLANG_RULE.signature
    ),
    ("kernels/ops/attention/fla/fused_recurrent.py", "fused_recurrent_gated_delta_rule_packed_decode"): PACKED_DECODE,
    ("kernels/ops/attention/fla/fused_recurrent.py", "fused_recurrent_kda_packed_decode"): (
        f"{PACKED_DECODE}, lower_bound=None"
    ),
    (GDN, "GDNKernelDispatcher.__init__"): ("self, decode_backend, prefill_backend, verify_backend=None"),
    (
        f"{LINEAR}/kda_backend.py",
        "KDAKernelDispatcher.__init__",
    ): "self, decode_backend, prefill_backend, verify_backend",
    (f"{LINEAR}/utils.py", "resolve_linear_attn_backends"): "prefill_default=None",
    (DISPATCH, "initialize_mamba_selective_state_update_backend"): "server_args",
    ("srt/arg_groups/resolution_hooks.py", "register_resolution_hook"): "name",
    ("srt/arg_groups/overrides.py", "declare_resolution"): "server_args, source, **fields",
    ("srt/arg_groups/model_override_base.py", "resolving_view"): "server_args",
    ("srt/plugins/hook_registry.py", "HookRegistry.register"): (
        "cls, target, hook, hook_type=HookType.AFTER, *, source=None"
    ),
    ("srt/server_args.py", "ServerArgs.resolve_once"): "self",
    ("srt/runtime_context.py", "get_exec"): "",
    ("srt/utils/common.py", "is_cuda"): "",
    ("srt/utils/common.py", "is_hip"): "",
}

CONV_DECODE = ("conv_state_indices",)
CONV_VERIFY = (
    *CONV_DECODE, "intermediate_conv_window", "intermediate_state_indices", "retrieve_next_token",
    "retrieve_next_sibling", "retrieve_parent_token",
)  # fmt: skip
UPDATE = ("z", "dt_bias", "dt_softplus", "state_batch_indices", "out")
WEIGHTS, POOLS = ("A_log", "dt_bias"), ("ssm_states", "cache_indices")
TOKENS, BOUNDS = ("q", "k", "v", "a", "b"), (*POOLS, "query_start_loc")
PACKED = ("mixed_qkv", "a", "b", *WEIGHTS, "scale", *POOLS, "num_v_heads", "head_v_dim")
RINGS = ("replayssm_d", "replayssm_k", "replayssm_g", "replayssm_write_pos", "replayssm_force_flush")
VERIFY = (
    *WEIGHTS, *TOKENS, *BOUNDS, "intermediate_states_buffer", "intermediate_state_indices", "cache_steps",
    "retrieve_parent_token",
)  # fmt: skip
# (file, line, name) of a call: how many arguments it gives by position, and the names of the others.
CALLS: dict[tuple[str, int, str], tuple[int, tuple[str, ...]]] = {
    (MIXER, 695, "ccu"): (5, CONV_DECODE),
    (MIXER, 673, "causal_conv1d_update_triton"): (5, CONV_VERIFY),
    (MIXER, 756, "selective_state_update"): (7, UPDATE),
    (MIXER, 721, "selective_state_update"): (
        7,
        (
            *UPDATE, "disable_state_update", "intermediate_states_buffer", "cache_steps", "retrieve_parent_token",
            "intermediate_state_indices",
        ),
    ),
    (MIXER1, 435, "ccu"): (5, CONV_DECODE),
    (MIXER1, 459, "selective_state_update"): (7, UPDATE),
    (GDN, 855, "causal_conv1d_update"): (5, CONV_DECODE),
    (GDN, 1047, "causal_conv1d_update"): (5, CONV_VERIFY),
    (GDN, 867, "packed_decode"): (0, (*PACKED, *RINGS)),
    (GDN, 900, "decode"): (0, (*TOKENS, *WEIGHTS, *BOUNDS)),
    (GDN, 1147, "target_verify"): (0, (*VERIFY, "stable_rows")),
    (KDA, 955, "causal_conv1d_update"): (4, ("activation", *CONV_DECODE)),
    (KDA, 1400, "causal_conv1d_update"): (4, ("activation", *CONV_VERIFY)),
    (KDA, 973, "packed_decode"): (0, (*PACKED, "lower_bound", *RINGS)),
    (KDA, 1001, "decode"): (0, (*TOKENS, *WEIGHTS, *BOUNDS, "lower_bound")),
    (KDA, 1431, "target_verify"): (0, (*VERIFY, "lower_bound")),
    (DISPATCH, 216, "backend_cls"): (0, ("enable_stochastic_rounding", "cache_philox_rounds")),
    (GDN, 538, "GDNKernelDispatcher"): (3, ()),
    (KDA, 513, "KDAKernelDispatcher"): (3, ()),
}  # fmt: skip
