"""Models of Transformers at full size with random weights, made on the device they are timed on, and their bytes."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flashstate.integrations.transformers.tiny import Settings, fill, tiny_model, untrained

if TYPE_CHECKING:
    from transformers import PreTrainedModel

DTYPE = torch.bfloat16


class Full(NamedTuple):
    """A model that is timed: what it is called, and the family and settings of its configuration."""

    title: str
    family: str
    package: str  # whose kernels Transformers uses for its mixers wherever it can be imported
    settings: Settings


# No token ends a generation, so that lengths are fixed.
COMMON: Settings = {"pad_token_id": 0, "bos_token_id": None, "eos_token_id": None}
MODELS = {
    "mamba2": Full(
        "Mamba-2 2.7B", "mamba2", "mamba_ssm",
        {
            "vocab_size": 50288, "hidden_size": 2560, "num_hidden_layers": 64, "num_heads": 80, "head_dim": 64,
            "state_size": 128, "n_groups": 1, "tie_word_embeddings": True,
        },
    ),
    "nemotron_h": Full(
        "a hybrid like Nemotron-H 8B", "nemotron_h", "mamba_ssm",
        {
            "vocab_size": 131072, "hidden_size": 4096, "intermediate_size": 21504, "num_attention_heads": 32,
            "num_key_value_heads": 8, "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64,
            "ssm_state_size": 128, "n_groups": 8, "max_position_embeddings": 8192,
            "hybrid_override_pattern": "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-",
        },
    ),
    "qwen3_next": Full(
        "12 layers like Qwen3-Next", "qwen3_next", "fla",
        {
            "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16,
            "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 64, "num_experts_per_tok": 8,
            "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "max_position_embeddings": 8192,
        },
    ),
}  # fmt: skip


def make_model(name: str, device: torch.device, tiny: bool = False) -> PreTrainedModel:
    """One of MODELS on this device, in bfloat16, or a tiny one of the same family."""
    full = MODELS[name]
    if tiny:
        return tiny_model(full.family, device=device, dtype=DTYPE)
    torch.manual_seed(0)
    with default_dtype(DTYPE), torch.device(device):
        model = untrained(full.family, {**COMMON, **full.settings})
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            fill(parameter_name, parameter)
    return model.eval()


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make new tensors in this dtype."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def kernels_of(name: str) -> str:
    """The package whose kernels Transformers uses for this model in this process; "" where it steps in plain torch."""
    package = MODELS[name].package
    return package if importlib.util.find_spec(package) else ""


def weight_bytes(model: PreTrainedModel) -> int:
    """Bytes of all weights."""
    return sum(map(bytes_of, model.parameters()))


def weights_read(model: PreTrainedModel, batch: int) -> float:
    """Bytes of weights that a decode step of this batch reads: all but rows of embeddings, and only experts in use."""
    embeddings = model.get_input_embeddings().weight
    unread = 0 if embeddings is model.get_output_embeddings().weight else bytes_of(embeddings)
    experts = sum(bytes_of(weight) for name, weight in model.named_parameters() if ".experts." in name)
    dense = weight_bytes(model) - experts - unread
    return dense + experts * share_of_experts(model, batch) if experts else float(dense)


def share_of_experts(model: PreTrainedModel, batch: int) -> float:
    """The share of experts that a batch is expected to use, if every row chooses its own at random."""
    config = model.config
    return 1 - (1 - config.num_experts_per_tok / config.num_experts) ** batch


def bytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
