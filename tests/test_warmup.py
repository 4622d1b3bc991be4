"""warmup: what it compiles is what later calls need, and it touches nothing."""

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

    @property
    def fold(self) -> Any:
        return flashstate.mamba2_fold if self.op is MAMBA2_REPLAY else flashstate.gated_delta_fold

    @property
    def replays(self) -> bool:
        return "ring" in self.op.hints

    def serve(self, pool: StatePool[Any], batch: int, tokens: int = 1, **given: Any) -> None:
        """Steps of all layers, or by replay of those with a ring for it, which are folded; then the seeds move on."""
        data = ssm_of(pool.layer(0)).data
        case = replace(self.case, rows=data.shape[2], tokens=0 if tokens == 1 else tokens)
        inputs = inputs_of(case, batch, data.device)
        arguments = arguments_of(case.op.declared, inputs, **{"slots": inputs.slots, **given})
        pool.advance(inputs.slots)
        if not self.replays:
            for i in range(pool.layers):
                self.op.function(**{**arguments, "state": pool.layer(i)})
            return
        plan, layers = pool.plan(inputs.slots, tokens), [(pool.layer(i), pool.ring(i)) for i in range(pool.layers)]
        taken = {name: arguments[name] for name in self.op.hints if name in arguments}
        folds_with = {name: arguments[name] for name in ("A", "A_log", "dt_bias") if name in self.fold.__annotations__}
        for state, ring in layers:
            if isinstance(ring, self.op.hints["ring"]):
                self.op.function(**{**taken, "state": state, "ring": ring, "slots": None, "plan": plan, **given})
                self.fold(state, ring, **folds_with, slots=inputs.slots)
        pool.commit(plan, torch.zeros(batch, dtype=torch.int32))
        pool.commit(plan)
        pool.folded(inputs.slots)


@cache
def inputs_of(case: AnyCase, batch: int, device: torch.device) -> Inputs:
    """Inputs of so many rows, which take the memory of one; in slots of any pool."""
    inputs = make_inputs(replace(case, batch=1, slots=2), device)
    inputs = inputs.changed(lambda tensor: tensor.expand(batch, *tensor.shape[1:]))
    return replace(inputs, slots=torch.arange(batch, dtype=dtype(case.index), device=device))


def admit(
    pool: StatePool[Any], requests: int, kind: torch.dtype = torch.float32, index: torch.dtype = torch.int32
) -> None:
    """What a server does with states that a prefill left, when it looks at them, clones and moves them."""
    slots = pool.acquire(requests, dtype=index)
    heads, rows, cols = ssm_of(pool.layer(1)).data.shape[1:]
    pool.write(1, slots, torch.empty(requests, heads, rows, cols, device=slots.device, dtype=kind))
    pool.write(1, slots, torch.empty(requests, heads, cols, rows, device=slots.device, dtype=kind).mT)
    pool.read(0, slots)
    for keep_seed in (False, True):
        pool.copy(slots, slots.flip(0), keep_seed=keep_seed)
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


def ranked(rank: int, angles: int = 32) -> Server:
    """A server of Mamba-3 of another rank."""
    case = replace(
        MAMBA3.case, rank=rank, angles=angles, **{} if rank > 1 else dict.fromkeys(("Wx", "Wz", "Wo"), False)
    )
    return replace(MAMBA3, case=case, pool={"rank": rank, "angles": angles})


