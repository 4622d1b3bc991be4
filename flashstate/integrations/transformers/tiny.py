"""Tiny models with random weights, one of every family that flashstate knows: for tests and for trying things out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Settings = dict[str, Any]

# No token ends a generation, so that lengths are fixed.
COMMON: Settings = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 3, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ATTENTION: Settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48}
MIXED: Settings = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
SHARED: Settings = {"layers_block_type": ["linear_attention", "hybrid", "linear_attention"]}
CONV: Settings = {**ATTENTION, "layer_types": ["conv", "full_attention", "conv"]}
EXPERTS: Settings = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
SHARED_EXPERT: Settings = {**EXPERTS, "shared_expert_intermediate_size": 24}
# Heads of Mamba-2 have 16 rows and 16 columns; two of them share B and C.
MAMBA2: Settings = {
    **ATTENTION, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}  # fmt: skip
DELTA: Settings = {
    **ATTENTION, **MIXED, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 8,
}  # fmt: skip
# Beside attention whose keys and values are projections of few numbers.
KDA: Settings = {
    **ATTENTION, **MIXED, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "v_head_dim": 8,
    "linear_num_heads": 4, "linear_head_dim": 16, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip

# What a family's configuration has besides COMMON.
FAMILIES: dict[str, Settings] = {
    "mamba": {"state_size": 16, "time_step_rank": 4},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 4},
    "jamba": {**ATTENTION, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "mamba_dt_rank": 4},
    "zamba": {**ATTENTION, **SHARED, "num_key_value_heads": 4, "n_mamba_heads": 2, "mamba_dt_rank": 4},
    "mamba2": {"num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "bamba": {**MAMBA2, "attn_layer_indices": [1]},
    "nemotron_h": {
        **ATTENTION, "head_dim": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
        "chunk_size": 8, "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
    },
    "falcon_h1": {
        **MAMBA2, "mamba_d_ssm": 64, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 2.0,
        "ssm_multipliers": [0.75, 1.25, 1.5, 1.25, 0.5],
    },
    "granitemoehybrid": {**MAMBA2, **MIXED, "num_local_experts": 4, "shared_intermediate_size": 24},
    "zamba2": {
        **ATTENTION, **SHARED, "num_key_value_heads": 4, "n_mamba_heads": 4, "mamba_ngroups": 2, "mamba_d_state": 16,
        "chunk_size": 8,
    },
    "qwen3_next": {**DELTA, **SHARED_EXPERT},
    "qwen3_5": DELTA,
    "qwen3_5_moe": {**DELTA, **SHARED_EXPERT},
    "olmo_hybrid": {**DELTA, "linear_num_key_heads": 4},
    "kimi_linear": {**KDA, "qk_rope_head_dim": 8, "num_local_experts": 4},
    "bailing_hybrid": {**KDA, "qk_rope_head_dim": 8, "head_dim": 16, "num_local_experts": 4},
    "glm5_next": {
        **KDA, "layer_types": ["linear_attention", "indexed_attention", "linear_attention"], "q_lora_rank": 16,
        "qk_rope_head_dim": 0, "n_routed_experts": 4, "index_topk": 64, "index_head_dim": 16, "index_n_heads": 2,
        "index_kpool": 4,
    },
    "lfm2": {**CONV, "block_auto_adjust_ff_dim": False},
    "lfm2_moe": {**CONV, **EXPERTS, "num_dense_layers": 2},
    "lfm3": {
        **CONV, "head_dim": 8, "num_hidden_layers": 4, "sliding_window": 16,
        "layer_types": ["conv", "full_attention", "sliding_attention", "conv"],
    },
}  # fmt: skip

# Families whose text model has a name of its own.
TEXT_TYPES = {"qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
# Families that come only with a vision tower, which stays idle.
TOWERS: dict[str, Settings] = {
    "glm5_next": {
        "depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": 32,
        "projection_intermediate_size": 16,
    },
}  # fmt: skip


def tiny_model(
    family: str,
    *,
    seed: int = 0,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    **changes: Any,
) -> PreTrainedModel:
    """A small causal language model of `family` with random weights, which `seed` decides; it is ready to generate.

    changes: settings of its configuration other than those in FAMILIES.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}; got {family!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = untrained(family, {**COMMON, **FAMILIES[family], **changes})
        for name, parameter in model.named_parameters():
            fill(name, parameter.data)
    return model.to(device=device, dtype=dtype).eval()


def untrained(family: str, settings: Settings) -> PreTrainedModel:
    """A model of `family` with the weights that Transformers gives it."""
    import transformers
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText

    if family not in CONFIG_MAPPING:
        raise ValueError(f"family {family!r} is not in transformers {transformers.__version__}")
    if family in TOWERS:
        config = CONFIG_MAPPING[family](text_config=settings, vision_config=TOWERS[family])
        return AutoModelForImageTextToText.from_config(config)
    return AutoModelForCausalLM.from_config(CONFIG_MAPPING[TEXT_TYPES.get(family, family)](**settings))


def fill(name: str, weight: Tensor) -> None:
    """Draw a parameter such that states last for some tokens and that every token changes what comes next."""
    if name.endswith("A_log"):
        weight.uniform_(-1.0, 0.5)
    elif "dt" in name and name.endswith("bias"):
        weight.uniform_(-4.0, -1.0)
    elif weight.ndim == 1:  # norms, biases and D stay near what they were, though no two are equal
        weight.add_(torch.randn_like(weight), alpha=0.2)
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5)
