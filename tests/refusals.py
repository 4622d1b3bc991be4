"""Wrong calls: what is changed in a right one, what that raises, and that no memory changes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from pools import memory_of
from torch import Tensor

from flashstate import Slots, State
from flashstate.errors import ACTIVATION_DTYPES, INDEX_DTYPES, dtype_name
from flashstate.proof import AnyCase, Case, DeltaCase, Mamba3Case, ReplayCase, make_inputs
from flashstate.state.signature import Describes

CPU, META = torch.device("cpu"), torch.device("meta")
SHAPE = {"batch": 3, "heads": 4, "groups": 2, "rows": 6, "format": "float16", "rounding": "stochastic", "x": "float16"}
CASE = Case(**SHAPE, cols=5)
DELTA = DeltaCase(3, 4, 2, 6, 5, format="float16", rounding="stochastic", x="float16", qk="float16")
MAMBA3 = Mamba3Case(**SHAPE, cols=8, rank=3, angles=3)
REPLAY = ReplayCase(**SHAPE, cols=8, window=4)
T = 3

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # all arguments of a call that is right: those to change to make it wrong
Refusal = tuple[Any, ...]  # the change, the message, and the error, if it is no ValueError
Form = TypeVar("Form", bound=AnyCase)


def forms_of(case: Form) -> dict[str, Form]:
    """A case with each form that tokens can have."""
    forms = (("one token", 0, False), ("several tokens", T, False), ("packed", T, True))
    return {form: replace(case, tokens=tokens, packed=packed) for form, tokens, packed in forms}


SMALL_FORMS = forms_of(replace(CASE, heads=1, groups=1, rows=2, cols=3))  # to be run


# What is changed


def only(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: {name: change(arguments[name])}


def given(**values: Any) -> Change:
    return lambda arguments: values


def at(**tables: Any) -> Change:
    """`slots` with other fields: values, or what becomes of (batch,) slot numbers."""

    def change(arguments: Arguments) -> Arguments:
        slots = arguments["slots"] if isinstance(arguments["slots"], Slots) else Slots(arguments["slots"])
        return {"slots": replace(slots, **{name: t(slots.read) if callable(t) else t for name, t in tables.items()})}

    return change


def both(*changes: Change) -> Change:
    return lambda arguments: {name: value for change in changes for name, value in change(arguments).items()}


def of_tensor(name: str, change: Callable[[Tensor], Any]) -> Change:
    """Another tensor for an argument: for the data of a State, and for a field of what holds some ("rotary.angle")."""
    holder, _, field = name.partition(".")
    if field:
        return other(holder, **{field: change})
    return only(holder, lambda value: change(value.data if isinstance(value, State) else value))


def other(name: str, **changes: Any) -> Change:
    """A holder of tensors with other fields: values, or what becomes of those there are."""

    def changed(value: Any) -> Any:
        return replace(value, **{n: c(getattr(value, n)) if callable(c) else c for n, c in changes.items()})

    return only(name, changed)


def of_each(names: Iterable[str], change: Callable[[Any], Any]) -> Change:
    return both(*(only(name, change) for name in names))


def cut(value: Any) -> Any:
    """Two slots of a pool."""
    if isinstance(value, Tensor | State):
        return value[:2] if isinstance(value, Tensor) else State(value.data[:2])
    return replace(value, **{n: cut(part) for n, part in fields_of(value).items() if not isinstance(part, int)})


def columns(n: int) -> Callable[[Tensor], Tensor]:
    """A table of n columns from a list of numbers."""
    return lambda numbers: numbers[:, None].repeat(1, n)


def strided(tensor: Tensor) -> Tensor:
    """Equal values, which are every second element of longer rows."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def transposed(tensor: Tensor) -> Tensor:
    """Equal values, those of a column side by side in memory."""
    return tensor.mT.contiguous().mT


def resized(tensor: Tensor, axis: int, by: int) -> Tensor:
    size = tensor.shape[axis] + by
    return torch.cat([tensor, tensor, tensor], axis).narrow(axis, 0, size).clone()


def expanded(tensor: Tensor, axis: int = 0) -> Tensor:
    """One element of this axis for all of it."""
    return tensor.narrow(axis, 0, 1).expand_as(tensor)


def on_meta(value: Any) -> Any:
    """The argument on another device."""
    if isinstance(value, Describes):
        return replace(value, **{name: on_meta(part) for name, part in fields_of(value).items()})
    return value.to(META) if isinstance(value, Tensor) else value


LAYOUTS = {  # the end of a message about strides
    "rows": " along its last axis, got stride", "whole": "(, or .*)?, got stride", "slot": " within a (slot|head|group)"
}  # fmt: skip


def wrong(
    name: str, axes: str, free: str = "", dtypes: Collection[torch.dtype] = ACTIVATION_DTYPES, layout: str = "",
    what: str = "a tensor", elsewhere: str = "^{name} is on meta, but the state is on cpu",
) -> list[Refusal]:  # fmt: skip
    """What a tensor argument must not be: a list, of another dtype, shape or layout, elsewhere. `free`: axes that may
    have any size; tests/test_axes.py has more of what any tensor must be."""
    words, allowed = axes.split(), " or ".join(map(dtype_name, dtypes))
    shape = rf"have shape \({re.escape(words[0])}.*\), got \("
    changes: list[Refusal] = [
        (Tensor.tolist, f"be {what}, got list", TypeError),
        (Tensor.double, f"be {allowed}, got float64", TypeError),
        (lambda t: t[None], shape),
        *[(lambda t, i=i: resized(t, i, 1), shape) for i, word in enumerate(words) if word not in free.split()],
        *([(strided, f"be contiguous{LAYOUTS[layout]}")] if layout else []),
    ]
    found = [(of_tensor(name, change), f"^{name} must {message}", *error) for change, message, *error in changes]
    return [*found, (of_tensor(name, on_meta), elsewhere.format(name=name))]


