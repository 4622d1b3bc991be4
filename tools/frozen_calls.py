"""Calls that reach every kernel in every form and format, and every entry of a launch table.

Cases are those of flashstate.proof. Inputs are small CPU tensors: calls are made where launches are collected, so
nothing is computed. A call has a name that stays as long as the case and the way it is called stay.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple, cast
from zlib import crc32

import torch
from torch import Tensor

from flashstate import Slots, State, StatePool
from flashstate.launch import Config, Gpu, choose
from flashstate.launch.table import load_table
from flashstate.ops.replaying import parted
from flashstate.proof import (
    CASES,
    AnyCase,
    AnyReplayCase,
    Case,
    ConvCase,
    DeltaCase,
    Mamba3Case,
    ReplayCase,
    dtype,
    slotted,
)
from flashstate.proof.laws.steps import make_snapshots, several, stores_every_token
from flashstate.proof.laws.tokens import TREE
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

CPU = torch.device("cpu")
ARCHITECTURES = (90, 100)
MEASURED = Gpu("NVIDIA H200", (9, 0))  # the GPU that has a table
EVERY = 7  # of the cases of real shapes, one in so many is called, and
RARER = 2  # formats that forms on odd shapes have, but for the first form, which has all
FAR = (1 << 31) + 16  # elements between slots, past 32 bits


class Call(NamedTuple):
    """A call with a name, and the architectures it is made on."""

    name: str
    make: Callable[[], object]
    architectures: tuple[int, ...] = ARCHITECTURES
    compiled: bool = True  # whether what it launches is

    @property
    def compiled_on(self) -> int | None:
        """The architecture that what it launches is compiled for, which takes seconds. So there is one, by turns: its
        name decides."""
        return self.architectures[crc32(self.name.encode()) % len(self.architectures)] if self.compiled else None


class Manner(NamedTuple):
    """A way to call an op, and the cases that it is for."""

    name: str
    call: Callable[[Any, Any], object]  # of a case and its inputs
    fits: Callable[[Any], bool] = lambda case: True


@cache
def inputs_of(case: AnyCase) -> Any:
    """The inputs of a case on a pool that is no larger than its batch needs."""
    return replace(case, slots=case.batch + 1).make_inputs(CPU)


def can_be_a_tree(case: AnyCase) -> bool:
    """Whether the tokens of a row can form a tree."""
    return several(case) and case.op.between_tokens and case.tokens <= len(TREE)


def token_slots(case: AnyCase) -> Tensor:
    """A slot for every token."""
    return torch.zeros(case.batch, case.tokens, dtype=torch.int64)


def parents_of(case: AnyCase) -> Tensor:
    """A tree of the tokens of every row."""
    return torch.tensor(TREE[: case.tokens]).repeat(case.batch, 1)


def with_accepted(case: AnyCase, inputs: Any) -> object:
    """Call with three slots to read for each row, of which a count names one."""
    read = inputs.slots[:, None].expand(-1, 3).contiguous()
    return inputs.step(slots=inputs.at(read=read, accepted=torch.ones_like(inputs.slots)))


def with_snapshots(case: AnyCase, inputs: Any, which: int) -> object:
    """Call with snapshots in one of the formats that a case tries."""
    snapshots = make_snapshots(case, *case.snapshot_formats[which], CPU)
    return inputs.step(slots=inputs.at(snapshot_rows=inputs.slots), snapshots=snapshots)


def far_apart(case: AnyCase, inputs: Any) -> object:
    """Call on a pool whose slots are further apart than 32 bits count, with slots to write beside those to read."""
    tensors = {name: tensor[:1] for name, tensor in slotted(inputs.state).items()}
    data = tensors["data"]
    tensors["data"] = data.as_strided(data.shape, (FAR, *data.stride()[1:]))
    seed = None if inputs.state.seed is None else inputs.state.seed[:1]
    slots = inputs.slots.long()
    far = replace(inputs, state=replace(inputs.state, **tensors, seed=seed))
    return far.step(slots=far.at(read=slots, write=slots))


def has_early(case: AnyCase) -> bool:
    """Whether the op of a case may start before the kernel in front of it has ended."""
    return isinstance(case, Case | DeltaCase | ConvCase)


STEPS = (
    Manner("in place", lambda case, inputs: inputs.step()),
    Manner("a slot for every token", lambda c, i: i.step(slots=i.at(write=token_slots(c))), stores_every_token),
    Manner("snapshots in another format", partial(with_snapshots, which=-2), lambda c: c.op.between_tokens),
    Manner("a tree", lambda c, i: i.step(slots=i.at(parents=parents_of(c)), update=False), can_be_a_tree),
    Manner("update=False", lambda case, inputs: inputs.step(update=False)),
    Manner("int64 slots", lambda c, i: i.step(slots=i.at(read=i.slots.long())), lambda c: c.index == "int32"),
    Manner("early", lambda case, inputs: inputs.step(early=True), has_early),
    Manner("fresh padding", lambda case, inputs: inputs.step(slots=inputs.at(padding="fresh"))),
    Manner("strided activations", lambda case, inputs: case.as_views(inputs).step()),
    Manner("kept padding", lambda case, inputs: inputs.step(slots=inputs.at(padding="keep"))),
    Manner("accepted slots", with_accepted),
    Manner("snapshots in the same format", partial(with_snapshots, which=1), lambda c: c.op.between_tokens),
    Manner(
        "a tree with a slot for every token",
        lambda c, i: i.step(slots=i.at(parents=parents_of(c), write=token_slots(c))),
        lambda case: can_be_a_tree(case) and case.op.every_token,
    ),
    Manner("slots far apart", far_apart),
    Manner("slots left out", lambda case, inputs: inputs.step(slots=None), lambda case: not case.packed),
)


def rolled_back(case: ConvCase, inputs: Any) -> object:
    """Convolve windows that are longer by the tokens of a call, and roll back to the accepted ones."""
    longer = inputs_of(replace(case, extra=case.extra + max(1, case.tokens)))
    return longer.step(slots=longer.at(accepted=torch.zeros_like(longer.slots)))


CONVOLUTIONS = (
    Manner("rolled back", rolled_back),
    Manner("in a ring", lambda case, inputs: inputs.step(positions=inputs.slots + 0)),
    *STEPS,
)


def replay(form: str, inputs: Any, options: dict[str, Any] | None = None, **of_slots: Any) -> object:
    """Replay in one of its forms, with these options of the op and fields of Slots."""
    run = replace(inputs, form=form)
    return run.step(slots=run.at(**of_slots), **options or {})


def replayed(form: str, **of_slots: Any) -> Callable[[Any, Any], object]:
    """A way to call replay: in one of its forms, with fields of Slots."""
    return lambda case, inputs: replay(form, inputs, **of_slots)


REPLAYING = ("mamba2_replay", "gated_delta_replay")
REPLAYS = (
    Manner("decided", replayed("decided")),
    Manner("parted", replayed("parted")),
    Manner("planned", replayed("planned")),
    Manner("decided, update=False", lambda case, inputs: replay("decided", inputs, {"update": False})),
    Manner("planned, fresh padding", replayed("planned", padding="fresh")),
    Manner("parted, kept padding", replayed("parted", padding="keep")),
    Manner(
        "decided, int64 slots", lambda c, i: replay("decided", i, read=i.slots.long()), lambda c: c.index == "int32"
    ),
    Manner("decided, strided activations", lambda case, inputs: case.as_views(inputs).step()),
    Manner("parted, update=False", lambda case, inputs: replay("parted", inputs, {"update": False})),
    Manner(
        "planned, int64 slots", lambda c, i: replay("planned", i, read=i.slots.long()), lambda c: c.index == "int32"
    ),
    Manner("decided, kept padding", replayed("decided", padding="keep")),
)


def called(case: AnyCase, manner: Manner) -> Call:
    """A case called in a manner."""
    return Call(f"{case}, {manner.name}", lambda: manner.call(case, inputs_of(case)))


def by_turns(cases: Iterable[AnyCase], manners: Sequence[Manner]) -> Iterator[Call]:
    """Every case in the manner that the fewest cases before it were called in, among those that it fits."""
    used: Counter[str] = Counter()
    for case in cases:
        manner = min((manner for manner in manners if manner.fits(case)), key=lambda manner: used[manner.name])
        used[manner.name] += 1
        yield called(case, manner)


def some_formats(cases: Sequence[AnyCase], forms: int) -> Iterator[AnyCase]:
    """All cases of the first form and some of each other one, in formats by turns. The cases of all forms in a format
    are neighbours, and formats follow on each other."""
    every = len(cases) // forms // RARER
    for i, case in enumerate(cases):
        if i % forms == 0 or (i // forms + i % forms) % every == 0:
            yield case


def odd_calls() -> Iterator[Call]:
    """Every op in every form, format and rounding, on small and odd shapes; of rarer forms formats take turns."""
    for op in ("mamba2_step", "gated_delta_step", "mamba3_step", *REPLAYING):
        some = some_formats(CASES[op].odd, len(CASES[op].groups[0]))
        yield from by_turns(some, REPLAYS if op in REPLAYING else STEPS)
    for i, manner in enumerate(CONVOLUTIONS):
        fitting = [case for case in CASES["conv1d_step"].odd if manner.fits(case)]
        yield from (called(fitting[(i + 5 * j) % len(fitting)], manner) for j in range(RARER))


def real_calls() -> Iterator[Call]:
    """Shapes of real models, and batches so large that replay starts two kernels."""
    for op in ("mamba2_step", "gated_delta_step", "mamba3_step"):
        yield from by_turns(CASES[op].real[::EVERY], STEPS)
    yield from by_turns(CASES["conv1d_step"].real, CONVOLUTIONS)
    for op in REPLAYING:
        cases = cast("Sequence[AnyReplayCase]", CASES[op].real)
        yield from by_turns(cases[::EVERY], REPLAYS)
        largest = max(case.problem.batch_heads for case in cases)
        large = (case for case in cases if case.problem.batch_heads == largest)
        yield from (called(case, Manner("planned, two kernels", replayed("planned"))) for case in large)


def hardware_rounding_calls() -> Iterator[Call]:
    """Rounding by an instruction that only the newest architecture has."""
    for name in ("float16", "float8_e4m3fn"):
        case = Case(
            2, 16, 1, 64, 128, format=name, rounding="stochastic_hw", x="bfloat16", bc="bfloat16", dt="bfloat16"
        )
        yield called(case, STEPS[0])._replace(architectures=ARCHITECTURES[-1:])


def folded_into(inputs: Any, name: str, rounding: str) -> None:
    """Fold into another State, of this format."""
    pool = inputs.state
    into = untouched_state(pool.data.shape, name, rounding, pool.seed)
    slots = Slots(inputs.slots, write=inputs.slots.flip(0))
    inputs.fold(slots=slots, into=into)


def untouched_state(shape: Sequence[int], name: str, rounding: str, seed: Tensor | None = None) -> State:
    """A State of this shape and format whose memory nobody touches."""
    scaled = FORMATS[dtype(name)].scaled
    scale = torch.empty(*shape[:-1]) if scaled else None
    return State(torch.empty(*shape, dtype=dtype(name)), scale, rounding=rounding, seed=seed)


def fold_calls() -> Iterator[Call]:
    """Folds of states in every format, in place and into every format."""
    for op, (i, (name, rounding)) in product(REPLAYING, enumerate(PORTABLE_FORMATS)):
        shapes = [case for case in cast("Sequence[AnyReplayCase]", CASES[op].real) if case.batch < 8]
        case = replace(shapes[(5 * i) % len(shapes)], format=name, rounding=rounding)
        inputs, (into, into_rounding) = inputs_of(case), PORTABLE_FORMATS[(4 * i + 3) % len(PORTABLE_FORMATS)]
        rows: dict[str, dict[str, Any]] = {
            "everywhere": {},
            "of slots": {"slots": inputs.slots},
            "of some tokens": {"slots": inputs.slots, "tokens": torch.ones_like(inputs.slots)},
            "of two tokens": {"tokens": 2},
        }
        which = list(rows)[i % len(rows)]
        yield Call(f"{case}, fold {which}", partial(inputs.fold, **rows[which]))
        yield Call(f"{case}, fold into {into} {into_rounding}", partial(folded_into, inputs, into, into_rounding))


def planned_and_committed(inputs: Any, accepted: Tensor | None) -> None:
    """Make the plan of a step, and move the cursors on as if it had been made."""
    inputs.state.ring.commit(inputs.plan(), accepted)


def ring_calls() -> Iterator[Call]:
    """Plans of a step, and what moves the cursors of rings."""
    for case in CASES["mamba2_replay"].odd[:3]:
        inputs = inputs_of(case)
        ring, slots, accepted = inputs.state.ring, inputs.slots, torch.ones_like(inputs.slots)
        yield Call(f"{case}, commit", partial(planned_and_committed, inputs, None))
        yield Call(f"{case}, commit accepted", partial(planned_and_committed, inputs, accepted))
        yield Call(f"{case}, folded", partial(ring.folded, slots))
        yield Call(f"{case}, folded some tokens", partial(ring.folded, slots, accepted))
        yield Call(f"{case}, folded everywhere", partial(ring.folded, None, 2))
    case = replace(CASES["mamba2_replay"].odd[0], batch=2000)
    yield Call(f"{case}, plan of many rows", lambda: inputs_of(case).plan())


def pool_calls() -> Iterator[Call]:
    """States written to a pool and read from it, in every format, and seeds that advance."""
    for i, (name, rounding) in enumerate(PORTABLE_FORMATS):
        for rows, cols, transposed in ((64, 128, False), (64, 128, True), (5, 20, False)):
            if transposed and FORMATS[dtype(name)].scaled:
                continue
            state = untouched_state((4, 2, rows, cols), name, rounding, torch.arange(4))
            if transposed:
                state = replace(state, data=state.data.mT.contiguous().mT)
            pool, given = StatePool.wrap([state]), (torch.float32, torch.bfloat16, torch.float16)[i % 3]
            shape = f"{rows}x{cols}{' transposed' if transposed else ''} {name} {rounding}"
            states = torch.zeros(2, 2, rows, cols, dtype=given)
            yield Call(f"pool {shape}, write {given}", partial(pool.write, 0, [0, 2], states))
            yield Call(f"pool {shape}, read", partial(pool.read, 0, [0, 2]))
    state = untouched_state((8, 2, 64, 128), "float16", "stochastic", torch.arange(8))
    for index in (torch.int32, torch.int64):
        read, one = torch.arange(3, dtype=index), torch.ones(3, dtype=index)
        where = {
            "slots": Slots(read),
            "accepted slots": Slots(read[:, None].expand(-1, 3).contiguous(), accepted=one),
            "packed rows": Slots(read, cu_seqlens=torch.arange(4, dtype=index), max_len=1),
        }
        for name, slots in where.items():
            yield Call(f"advance, {name} {index}", partial(state.advance, slots))
    yield Call("advance, everywhere", state.advance)
    yield from moving_calls(StatePool.wrap([state]))


def moving_calls(pool: StatePool) -> Iterator[Call]:
    """What a pool does to slots in all layers."""
    for count in (1, 3, 8):
        slots = torch.arange(count)
        for keep_seed in (False, True):
            words = f"copy {count}, {'kept' if keep_seed else 'new'} seeds"
            yield Call(f"pool, {words}", partial(pool.copy, slots, slots.flip(0), keep_seed))
    yield Call("pool, reset", partial(pool.reset, slots))
    yield Call("pool, export", partial(pool.export, slots))
    exported = pool.export(slots)
    yield Call("pool, load", partial(pool.load, slots, exported))


def portable_calls() -> list[Call]:
    """Calls for a GPU without a table."""
    kinds = (odd_calls, real_calls, hardware_rounding_calls, fold_calls, ring_calls, pool_calls)
    return [call for kind in kinds for call in kind()]


KEY = re.compile(
    r"(?P<op>\w+?)(?P<more>(?:_16)?(?: rank \d+)?(?: turned| either| keep| fold)?) (?P<rows>\d+)x(?P<cols>\d+) "
    r"(?P<format>\w+) vector (?P<vector>\d+)(?P<layout> transposed)?"
)
MODE = re.compile(r"(?P<rounding>\w+), (?P<tokens>one token|several tokens)(?:, (?P<stored>every|none) stored)?")
HALF = "bfloat16"


def case_of(key: str, mode: str, size: int) -> AnyCase:
    """A case whose call has batch x heads of that size and uses the entries of a table that have these keys."""
    about, how = KEY.fullmatch(key), MODE.fullmatch(mode)
    assert about, f"{key!r} is not a key"
    assert how, f"{mode!r} is not a mode"
    op, more, rows, cols = about["op"], about["more"], int(about["rows"]), int(about["cols"])
    tokens = (16 if more == "_16" else 4) if how["tokens"] == "several tokens" else 0
    if op == "conv1d_step":
        return ConvCase(size, rows, cols, tokens=tokens, x=HALF, window="same", parameters=HALF)
    shape: dict[str, Any] = {
        "rows": rows, "cols": cols, "format": about["format"], "rounding": how["rounding"], "x": HALF, "tokens": tokens
    }  # fmt: skip
    if op in ("mamba2_step", "mamba2_at_once"):
        return Case(*heads_of(size, 16, 16), **shape, exact=op == "mamba2_step", bc=HALF, dt=HALF)
    if op == "mamba2_replay":
        return ReplayCase(*heads_of(size, 16, 16), **shape, dt=HALF)
    if op == "mamba3_step":
        rank, turned = int(more.split()[1]), more.endswith("turned")
        return Mamba3Case(*heads_of(size, 48, 48), **shape, rank=rank, angles=32 if turned else 0, bc=HALF, kv=HALF)
    if op in ("gated_delta_step", "gated_delta_at_once"):
        exact, transposed = op == "gated_delta_step", about["layout"] is not None
        return DeltaCase(*heads_of(size, 32, 2), **shape, exact=exact, transposed=transposed, qk=HALF, gates=HALF)
    raise ValueError(f"no case is known for {op}, of which the table has {key!r}")


def heads_of(size: int, most: int, per_group: int) -> tuple[int, int, int]:
    """Rows of a batch, heads and groups, so that batch x heads is that size."""
    heads = math.gcd(size, most)
    return size // heads, heads, heads // math.gcd(heads, per_group)


def enlarged(case: AnyCase) -> Any:
    """The inputs of a case, of which all rows of the batch have the memory of one."""
    inputs = inputs_of(replace(case, batch=1)).changed(lambda t: t.expand(case.batch, *t.shape[1:]))
    return replace(inputs, slots=torch.zeros(case.batch, dtype=dtype(case.index)))


def measured_call(case: AnyCase, op: str, stored: str, size: int) -> object:
    """Call as the mode of an entry says: what is stored of several tokens, and by which kernel of replay."""
    inputs = enlarged(case)
    if op.startswith("mamba2_replay"):
        with nullcontext() if op.endswith("either") else parted():
            return inputs.step() if op.endswith("either") else inputs.step(plan=inputs.plan())
    if stored == "none":
        return inputs.step(update=False)
    if stored == "last":
        return inputs.step()
    if size.bit_length() % 2:
        return inputs.step(slots=inputs.at(write=token_slots(case)))
    snapshots = untouched_state((case.batch, case.tokens, *case.state_axes), case.format, case.rounding)
    return inputs.step(snapshots=snapshots)


def table_calls() -> Iterator[Call]:
    """A call for every entry of the table; what the largest size of each mode launches is compiled."""
    for key, modes in load_table(MEASURED.name).items():
        for mode, sizes in modes.items():
            for size, config in sizes.items():
                yield table_call(key, mode, size, config)._replace(compiled=size == max(sizes))


def table_call(key: str, mode: str, size: int, config: Config) -> Call:
    """A call that uses this entry of the table."""
    case, op = case_of(key, mode, size), re.split(r" \d+x", key)[0]
    found = MODE.fullmatch(mode)
    stored = (found and found["stored"]) or "last"
    problem = replace(case.problem, op=op, stored=stored)
    assert problem.batch_heads == size, (key, mode, size, problem)
    assert choose(problem, MEASURED) == config, (key, mode, size, problem)
    return Call(f"{key}, {mode}, size {size}", partial(measured_call, case, op, stored, size), (90,))
