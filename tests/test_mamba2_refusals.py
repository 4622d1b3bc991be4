"""mamba2_step: what it alone refuses by name: parameters of either form, rows of dt, and transposed states."""

from collections.abc import Callable

from refusals import (
    CASE,
    FORMS,
    FORMS_PER_ROW,
    Change,
    Refusal,
    only,
    refuses_change,
    step_arguments,
    strided,
    table,
    table_of_forms,
    transposed,
)
from torch import Tensor

from flashstate import State, mamba2_step
from flashstate.proof import Case

TRANSPOSED = (
    r"must be contiguous within a slot: strides \((any, )+\d+, \d+, 1\), got \([\d, ]+\); only gated_delta_step takes "
    "transposed states$"
)


def wrong_parameters(case: Case) -> list[Refusal]:
    """Wrong strides of what must be contiguous, or expanded from one value per head that is."""
    changes: list[tuple[str, str, Callable[[Tensor], Tensor]]] = [
        (name, what, change)
        for name in ("A", "D", "dt_bias")
        for what, change in (("strided", strided), ("one value for all heads", lambda t: t[:1].expand_as(t)))
    ]
    if case.mamba1:
        changes += [
            ("A", "expanded along rows alone", lambda t: t[:, :1].expand_as(t)),
            ("A", "expanded along cols alone", lambda t: t[..., :1].expand_as(t)),
            *[(name, "transposed", lambda t: t.mT.contiguous().mT) for name in ("A", "D", "dt_bias")],
        ]
    else:
        changes += [
            ("A", "strided before it was expanded", lambda t: strided(t)[:, None, None].expand(4, 6, 5)),
            ("D", "strided before it was expanded", lambda t: strided(t)[:, None].expand(4, 6)),
            ("dt_bias", "strided before it was expanded", lambda t: strided(t)[:, None].expand(4, 6)),
        ]
    message = r" must be contiguous, or expanded from contiguous values per head, got strides \("
    return [(f"{name} {what}", only(name, change), ValueError, f"^{name}{message}") for name, what, change in changes]


def wrong_rows(case: Case) -> list[Refusal]:
    """Of dt, whose rows are activations, where it has some."""
    message = r"^dt must be contiguous along its last axis, got strides \("
    return [("dt strided", only("dt", strided), ValueError, message)] if case.mamba1 else []


@table_of_forms({**FORMS, **FORMS_PER_ROW}, lambda case: [*wrong_parameters(case), *wrong_rows(case)])
def test_wrong_strides_are_refused_by_name(case: Case, change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba2_step, step_arguments(case), change, error, message)


TRANSPOSED_STATES: list[Refusal] = [
    (f"{name} transposed, {what}", change, ValueError, f"^{name} {TRANSPOSED}")
    for name, values in (("state", lambda a: a["state"].data), ("snapshots", lambda a: a["snapshots"]))
    for what, wrap in (("a tensor", lambda t: t), ("a State", State))
    for change in [lambda a, name=name, values=values, wrap=wrap: {name: wrap(transposed(values(a)))}]
]


@table(TRANSPOSED_STATES)
def test_transposed_states_are_refused_by_name(change: Change, error: type[Exception], message: str) -> None:
    refuses_change(mamba2_step, step_arguments(CASE), change, error, message)
