"""The bytes of requests outside of a pool: what they mean, and whether a pool can take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flashstate.errors import check_tensor
from flashstate.state.parts import Parts
from flashstate.state.ring import AnyRing

VERSION = 1
KEYS = ("version", "layout", "bytes")


def layout_of(parts: Parts, drafts: int, rings: Sequence[AnyRing]) -> dict[str, Any]:
    """What the bytes of a slot mean, in plain types: of every part its name, dtype, shape and the order of its axes in
    memory; and what else a request depends on, the drafts of windows and the window of rings, 0 without them."""
    window = rings[0].window if rings else 0
    return {"parts": [part.layout() for part in parts.parts], "drafts": drafts, "window": window}


def bytes_for(parts: Parts, layout: Mapping[str, Any], exported: Any, n: int) -> Tensor:
    """The bytes of so many slots, (n, bytes) uint8 on the device of the parts and in their order. Raises unless they
    were exported from a pool with slots like these."""
    if not isinstance(exported, Mapping) or any(key not in exported for key in KEYS):
        got = list(exported) if isinstance(exported, Mapping) else type(exported).__name__
        raise TypeError(f"exported must be what export returns, a dict with {', '.join(KEYS)}, got {got}")
    if exported["version"] != VERSION:
        raise ValueError(f"exported must be of version {VERSION}, got {exported['version']!r}")
    orders = _check_layout(layout, exported["layout"])
    packed = exported["bytes"]
    sizes = n, parts.offsets[-1]
    check_tensor("exported['bytes']", packed, ("slots", "bytes"), sizes, dtypes=(torch.uint8,))
    packed = packed.to(parts.device)
    if orders == [part.order for part in parts.parts]:
        return packed
    pieces = packed.split([part.nbytes for part in parts.parts], 1)
    turned = [part.pack(part.unpack(*of_part)) for part, *of_part in zip(parts.parts, pieces, orders, strict=True)]
    return torch.cat(turned, 1)


def _check_layout(mine: Mapping[str, Any], given: Any) -> list[tuple[int, ...]]:
    """The orders of axes of a layout, if it is that of this pool otherwise."""
    if not isinstance(given, Mapping) or not isinstance(given.get("parts"), (list, tuple)):
        raise TypeError(f"exported['layout'] must be a dict with parts, got {given!r}")
    for name in ("drafts", "window"):
        if given.get(name) != mine[name]:
            words = f"must have {name} {mine[name]}, which this pool has, got {given.get(name)!r}"
            raise ValueError(f"exported['layout'] {words}")
    of_pool, of_bytes = ([_described(part) for part in layout["parts"]] for layout in (mine, given))
    if of_pool != of_bytes:
        pairs = zip([*of_pool, "nothing"], [*of_bytes, "nothing"], strict=False)
        want, got = next(pair for pair in pairs if pair[0] != pair[1])
        raise ValueError(f"exported['layout'] must have {want}, which this pool has, got {got}")
    return [tuple(part[3]) for part in given["parts"]]


def _described(part: Any) -> str:
    """A part of a layout in words, without the order of its axes."""
    kinds = (list, tuple)
    known = isinstance(part, kinds) and len(part) == 4 and isinstance(part[2], kinds) and isinstance(part[3], kinds)
    if not known or len(part[3]) != len(part[2]) or set(part[3]) != set(range(len(part[2]))):
        raise TypeError(f"exported['layout'] must have name, dtype, shape and order of every part, got {part!r}")
    name, dtype, shape, _ = part
    return f"{name} {dtype} {tuple(shape)}"
