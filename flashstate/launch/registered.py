"""Ops as torch.compile sees them: registered with flat arguments, which this file makes of an op's signature and back.

Eager calls do not go through here. An argument that is a dataclass, such as State or Slots, becomes its fields, each
under the name of the argument and its own; None becomes None for each of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from functools import cache, wraps
from itertools import chain
from typing import Any, NamedTuple, get_args, get_type_hints

import torch
from torch import Tensor

_library = torch.library.Library("flashstate", "DEF")
SCHEMA_TYPES = {Tensor: "Tensor", bool: "bool", int: "SymInt", float: "float", str: "str", tuple: "float[]"}


class Piece(NamedTuple):
    """A flat argument: the attributes that lead to it, its type, whether it may be None, and whether it is written."""

    path: tuple[str, ...]
    kind: Any
    optional: bool
    written: bool

    @property
    def schema(self) -> str:
        """How a schema has it; a tensor that is written still needs its mark."""
        return f"{SCHEMA_TYPES[self.kind]}{{mark}}{'?' if self.optional else ''} {'_'.join(self.path)}"


def _pieces(path: tuple[str, ...], hint: Any, optional: bool, written: bool) -> Iterator[Piece]:
    """The flat arguments of one argument, or of one field of it."""
    optional = optional or type(None) in get_args(hint)
    holder = _dataclass_of(hint)
    if holder is None:
        yield Piece(path, _plain_type(hint), optional, written)
        return
    for name, kind in _fields_of(holder).items():
        yield from _pieces((*path, name), kind, optional, name in holder.written)


@cache
def _dataclass_of(hint: Any) -> Any:
    """The dataclass that an argument of this type is, once it was checked; None if it is none."""
    return next((one for one in (hint, *get_args(hint)) if isinstance(one, type) and is_dataclass(one)), None)


def _plain_type(hint: Any) -> Any:
    """The type of an argument that is no dataclass, without None and without what is annotated."""
    kinds = (getattr(kind, "__origin__", kind) for kind in (hint, *get_args(hint)))
    return next(kind for kind in kinds if kind in SCHEMA_TYPES)


@cache
def _fields_of(holder: Any) -> dict[str, Any]:
    """The types of the fields of a dataclass."""
    hints = get_type_hints(holder)
    return {one.name: hints[one.name] for one in fields(holder)}


def register(
    name: str, hints: Mapping[str, Any], run: Callable[[Mapping[str, Any]], object], writes: tuple[str, ...] = ()
) -> tuple[Piece, ...]:
    """Make `run`, which is given the arguments of an op by their names, the op torch.ops.flashstate.<name>; returns its
    flat arguments. It returns nothing, as torch demands."""
    types = {**hints, "out": Tensor} if "out" in hints else hints  # which has been allocated by then
    found = [_pieces((argument,), types[argument], False, argument in (*writes, "out")) for argument in hints]
    pieces, marks = tuple(chain(*found)), iter("abcdefghijklmnopqrstuvwxyz")
    words = [piece.schema.format(mark=f"({next(marks)}!)" if piece.written else "") for piece in pieces]

    def on_flat(*flat: Any) -> None:
        rest = iter(flat)
        run({argument: _restored(hint, rest) for argument, hint in hints.items()})

    schema = f"{name}({', '.join(words)}) -> ()"
    _library.define(schema)
    _library.impl(name, on_flat, "CompositeExplicitAutograd")
    torch.library.register_fake(f"flashstate::{name}", lambda *flat: None, lib=_library)
    return pieces


def registered(*writes: str, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Make a function an op, which writes these arguments and returns nothing: inside torch.compile calls go to the
    registered one. `name`: that of the op, where the function has another."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        called, hints = name or function.__name__, get_type_hints(function)
        hints.pop("return")
        pieces = register(called, hints, lambda arguments: function(**arguments), writes)

        @wraps(function)
        def run(*values: Any) -> None:
            if torch.compiler.is_compiling():
                call(called, pieces, dict(zip(hints, values, strict=True)))
            else:
                function(*values)

        run.pieces = pieces  # type: ignore[attr-defined]
        return run

    return decorate


def _restored(hint: Any, flat: Iterator[Any]) -> Any:
    """An argument, of its flat ones, in which nothing is checked again; None where a tensor that it needs is."""
    holder = _dataclass_of(hint)
    if holder is None:
        return next(flat)
    kinds = _fields_of(holder)
    found = {name: _restored(kind, flat) for name, kind in kinds.items()}
    if any(found[name] is None for name, kind in kinds.items() if kind is Tensor):
        return None
    made = object.__new__(holder)
    made.__dict__.update(found)
    return made


def call(name: str, pieces: tuple[Piece, ...], arguments: Mapping[str, Any]) -> None:
    """Call a registered op with arguments that were checked."""
    flat: list[Any] = []
    for piece in pieces:
        first, *attributes = piece.path
        value = arguments[first]
        for attribute in attributes:
            value = None if value is None else getattr(value, attribute)
        flat.append(value)
    getattr(torch.ops.flashstate, name)(*flat)
