"""Tiny models with random weights, as checkpoints that vLLM loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# No token ends a generation, so that lengths are fixed.
COMMON: dict[str, Any] = {
    "vocab_size": 96, "hidden_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 512,
    "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ATTENTION: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 48}
MAMBA2: dict[str, Any] = {
    **ATTENTION, "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
    "mamba_chunk_size": 8,
}  # fmt: skip

# What a family's configuration has besides COMMON.
FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16, "chunk_size": 8},
    "granitemoehybrid": {
        **MAMBA2, "layer_types": ["mamba", "attention", "mamba"], "num_local_experts": 0, "num_experts_per_tok": 0,
        "shared_intermediate_size": 24,
    },
    "falcon_h1": {**MAMBA2, "mamba_d_ssm": 128, "head_dim": 32},
    "zamba2": {
        **ATTENTION, "layers_block_type": ["mamba", "hybrid", "mamba"], "n_mamba_heads": 8, "mamba_ngroups": 2,
        "mamba_d_state": 16, "chunk_size": 8,
    },
    "nemotron_h": {
        **ATTENTION, "head_dim": 32, "mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
        "chunk_size": 8, "hybrid_override_pattern": "M-*M", "num_hidden_layers": 4,
    },
}  # fmt: skip


# Families by another name: with states as large as those of a real model.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "wide": ("granitemoehybrid", {"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_expand": 16}),
}


def checkpoint(family: str, folder: Path) -> Path:
    """Where a small model of this family is stored, in `folder`; it is made if it is not there."""
    path = folder / family
    if path.exists():
        return path
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    torch.manual_seed(0)
    kind, changes = VARIANTS.get(family, (family, {}))
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**{**COMMON, **FAMILIES[kind], **changes}))
    for name, parameter in model.named_parameters():
        fill(name, parameter.data)
    model.save_pretrained(path)
    return path


def fill(name: str, weight: Tensor) -> None:
    """Draw a parameter such that states last for some tokens and that every token changes what comes next."""
    if name.endswith("A_log"):
        weight.uniform_(-1.0, 0.5)
    elif "dt" in name and name.endswith("bias"):
        weight.uniform_(-4.0, -1.0)
    elif weight.ndim == 1:
        weight.add_(torch.randn_like(weight), alpha=0.2)
    else:
        weight.normal_(std=weight.shape[-1] ** -0.5)
