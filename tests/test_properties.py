"""mamba2_step on random problems equals a loop over rows and tokens."""

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from situations import FORMS, NOWHERE, Numbers, RowAndToken, Situation, Table, cases, situations
from torch import Tensor

import flashstate
from flashstate import Slots, State
from flashstate.proof import error_ratio, interpreted, make_inputs
from flashstate.reference.mamba2 import mamba2_token
from flashstate.state.faults import KINDS
from flashstate.state.formats import Encoded, decode, encode
from flashstate.state.rounding import SEED_STEP, random_bits

CPU = torch.device("cpu")
COMMON = settings(
    deadline=None,
    derandomize=True,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate, Phase.shrink),
    suppress_health_check=(HealthCheck.too_slow, HealthCheck.data_too_large),
)
EVERY_FORM = pytest.mark.parametrize(("form", "tree"), list(product(FORMS, (False, True))))
PER_TOKEN = ("x", "dt", "B", "C", "z")
NOT_RUN = {"new": 0.0, "given": torch.nan, "x": torch.nan}  # what `out` holds of a token that does not run


@dataclass
class Call:
    """The tensors of a situation: all tokens on one axis, and states inside larger buffers."""

    situation: Situation
    arguments: dict[str, Any]
    state: State
    snapshots: State | None
    buffers: list[Tensor]

    @classmethod
    def of(cls, situation: Situation) -> "Call":
        """Make them, alike every time. NaN in tokens that do not run."""
        inputs = make_inputs(replace(situation.case, batch=situation.tokens), CPU, situation.seed)
        arguments = {**inputs.arguments}
        dt_per_row, A_per_element, bias_per_row = situation.per_row
        if not dt_per_row:
            arguments["dt"] = arguments["dt"][..., 0]
        if not A_per_element:
            arguments["A"] = arguments["A"][:, 0, 0].clone()
        if not bias_per_row and arguments["dt_bias"] is not None:
            arguments["dt_bias"] = arguments["dt_bias"][:, 0].clone()
        running = {situation.at(*token) for token in situation.running}
        for name in PER_TOKEN:
            if arguments[name] is not None:
                arguments[name][[t for t in range(situation.tokens) if t not in running]] = torch.nan
        buffers: list[Tensor] = []
        state, snapshots = inputs.state, None
        data, scale = in_buffers(Encoded(state.data, state.scale), situation, buffers)
        state = replace(state, data=data, scale=scale)
        if situation.snapshots is not None:
            name, rounding = situation.snapshots
            ones = torch.ones(*situation.snapshot_size, *state.data.shape[1:])
            taken = in_buffers(encode(ones, getattr(torch, name)), situation, buffers)
            snapshots = State(*taken, rounding=rounding)
        return cls(situation, arguments, state, snapshots, buffers)

    def step(self) -> Tensor:
        """Call mamba2_step; the outputs of all tokens on one axis."""
        situation, arguments = self.situation, dict(self.arguments)
        if situation.form == "several tokens":
            for name in PER_TOKEN:
                if arguments[name] is not None:
                    arguments[name] = arguments[name].unflatten(0, (situation.case.batch, situation.longest))
        x = arguments["x"]
        out = {"new": None, "given": torch.full_like(x, torch.nan), "x": x}[situation.out]
        y = flashstate.mamba2_step(
            self.state, **arguments, slots=self.slots, snapshots=self.snapshots, update=situation.update, out=out
        )
        assert out is None or y is out
        assert y.dtype == x.dtype
        return y.reshape(self.arguments["x"].shape)

    @property
    def slots(self) -> Slots:
        situation = self.situation
        bounds = tuple(situation.at(row, 0) for row in range(situation.case.batch + 1))
        return Slots(
            self.numbers(situation.read, squeeze=situation.accepted is None),
            write=self.numbers(situation.write, squeeze=not situation.every),
            accepted=self.numbers(situation.accepted),
            snapshot_rows=self.numbers(situation.snapshot_rows),
            cu_seqlens=self.numbers(bounds) if situation.form == "packed" else None,
            max_len=situation.max_len,
            parents=self.numbers(situation.parents),
            null=situation.null,
            padding=situation.padding,
        )

    def numbers(self, entries: Numbers | Table | None, squeeze: bool = False) -> Tensor | None:
        """A list of numbers, or a table, as a view of a wider one; or its only column."""
        if entries is None:
            return None
        tensor = torch.tensor(entries, dtype=getattr(torch, self.situation.case.index))
        if tensor.dim() == 2:
            tensor = torch.nn.functional.pad(tensor, (0, 2), value=NOWHERE)[:, : tensor.shape[1]]
        return tensor[:, 0] if squeeze else tensor


