"""What mixers of several kinds do with tokens around their ops."""

from __future__ import annotations

from typing import Any

from torch import Tensor

SILU = ("silu", "swish")  # names that Transformers has for it


def masked(tokens: Tensor, mask: Tensor | None) -> Tensor:
    """Tokens (batch, T, channels) with those that the mask, (batch, T), marks with 0 as zeros."""
    return tokens if mask is None else (tokens * mask[:, :, None]).to(tokens.dtype)


def check_silu(mixer: Any) -> None:
    """Raise where the mixer has another activation than ops have."""
    if mixer.activation not in SILU:
        name = type(mixer).__name__
        raise ValueError(f"{name}.activation must be one of {', '.join(SILU)}, got {mixer.activation!r}")
