"""Norms of a model as one kernel each: Transformers writes them out in six to eight, which decoding has no time for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from flashstate.integrations.transformers.families import fingerprint
from flashstate.integrations.transformers.mixers.parameters import derived
from flashstate.integrations.transformers.mixers.rms import is_for_graph, is_lean, rms


def weighted(norm: Any, hidden: Tensor) -> Tensor:
    """weight * hidden / rms(hidden), rounded once, where Transformers may round twice."""
    if not is_lean() or hidden.dtype != norm.weight.dtype:  # for two dtypes torch has no kernel
        return type(norm).forward(norm, hidden)
    return rms(hidden.unsqueeze(-2), norm.weight, norm.variance_epsilon).squeeze(-2)


def weighted_from_one(norm: Any, hidden: Tensor) -> Tensor:
    """(1 + weight) * hidden / rms(hidden), in float32 and rounded once."""
    if not is_lean():
        return type(norm).forward(norm, hidden)
    weight = derived(norm, plus_one, norm.weight)
    if is_for_graph():
        return rms(hidden.unsqueeze(-2), weight, norm.eps).squeeze(-2)
    return rms_norm(hidden.float(), weight.shape, weight, norm.eps).type_as(hidden)


def plus_one(weight: Tensor) -> Tensor:
    """What a norm multiplies with whose weight is kept as its difference from 1."""
    return 1.0 + weight.float()


FORWARDS: dict[str, Callable[[Any, Tensor], Tensor]] = {  # by the fingerprint of the forward that each stands for
    "761d8170c0e0": weighted,
    "599745ad39b5": weighted,
    "3b494dd2ea1c": weighted,
    "d5e55b6f4902": weighted,
    "4771cd216b28": weighted_from_one,
}


def norms_of(model: nn.Module) -> Iterator[tuple[nn.Module, Callable[[Any, Tensor], Tensor]]]:
    """The norms of a model that can be one kernel, and the forward that makes them so."""
    for module in model.modules():
        if "RMSNorm" in type(module).__name__ and (forward := FORWARDS.get(fingerprint(type(module)))) is not None:
            yield module, forward