def in_buffers(states: Encoded, situation: Situation, buffers: list[Tensor]) -> Encoded:
    """Put data and scales into buffers of random bytes, which are added to the list."""
    lead = states.data.dim() - 3
    views = [None if tensor is None else in_buffer(tensor, lead, situation) for tensor in states]
    buffers += [view[1] for view in views if view is not None]
    return Encoded(*(None if view is None else view[0] for view in views))


def in_buffer(values: Tensor, lead: int, situation: Situation) -> tuple[Tensor, Tensor]:
    """Put values into a buffer, with gaps between the entries of the first `lead` axes."""
    reach, strides = values.shape[lead:].numel(), list(values.contiguous().stride())
    for axis in reversed(range(lead)):
        strides[axis] = reach + situation.gap
        reach = strides[axis] * max(1, values.shape[axis])
    size = (situation.offset + reach) * values.element_size()
    generator = torch.Generator().manual_seed(situation.seed)
    buffer = torch.randint(256, (size,), dtype=torch.uint8, generator=generator).view(values.dtype)
    return buffer.as_strided(values.shape, strides, situation.offset).copy_(values), buffer


def outcomes(
    call: Call, dtype: torch.dtype, slots: list[int] | None = None
) -> dict[RowAndToken, tuple[Tensor, Tensor]]:
    """Outputs (slots, H, D) and states (slots, H, D, N) after every token that runs, each row on its own, computed in
    `dtype`: from the slot that it reads, or from all of these; padding from zero."""
    state, found = call.state, {}
    arguments = {name: value for name, value in call.arguments.items() if name != "exact"}
    for (row, t), parent in call.situation.running.items():
        at, live = call.situation.at(row, t), call.situation.live(row)
        starts = slots or [call.situation.slot(row) if live else 0]
        s = decode(state.data[starts], None if state.scale is None else state.scale[starts]).to(dtype)
        s = found[row, parent][1] if parent >= 0 else s if live else torch.zeros_like(s)
        token = {name: arguments[name] for name in PER_TOKEN}
        token = {
            name: None if tensor is None else tensor[at].expand(len(s), *tensor.shape[1:])
            for name, tensor in token.items()
        }
        found[row, t] = mamba2_token(s, **{**arguments, **token})
    return found


def stored(values: Tensor, target: State, keyed: State, slots: list[int], token: int) -> Encoded:
    """These states as the target holds them, rounded with the bits of these slots of the state `keyed`."""
    random = None
    if target.rounding == "stochastic":
        assert keyed.seed is not None
        random = random_bits(
            keyed.seed[slots], tuple(values.shape[1:]), token, keyed.stream, keyed.rounds, target.data.dtype
        )
    return encode(values, target.data.dtype, random)


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def require_equal_memory(got: Call, want: Call) -> None:
    """States, scales, snapshots, what is around them, and seeds."""
    assert all(map(equal_bytes, got.buffers, want.buffers))
    assert torch.equal(got.state.seed, want.state.seed)


def require_faults(situation: Situation) -> None:
    """Kernels are not launched without tokens, so they note nothing then."""
    assert faults_found() in ([situation.faults] if situation.tokens else [situation.faults, set()])
    assert not faults_found()


def require_advance(got: Call, want: Call) -> None:
    """The seeds of all slots that a row has to read move on, if it is live; those of a packed row if it has tokens."""
    situation = want.situation
    got.state.advance(got.slots)
    for row, length in enumerate(situation.lengths):
        if situation.live(row) and (length or situation.form != "packed"):
            for slot in filter(situation.inside, situation.read[row]):
                want.state.seed[slot] += SEED_STEP
    assert torch.equal(got.state.seed, want.state.seed)
    assert faults_found() == situation.faults & {"read slot", "accepted"}


