"""What mixers derive from their parameters: made once, and anew when a parameter has changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn


class Derived(NamedTuple):
    """A tensor, and what it was made from."""

    tensor: Tensor
    sources: tuple[Tensor, ...]  # held, so that no other tensor gets their memory
    versions: tuple[int, ...]


DERIVED: WeakKeyDictionary[nn.Module, dict[Callable[..., Tensor], Derived]] = WeakKeyDictionary()


def derived(module: nn.Module, make: Callable[..., Tensor], *sources: Tensor) -> Tensor:
    """make(*sources) for parameters or buffers of the module, kept until one of them is replaced or written to.

    make: a function of a module of Python, by which the tensor is found again: no lambda, no partial.

    It is kept beside the module and not in it, so that neither its state_dict nor a copy of it has it. It is made
    anew where a change could not be seen: while compiling, and from tensors made in inference mode.
    """
    if torch.compiler.is_compiling() or any(source.is_inference() for source in sources):
        return make(*sources)
    versions = tuple(source._version for source in sources)
    kept = DERIVED.setdefault(module, {})
    known = kept.get(make)
    if known is None or known.versions != versions or not same_memory(known.sources, sources):
        with torch.inference_mode(False), torch.no_grad():
            held = tuple(source.detach() for source in sources)
            known = kept[make] = Derived(make(*held), held, versions)
    return known.tensor


def same_memory(held: tuple[Tensor, ...], sources: tuple[Tensor, ...]) -> bool:
    """Whether each of the tensors begins where the one that was held does, and has its dtype."""
    return all(a.data_ptr() == b.data_ptr() and a.dtype == b.dtype for a, b in zip(held, sources, strict=True))


def decay(A_log: Tensor) -> Tensor:
    """A of `mamba2_step` from what models learn."""
    return -torch.exp(A_log.float())
