"""Facts about SGLang 0.5.23, with the files and lines of its package that show them.

A tree of its sources is compared with them where there is one (FLASHSTATE_SGLANG_SOURCES).
"""

from peer_conv1d import SGLANG_CONV
from peer_rules import PACKED_DECODE, SGLANG_RULE
from peer_selective import SGLANG_STATE

VERSION = "0.5.23"
LINEAR, MAMBA = "srt/layers/attention/linear", "srt/layers/attention/mamba"
GDN, KDA, MIXER, MIXER1 = (
    f"{LINEAR}/gdn_backend.py",
    f"{LINEAR}/kda_backend.py",
    f"{MAMBA}/mamba.py",
    f"{MAMBA}/mamba1.py",
)
HYBRID, POOL = "srt/layers/attention/hybrid_linear_attn_backend.py", "srt/mem_cache/memory_pool.py"
DISPATCH, FIELDS = "kernels/ops/mamba/triton_ops/ssu_dispatch.py", "srt/arg_groups/fields/exec_.py"

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

# (file, line) of a statement: words that it has, and what they show.
STATEMENTS: dict[tuple[str, int], tuple[str, str]] = {
    (DISPATCH, 185): ("_BACKEND_REGISTRY TritonSSUBackend", "state updates are found by name"),
    (DISPATCH, 208): ("backend_cls requested", "the name is that of --mamba-backend"),
    (FIELDS, 483): ("mamba_backend choices triton flashinfer", "a list in the field's annotation"),
    (FIELDS, 549): ("linear_attn_decode_backend LINEAR_ATTN_KERNEL_BACKEND_CHOICES", "a list that plugins may extend"),
    (FIELDS, 563): ("linear_attn_verify_backend nv_cutedsl", "a list of its own"),
    (FIELDS, 572): ("enable_linear_replayssm bool", "a ring for decodes"),
    (FIELDS, 592): ("enable_linear_replayssm_spec bool", "a ring for drafts"),
    ("srt/arg_groups/overrides.py", 134): ("_resolved_overrides stash", "declarations are a list, newest last"),
    (GDN, 678): ("layer forward_batch mixed_qkv", "the layer is a local of who calls us"),
    (KDA, 770): ("layer forward_batch mixed_qkv", "the same"),
    (KDA, 1217): ("layer forward_batch mixed_qkv", "the same"),
    (HYBRID, 1123): ("layer_id mixer hidden_states", "its number is"),
    (GDN, 352): ("verify_kernel verify_kernel_is_flashinfer triton_kernel", "a kernel for drafts"),
    (GDN, 261): ("tree_verify_kernel triton_kernel", "and one for trees"),
    (GDN, 364): ("supports_packed_decode decode_kernel", "decodes are packed if the kernel says so"),
    (KDA, 333): ("lower_bound TritonKDAKernel NotImplementedError", "the class that lower bounds need"),
    (KDA, 529): ("is_triton _fused_chain_verify_fn", "Triton's verify may be fused with the convolution"),
    (HYBRID, 626): ("pad_slot_id int32 full", "slots of a graph are int32, padding is -1"),
    (HYBRID, 642): ("draft_token_num int32 retrieve_next_token_list", "trees of a graph are int32"),
    (HYBRID, 215): ("arange int32 query_start_loc", "bounds of decodes are int32"),
    (POOL, 1520): ("int32 req_index_to_mamba_index_mapping", "slots of requests are int32"),
    (POOL, 611): ("num_mamba_layers spec_state_size physical_conv_shape", "windows of drafts share their inputs"),
    (POOL, 749): ("num_mamba_layers temporal_state_shape ssm_dtype", "states: (layers, slots + 1, heads, dim, dstate)"),
    (POOL, 883): ("spec_state_size speculative_num_draft_tokens", "of drafts: (layers, rows, steps, ...)"),
    ("srt/mem_cache/layout/token_major.py", 221): ("conv_slot_stride_elems", "page-major: slots are an entry apart"),
    ("srt/configs/mamba_utils.py", 230): ("num_heads head_dim state_size tp_world_size", "a rank has some heads"),
    ("srt/configs/mamba_utils.py", 351): ("conv_state_k_shape", "windows of KDA lie with channels last"),
    ("srt/models/kimi_linear.py", 385): ("dt_bias projection_size float32", "one bias per channel"),
    ("srt/models/kimi_linear.py", 410): ("A_log local_num_heads float32", "with axes of one around the heads"),
}  # fmt: skip
STEPS = ("handle_mamba_backend", "handle_linear_attn_backend", "handle_page_major_kv_layout")
