"""Tables of wrong calls: what is changed in a right one, what that raises, and that no memory changes."""

from collections.abc import Callable, Iterator
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor

from flashstate import Slots, State
from flashstate.testing import Case, make_inputs

CASE = Case(batch=3, heads=4, groups=2, rows=6, cols=5, format="float16", rounding="stochastic", x="float16")

Arguments = dict[str, Any]
Change = Callable[[Arguments], Arguments]  # all arguments of a call that is right: those to change to make it wrong
Refusal = tuple[str, Change, type[Exception], str]


def only(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda arguments: {name: change(arguments[name])}


def given(**values: Any) -> Change:
    return lambda arguments: values


def table(refusals: list[Refusal]) -> pytest.MarkDecorator:
    names = [refusal[0] for refusal in refusals]
    assert len(set(names)) == len(names)
    return pytest.mark.parametrize(("change", "error", "message"), [r[1:] for r in refusals], ids=names)


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Every tensor with memory in an argument, a State or a Slots."""
    if isinstance(value, Tensor):
        if not value.is_meta:
            yield value
    elif isinstance(value, (State, Slots)):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


def memory_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor's storage, so that memory around a view counts too."""
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


def refuses(call: Callable[[], Any], error: type[Exception], message: str, touched: Arguments) -> None:
    """The call raises this, and no tensor that it could reach changes."""
    memory = [memory_of(tensor) for value in touched.values() for tensor in tensors_of(value)]
    before = [region.clone() for region in memory]
    with pytest.raises(error, match=message):
        call()
    assert all(map(torch.equal, memory, before))


def strided(tensor: Tensor) -> Tensor:
    """The same values, every second element of longer rows."""
    return tensor.repeat_interleave(2, dim=-1)[..., ::2]


def resized(tensor: Tensor, axis: int, by: int) -> Tensor:
    size = tensor.shape[axis] + by
    return torch.cat([tensor, tensor], axis).narrow(axis, 0, size).clone()


def state_arguments() -> Arguments:
    """The arguments of a State that is right."""
    data = torch.randn(3, 2, 4, 8, generator=torch.Generator().manual_seed(0)).half()
    return {"data": data, "rounding": "stochastic", "rounds": 10, "seed": torch.tensor([5, -6, 7]), "stream": 3}


def step_arguments() -> Arguments:
    """All arguments of a call that is right, `out` and the slots no row has among them."""
    inputs = make_inputs(CASE, torch.device("cpu"))
    out = torch.full_like(inputs.arguments["x"], 7.0)
    return {
        "state": inputs.state,
        **inputs.arguments,
        **inputs.options,
        "slots": inputs.slots,
        "update": True,
        "out": out,
    }
