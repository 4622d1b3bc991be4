"""Candidates of assisted generation: where they may come from, and how many of them a cache can take back."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashstate.integrations.transformers.families import recurrent_layers


def check_source(drafts: int, model: Any, generation_config: Any, assistant_model: Any) -> None:
    """Raise where candidates come from what cannot take its own tokens back, or are more than a call may have."""
    if generation_config.assistant_early_exit is not None:
        raise ValueError("assistant_early_exit takes tokens of several calls back, which a StateCache cannot")
    if assistant_model is not None and recurrent_layers(assistant_model):
        name = type(assistant_model).__name__
        raise ValueError(
            f"assistant_model has recurrent layers, which cannot take tokens of several calls back: {name}"
        )
    if generation_config.use_mtp:
        layers = getattr(model.config.get_text_config(), "num_mtp_layers", None) or 0
        if layers > drafts:
            raise ValueError(
                f"use_mtp has a candidate from each of {layers} layers: drafts must be as many, got {drafts}"
            )


def for_cache(kept: Any, generator: Any) -> Any:
    """A generator of candidates that gives no more for a call than a StateCache can take back, and before the first
    call lets it know how many tokens the prompt has."""
    stock, drafts = generator.get_candidates, kept.format.drafts

    def get_candidates(input_ids: Tensor, **given: Any) -> tuple[Tensor, Tensor | None]:
        if kept.batch is None:
            kept.sure = input_ids.shape[1]
        ids, logits = stock(input_ids, **given)
        return ids[:, : input_ids.shape[1] + drafts], None if logits is None else logits[:, :drafts]

    generator.get_candidates = get_candidates
    return generator
