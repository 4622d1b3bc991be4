"""Wrong calls: what is changed in a right one, what that raises, and that no memory changes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple, TypeVar

import pytest
import torch
from pools import memory_of
from torch import Tensor

from flashstate import DeltaRing, Mamba3State, Plan, Ring, Rotary, Slots, State
from flashstate.errors import ACTIVATION_DTYPES, INDEX_DTYPES, dtype_name
from flashstate.proof import AnyCase, Case, DeltaCase, Mamba3Case, ReplayCase, make_inputs
from flashstate.state.ring import AnyRing

CPU, META = torch.device("cpu"), torch.device("meta")
CASE = Case(batch=3, heads=4, groups=2, rows=6, cols=5, format="float16", rounding="stochastic", x="float16")
SHAPE = {"batch": 3, "heads": 4, "groups": 2, "rows": 6, "format": "float16", "rounding": "stochastic", "x": "float16"}
DELTA = DeltaCase(3, 4, 2, 6, 5, format="float16", rounding="stochastic", x="float16", qk="float16")
MAMBA3 = Mamba3Case(**SHAPE, cols=8, rank=3, angles=3)
REPLAY = ReplayCase(**SHAPE, cols=8, window=4)
T = 3

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # all arguments of a call that is right: those to change to make it wrong
Refusal = tuple[Any, ...]  # what is wrong, the change, the message, and the error, if it is no ValueError
Form = TypeVar("Form", bound=AnyCase)
HOLDERS = (State, Slots, Mamba3State, Rotary, Ring, DeltaRing, Plan)  # of tensors


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
        return only(holder, lambda value: replace(value, **{field: change(getattr(value, field))}))
    return only(holder, lambda value: change(value.data if isinstance(value, State) else value))


def other(name: str, **changes: Any) -> Change:
    """A holder of tensors with other fields: values, or what becomes of those there are."""

    def changed(value: Any) -> Any:
        return replace(value, **{n: c(getattr(value, n)) if callable(c) else c for n, c in changes.items()})

    return only(name, changed)


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
    if isinstance(value, HOLDERS):
        return replace(value, **{field.name: on_meta(getattr(value, field.name)) for field in fields(value)})
    return value.to(META) if isinstance(value, Tensor) else value


# What is wrong for a tensor, from its description


class Described(NamedTuple):
    """A tensor argument: all that it must be."""

    name: str
    axes: Sequence[str]
    free: Collection[str] = ()  # axes that may have any size
    dtypes: Collection[torch.dtype] = ACTIVATION_DTYPES
    layout: str = "any"  # "rows": contiguous along the last axis; "whole"; "slot": behind the first axis, no overlap
    tied: Mapping[str, int] = {}  # sizes of more axes, which it may have, and be expanded along all of
    what: str = "a tensor"
    elsewhere: str = "^{name} is on meta, but the state is on cpu"


def wrong_tensors(d: Described) -> Iterator[Refusal]:
    """What a tensor argument can be that it must not be; tests/test_axes.py has more of what any tensor must be."""
    must, allowed = f"^{d.name} must ", " or ".join(map(dtype_name, d.dtypes))
    shape = rf"{must}have shape \({re.escape(d.axes[0])}.*\), got \("
    yield "a list", Tensor.tolist, f"{must}be {d.what}, got list", TypeError
    yield "elsewhere", on_meta, d.elsewhere.format(name=d.name)
    yield "float64", Tensor.double, f"{must}be {allowed}, got float64", TypeError
    yield "of higher rank", lambda t: t[None], shape
    for axis, word in enumerate(d.axes):
        if word not in d.free:
            yield f"with {word} + 1", lambda t, axis=axis: resized(t, axis, 1), shape
    if d.axes[-1] not in d.free:
        yield f"with {d.axes[-1]} 1", lambda t: t[..., :1].clone(), shape
    yield from wrong_strides(d)


def wrong_strides(d: Described) -> Iterator[Refusal]:
    """Strides that the layout of a tensor argument does not allow."""
    apart = {
        "rows": " along its last axis, got stride",
        "whole": "(, or .*)?, got stride",
        "slot": " within a (slot|head|group)",
    }
    if d.layout == "any":
        return
    has_tied, message = d.axes[-1] in d.tied, f"^{d.name} must be contiguous{apart[d.layout]}"
    yield "strided", strided, message
    if d.layout == "rows" and not has_tied:
        yield "expanded along rows", lambda t: expanded(t, -1), message
    if d.layout == "whole":
        yield "one for all", expanded, message
    if d.layout == "slot":
        yield "one slot for all", expanded, f"^{d.name} has overlapping slots.*: an axis of stride 0"
    if d.layout != "rows" and len(d.axes) > 1 + (d.layout == "slot"):
        yield "transposed", transposed, message
    if has_tied and len(d.tied) > 1:
        for axis, word in enumerate(d.tied, -len(d.tied)):
            yield f"expanded along {word} alone", lambda t, axis=axis: expanded(t, axis), message
    if d.tied and not has_tied and d.layout == "whole":
        axes, sizes = (..., *(None for _ in d.tied)), (-1, *d.tied.values())
        yield "strided, then expanded", lambda t: strided(t)[axes].expand(sizes), message


def wrong(d: Described) -> list[Refusal]:
    return [(f"{d.name} {what}", of_tensor(d.name, change), *rest) for what, change, *rest in wrong_tensors(d)]


SLOTS = Described(
    "slots", ("batch",), ("batch",), INDEX_DTYPES, what="a Slots, an index tensor or None",
    elsewhere="^slots are on meta, but the state is on cpu",
)  # fmt: skip


TRANSPOSED = (
    r"^\w+ must be contiguous within a head: strides \((any, )+\d+, 1\), got \([\d, ]+\); only gated_delta_step takes"
)
STANDS = "a State or a tensor"
OTHER_RING = "^plan was made for rings of other slots: their start and count are not those of this ring"


def of_another_rule(ring: AnyRing) -> AnyRing:
    """A DeltaRing over the tensors of a Ring, or the other way round."""
    one, other, decay = (getattr(ring, name) for name in ring.written)
    kind = DeltaRing if isinstance(ring, Ring) else Ring
    return kind(other, one, decay, ring.start, ring.count, ring.window)


def wrong_rings(kind: type[AnyRing]) -> list[Refusal]:
    """Rings that are not for states (7, 4, 6, 8)."""
    must, longer = f"^ring must be a {kind.__name__}, got", lambda t: resized(t, 3, 1)
    (_, heads, _, row), (*_, column) = kind.axes[kind.of_rows], kind.axes[kind.of_cols]
    shape, per_head = rf"^ring.{kind.of_rows} must have shape \(", [n for n in kind.written if kind.axes[n][1] == heads]
    return [
        ("ring missing", given(ring=None), f"{must} NoneType", TypeError),
        ("ring a tensor", only("ring", lambda r: r.start), f"{must} Tensor", TypeError),
        ("ring of another rule", only("ring", of_another_rule), f"{must} (Delta)?Ring", TypeError),
        ("ring elsewhere", only("ring", on_meta), f"^ring.{kind.of_rows} is on meta, but the state is on cpu"),
        ("ring of fewer slots", only("ring", cut), f"{shape}slots=7, "),
        ("ring of other rows", other("ring", **{kind.of_rows: longer}), rf"{shape}.* {row}=6\), got"),
        (
            "ring of other columns",
            other("ring", **{kind.of_cols: longer}),
            rf"^ring.{kind.of_cols} must .* {column}=8\), ",
        ),
        (
            "ring of other heads",
            other("ring", **dict.fromkeys(per_head, lambda t: t[:, :2].clone())),
            f"{shape}slots=7, {heads}=4, ",
        ),
    ]


RINGS = wrong_rings(Ring)


# Who refuses it


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument, or in what holds some."""
    if isinstance(value, Tensor):
        if not value.is_meta and not value.is_sparse:
            yield value
    elif isinstance(value, HOLDERS):
        for field in fields(value):
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
    assert all(map(torch.equal, memory, before))


def refuses_all(step: Callable[..., Any], arguments: Arguments, refusals: Iterable[Refusal]) -> None:
    """A call with changed arguments raises what each refusal says, and no tensor of it or of the right one changes.
    Unchanged it goes through first, which must not let through what is like it."""
    step(**arguments)
    for what, change, message, *errors in refusals:
        wrong = {**arguments, **change(arguments)}
        touched = {**arguments, **{f"wrong {name}": value for name, value in wrong.items()}}
        try:
            refuses(lambda wrong=wrong: step(**wrong), (errors or [ValueError])[0], message, touched)
        except (Exception, pytest.fail.Exception) as failure:
            raise AssertionError(f"{what}: {failure}") from failure


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
