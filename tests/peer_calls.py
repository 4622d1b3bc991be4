"""Adapters of flashstate/compat: how they are called, and how their results are compared with those of a model."""

import contextlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from models_of_peers import Arguments, Outcome, decoded, rounded
from torch import Tensor

import flashstate
from flashstate.proof import error_ratio

CPU = torch.device("cpu")
HEADS, DIM, DSTATE, SLOTS = 4, 8, 16, 14
CURSORS = ("ring_start", "prev_num_accepted_tokens")
WRITTEN_ALONE = ("state_out", "intermediate_states_buffer", "intermediate_conv_window", *CURSORS)  # pools never read
FLOAT, HALF, BRAIN, SHORT, BYTE = torch.float32, torch.float16, torch.bfloat16, torch.int16, torch.int8
Call = dict[str, Any]  # options of Adapter.make, arguments besides, lists of indices
Calls = dict[str, Call]


def in_turn(modes: Calls, *tables: Calls) -> Calls:
    """Every mode, with the next call of every table; the modes go round until each call has had its turn."""
    longest = max(map(len, (modes, *tables)))
    turns = [[list(table.items())[i % len(table)] for table in (modes, *tables)] for i in range(longest)]
    combinations = [list(zip(*turn, strict=True)) for turn in turns]
    return {
        ", ".join(filter(None, names)): {name: value for call in calls for name, value in call.items()}
        for names, calls in combinations
    }


@dataclass(frozen=True, eq=False)
class Adapter:
    """A function of flashstate/compat, its contract, and calls that are right.

    make: random arguments for a device, by options. pools: arguments that hold states, with the names of their scales.
    tokens: arguments that have the rows of the output on their first axis. calls: in every mode and form. edges: calls
    that show nothing more of a kernel. out: the argument that is filled and returned, or with `in_place` x. fills:
    others that are filled.
    """

    function: Callable[..., Any]
    make: Callable[..., Arguments]
    model: Callable[[Arguments, torch.dtype], Any]
    pools: dict[str, str]
    tokens: tuple[str, ...]
    calls: Calls
    edges: Calls = field(default_factory=dict)
    out: str = "out"
    in_place: bool = False
    fills: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.function.__module__.rpartition('.')[2]}.{self.function.__name__}"

    def arguments(self, call: str | Call, device: torch.device = CPU) -> Arguments:
        """The arguments of a call.

        Lists become tensors of the type that `indices` says, or int32; counts have the other type. With `given` there
        is memory for the output, of that dtype if it is one.
        """
        call = dict((self.calls | self.edges)[call] if isinstance(call, str) else call)
        kind, given, _ = call.pop("indices", torch.int32), call.pop("given", False), call.pop("fault", None)
        options = {name: call.pop(name) for name in inspect.signature(self.make).parameters if name in call}
        arguments = {**self.make(device, **options), **call}
        for name, entry in arguments.items():
            if isinstance(entry, list):
                other = torch.int32 if kind == torch.int64 else torch.int64
                dtype = other if "accepted" in name else kind
                arguments[name] = torch.tensor(entry, dtype=dtype, device=device)
            elif isinstance(entry, Tensor) and entry.device != device:
                arguments[name] = entry.to(device)
        dtype = given if isinstance(given, torch.dtype) else None
        return self.with_room(arguments, dtype) if given and arguments.get(self.out) is None else arguments

    def with_room(self, arguments: Arguments, dtype: torch.dtype | None = None) -> Arguments:
        """With memory for the output, in pages, in which there is something."""
        like = arguments[self.tokens[0]]
        if "outproj" in arguments and arguments["outproj"] is None:  # then mamba3_step_fn has an output for every rank
            like = like[:, None].expand(-1, arguments["Bstate"].shape[1], -1, -1)
        return {**arguments, self.out: in_pages(torch.full_like(like, 5.0, dtype=dtype))}

    def results(self, arguments: Arguments) -> dict[str, Tensor]:
        """The output of a call, and the states after it."""
        y = self.function(**arguments)
        if isinstance(y, tuple):
            y, pool = y
            if not self.pools:  # then states are new
                return {"y": y} if pool is None else {"y": y, "final": pool}
            assert any(pool is arguments.get(name) for name in self.pools)
        if self.in_place or arguments.get(self.out) is not None:
            assert y is arguments.get(self.out, arguments.get("x"))
        states = [name for pair in self.pools.items() for name in pair if arguments.get(name) is not None]
        return {"y": y, **{name: arguments[name] for name in states}}


