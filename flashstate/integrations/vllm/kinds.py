"""The layers of vLLM that flashstate serves, and the sources of vLLM that it depends on. Nothing of vLLM is imported.

A place is a definition in vLLM: its file, below the package, and its qualified name behind `::`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

LAYERS = "model_executor/layers/mamba"
BACKENDS = "v1/attention/backends"
DISPATCH = f"{LAYERS}/ops/ssu_dispatch.py"
COPIES = "v1/worker/mamba_utils.py"
QWEN, OLMO = f"{LAYERS}/gdn/qwen_gdn_linear_attn.py", f"{LAYERS}/gdn/olmo_gdn_linear_attn.py"
V2_STATES = "v1/worker/gpu/model_states/__init__.py"
KDA = tuple(f"vllm.models.kimi_k3.{vendor}.ops.third_party.kda" for vendor in ("nvidia", "amd"))


@dataclass(frozen=True)
class Call:
    """A function of vLLM that a layer calls and flashstate answers.

    state: its argument that holds the states.
    modules: the modules in which the layer finds it, other than the layer's own.
    needed: whether layers call it in every release; a layer that no longer does is not recognised.
    """

    name: str
    state: str | None = None
    modules: tuple[str, ...] = ()
    needed: bool = True


@dataclass(frozen=True)
class Kind:
    """A class of layers, what it is served with, and what must be known of its release of vLLM.

    file, name: where vLLM defines the class.
    methods: the methods that step states.
    calls: the functions that flashstate answers while they run.
    sources: the places whose code decides what these calls mean, such as the builder of metadata.
    elsewhere: functions of the file that hold states and never run on flashstate: other devices, vLLM's own replay.
    every_format: whether prefill takes states of every format; else float32 and the model's dtype alone.
    float32_prefill: whether prefill reads and writes float32 states, whatever their format.
    everywhere: whether the layers are served on all devices of vLLM; else on NVIDIA's GPUs alone.
    ssu: whether they call selective_state_update, which a backend of vLLM answers.
    settings: attributes that choose between ways to decode, and the values that flashstate needs.
    """

    file: str
    name: str
    methods: tuple[str, ...]
    calls: tuple[Call, ...]
    sources: tuple[str, ...]
    elsewhere: tuple[str, ...] = ()
    every_format: bool = True
    float32_prefill: bool = False
    everywhere: bool = False
    ssu: bool = False
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def module(self) -> str:
        """The module of the class."""
        return f"vllm.{self.file.removesuffix('.py').replace('/', '.')}"


CONV = Call("causal_conv1d_update")

# Sources that every kind needs: how a layer keeps its pages, how states lie in them, and what runs between CUDA graphs.
COMMON = (
    f"{LAYERS}/abstract.py::MambaBase",
    f"{LAYERS}/mamba_utils.py::is_conv_state_dim_first",
    "compilation/breakable_cudagraph.py::eager_break_during_capture",
    f"{BACKENDS}/utils.py::NULL_BLOCK_ID",
    f"{BACKENDS}/utils.py::split_decodes_and_prefills",
    f"{BACKENDS}/utils.py::mamba_get_block_table_tensor",
    f"{BACKENDS}/utils.py::compute_causal_conv1d_metadata",
)
BUILDERS = (
    f"{BACKENDS}/mamba_attn.py::BaseMambaAttentionMetadata",
    f"{BACKENDS}/mamba_attn.py::BaseMambaAttentionMetadataBuilder",
)
DELTA = (
    *COMMON,
    f"{BACKENDS}/gdn_attn.py::GDNAttentionMetadata",
    f"{BACKENDS}/gdn_attn.py::GDNAttentionMetadataBuilder",
    f"{LAYERS}/gdn/base.py::GatedDeltaNetAttention",
)
SHAPES = f"{LAYERS}/mamba_utils.py::MambaStateShapeCalculator"

# Sources for choosing the backend and making layers: without them the plugin stays inert.
CHOOSING = (
    "config/mamba.py::MambaBackendEnum",
    "config/mamba.py::MambaConfig",
    "model_executor/custom_op.py::PluggableLayer.__new__",
    "model_executor/custom_op.py::CustomOp.__new__",
)

# Sources for a backend of selective_state_update.
SSU = (
    f"{DISPATCH}::MambaSSUBackend",
    f"{DISPATCH}::TritonSSUBackend",
    f"{DISPATCH}::initialize_mamba_ssu_backend",
    f"{DISPATCH}::selective_state_update",
)

# Sources for states of other formats than vLLM's: how pages are sized and copied.
PAGES = (
    "platforms/interface.py::Platform._align_hybrid_block_size",
    "v1/kv_cache_interface.py::MambaSpec",
    "v1/worker/utils.py::copy_kv_cache_blocks_inplace",
    f"{LAYERS}/mamba_utils.py::get_conv_copy_spec",
    f"{LAYERS}/mamba_utils.py::get_temporal_copy_spec",
    f"{COPIES}::batch_memcpy",
    f"{COPIES}::batch_memcpy_kernel",
    f"{COPIES}::collect_mamba_copy_meta",
    f"{COPIES}::do_mamba_copy_block",
    f"{COPIES}::preprocess_mamba",
    f"{COPIES}::_copy_mamba_state_block",
    f"{COPIES}::_memcpy_u64_tiled",
    f"{COPIES}::precopy_mamba_align_fused_kernel",
    f"{COPIES}::postprocess_mamba_fused_kernel",
    f"{COPIES}::MambaSpecDecodeGPUContext",
)

# Sources for drafts of models without attention: whether model runner V2 counts accepted ones.
DRAFTS = (f"{V2_STATES}::init_model_state", f"{V2_STATES}::resolve_model_state_cls")

KINDS = (
    Kind(
        f"{LAYERS}/mamba_mixer2.py",
        "MambaMixer2",
        ("conv_ssm_forward",),
        (CONV, Call("mamba_chunk_scan_combined_varlen")),
        (
            *COMMON,
            *BUILDERS,
            *SSU,
            f"{BACKENDS}/mamba2_attn.py::Mamba2AttentionMetadata",
            f"{BACKENDS}/mamba2_attn.py::Mamba2AttentionMetadataBuilder",
            f"{LAYERS}/mamba_mixer2.py::mamba_mixer2",
            f"{LAYERS}/ops/ssd_combined.py::mamba_chunk_scan_combined_varlen",
            f"{LAYERS}/ops/ssd_combined.py::_mamba_chunk_scan_combined_fwd",
            f"{SHAPES}.mamba2_state_shape",
        ),
        elsewhere=("share_replayssm_ring_trackers",),
        everywhere=True,
        ssu=True,
    ),
    Kind(
        f"{LAYERS}/mamba_mixer.py",
        "MambaMixer",
        ("forward_impl",),
        (CONV,),
        (
            *COMMON,
            *BUILDERS,
            *SSU,
            f"{BACKENDS}/mamba1_attn.py::Mamba1AttentionMetadataBuilder",
            f"{LAYERS}/mamba_mixer.py::mamba_mixer",
            f"{SHAPES}.mamba1_state_shape",
        ),
        every_format=False,
        ssu=True,
    ),
    Kind(
        f"{LAYERS}/short_conv.py",
        "ShortConv",
        ("forward_cuda",),
        (CONV,),
        (
            *COMMON,
            *BUILDERS,
            f"{BACKENDS}/short_conv_attn.py::ShortConvAttentionMetadataBuilder",
            f"{LAYERS}/short_conv.py::short_conv",
            f"{SHAPES}.short_conv_state_shape",
        ),
        elsewhere=("forward_native",),
    ),
    Kind(
        QWEN,
        "QwenGatedDeltaNetAttention",
        ("_forward_core",),
        (
            CONV,
            Call("fused_recurrent_gated_delta_rule_packed_decode", "initial_state"),
            Call("fused_sigmoid_gating_delta_rule_update", "initial_state"),
        ),
        (
            *DELTA,
            f"{SHAPES}.gated_delta_net_state_shape",
            f"{QWEN}::qwen_gdn_attention_core",
            f"{QWEN}::QwenGatedDeltaNetAttention.__init__",  # sets the flags below
            f"{QWEN}::QwenGatedDeltaNetAttention.forward_cuda",  # reads them
        ),
        elsewhere=("_forward_core_decode_aiter",),
        settings=(
            ("gdn_decode_kernel", "triton"),
            ("enable_fused_gdn_decode", False),
            ("enable_fused_gdn_spec_decode", False),
        ),
    ),
    Kind(
        OLMO,
        "OlmoHybridGatedDeltaNetAttention",
        ("_forward_core",),
        (CONV, Call("fused_recurrent_gated_delta_rule", "initial_state")),
        (*DELTA, f"{SHAPES}.gated_delta_net_state_shape", f"{OLMO}::olmo_hybrid_gdn_full_forward"),
    ),
    Kind(
        f"{LAYERS}/gdn/kimi_gdn_linear_attn.py",
        "KimiGatedDeltaNetAttention",
        ("_forward",),
        (
            CONV,
            Call("gather_initial_states", needed=False),
            Call("fused_recurrent_kda", "initial_state", KDA),
            Call("fused_recurrent_kda_packed_decode", "initial_state", KDA, needed=False),
        ),
        (*DELTA, f"{SHAPES}.kda_state_shape", f"{LAYERS}/ops/gather_initial_states.py::gather_initial_states"),
        float32_prefill=True,
    ),
)
