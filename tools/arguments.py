"""The table of an op's tensor arguments, as its declaration has them, for the documents."""

from __future__ import annotations

import flashstate  # noqa: F401  (which declares all ops)
from flashstate.errors import dtype_name
from flashstate.launch.axes import Axes
from flashstate.launch.call import OPS

HEAD = "| argument | axes | side by side in memory | |\n|---|---|---|---|\n"


def arguments_table(name: str) -> str:
    """The tensor arguments of an op in the order of its signature; ValueError where there is no such op."""
    if name not in OPS:
        raise ValueError(f"there is no op {name}, only {', '.join(OPS)}")
    op = OPS[name]
    rows = [
        row(argument, op.tensors[argument], argument in op.optional) for argument in op.hints if argument in op.tensors
    ]
    return "\n" + HEAD + "".join(rows) + "\n"


def row(argument: str, axes: Axes, optional: bool) -> str:
    """One argument: its axes, those that must be neighbours in memory, and whether it may be left out."""
    needed = shape(axes, ())
    shapes = needed if not axes.optional else f"{needed} or {shape(axes, axes.optional)}"
    dense = ", ".join((*axes.dense, *axes.optional)) or "none"
    if not axes.tokens and not axes.strided:
        dense = "all" + (", or expanded from the first" if axes.optional else "")
    kinds = "" if len(axes.dtypes) > 2 else " or ".join(map(dtype_name, axes.dtypes))
    remarks = "; ".join(filter(None, ("may be left out" if optional else "", kinds)))
    return f"| `{argument}` | {shapes} | {dense} | {remarks} |\n"


def shape(axes: Axes, more: tuple[str, ...]) -> str:
    """Axes as a document writes them: (…) stands for token axes."""
    names = [*(["…"] if axes.tokens else []), *axes.names, *more]
    return f"({', '.join(names)}{',' if len(names) == 1 else ''})"
