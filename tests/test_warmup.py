"""warmup: what it compiles is what later calls need, and it touches nothing."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import arguments_of
from compiling import collected, machine_with

import flashstate
from flashstate import Slots, State, StatePool, warming
from flashstate.launch import Gpu
from flashstate.launch.axes import Axes
from flashstate.launch.call import Op
from flashstate.launch.environment import pretending
from flashstate.launch.start import Launch
from flashstate.launch.variants import variant_key, variants_of
from flashstate.ops.conv1d import CONV1D_STEP
from flashstate.ops.gated_delta import GATED_DELTA_STEP
from flashstate.ops.gated_delta_replay import GATED_DELTA_REPLAY
from flashstate.ops.mamba2 import MAMBA2_STEP
from flashstate.ops.mamba2_replay import MAMBA2_REPLAY
from flashstate.ops.mamba3 import MAMBA3_STEP
from flashstate.pool.layers import ssm_of
from flashstate.proof import AnyCase, Case, ConvCase, DeltaCase, Inputs, Mamba3Case, ReplayCase, dtype, make_inputs
from flashstate.state.formats import PORTABLE_FORMATS
from flashstate.warming import Serving

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DOCUMENT = Path(__file__).parent.parent / "docs" / "launching.md"
HEADS, GROUPS, ROWS, COLS = 16, 2, 64, 128
SIZES = (1, HEADS, GROUPS, ROWS, COLS)
BATCHES = (1, 3, 8, 33)  # 33 x 16 heads are more than the heuristic's bound
OF_NO_SHAPE = ("advance_seeds", "move_slots", "copy_slots", "draw_seeds")  # kernels
MANY = (1, 3, 33, 300)  # 300 x 16 heads have a kernel for rows that fold and one for others
BFLOAT16 = {"x": "bfloat16", "index": "int32"}
SHAPE = {"slots": 40, "layers": 2, "heads": HEADS, "cols": COLS}


@dataclass(frozen=True)
class Server:
    """What a server calls in a model step: an op with inputs like those of a case. And how it makes a pool, and what
    it tells warmup."""

    op: Op
    case: AnyCase
    pool: dict[str, Any] = field(default_factory=dict, hash=False)
    told: dict[str, Any] = field(default_factory=dict, hash=False)

    def make_pool(self, name: str, rounding: str, device: torch.device = CPU, **changes: Any) -> StatePool[Any]:
        kind = self.op.name.rpartition("_")[0]
        rows = {"value_dim" if kind == "gated_delta" else "rows": changes.pop("rows", ROWS)}
        shape = {**SHAPE, **rows, **self.pool, **changes}
        if kind == "gated_delta":
            shape["key_dim"] = shape.pop("cols")
        options = {"dtype": dtype(name), "rounding": rounding, "seed": 0, "device": device}
        return getattr(StatePool, kind)(**shape, **options)

    def warm_up(self, pool: StatePool[Any], batches: Sequence[int] = BATCHES, **told: Any) -> dict[str, int]:
        return flashstate.warmup(pool, batches, **{**self.told, "progress": False, **told})

    def serve(
        self, pool: StatePool[Any], batch: int, tokens: int = 1, case: AnyCase | None = None, **given: Any
    ) -> None:
        """Steps of all layers, then the seeds move on."""
        data = ssm_of(pool.layer(0)).data
        shape = {"rows": data.shape[2], "tokens": 0 if tokens == 1 else tokens}
        inputs = inputs_of(replace(case or self.case, **shape), batch, data.device)
        arguments = arguments_of(self.op, inputs, **{"slots": inputs.slots, **given})
        for i in range(pool.layers):
            self.op.function(**{**arguments, "state": pool.layer(i)})
        pool.advance(inputs.slots)


@cache
def inputs_of(case: AnyCase, batch: int, device: torch.device) -> Inputs:
    """Inputs of so many rows, which take the memory of one; in slots of any pool."""
    inputs = make_inputs(replace(case, batch=1, slots=2), device)
    inputs = inputs.changed(lambda tensor: tensor.expand(batch, *tensor.shape[1:]))
    return replace(inputs, slots=torch.arange(batch, dtype=dtype(case.index), device=device))


def admit(pool: StatePool[Any], requests: int, kind: torch.dtype = torch.float32) -> None:
    """What a server does with states that a prefill left, when it looks at them, clones and moves them."""
    slots = pool.acquire(requests)
    heads, rows, cols = ssm_of(pool.layer(1)).data.shape[1:]
    pool.write(1, slots, torch.empty(requests, heads, rows, cols, device=slots.device, dtype=kind))
    pool.write(1, slots, torch.empty(requests, heads, cols, rows, device=slots.device, dtype=kind).mT)
    pool.read(0, slots)
    pool.copy(slots, slots.flip(0))
    pool.copy(slots, slots.flip(0), keep_seed=True)
    pool.load(slots, pool.export(slots))
    pool.reset(slots)
    pool.release(slots)


MAMBA2 = Server(MAMBA2_STEP, Case(*SIZES, bc="bfloat16", dt="bfloat16", **BFLOAT16), told={"groups": GROUPS})
DELTA = Server(
    GATED_DELTA_STEP, DeltaCase(*SIZES, qk="bfloat16", gates="bfloat16", **BFLOAT16),
    told={"op": "gated_delta", "key_heads": GROUPS},
)  # fmt: skip
MAMBA3 = Server(
    MAMBA3_STEP, Mamba3Case(*SIZES, rank=4, angles=32, angle_per_head=True, bc="bfloat16", **BFLOAT16),
    {"rank": 4, "angles": 32}, {"op": "mamba3", "groups": GROUPS},
)  # fmt: skip


def ranked(rank: int, angles: int = 32, **fields: Any) -> Server:
    """A server of Mamba-3 of another rank."""
    weights = {} if rank > 1 else dict.fromkeys(("Wx", "Wz", "Wo"), False)
    case = replace(MAMBA3.case, rank=rank, angles=angles, **weights, **fields)
    return replace(MAMBA3, case=case, pool={"rank": rank, "angles": angles})


@dataclass(frozen=True)
class Replayer(Server):
    """A server of steps by replay, which also folds when requests end."""

    def serve(
        self, pool: StatePool[Any], batch: int, tokens: int = 1, case: AnyCase | None = None, **given: Any
    ) -> None:
        inputs = inputs_of(replace(case or self.case, tokens=0 if tokens == 1 else tokens), batch, CPU)
        arguments = arguments_of(self.case.op.declared, inputs, slots=None)
        arguments = {name: arguments[name] for name in self.op.hints if name in arguments} | given
        plan, layers = pool.plan(inputs.slots, tokens), [(pool.layer(i), pool.ring(i)) for i in range(pool.layers)]
        own = [(state, ring) for state, ring in layers if isinstance(ring, self.op.hints["ring"])]
        for state, ring in own:
            self.op.function(**{**arguments, "state": state, "ring": ring, "plan": plan})
        pool.commit(plan, torch.zeros(batch, dtype=torch.int32))
        pool.commit(plan)
        pool.advance(inputs.slots)
        for state, ring in own:
            self.fold(state, ring, **{name: arguments[name] for name in self.folds_with}, slots=inputs.slots)
        pool.folded(inputs.slots)

    @property
    def fold(self) -> Any:
        return flashstate.mamba2_fold if self.op is MAMBA2_REPLAY else flashstate.gated_delta_fold

    @property
    def folds_with(self) -> tuple[str, ...]:
        return ("A",) if self.op is MAMBA2_REPLAY else ("A_log", "dt_bias")


ROOM = {"slots": 301, "window": 16, "tokens": 4}
REPLAY = Replayer(MAMBA2_REPLAY, ReplayCase(*SIZES, dt="bfloat16", **BFLOAT16), {**ROOM, "groups": GROUPS})
DELTA_REPLAY = Replayer(GATED_DELTA_REPLAY, DELTA.case, {**ROOM, "key_heads": GROUPS})
KDA_REPLAY = Replayer(
    GATED_DELTA_REPLAY, replace(DELTA.case, per_channel=True), {**DELTA_REPLAY.pool, "per_channel": True}
)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """The variants that warmup would have compiled: here there is nothing to compile them for."""
    variants: list[Launch] = []
    monkeypatch.setattr(warming, "compile_variants", lambda found, progress: variants.extend(found))
    with collected(90) as launched:
        yield variants
        assert not launched, "warmup launched something"


def keys_of(launches: Sequence[Launch]) -> set[Hashable]:
    return set(map(variant_key, launches))


def with_case(server: Server, **fields: Any) -> Server:
    return replace(server, case=replace(server.case, **fields))


SERVED = [
    *((MAMBA2, *of_state, (1, 4), {}) for of_state in PORTABLE_FORMATS),
    (with_case(MAMBA2, exact=False), "int8", "stochastic", (1, 4, 12), {"exact": False}),
    *(
        (with_case(DELTA, **fields), *of_state, (1, 4, 12), told)
        for of_state in PORTABLE_FORMATS[::4]
        for fields, told in (
            ({}, {}), ({"exact": False}, {"exact": False}), ({"per_channel": True}, {"per_channel": True}),
            ({}, {"early": True}),
        )
    ),
    *((ranked(rank), *of_state, (1, 4), {}) for of_state in PORTABLE_FORMATS[::4] for rank in (1, 4)),
    *(
        (with_case(REPLAY, **fields), *of_state, (1, 4), told)
        for of_state in (("float32", "nearest"), ("int8", "stochastic"))
        for fields, told in (
            ({}, {}), ({"z": False}, {"z": False}), ({"D": None, "dt_bias": False}, {"D": False, "dt_bias": False})
        )
    ),
    *(
        (with_case(server, **fields), *of_state, (1, 4), told)
        for server in (DELTA_REPLAY, KDA_REPLAY)
        for of_state in (("float32", "nearest"), ("int8", "stochastic"))
        for fields, told in (({}, {}), ({"raw": False}, {"A_log": False}), ({"dt_bias": False}, {"dt_bias": False}),
                             ({}, {"early": True}))
    ),
    *(
        (with_case(server, dt_limit=(0.5, 2.0)), "float16", "nearest", (1, 4), {"dt_limit": (0.0, math.inf)})
        for server in (MAMBA2, REPLAY)
    ),
]  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize(
    ("server", "name", "rounding", "tokens", "told"),
    [pytest.param(*one, id=f"{one[0].op.name}-{i}-{one[1]}-{one[2]}-{one[4]}") for i, one in enumerate(SERVED)],
)
def test_every_variant_of_later_calls_was_compiled_and_none_in_vain(
    server: Server, name: str, rounding: str, tokens: Sequence[int], told: dict[str, bool], compiled: list[Launch]
) -> None:
    pool, batches = server.make_pool(name, rounding), MANY if isinstance(server, Replayer) else BATCHES
    counts = server.warm_up(pool, batches, tokens=tokens, **told)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    recurrence = server.op.name.removesuffix("_step")
    at_once = set() if told.get("exact", True) else {f"{recurrence}_at_once"}
    assert {kernel for kernel in counts if kernel.startswith("mamba")} <= {server.op.name, "mamba2_fold", *at_once}
    if isinstance(server, Replayer):
        assert {server.op.name, server.fold.__name__} <= counts.keys()
        assert not any(kernel.endswith("_step") for kernel in counts)
    assert all(counts[kernel] >= 2 for kernel in at_once)  # room for 8 tokens and for 16
    early = {"early": True} if "early" in told else {}
    with collected(90) as later:
        for batch, count in product(batches, tokens):
            server.serve(pool, batch, count, **early)
        for batch, kind in product(batches, (torch.float32, torch.bfloat16)):
            admit(pool, batch, kind)
    assert keys_of(later) == keys_of(compiled)


HALF = {"x": "float16", "bc": "float16", "dt": "float16"}
LOGIT = {"trap_logit": True, "update_kv": False}
TOLD: dict[str, tuple[Any, ...]] = {  # a server, what it tells, fields of its case, and other arguments
    **{
        f"mamba2 with {index}, without {without}": (
            MAMBA2, {**told, "activations": torch.float16, "index": dtype(index)}, {**HALF, "index": index, **fields}
        )
        for index in ("int32", "int64")
        for without, told, fields in (
            ("nothing", {}, {}), ("z", {"z": False}, {"z": False}),
            ("D, dt_bias", {"D": False, "dt_bias": False}, {"D": None, "dt_bias": False}),
        )
    },
    "gated delta": (DELTA, {}, {}, {}),
    "gated delta without dt_bias": (DELTA, {"dt_bias": False}, {"dt_bias": False}),
    "gated delta without A_log": (DELTA, {"A_log": False, "dt_bias": False}, {"raw": False}),
    "mamba3": (MAMBA3, {}, {}, {}),
    "mamba3 without z": (MAMBA3, {"z": False, "Wz": False}, {"z": False}),
    "mamba3 without D, Wx": (MAMBA3, {"D": False, "Wx": False}, {"D": False, "Wx": False}),
    "mamba3 without biases, Wo": (MAMBA3, {"biases": False, "Wo": False}, {"bias": False, "Wo": False}),
    "mamba3 without rotary, Wz": (MAMBA3, {"rotary": False, "Wz": False}, {"Wz": False}, {"rotary": None}),
    **{
        f"mamba3 of rank {rank}, {angles} angles": (
            ranked(rank, angles), LOGIT, LOGIT, {"trap": torch.zeros(8, HEADS, dtype=torch.bfloat16)}
        )
        for rank, angles in ((1, 0), (1, 32), (3, 0))
    },
}  # fmt: skip
OTHERWISE: dict[str, tuple[tuple[dict[str, Any], dict[str, Any]], ...]] = {  # fields and arguments that nobody told of
    "mamba2_step": (({"x": "bfloat16"}, {}), ({"dt_softplus": False}, {}), ({}, {"update": False})),
    "gated_delta_step": (({"exact": False}, {}), ({"qk_l2norm": False}, {}), ({"per_channel": True}, {})),
    "mamba3_step": (({}, {"update": False}), ({"update_kv": False}, {"trap_logit": False})),
}


@pytest.mark.compiled
@pytest.mark.parametrize("what", TOLD)
def test_what_calls_leave_out_and_their_dtypes_are_compiled_as_told(what: str, compiled: list[Launch]) -> None:
    server, told, fields, given = (*TOLD[what], {})[:4]
    case, pool = replace(server.case, **fields), server.make_pool("float16", "stochastic")
    tokens = 1 if server.op is not GATED_DELTA_STEP else 4
    server.warm_up(pool, (8,), tokens=(tokens,), **told)
    with collected(90) as as_told:
        server.serve(pool, 8, tokens, case, **given)
        if server.op is GATED_DELTA_STEP:
            server.serve(pool, 8, tokens, case, scale=0.3)  # which is read when a kernel runs
    assert keys_of(as_told) < keys_of(compiled)
    other_index = {"index": "int32" if case.index == "int64" else "int64"}
    for others, arguments in (*OTHERWISE[server.op.name], (other_index, {})):
        with collected(90) as otherwise:
            server.serve(pool, 8, tokens, replace(case, **others), **{**given, **arguments})
        assert not keys_of(otherwise) <= keys_of(compiled), (others, arguments)


@pytest.mark.compiled
def test_other_calls_are_compiled_as_also_makes_them(compiled: list[Launch]) -> None:
    pool = MAMBA2.make_pool("float32", "nearest")
    snapshots = State(torch.zeros(8, 4, HEADS, ROWS, COLS, dtype=torch.int8), torch.ones(8, 4, HEADS, ROWS))

    def verify() -> None:
        MAMBA2.serve(pool, 8, 4, snapshots=snapshots, update=False)

    counts = MAMBA2.warm_up(pool, (8,), also=verify)
    assert counts["mamba2_step"] == 2
    with collected(90) as later:
        MAMBA2.serve(pool, 8)
        verify()
    assert keys_of(later) <= keys_of(compiled)


@pytest.mark.compiled
def test_of_a_pool_with_both_an_op_compiles_for_its_own_layers(compiled: list[Launch]) -> None:
    plain, turned = MAMBA2.make_pool("float32", "nearest", layers=1), MAMBA3.make_pool("float32", "nearest")
    pool: StatePool[Any] = StatePool.wrap([plain.layer(0), turned.layer(0)])
    for op, other in (("mamba2", "mamba3"), ("mamba3", "mamba2")):
        counts = flashstate.warmup(pool, (8,), op=op, groups=GROUPS, progress=False)
        assert f"{op}_step" in counts
        assert f"{other}_step" not in counts
    with collected(90) as later:
        MAMBA2.serve(plain, 8)
        MAMBA3.serve(turned, 8)
    assert keys_of(later) <= keys_of(compiled)


@pytest.mark.compiled
def test_of_a_pool_with_rings_of_both_rules_every_layer_is_compiled_as_its_ring_says(compiled: list[Launch]) -> None:
    pools = [server.make_pool("bfloat16", "nearest", layers=1) for server in (REPLAY, KDA_REPLAY)]
    shared = {name: getattr(pools[0].ring(0), name) for name in ("start", "count")}
    rings = [pools[0].ring(0), replace(pools[1].ring(0), **shared)]
    pool = StatePool.wrap([pool.layer(0) for pool in pools], rings=rings)
    counts = flashstate.warmup(pool, MANY, tokens=(1, 4), progress=False)
    assert {"mamba2_replay", "mamba2_fold", "gated_delta_replay", "gated_delta_fold"} <= counts.keys()
    with collected(90) as later:
        for server, batch, tokens in product((REPLAY, KDA_REPLAY), MANY, (1, 4)):
            server.serve(pool, batch, tokens)
    assert keys_of(later) <= keys_of(compiled)


@pytest.mark.compiled
@pytest.mark.parametrize(("bias", "drafts", "early"), [(True, 0, False), (False, 0, True), (True, 4, False)])
def test_convolutions_of_pools_with_windows_are_compiled_too(
    bias: bool, drafts: int, early: bool, compiled: list[Launch]
) -> None:
    pool = MAMBA2.make_pool("float32", "nearest", conv_channels=96, conv_width=3, drafts=drafts)
    counts = MAMBA2.warm_up(pool, (1, 3), tokens=(1, 4), conv_bias=bias, early=early)
    assert counts["conv1d_step"] == 2
    case = ConvCase(1, 96, 3, x="bfloat16", parameters="bfloat16", bias=bias, index="int32")
    with collected(90) as later:
        for batch, tokens in ((1, 1), (3, 4)):
            inputs = inputs_of(replace(case, tokens=0 if tokens == 1 else tokens), batch, CPU)
            slots = Slots(inputs.slots, accepted=torch.zeros_like(inputs.slots)) if drafts else inputs.slots
            arguments = arguments_of(CONV1D_STEP, inputs, window=pool.window(0), slots=slots, early=early)
            flashstate.conv1d_step(**arguments)
            MAMBA2.serve(pool, batch, tokens, early=early)
    of_steps = [launch for launch in compiled if launch.kernel.__name__.endswith("_step_kernel")]
    assert keys_of(launch for launch in later if launch.kernel.__name__.endswith("_step_kernel")) == keys_of(of_steps)


@pytest.mark.compiled
def test_layers_of_different_formats_are_all_compiled(compiled: list[Launch]) -> None:
    pools = [MAMBA2.make_pool(name, "nearest", layers=1) for name in ("float32", "int8", "float32")]
    pool = StatePool.wrap([pool.layer(0) for pool in pools])
    assert MAMBA2.warm_up(pool, (8,))["mamba2_step"] == 2
    with collected(90) as later:
        MAMBA2.serve(pool, 8)
    assert keys_of(later) <= keys_of(compiled)


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gpu", [machine_with(90).gpu, Gpu("NVIDIA H200", (9, 0))], ids=lambda gpu: gpu.name)
def test_many_sizes_share_few_variants_as_the_document_says(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    promised = re.search(r"`(\{'.*?\})`", text)
    assert example, "the document has no example"
    assert promised, "the document has no numbers"
    names: dict[str, Any] = {}
    with pretending(replace(machine_with(90), gpu=gpu)):
        exec(example[1], names)
    assert names["variants"] == ast.literal_eval(promised[1])
    error = capsys.readouterr().err
    assert all(f"{count} of {name}" in error for name, count in names["variants"].items())


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
def test_the_pool_stays_as_it_is() -> None:
    pool = MAMBA2.make_pool("int8", "stochastic")
    before = [(state.data.clone(), state.scale.clone(), state.seed.clone()) for state in map(pool.layer, (0, 1))]
    free = pool.free
    MAMBA2.warm_up(pool, also=lambda: MAMBA2.serve(pool, 4))
    for old, state in zip(before, map(pool.layer, (0, 1)), strict=True):
        assert all(map(torch.equal, old, (state.data, state.scale, state.seed)))
    assert pool.free == free


def test_a_cpu_has_no_kernels_to_compile() -> None:
    pool = MAMBA2.make_pool("int8", "stochastic", rows=4, cols=16)
    assert flashstate.warmup(pool, BATCHES, also=lambda: 1 / 0) == {}


@pytest.mark.parametrize(
    ("batches", "changes", "error", "complaint"),
    [
        ((0,), {}, ValueError, "batches must be from 1"),
        ((1.5,), {}, TypeError, "batches must be an int"),
        ({4}, {}, TypeError, "batches must be an int, a sequence of ints or an integer tensor, got set"),
        (1, {"tokens": 0}, ValueError, "tokens must be from 1"),
        ((1,), {"op": "mamba4"}, ValueError, "op must be one of gated_delta, mamba2, mamba3, got 'mamba4'"),
        ((1,), {"op": "mamba3"}, ValueError, "op='mamba3' is not for any layer of this pool"),
    ],
)
def test_wrong_sizes_are_refused_by_name(
    batches: Sequence[int], changes: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=f"^{complaint}"):
        flashstate.warmup(MAMBA2.make_pool("float32", "nearest", rows=4, cols=16), batches, **changes)


@pytest.mark.compiled
def test_an_axis_that_warmup_cannot_know_is_refused_by_name() -> None:
    op: Any = SimpleNamespace(name="x_step", tensors={"x": Axes.parse("tokens heads | lanes")})
    pool = StatePool.mamba2(slots=2, layers=1, heads=2, rows=4, cols=8)
    serving = Serving(pool, torch.bfloat16, torch.float32, {}, {}, per_channel=False, options={}, conv_width=None)
    with pytest.raises(ValueError, match=r"^x of x_step has lanes, whose size warmup cannot know: give `also`$"):
        serving.tensors(op, {"heads": 2}, Slots(torch.arange(2)), 1, {})


def test_launches_of_other_values_are_one_variant_and_of_other_types_several() -> None:
    pool, far = MAMBA2.make_pool("float32", "nearest"), MAMBA2.make_pool("float32", "nearest")
    with collected(90) as launches:
        MAMBA2.serve(pool, 3)
        MAMBA2.serve(far, 8)
    assert len(launches) == 4
    assert len(variants_of(launches)) == 1
    slots = torch.arange(4)
    with collected(90) as launches:
        for given in (slots, Slots(slots, null=1 << 40), Slots(slots, write=slots)):
            MAMBA2.serve(pool, 4, slots=given)
    assert len(variants_of(launches)) == 3


@pytest.mark.compiled
def test_no_kernel_is_compiled_for_the_value_of_an_argument() -> None:
    pool = MAMBA2.make_pool("int8", "stochastic")
    with collected(90) as launches:
        MAMBA2.serve(pool, 4)
        admit(pool, 4)
    for launch in launches:
        assert all(parameter.is_constexpr or parameter.do_not_specialize for parameter in launch.kernel.params)
        assert not any(isinstance(argument, tuple) for argument in launch.arguments)  # Triton specialises on those


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """What Triton compiles, as it does."""
    from triton import knobs

    found: list[str] = []
    before = knobs.runtime.jit_cache_hook
    knobs.runtime.jit_cache_hook = lambda **compilation: found.append(compilation["repr"])
    yield found
    knobs.runtime.jit_cache_hook = before


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("server", "name", "rows", "told"),  # rows of no other test: nothing of them was compiled before
    [
        pytest.param(MAMBA2, "float16", 48, {}, id="mamba2"),
        pytest.param(DELTA, "bfloat16", 112, {}, id="gated delta"),
        pytest.param(with_case(DELTA, exact=False), "bfloat16", 80, {"exact": False}, id="gated delta at once"),
        pytest.param(ranked(1), "bfloat16", 45, {}, id="mamba3 of rank 1"),
        pytest.param(ranked(4), "bfloat16", 48, {}, id="mamba3 of rank 4"),
    ],
)
def test_nothing_is_compiled_after_warmup(
    server: Server, name: str, rows: int, told: dict[str, Any], compilations: list[str]
) -> None:
    pool = server.make_pool(name, "stochastic", CUDA, rows=rows)
    counts = server.warm_up(pool, tokens=(1, 4), **told)
    of_a_shape = sum(count for kernel, count in counts.items() if kernel not in OF_NO_SHAPE)  # which others compile
    assert len(compilations) >= of_a_shape > 0
    compilations.clear()
    for batch in BATCHES:
        server.serve(pool, batch)
        server.serve(pool, batch, 4)
        admit(pool, batch)
    assert not compilations
    server.serve(pool, 8, update=False)
    assert len(compilations) == 1, "the hook that counts compilations does not work"
