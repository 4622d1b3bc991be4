"""Tables of wrong calls: what is changed in a right one, what that raises, and that no memory changes."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from flashstate import Mamba3State, Plan, Ring, Rotary, Slots, State
from flashstate.proof import AnyCase, Case, DeltaCase, make_inputs

CPU = torch.device("cpu")
META = torch.device("meta")
CASE = Case(batch=3, heads=4, groups=2, rows=6, cols=5, format="float16", rounding="stochastic", x="float16")
DELTA_CASE = DeltaCase(3, 4, 2, 6, 5, format="float16", rounding="stochastic", x="float16", qk="float16")
T = 3

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # all arguments of a call that is right: those to change to make it wrong
Refusal = tuple[str, Change, type[Exception], str]
Form = TypeVar("Form", bound=AnyCase)
HOLDERS = (State, Slots, Mamba3State, Rotary, Ring, Plan)  # of tensors


def forms_of(case: Form) -> dict[str, Form]:
    """A case with each form that tokens can have."""
    forms = (("one token", 0, False), ("several tokens", T, False), ("packed", T, True))
    return {form: replace(case, tokens=tokens, packed=packed) for form, tokens, packed in forms}


FORMS, DELTA_FORMS = forms_of(CASE), forms_of(DELTA_CASE)
FORMS_PER_ROW = {f"{form} per row": case for form, case in forms_of(replace(CASE, mamba1=True, D="row")).items()}
DELTA_FORMS_PER_CHANNEL = {
    f"{form} per channel": case for form, case in forms_of(replace(DELTA_CASE, per_channel=True)).items()
}
SMALL_FORMS = forms_of(replace(CASE, heads=1, groups=1, rows=2, cols=3))  # to be run


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


def columns(n: int) -> Callable[[Tensor], Tensor]:
    """A table of n columns from a list of numbers."""
    return lambda numbers: numbers[:, None].repeat(1, n)


def table(refusals: list[Refusal]) -> pytest.MarkDecorator:
    names = [refusal[0] for refusal in refusals]
    assert len(set(names)) == len(names)
    return pytest.mark.parametrize(("change", "error", "message"), [r[1:] for r in refusals], ids=names)


def table_of_forms(forms: Mapping[str, Form], refusals: Callable[[Form], list[Refusal]]) -> pytest.MarkDecorator:
    """The refusals of every form, beside the form."""
    entries = [(f"{form}: {r[0]}", case, *r[1:]) for form, case in forms.items() for r in refusals(case)]
    names = [entry[0] for entry in entries]
    assert len(set(names)) == len(names)
    return pytest.mark.parametrize(("case", "change", "error", "message"), [e[1:] for e in entries], ids=names)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument, or in what holds some."""
    if isinstance(value, Tensor):
        if not value.is_meta and not value.is_sparse:
            yield value
    elif isinstance(value, HOLDERS):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, so that memory around a view counts too."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def refuses(call: Callable[[], Any], error: type[Exception], message: str, touched: Arguments) -> None:
    """The call raises this, and no tensor that it could reach changes."""
    memory = [memory_of(tensor) for value in touched.values() for tensor in tensors_of(value)]
    before = [region.clone() for region in memory]
    with pytest.raises(error, match=message):
        call()
    assert all(map(torch.equal, memory, before))


def refuses_change(
    step: Callable[..., Any], arguments: Arguments, change: Change, error: type[Exception], message: str
) -> None:
    """A call of an op with changed arguments raises this, and no tensor of it or of the call that was right changes."""
    wrong = {**arguments, **change(arguments)}
    touched = {**arguments, **{f"wrong {name}": value for name, value in wrong.items()}}
    refuses(lambda: step(**wrong), error, message, touched)


def strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of longer rows."""
    return torch.stack([tensor, tensor], -1).flatten(-2)[..., ::2]


def transposed(tensor: Tensor) -> Tensor:
    """The same values, those of a column side by side in memory."""
    return tensor.mT.contiguous().mT


def resized(tensor: Tensor, axis: int, by: int) -> Tensor:
    size = tensor.shape[axis] + by
    return torch.cat([tensor, tensor], axis).narrow(axis, 0, size).clone()


def on_meta(value: Any) -> Any:
    """The same argument on another device."""
    if isinstance(value, HOLDERS):
        return replace(value, **{field.name: on_meta(getattr(value, field.name)) for field in fields(value)})
    return value.to(META) if isinstance(value, Tensor) else value


WRONG_INDICES = (
    ("int16", Tensor.short, TypeError, r"^{name} must be int32 or int64, got int16"),
    ("float32", Tensor.float, TypeError, r"^{name} must be int32 or int64, got float32"),
    ("bool", Tensor.bool, TypeError, r"^{name} must be int32 or int64, got bool"),
    ("of rank 0", lambda t: t.flatten()[0], ValueError, r"^{name} must have shape \(batch.*\), got \(\)"),
    ("of rank 3", lambda t: t.reshape(-1, 1, 1), ValueError, r"^{name} must have shape \(batch.*\), got \(\d+, 1, 1\)"),
)
_SLOTS_OF_A_CALL = (
    ("a list", Tensor.tolist, TypeError, r"^slots must be a Slots, an index tensor or None, got list"),
    ("an int", lambda t: 1, TypeError, r"^slots must be a Slots, an index tensor or None, got int"),
    ("a State", lambda t: State(torch.ones(1, 1, 1, 1)), TypeError, r"^slots must be a Slots, .* got State"),
    *WRONG_INDICES,
    ("of rank 2", lambda t: t[:, None], ValueError, r"^slots must have shape \(batch\), got \(3, 1\)"),
    ("elsewhere", on_meta, ValueError, r"^slots are on meta, but the state is on cpu"),
    ("a Slots elsewhere", lambda t: Slots(on_meta(t)), ValueError, r"^slots are on meta, but the state is on cpu"),
)
WRONG_SLOTS: list[Refusal] = [
    (f"slots {what}", only("slots", change), error, message.format(name="slots"))
    for what, change, error, message in _SLOTS_OF_A_CALL
]


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


def ring_arguments() -> Arguments:
    """The arguments of a Ring that is right: 7 slots, 4 heads, 2 groups, 7 tokens, 6 rows, 8 columns."""
    generator = torch.Generator().manual_seed(0)
    x, B, dt = (torch.randn(7, *size, generator=generator) for size in ((4, 7, 6), (2, 7, 8), (4, 7)))
    start, count = torch.arange(7).int(), torch.tensor([3, 0, 4, 1, 2, 4, 3]).int()
    return {"x": x.half(), "B": B.half(), "dt": dt.abs(), "start": start, "count": count, "window": 4}


def step_arguments(case: Case | DeltaCase = CASE, device: torch.device = CPU) -> Arguments:
    """All arguments of a call that is right: `out`, and snapshots with room for more rows and tokens, among them."""
    inputs = make_inputs(case, device)
    return {
        "state": inputs.state,
        **inputs.arguments,
        **inputs.options,
        "slots": inputs.at() if case.packed else inputs.slots,
        "snapshots": torch.full((5, 6, case.heads, case.rows, case.cols), 7.0, dtype=torch.float16, device=device),
        "update": True,
        "out": torch.full_like(inputs.main, 7.0),
    }
