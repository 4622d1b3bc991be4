"""The function of an op that starts a kernel again, written out for its signature, as namedtuple writes out a class.

It is all that a repeated call costs the host, so it asks nothing twice and loops over nothing: it collects the
pointers in the order in which the kernel takes them, and a key that tells calls apart but for what torch's guard
compares: dtypes, shapes and strides of tensors. `print(source_of(op, kernel))` shows it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import is_dataclass
from textwrap import dedent, indent
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from flashstate.launch import direct, environment
from flashstate.state.mamba3 import Mamba3State, Rotary
from flashstate.state.signature import ACCESS_BYTES, describe_aligned
from flashstate.state.slots import TABLES, Slots
from flashstate.state.state import State

if TYPE_CHECKING:
    from flashstate.launch.call import Op


class Variable(NamedTuple):
    """A variable of the function, with a tensor."""

    name: str
    optional: bool  # it may be None
    compared: bool  # with the tensor of the earlier call


class Holder(NamedTuple):
    """How an argument that holds tensors takes part in a repeated call."""

    prelude: str  # source that takes it apart
    pointers: str  # variables behind the names that kernels have for them; "?": may be None, "!": is compared
    key: tuple[str, ...] = ()  # expressions that tell calls apart

    @property
    def variables(self) -> dict[str, Variable]:
        """The variable with each tensor, by the name of its pointer."""
        pairs = (word.split("=") for word in self.pointers.split())
        return {f"{pointer}_ptr": Variable(word.rstrip("?!"), "?" in word, "!" in word) for pointer, word in pairs}


HOLDERS = {
    "State": Holder(
        """
        state_data, state_scale, state_seed, stream, state_like = state, None, None, 0, None
        if state.__class__ is State:
            state_data, state_scale, state_seed = state.data, state.scale, state.seed
            stream, state_like = state.stream, state.signature
        """,
        "data=state_data! scale=state_scale? seed=state_seed?", ("state_like", f"state_data_at % {ACCESS_BYTES}"),
    ),
    "Mamba3State": Holder(
        """
        if state.__class__ is not Mamba3State: raise TypeError
        ssm, state_like = state.ssm, state.signature
        state_data, state_scale, state_seed, stream = ssm.data, ssm.scale, ssm.seed, ssm.stream
        state_k, state_v, theta = state.k, state.v, None if rotary is None else state.angle
        """,
        "data=state_data scale=state_scale? seed=state_seed? k=state_k v=state_v theta=theta?", ("state_like",),
    ),
    "Rotary": Holder(
        """
        angle = bias_B = bias_C = pairing = None
        if rotary is not None:
            if rotary.__class__ is not Rotary: raise TypeError
            angle, bias_B, bias_C, pairing = rotary.angle, rotary.bias_B, rotary.bias_C, rotary.pairing
        """,
        "angle=angle?! bias_B=bias_B?! bias_C=bias_C?!", ("pairing",),
    ),
    "Ring": Holder(
        "ring_x, ring_B, ring_dt, start, count = ring.x, ring.B, ring.dt, ring.start, ring.count",
        "ring_x=ring_x ring_B=ring_B ring_dt=ring_dt start=start count=count", ("ring.signature",),
    ),
    "DeltaRing": Holder(
        "ring_k, ring_u, ring_decay, start, count = ring.k, ring.u, ring.decay, ring.start, ring.count",
        "ring_k=ring_k ring_u=ring_u ring_decay=ring_decay start=start count=count", ("ring.signature",),
    ),
    "Plan": Holder(
        """
        rows = parts = plan_like = None
        if plan is not None:
            other = slots is not None and slots is not plan.slots
            if other or plan.window != ring.window or plan.count.data_ptr() != count.data_ptr(): raise TypeError
            rows, parts, plan_like, slots = plan.rows, plan.parts, plan.signature, plan.slots
        """,
        "rows=rows? parts=parts?", ("plan_like",),
    ),
    "snapshots": Holder(
        """
        copies = copies_scale = snapshots_like = None
        if snapshots.__class__ is State:
            copies, copies_scale, snapshots_like = snapshots.data, snapshots.scale, snapshots.signature
        elif snapshots is not None:
            copies, snapshots_like = snapshots, describe_aligned(snapshots)
        """,
        "copy=copies? copy_scale=copies_scale?", ("snapshots_like",),
    ),
}  # fmt: skip

SLOTS = """
if slots.__class__ is Slots:
    for table in slots.tables:
        pointers.append(table.data_ptr())
    slots_like, null = slots.signature, slots.null
    if slots.cu_seqlens is not None:  # rows of any length: what differs is the number of tokens
        slots_like = slots_like, len({main})