def wrong_ints(name: str, allowed: str, *values: int) -> list[Refusal]:
    """What is no int, and ints that are not allowed."""
    outside = [(given(**{name: value}), f"^{name} must be from {allowed}, got {value}") for value in values]
    return [(given(**{name: 4.0}), f"^{name} must be an int, got 4.0", TypeError), *outside]


SLOTS = wrong("slots", "batch", "batch", INDEX_DTYPES, what="a Slots, an index tensor or None",
              elsewhere="^slots are on meta, but the (state|ring) is on cpu")  # fmt: skip
SLOTS.append((only("slots", Tensor.tolist), "got list: torch.tensor", TypeError))
TRANSPOSED = (
    r"^\w+ must be contiguous within a head: strides \((any, )+\d+, 1\), got \([\d, ]+\); only gated_delta_step takes"
)
STANDS = "a State or a tensor"
ENTRIES = "must have an entry for each of the {} tokens, got shape"
OTHER_RING = "^plan was made for rings of other slots: their start and count are not those of this ring"


# Who refuses it


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument, or in what holds some."""
    if isinstance(value, Tensor):
        if not value.is_meta and not value.is_sparse:
            yield value
    elif isinstance(value, Describes):
        for field in fields(value):  # type: ignore[arg-type]
            yield from tensors_of(getattr(value, field.name))
    elif isinstance(value, list):
        for one in value:
            yield from tensors_of(one)


def refuses(call: Callable[[], Any], error: type[Exception], message: str, touched: Arguments) -> None:
    """The call raises this, and no tensor that it could reach changes."""
    memory = [memory_of(tensor) for value in touched.values() for tensor in tensors_of(value)]
    before = [region.clone() for region in memory]
    with pytest.raises(error, match=message):
        call()
    assert all(map(torch.equal, memory, before)), message


def refuses_all(step: Callable[..., Any], arguments: Arguments, refusals: Iterable[Refusal]) -> None:
    """A call with changed arguments raises what each refusal says, and no tensor of it or of the right one changes.
    Unchanged it goes through first, which must not let through what is like it."""
    step(**arguments)
    for change, message, *errors in refusals:
        wrong = {**arguments, **change(arguments)}
        touched = {**arguments, **{f"wrong {name}": value for name, value in wrong.items()}}
        try:
            refuses(lambda wrong=wrong: step(**wrong), (errors or [ValueError])[0], message, touched)
        except (Exception, pytest.fail.Exception) as failure:
            raise AssertionError(f"{message}: {failure}") from failure


# What is right


def fields_of(value: Any) -> Arguments:
    """The arguments that an object can be made of again."""
    return {field.name: getattr(value, field.name) for field in fields(value)}


def state_arguments() -> Arguments:
    """The arguments of a State that is right."""
    data = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0)).half()
    return {"data": data, "rounding": "stochastic", "rounds": 10, "seed": torch.tensor([5, -6, 7]), "stream": 3}


def scaled_arguments(dtype: torch.dtype = torch.int8, *axes: int) -> Arguments:
    """The arguments of a State with scales that is right; with other leading axes than 3 slots."""
    data = torch.randn(*axes or (3,), 2, 4, 8, generator=torch.Generator().manual_seed(0)).mul(40).to(dtype)
    return {"data": data, "scale": data[..., 0].float() + 0.5}


def slots_arguments() -> Arguments:
    """The arguments of a Slots that is right and has everything; its read slots are a view of a wider table."""
    return {
        "read": torch.arange(12).reshape(3, 4)[:, 1:3],
        "write": torch.arange(12, 24).reshape(3, 4),
        "accepted": torch.tensor([1, 2, 1], dtype=torch.int32),
        "snapshot_rows": torch.tensor([2, 0, 1]),
        "cu_seqlens": torch.tensor([0, 4, 4, 7], dtype=torch.int32),
        "max_len": 4,
        "parents": torch.tensor([-1, 0, 0, 2]).repeat(3, 1),
        "null": -1,
        "padding": "fresh",
    }


def step_arguments(case: AnyCase = CASE, device: torch.device = CPU) -> Arguments:
    """All arguments of a call that is right: `out`, and snapshots with room for more rows and tokens, among them."""
    inputs = make_inputs(case, device)
    slots, out = inputs.at() if case.packed else inputs.slots, torch.full_like(inputs.main, 7.0)
    given: Arguments = {**inputs.arguments, "slots": slots, "update": True, "out": out}
    takes = inputs.op.declared.hints
    if "snapshots" in takes:
        given["snapshots"] = torch.full((5, 6, *case.state_axes), 7.0, dtype=torch.float16, device=device)
    without_plan = {"plan": None} if "plan" in takes else {}
    return {**inputs.op.takes(inputs.state, given), **without_plan}