def faults_found() -> set[str]:
    try:
        flashstate.check_faults()
    except IndexError as error:
        words = str(error)
        return {kind for kind in ("read slot", "write slot", *KINDS[2:]) if kind in words}
    return set()


def put(target: State, where: Numbers, data: Tensor, scale: Tensor | None) -> None:
    target.data[where] = data
    if scale is not None:
        target.scale[where] = scale


@settings(COMMON, max_examples=40)
@given(data=st.data())
@EVERY_FORM
def test_reference_equals_a_loop_over_rows_and_tokens_bit_by_bit(form: str, tree: bool, data: st.DataObject) -> None:
    situation = data.draw(situations(form, tree, cases(3, 20, 70, ("float32", "bfloat16", "float16"))))
    faults_found()
    got, want = Call.of(situation), Call.of(situation)
    y, y_want, after = got.step(), torch.zeros_like(want.arguments["x"]), outcomes(want, torch.float32)
    for token, (output, _) in after.items():
        y_want[situation.at(*token)] = output[0].to(y.dtype)
    y_want[situation.kept] = NOT_RUN[situation.out]
    for name, where, (row, t) in situation.stores:
        target = getattr(want, name)
        data, scale = stored(after[row, t][1], target, want.state, [situation.slot(row)], t)
        put(target, where, data[0], None if scale is None else scale[0])
    assert equal_bytes(y, y_want)
    require_equal_memory(got, want)
    require_faults(situation)
    require_advance(got, want)


@pytest.mark.interpreted
@settings(COMMON, max_examples=4)
@given(data=st.data())
@EVERY_FORM
def test_interpreted_kernel_is_close_to_a_loop_over_rows_and_tokens(form: str, tree: bool, data: st.DataObject) -> None:
    """Within budget, and every byte that it should not touch is as it was."""
    situation = data.draw(situations(form, tree, cases(2, 9, 35, ("float32", "float16"))))
    faults_found()
    got, want = Call.of(situation), Call.of(situation)
    every = list(range(situation.case.slots))  # a budget of few values would be left to luck
    exact, plain = (outcomes(want, dtype, every) for dtype in (torch.float64, torch.float32))
    with interpreted():
        y = got.step()
    running = [situation.at(*token) for token in exact]
    assert all(equal_bytes(y[t], torch.full_like(y[t], NOT_RUN[situation.out])) for t in situation.kept)
    assert not y[[t for t in range(situation.tokens) if t not in running + situation.kept]].any()
    outputs = [(y[situation.at(*token)], exact[token][0], plain[token][0].to(y.dtype), token[0]) for token in exact]
    require_within_budget(outputs, situation)
    for name in ("state", "snapshots"):
        entries = []
        for _, where, (row, t) in (store for store in situation.stores if store[0] == name):
            target, kept = getattr(got, name), getattr(want, name)
            data, scale = stored(plain[row, t][1], target, want.state, every, t)
            entry = Encoded(target.data[where], None if target.scale is None else target.scale[where])
            entries.append((decode(*entry), exact[row, t][1], decode(data, scale), row))
            if data.dtype not in (torch.float32, torch.int16):  # which show the last bits of float32
                differs = entry.data.view(torch.uint8) != data[situation.slot(row)].view(torch.uint8)
                assert differs.sum() <= 1 + data[0].numel() // 100
            put(kept, where, *entry)
        require_within_budget(entries, situation)
    require_equal_memory(got, want)
    require_faults(situation)
    with interpreted():
        require_advance(got, want)


def require_within_budget(entries: list[tuple[Tensor, Tensor, Tensor, int]], situation: Situation) -> None:
    """Entries: what is got for a row, and what the loop says from all slots, exactly and plainly; and the row."""
    if entries:
        exact, plain = (torch.stack([entry[i] for entry in entries]) for i in (1, 2))
        filled = plain.clone()
        for i, (got, _, _, row) in enumerate(entries):
            filled[i, situation.slot(row) if situation.live(row) else 0] = got
        assert error_ratio(filled, exact, plain) <= 1.0