elif slots is None:
    slots_like, null = None, -1
else:
    tensors.append(slots)
    pointers.append(slots.data_ptr())
    slots_like, null = ~len(slots), -1  # signatures are not negative
"""

FRAME = """
def {name}({every}):
    if environment.suspensions or not direct.available or is_compiling() or not (
        environment.pretended or getattr({main}, "is_cuda", False)
    ):
        return op.ordinary(({every}), None)
    likeness = found = None
    asked = out
    try:
{body}
        for launch in launches.get(key, ()):
            if launch.same_tensors(*tensors):
                found = launch
                break
        else:
            likeness = launches, key, tensors
    except (AttributeError, TypeError, RuntimeError):  # the last from tensors without memory
        pass
    if found is not None and found.usable():
        found.start(pointers, {number})
        return out
    out = asked
    return op.ordinary(({every}), likeness)
"""


def repeat_function(op: Op, kernel: Any) -> Callable[..., Any]:
    """The function that takes all arguments of an op, starts its kernel as a call like this did before, and makes an
    ordinary call where there was none."""
    names = {
        "op": op, "launches": op.launches, "direct": direct, "environment": environment,
        "is_compiling": torch.compiler.is_compiling, "out_like": out_like, "State": State, "Mamba3State": Mamba3State,
        "Rotary": Rotary, "Slots": Slots, "describe_aligned": describe_aligned,
    }  # fmt: skip
    exec(compile(source_of(op, kernel), f"<repeated calls of {op.name}>", "exec"), names)
    function: Callable[..., Any] = names[op.name]  # type: ignore[assignment]
    return function


def new_out(shape: Sequence[int], main: Tensor, slots: Slots | Tensor | None) -> Tensor:
    """An output of the dtype of the main argument; zeros where padding rows keep what is in it."""
    return (torch.zeros if keeps(slots) else torch.empty)(shape, dtype=main.dtype, device=main.device)


def out_like(main: Tensor, slots: Slots | Tensor | None) -> Tensor:
    """The same with the shape of the main argument, in half the time."""
    return (torch.zeros_like if keeps(slots) else torch.empty_like)(main, memory_format=torch.contiguous_format)


def keeps(slots: Slots | Tensor | None) -> bool:
    """Whether padding rows keep what is in the output."""
    return slots.__class__ is Slots and slots.padding == "keep"


def source_of(op: Op, kernel: Any) -> str:
    """The source of the function for repeated calls of an op."""
    body, number = indent("\n".join(body_of(op, kernel.pointers)), " " * 8), kernel.runtime[len(kernel.pointers)]
    return FRAME.format(name=op.name, every=", ".join(op.hints), main=op.main, body=body, number=number)


def holders_of(op: Op) -> list[Holder]:
    """The arguments of an op that hold tensors."""
    found = []
    for name, hint in op.hints.items():
        kinds = [kind for kind in getattr(hint, "__args__", (hint,)) if isinstance(kind, type)]
        if name == "snapshots" and op.takes_snapshots:
            found.append(HOLDERS["snapshots"])
        elif name != "slots":
            found += [HOLDERS[kind.__name__] for kind in kinds if is_dataclass(kind)]  # KeyError: it needs one
    return found


def body_of(op: Op, pointers: tuple[str, ...]) -> list[str]:
    """Lines that collect pointers, tensors to compare, and the key."""
    holders = holders_of(op)
    variables = {f"{op.aliases.get(name, name)}_ptr": Variable(name, name in op.optional, True) for name in op.tensors}
    variables["out_ptr"] = Variable("out", False, False)
    for holder in holders:
        variables |= holder.variables
    lines = [line for holder in holders for line in dedent(holder.prelude).strip().splitlines()]
    lines += [f"if out is None and ({op.like_main}):", f"    out = out_like({op.main}, slots)"]
    always = [variable.name for variable in variables.values() if variable.compared and not variable.optional]
    addressed = {*op.aligned, *op.aligned_each, op.main, "out"} | {"state_data"} & {*always}
    for name in sorted(addressed):
        absent = name in op.optional and name != "out"
        lines.append(f"{name}_at = 0" if absent else f"{name}_at = {name}.data_ptr()")
    lines += [
        f"tensors = [{', '.join(always)}]",
        f"present = out is {op.main}",
        "if not present: tensors.append(out)",
        *pointer_lines(op, pointers, variables, addressed),
        *(f"if slots.__class__ is Slots and slots.{table} is not None: raise TypeError" for table in op.ignored),
    ]
    if "parents_ptr" in pointers:
        shares = f"out_at == {op.main}_at and slots.__class__ is Slots"
        lines.append(f"if {shares} and slots.parents is not None: raise TypeError  # which is refused")
    return [*lines, *option_lines(op), f"key = {', '.join(key_of(op, holders))}"]


def pointer_lines(op: Op, pointers: Sequence[str], variables: dict[str, Variable], addressed: set[str]) -> list[str]:
    """Lines that collect the pointers that are there, in the order of the kernel."""
    lines: list[str] = []
    for bit, pointer in enumerate(pointers, 1):
        if pointer not in variables:
            table = pointer.removesuffix("_ptr")
            assert table in TABLES, f"{op.name} has no argument for {pointer}"
            lines += SLOTS.format(main=op.main).strip().splitlines() if table == TABLES[0] else []
            continue
        name, optional, compared = variables[pointer]
        address = f"{name}_at" if name in addressed else f"{name}.data_ptr()"
        if optional:
            lines += [f"if {name} is not None:", f"    present += {1 << bit}"]
            lines += [f"    {name}_at = {name}.data_ptr()"] if name in addressed else []
            lines.append(f"    pointers.append({address})")
            lines += [f"    tensors.append({name})"] if compared else []
        elif lines and lines[-1].startswith("pointers "):
            lines[-1] = f"{lines[-1][:-1]}, {address}]"
        else:
            lines.append(f"pointers {'+=' if lines else '='} [{address}]")
    return lines


def option_lines(op: Op) -> list[str]:
    """Lines that refuse options of types that are equal to others: 1, True and 1.0 are one key."""
    wrong = [f"{name}.__class__ is not bool" for name in op.flags if name not in op.optional]
    wrong += [f"{name}.__class__ is not bool and {name} is not None" for name in op.flags if name in op.optional]
    wrong += [f"{name}.__class__ is not float and {name} is not None" for name in op.numbers]
    wrong += [f"{name} is not None and [*map(type, {name})] != [float, float]" for name in op.ranges]
    others = (*op.flags, *op.numbers, *op.ranges)
    wrong += [f"{name}.__class__ is bool" for name in op.options if name not in others]
    return [f"if {' or '.join(wrong)}: raise TypeError"] if wrong else []


def key_of(op: Op, holders: Iterable[Holder]) -> list[str]:
    """What tells calls apart but their tensors."""
    together = [f"({' | '.join(f'{name}_at' for name in op.aligned)}) % {ACCESS_BYTES} == 0"] if op.aligned else []
    each = [f"{name}_at % {ACCESS_BYTES}" for name in op.aligned_each]
    held = [part for holder in holders for part in holder.key]
    return [f'"{op.name}"', "slots_like", "present", *held, *op.options, *together, *each]