ROOM = {"slots": 301, "window": 16, "tokens": 4}
REPLAY = Server(MAMBA2_REPLAY, ReplayCase(*SIZES, dt="bfloat16", **BFLOAT16), {**ROOM, "groups": GROUPS})
DELTA_REPLAY = Server(GATED_DELTA_REPLAY, DELTA.case, {**ROOM, "key_heads": GROUPS})
KDA_REPLAY = Server(
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


HALF = {"x": "float16", "bc": "float16", "dt": "float16", "index": "int64"}
LOGIT = {"trap_logit": True, "update_kv": False}
FLOAT16 = {"activations": torch.float16, "index": torch.int64}
AT_ONCE, PER_CHANNEL = {"exact": False}, {"per_channel": True}
SERVED: dict[str, tuple[Any, ...]] = {  # a server, a format, what it tells, fields of its case, and other arguments
    "mamba2": (MAMBA2, "float32", {}, {}),
    "mamba2 of float16": (MAMBA2, "int8", {**FLOAT16, "z": False, "D": False}, {**HALF, "z": False, "D": None}),
    "mamba2 at once": (MAMBA2, "int8", AT_ONCE, AT_ONCE),
    "mamba2 with limits": (
        MAMBA2, "float16", {"dt_limit": (0.0, math.inf), "dt_bias": False}, {"dt_limit": (0.5, 2.0), "dt_bias": False},
    ),
    "gated delta": (DELTA, "float32", {}, {}),
    "gated delta, early": (DELTA, "int8", {"early": True}, {}, {"early": True}),
    "gated delta at once": (DELTA, "int8", AT_ONCE, AT_ONCE),
    "gated delta per channel": (DELTA, "float32", PER_CHANNEL, PER_CHANNEL),
    "gated delta without A_log": (DELTA, "float8_e4m3fn", {"A_log": False, "dt_bias": False}, {"raw": False}),
    "mamba3 of rank 1": (ranked(1), "float32", LOGIT, LOGIT, {"trap": torch.zeros(HEADS).bfloat16()}),
    "mamba3 of rank 1 without angles": (ranked(1, 0), "int8", {}, {}),
    "mamba3 without z, D": (MAMBA3, "int8", {"z": False, "Wz": False, "D": False}, {"z": False, "D": False}),
    "mamba3 without biases, Wo": (MAMBA3, "float32", {"biases": False, "Wo": False}, {"bias": False, "Wo": False}),
    "mamba3 without rotary, Wz": (MAMBA3, "float16", {"rotary": False, "Wz": False}, {"Wz": False}, {"rotary": None}),
    "replay": (REPLAY, "float32", {}, {}),
    "replay without z": (REPLAY, "int8", {"z": False, "dt_limit": (0.0, 1.0)}, {"z": False, "dt_limit": (0.5, 2.0)}),
    "replay without D, dt_bias": (REPLAY, "int8", {"D": False, "dt_bias": False}, {"D": None, "dt_bias": False}),
    "delta replay without A_log": (DELTA_REPLAY, "int8", {"A_log": False}, {"raw": False}),
    "delta replay, early": (DELTA_REPLAY, "float32", {"early": True}, {}, {"early": True}),
    "KDA by replay without dt_bias": (KDA_REPLAY, "float32", {"dt_bias": False}, {"dt_bias": False}),
}  # fmt: skip


@pytest.mark.compiled
@pytest.mark.parametrize("what", SERVED)
def test_every_variant_of_later_calls_was_compiled_and_none_in_vain(what: str, compiled: list[Launch]) -> None:
    server, name, told, fields, given = (*SERVED[what], {})[:5]
    server, pool = with_case(server, **fields), server.make_pool(name, "nearest" if name == "float32" else "stochastic")
    replays, kinds = server.replays, {torch.float32, told.get("activations", torch.bfloat16)}
    batches, tokens = MANY if replays else BATCHES, (1, 4, 12) if "at once" in what else (1, 4)
    counts = server.warm_up(pool, batches, tokens=tokens, **told)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    if replays:
        assert {server.op.name, server.fold.__name__} <= counts.keys()
        assert not any(kernel.endswith("_step") for kernel in counts)
    assert "at once" not in what or counts[f"{server.op.name.removesuffix('_step')}_at_once"] >= 2  # for 8 and for 16
    with collected(90) as later:
        for batch, count in product(batches, tokens):
            lead = (batch,) if count == 1 else (batch, count)
            more = {name: value.expand(*lead, -1) if name == "trap" else value for name, value in given.items()}
            server.serve(pool, batch, count, **more)
        for batch, kind, index in product(batches, kinds, {torch.int32, told.get("index", torch.int32)}):
            admit(pool, batch, kind, index)
    assert keys_of(later) == keys_of(compiled)


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
def test_an_op_compiles_for_its_own_layers_in_all_their_formats(compiled: list[Launch]) -> None:
    plain = [MAMBA2.make_pool(name, "nearest", layers=1) for name in ("float32", "int8", "float32")]
    turned = MAMBA3.make_pool("float32", "nearest")
    pool: StatePool[Any] = StatePool.wrap([*(one.layer(0) for one in plain), turned.layer(0)])
    for op, other, variants in (("mamba2", "mamba3", 2), ("mamba3", "mamba2", 1)):
        counts = flashstate.warmup(pool, 8, op=op, groups=GROUPS, progress=False)
        assert counts[f"{op}_step"] == variants
        assert f"{other}_step" not in counts
    with collected(90) as later:
        for one in plain:
            MAMBA2.serve(one, 8)
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
@pytest.mark.parametrize(("bias", "drafts", "early"), [(False, 0, True), (True, 4, False)])
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
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gpu", [machine_with(90).gpu, Gpu("NVIDIA H200", (9, 0))], ids=lambda gpu: gpu.name)
def test_many_sizes_share_few_variants_as_the_document_says(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    text, names = DOCUMENT.read_text(encoding="utf-8"), dict[str, Any]()
    (example, *_), (promised, *_) = re.findall(r"(?ms)^```python\n(.*?)^```$", text), re.findall(r"`(\{'.*?\})`", text)
    with pretending(replace(machine_with(90), gpu=gpu)):
        exec(example, names)
    assert names["variants"] == ast.literal_eval(promised)
    error = capsys.readouterr().err
    assert all(f"{count} of {name}" in error for name, count in names["variants"].items())


def test_a_cpu_has_no_kernels_to_compile() -> None:
    pool = MAMBA2.make_pool("int8", "stochastic", rows=4, cols=16)
    assert flashstate.warmup(pool, BATCHES, also=lambda: 1 / 0) == {}


def test_wrong_sizes_are_refused_by_name() -> None:
    pool, wrong = MAMBA2.make_pool("float32", "nearest", rows=4, cols=16), (ValueError, TypeError)
    for given, complaint in (
        ({"batches": (0,)}, "batches must be from 1"),
        ({"batches": {4}}, "batches must be an int, a sequence of ints or an integer tensor, got set"),
        ({"tokens": 0}, "tokens must be from 1"),
        ({"op": "mamba4"}, "op must be one of gated_delta, mamba2, mamba3, got 'mamba4'"),
        ({"op": "mamba3"}, "op='mamba3' is not for any layer of this pool"),
    ):
        with pytest.raises(wrong, match=f"^{complaint}"):
            flashstate.warmup(pool, **{"batches": 1, **given})


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
        pytest.param(with_case(DELTA, exact=False), "bfloat16", 80, {"exact": False}, id="gated delta at once"),
        pytest.param(ranked(1), "bfloat16", 45, {}, id="mamba3 of rank 1"),
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