def signature_of(function: Callable[..., Any]) -> str:
    """The parameters of a function as they are written, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)


def copied(arguments: Arguments, device: torch.device | None = None) -> Arguments:
    """Arguments in memory of their own, on a device or where they are; expanded ones are no longer."""
    copies = {name: t.clone() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    return {name: t.to(device) if isinstance(t, Tensor) and device else t for name, t in copies.items()}


def require_contract(adapter: Adapter, arguments: Arguments, fault: str | None = None) -> None:
    """Call the adapter, and require that its model is right about output, states and all that stays.

    Slots that no row reads are NaN. fault: what check_faults() finds, and nothing else.
    """
    exact, plain = (adapter.model(copied(arguments, CPU), dtype) for dtype in (torch.float64, torch.float32))
    poison(adapter, arguments, exact)
    before = copied(arguments, CPU)
    torch.manual_seed(0)  # adapters without a seed draw theirs from torch, and few of them leave a budget
    y = adapter.results(arguments)["y"].cpu()
    after, ran = copied(arguments, CPU), exact.ran
    like = before[adapter.tokens[0] if before.get(adapter.out) is None else adapter.out]
    assert (y.shape, y.dtype) == (exact.y.shape, like.dtype)
    assert not ran.any() or error_ratio(y[ran], exact.y[ran], plain.y[ran].to(y.dtype)) <= 1
    assert torch.equal(y[~ran], exact.y[~ran].to(y.dtype))
    for name, scale in adapter.pools.items():
        if before.get(name) is not None:
            require_stored(name, scale, before, after, exact, plain)
    changed = {*adapter.pools, *adapter.pools.values(), adapter.out, *adapter.fills, *"x" * adapter.in_place}
    for name, tensor in before.items():
        assert name in changed or not isinstance(tensor, Tensor) or equal_bytes(after[name], tensor), name
    with contextlib.nullcontext() if fault is None else pytest.raises(IndexError, match=fault):
        flashstate.check_faults()


def poison(adapter: Adapter, arguments: Arguments, outcome: Outcome) -> None:
    """Make NaN of slots that no row reads, or of their scales, and of the tokens of rows that do nothing."""
    for name, scale in adapter.pools.items():
        if arguments.get(name) is not None and name not in WRITTEN_ALONE:
            state = arguments[name if arguments.get(scale) is None else scale]
            state[[slot for slot in range(len(state)) if slot not in outcome.read]] = torch.nan
    idle = ~outcome.ran.flatten(1).any(1)
    for name in adapter.tokens:
        if arguments.get(name) is not None and 0 not in arguments[name].stride():
            arguments[name][idle] = torch.nan


def require_stored(name: str, scale: str, before: Arguments, after: Arguments, exact: Outcome, plain: Outcome) -> None:
    """States that were to be stored are, within budget or to the byte, and all else stayed."""
    places = [place for place in exact.stored if place[0] == name]
    for tensor in (tensor for tensor in (name, scale) if before.get(tensor) is not None):
        for place in places:
            kept = exact.stored[place].dtype == before[name].dtype
            before[tensor][place[1]] = exact.stored[place] if kept else after[tensor][place[1]]
        assert equal_bytes(after[tensor], before[tensor]), tensor
    if places:
        want, plainly = (torch.stack([outcome.stored[place] for place in places]) for outcome in (exact, plain))
        scales = after.get(scale)
        got = [decoded(after[name][entry], None if scales is None else scales[entry]) for _, entry in places]
        got = torch.stack(got).reshape(want.shape)
        assert error_ratio(got, want.double(), rounded(plainly, after[name].dtype)) <= 1, name


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(*(tensor.view(getattr(torch, f"int{8 * tensor.element_size()}")) for tensor in (one, other)))


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Both have the same bytes, but for axes of one."""
    assert one.keys() <= other.keys()
    for name, tensor in one.items():
        assert equal_bytes(tensor.squeeze(), other[name].squeeze()), name


def in_pages(tensor: Tensor) -> Tensor:
    """The entries of the first axis, with fives between them."""
    return torch.stack([tensor, torch.full_like(tensor, 5)], 1)[:, 0]
