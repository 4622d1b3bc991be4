"""warmup: what it compiles is what later calls need, and it touches nothing."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from compiling import collected, gpu_with
from torch import Tensor
from warming import compiled, keys_of

import flashstate
from flashstate import Mamba3State, Rotary, Slots, State, StatePool
from flashstate.launch import Gpu
from flashstate.launch.start import Launch
from flashstate.launch.variants import variants_of
from flashstate.pool.kv import ssm_of
from flashstate.proof import dtype
from flashstate.state.formats import PORTABLE_FORMATS

__all__ = ["compiled"]  # a fixture
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
DOCUMENT = Path(__file__).parent.parent / "docs" / "launching.md"
HEADS, GROUPS, ROWS, COLS = 16, 2, 64, 128
BATCHES = (1, 3, 8, 33)  # 33 x 16 heads are more than the heuristic's bound


def make_pool(name: str, rounding: str, device: torch.device = CPU, **shape: int) -> StatePool:
    sizes = {"slots": 40, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS, **shape}
    return StatePool.mamba2(**sizes, dtype=dtype(name), rounding=rounding, seed=0, device=device)


def serve(
    pool: StatePool,
    batch: int,
    tokens: int = 1,
    *,
    activations: torch.dtype = torch.bfloat16,
    leave_out: Sequence[str] = (),
    index: torch.dtype = torch.int64,
    **changes: Any,
) -> None:
    """What a server does in one model step: steps of all layers, then the seeds move on."""
    state = pool.layer(0)
    device, (_, heads, rows, cols) = state.data.device, state.data.shape
    leading = (batch,) if tokens == 1 else (batch, tokens)

    def normal(*sizes: int, kind: torch.dtype = activations) -> Tensor:
        return torch.randn(*sizes, device=device).to(kind)

    x, per_head = normal(*leading, heads, rows), normal(heads, kind=torch.float32)
    B, C = (normal(*leading, GROUPS, cols) for _ in range(2))
    options = {"D": per_head, "z": normal(*leading, heads, rows), "dt_bias": per_head.clone()}
    options = {name: tensor for name, tensor in options.items() if name not in leave_out}
    slots = torch.randperm(pool.slots)[:batch].to(index).to(device)
    for i in range(pool.layers):
        dt, A = normal(*leading, heads), -per_head.abs()
        changes.setdefault("slots", slots)
        flashstate.mamba2_step(pool.layer(i), x, dt, A, B, C, **options, **changes)
    pool.advance(slots)


def admit(pool: StatePool[Any], requests: int, kind: torch.dtype = torch.float32) -> None:
    """What a server does with states that a prefill left, and when it looks at them."""
    slots = pool.acquire(requests)
    shape = ssm_of(pool.layer(1)).data.shape[1:]
    pool.write(1, slots, torch.randn(requests, *shape, device=slots.device).to(kind))
    pool.read(0, slots)
    pool.release(slots)


@pytest.mark.compiled
@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS)
def test_every_variant_of_later_calls_was_compiled(name: str, rounding: str, compiled: list[Launch]) -> None:
    pool = make_pool(name, rounding)
    counts = flashstate.warmup(pool, BATCHES, tokens=(1, 4), groups=GROUPS, progress=False)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    with collected(90) as later:
        for batch in BATCHES:
            serve(pool, batch)
            serve(pool, batch, 4)
            admit(pool, batch)
            admit(pool, batch, torch.bfloat16)
    assert len(later) > 2 * len(compiled)
    assert keys_of(later) == keys_of(compiled)  # and none in vain


@pytest.mark.compiled
@pytest.mark.parametrize("leave_out", [(), ("z",), ("D", "dt_bias"), ("D", "z", "dt_bias")], ids=str)
@pytest.mark.parametrize("index", [torch.int32, torch.int64], ids=str)
def test_what_calls_leave_out_and_their_dtypes_are_compiled_as_told(
    leave_out: Sequence[str], index: torch.dtype, compiled: list[Launch]
) -> None:
    pool = make_pool("float16", "stochastic")
    options = dict.fromkeys(leave_out, False)
    told = {"groups": GROUPS, "activations": torch.float16, "index": index, "progress": False}
    flashstate.warmup(pool, BATCHES, **told, **options)
    with collected(90) as as_told:
        serve(pool, 8, activations=torch.float16, leave_out=leave_out, index=index)
    assert keys_of(as_told) < keys_of(compiled)
    other = torch.int32 if index == torch.int64 else torch.int64
    for change in ({"activations": torch.bfloat16}, {"index": other}, {"dt_softplus": False}, {"update": False}):
        with collected(90) as otherwise:
            serve(pool, 8, **{"activations": torch.float16, "leave_out": leave_out, "index": index, **change})
        assert not keys_of(otherwise) <= keys_of(compiled), change


@pytest.mark.compiled
def test_other_calls_are_compiled_as_also_makes_them(compiled: list[Launch]) -> None:
    pool = make_pool("float32", "nearest")
    snapshots = State(torch.zeros(8, 4, HEADS, ROWS, COLS, dtype=torch.int8), torch.ones(8, 4, HEADS, ROWS))

    def verify() -> None:
        serve(pool, 8, 4, snapshots=snapshots, update=False)

    counts = flashstate.warmup(pool, (8,), groups=GROUPS, also=verify, progress=False)
    assert counts["mamba2_step"] == 2
    with collected(90) as later:
        serve(pool, 8)
        verify()
    assert keys_of(later) <= keys_of(compiled)


def make_delta_pool(name: str, rounding: str, device: torch.device = CPU, value_dim: int = ROWS) -> StatePool:
    sizes = {"slots": 40, "layers": 2, "heads": HEADS, "value_dim": value_dim, "key_dim": COLS}
    return StatePool.gated_delta(**sizes, dtype=dtype(name), rounding=rounding, seed=0, device=device)


def serve_delta(pool: StatePool, batch: int, tokens: int, leave_out: Sequence[str] = (), **changes: Any) -> None:
    """What a server of the gated delta rule does in one model step."""
    device, (_, heads, rows, cols) = pool.layer(0).data.device, pool.layer(0).data.shape
    leading = (batch,) if tokens == 1 else (batch, tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*leading, *sizes, device=device).bfloat16()

    channels = (cols,) if changes.pop("per_channel", False) else ()
    q, k, v, a, b = (
        normal(GROUPS, cols),
        normal(GROUPS, cols),
        normal(heads, rows),
        normal(heads, *channels),
        normal(heads),
    )
    options = {"A_log": torch.randn(heads, device=device), "dt_bias": torch.randn(heads, *channels, device=device)}
    options = {name: tensor for name, tensor in options.items() if name not in leave_out}
    slots = torch.randperm(pool.slots)[:batch].to(device)
    for i in range(pool.layers):
        flashstate.gated_delta_step(pool.layer(i), q, k, v, a, b, **options, slots=slots, **changes)
    pool.advance(slots)


@pytest.mark.compiled
@pytest.mark.parametrize("told", [{}, {"exact": False}, {"per_channel": True}, {"early": True}], ids=str)
@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS[::4])
def test_every_variant_of_later_calls_of_the_gated_delta_rule_was_compiled(
    name: str, rounding: str, told: dict[str, bool], compiled: list[Launch]
) -> None:
    pool, tokens = make_delta_pool(name, rounding), (1, 4, 12)
    options = {"op": "gated_delta", "tokens": tokens, "key_heads": GROUPS, "progress": False}
    counts = flashstate.warmup(pool, BATCHES, **options, **told)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    assert counts.get("gated_delta_at_once", 0) >= (0 if told.get("exact", True) else 2)  # room for 8 tokens and for 16
    assert "mamba2_step" not in counts
    with collected(90) as later:
        for batch in BATCHES:
            for count in tokens:
                serve_delta(pool, batch, count, **told)
            admit(pool, batch)
            admit(pool, batch, torch.bfloat16)
    assert keys_of(later) == keys_of(compiled)  # and none in vain


@pytest.mark.compiled
@pytest.mark.parametrize("leave_out", [(), ("dt_bias",), ("A_log", "dt_bias")], ids=str)
def test_what_calls_of_the_gated_delta_rule_leave_out_is_compiled_as_told(
    leave_out: Sequence[str], compiled: list[Launch]
) -> None:
    pool = make_delta_pool("bfloat16", "nearest")
    told = {"op": "gated_delta", "key_heads": GROUPS, "progress": False, **dict.fromkeys(leave_out, False)}
    flashstate.warmup(pool, (8,), tokens=(4,), **told)
    with collected(90) as as_told:
        serve_delta(pool, 8, 4, leave_out)
    assert keys_of(as_told) < keys_of(compiled)
    for change in ({"exact": False}, {"qk_l2norm": False}, {"update": False}, {"per_channel": True}):
        with collected(90) as otherwise:
            serve_delta(pool, 8, 4, leave_out, **change)
        assert not keys_of(otherwise) <= keys_of(compiled), change
    with collected(90) as scaled:
        serve_delta(pool, 8, 4, leave_out, scale=0.3)
    assert keys_of(scaled) <= keys_of(compiled)  # which is read when a kernel runs


def make_mamba3_pool(
    name: str, rounding: str, device: torch.device = CPU, rank: int = 4, angles: int = 32, rows: int = ROWS
) -> StatePool[Mamba3State]:
    sizes = {"slots": 40, "layers": 2, "heads": HEADS, "rows": rows, "cols": COLS, "rank": rank, "angles": angles}
    return StatePool.mamba3(**sizes, dtype=dtype(name), rounding=rounding, seed=0, device=device)


def serve_mamba3(
    pool: StatePool[Mamba3State], batch: int, tokens: int, leave_out: Sequence[str] = (), **changes: Any
) -> None:
    """What a server of Mamba-3 does in one model step: B and C, x and z are views of what a projection gave."""
    layer = pool.layer(0)
    device, (_, heads, rows, cols), R = layer.k.device, layer.ssm.data.shape, layer.rank
    leading = (batch,) if tokens == 1 else (batch, tokens)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*leading, *sizes, device=device).bfloat16()

    def parameter(*sizes: int) -> Tensor:
        return torch.randn(*sizes, device=device)

    zx, bc = normal(2 * heads, rows), normal(2 * R, GROUPS, cols)
    (z, x), (B, C) = zx.split(heads, -2), bc.split(R, -3)
    dt, logit = parameter(*leading, heads).abs(), changes.get("trap_logit", False)
    trap = normal(heads) if logit else parameter(*leading, heads)
    rotary = None
    if layer.angle is not None:
        biases = {} if "biases" in leave_out else {n: parameter(R, heads, cols) for n in ("bias_B", "bias_C")}
        rotary = Rotary(normal(heads, layer.angle.shape[2]), **biases)  # of every head, or expanded: it is all one
    options = {"D": parameter(heads), "z": z, "rotary": rotary}
    options |= {name: parameter(R, heads, rows) for name in ("Wx", "Wz", "Wo") if R > 1}
    options = {name: value for name, value in options.items() if name not in leave_out} | changes
    slots = torch.randperm(pool.slots)[:batch].to(device)
    for i in range(pool.layers):
        flashstate.mamba3_step(pool.layer(i), x, -dt, dt, trap, B, C, slots=slots, **options)
    pool.advance(slots)


@pytest.mark.compiled
@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize(("name", "rounding"), PORTABLE_FORMATS[::4])
def test_every_variant_of_later_calls_of_mamba3_was_compiled(
    name: str, rounding: str, rank: int, compiled: list[Launch]
) -> None:
    pool, tokens = make_mamba3_pool(name, rounding, rank=rank), (1, 4)
    counts = flashstate.warmup(pool, BATCHES, op="mamba3", tokens=tokens, groups=GROUPS, progress=False)
    assert sum(counts.values()) == len(compiled) == len(keys_of(compiled))
    assert counts["mamba3_step"] >= len(tokens)
    assert "mamba2_step" not in counts
    with collected(90) as later:
        for batch in BATCHES:
            for count in tokens:
                serve_mamba3(pool, batch, count)
            admit(pool, batch)
            admit(pool, batch, torch.bfloat16)
    assert keys_of(later) == keys_of(compiled)  # and none in vain


@pytest.mark.compiled
@pytest.mark.parametrize("leave_out", [(), ("z", "Wz"), ("D", "Wx"), ("biases", "Wo"), ("rotary", "Wz")], ids=str)
def test_what_calls_of_mamba3_leave_out_is_compiled_as_told(leave_out: Sequence[str], compiled: list[Launch]) -> None:
    pool = make_mamba3_pool("bfloat16", "nearest")
    told = {"op": "mamba3", "groups": GROUPS, "progress": False, **dict.fromkeys(leave_out, False)}
    flashstate.warmup(pool, (8,), **told)
    with collected(90) as as_told:
        serve_mamba3(pool, 8, 1, leave_out)
    assert keys_of(as_told) < keys_of(compiled)
    for change in ({"update": False}, {"update_kv": False}, {"trap_logit": True}):
        with collected(90) as otherwise:
            serve_mamba3(pool, 8, 1, leave_out, **change)
        assert not keys_of(otherwise) <= keys_of(compiled), change


@pytest.mark.compiled
@pytest.mark.parametrize(("rank", "angles"), [(1, 0), (1, 32), (3, 0)])
def test_pools_of_mamba3_tell_warmup_their_rank_and_whether_they_have_angles(
    rank: int, angles: int, compiled: list[Launch]
) -> None:
    pool = make_mamba3_pool("float32", "nearest", rank=rank, angles=angles)
    flashstate.warmup(pool, (8,), op="mamba3", groups=GROUPS, trap_logit=True, update_kv=False, progress=False)
    with collected(90) as later:
        serve_mamba3(pool, 8, 1, trap_logit=True, update_kv=False)
    assert keys_of(later) < keys_of(compiled)


@pytest.mark.compiled
def test_of_a_pool_with_both_an_op_compiles_for_its_own_layers(compiled: list[Launch]) -> None:
    plain, turned = make_pool("float32", "nearest", layers=1), make_mamba3_pool("float32", "nearest")
    pool: StatePool[Any] = StatePool.wrap([plain.layer(0), turned.layer(0)])
    for op, other in (("mamba2", "mamba3"), ("mamba3", "mamba2")):
        counts = flashstate.warmup(pool, (8,), op=op, groups=GROUPS, progress=False)
        assert f"{op}_step" in counts
        assert f"{other}_step" not in counts
    with collected(90) as later:
        serve(plain, 8)
        serve_mamba3(turned, 8, 1)
    assert keys_of(later) <= keys_of(compiled)


def convolve(pool: StatePool, batch: int, tokens: int, bias: bool, rolls_back: bool, early: bool) -> None:
    """What a server does with a layer: its convolution, and the step behind it."""
    window = pool.window(0)
    channels, leading = window.shape[1], (batch,) if tokens == 1 else (batch, tokens)
    x = torch.randn(*leading, channels + 8, device=window.device).bfloat16()[..., 8:]
    weight = torch.randn(channels, 3, device=window.device).bfloat16()
    slots = torch.arange(batch, device=window.device)
    at = Slots(slots, accepted=torch.zeros_like(slots)) if rolls_back else slots
    options = {"bias": weight[:, 1].contiguous()} if bias else {}
    flashstate.conv1d_step(window, x, weight, **options, slots=at, early=early)


@pytest.mark.compiled
@pytest.mark.parametrize(("bias", "drafts", "early"), [(True, 0, False), (False, 0, True), (True, 4, False)])
def test_convolutions_of_pools_with_windows_are_compiled_too(
    bias: bool, drafts: int, early: bool, compiled: list[Launch]
) -> None:
    pool = make_pool("float32", "nearest", conv_channels=96, conv_width=3, drafts=drafts)
    options = {"groups": GROUPS, "conv_bias": bias, "early": early, "progress": False}
    counts = flashstate.warmup(pool, (1, 3), tokens=(1, 4), **options)
    assert counts["conv1d_step"] == 2
    with collected(90) as later:
        for batch, tokens in ((1, 1), (3, 4)):
            convolve(pool, batch, tokens, bias, drafts > 0, early)
            serve(pool, batch, tokens, early=early)
    of_steps = [launch for launch in compiled if launch.kernel.__name__.endswith("_step_kernel")]
    assert keys_of(later) == keys_of(of_steps)


@pytest.mark.compiled
def test_layers_of_different_formats_are_all_compiled(compiled: list[Launch]) -> None:
    pools = [make_pool(name, "nearest", layers=1) for name in ("float32", "int8", "float32")]
    pool = StatePool.wrap([pool.layer(0) for pool in pools])
    counts = flashstate.warmup(pool, (8,), groups=GROUPS, progress=False)
    assert counts["mamba2_step"] == 2
    with collected(90) as later:
        serve(pool, 8)
    assert keys_of(later) <= keys_of(compiled)


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("gpu", [gpu_with(90), Gpu("NVIDIA H200", (9, 0))], ids=lambda gpu: gpu.name)
def test_many_sizes_share_few_variants_as_the_document_says(gpu: Gpu, capsys: pytest.CaptureFixture[str]) -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    example = re.search(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    promised = re.search(r"`(\{'.*?\})`", text)
    assert example, "the document has no example"
    assert promised, "the document has no numbers"
    names: dict[str, Any] = {}
    with mock.patch("flashstate.ops.mamba2.gpu_of", return_value=gpu):
        exec(example[1], names)
    assert names["variants"] == ast.literal_eval(promised[1])
    error = capsys.readouterr().err
    assert all(f"{count} of {name}" in error for name, count in names["variants"].items())


@pytest.mark.compiled
@pytest.mark.usefixtures("compiled")
def test_the_pool_stays_as_it_is() -> None:
    pool = make_pool("int8", "stochastic")
    before = [(state.data.clone(), state.scale.clone(), state.seed.clone()) for state in map(pool.layer, (0, 1))]
    free = pool.free
    flashstate.warmup(pool, BATCHES, progress=False, also=lambda: serve(pool, 4))
    for (data, scale, seed), state in zip(before, map(pool.layer, (0, 1)), strict=True):
        assert torch.equal(data, state.data)
        assert torch.equal(scale, state.scale)
        assert torch.equal(seed, state.seed)
    assert pool.free == free


def test_a_cpu_has_no_kernels_to_compile() -> None:
    pool = make_pool("int8", "stochastic", rows=4, cols=16)
    assert flashstate.warmup(pool, BATCHES, also=lambda: 1 / 0) == {}


@pytest.mark.parametrize(
    ("batches", "changes", "error", "complaint"),
    [
        ((0,), {}, ValueError, "batches must be from 1"),
        ((1.5,), {}, TypeError, "batches must be an int"),
        ((1,), {"tokens": (0,)}, ValueError, "tokens must be from 1"),
        ((1,), {"op": "mamba4"}, ValueError, "op must be one of mamba2, gated_delta, mamba3, got 'mamba4'"),
        ((1,), {"op": "mamba3"}, ValueError, "op='mamba3' is not for any layer of this pool"),
    ],
)
def test_wrong_sizes_are_refused_by_name(
    batches: Sequence[int], changes: dict[str, Any], error: type[Exception], complaint: str
) -> None:
    with pytest.raises(error, match=f"^{complaint}"):
        flashstate.warmup(make_pool("float32", "nearest", rows=4, cols=16), batches, **changes)


@pytest.mark.compiled
def test_launches_of_other_values_are_one_variant_and_of_other_types_several() -> None:
    pool, far = make_pool("float32", "nearest"), make_pool("float32", "nearest")
    with collected(90) as launches:
        serve(pool, 3)
        serve(far, 8)
    assert len(launches) == 4
    assert len(variants_of(launches)) == 1
    with collected(90) as launches:
        slots = torch.arange(4)
        serve(pool, 4, slots=slots)
        serve(pool, 4, slots=Slots(slots, null=1 << 40))
        serve(pool, 4, slots=Slots(slots, write=slots))
    assert len(variants_of(launches)) == 3


@pytest.mark.compiled
def test_no_kernel_is_compiled_for_the_value_of_an_argument() -> None:
    pool = make_pool("int8", "stochastic")
    with collected(90) as launches:
        serve(pool, 4)
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


def of_a_shape(counts: dict[str, int]) -> int:
    """How many of these kernels are made for the shape of a state: all but that of seeds, which other tests compile."""
    return sum(count for name, count in counts.items() if name != "advance_seeds")


@pytest.mark.gpu
def test_nothing_is_compiled_after_warmup(compilations: list[str]) -> None:
    shape = {"heads": 6, "rows": 48, "cols": 80}  # of no other test: nothing of it was compiled before
    pool = make_pool("float16", "stochastic", CUDA, **shape)
    counts = flashstate.warmup(pool, BATCHES, tokens=(1, 4), groups=GROUPS, progress=False)
    assert len(compilations) >= of_a_shape(counts) > 0
    compilations.clear()
    for batch in BATCHES:
        serve(pool, batch)
        serve(pool, batch, 4)
        admit(pool, batch)
    assert not compilations
    serve(pool, 8, leave_out=["z"])
    assert len(compilations) == 1, "the hook that counts compilations does not work"


@pytest.mark.gpu
@pytest.mark.parametrize("exact", [True, False])
def test_nothing_of_the_gated_delta_rule_is_compiled_after_warmup(exact: bool, compilations: list[str]) -> None:
    pool = make_delta_pool("bfloat16", "stochastic", CUDA, value_dim=112 if exact else 80)  # of no other test
    told = {"op": "gated_delta", "key_heads": GROUPS, "exact": exact, "progress": False}
    counts = flashstate.warmup(pool, BATCHES, tokens=(1, 4), **told)
    assert len(compilations) >= of_a_shape(counts) > 0
    compilations.clear()
    for batch in BATCHES:
        serve_delta(pool, batch, 1, exact=exact)
        serve_delta(pool, batch, 4, exact=exact)
        admit(pool, batch)
    assert not compilations


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [1, 4])
def test_nothing_of_mamba3_is_compiled_after_warmup(rank: int, compilations: list[str]) -> None:
    pool = make_mamba3_pool("bfloat16", "stochastic", CUDA, rank, rows=44 + rank)  # of no other test
    counts = flashstate.warmup(pool, BATCHES, op="mamba3", tokens=(1, 4), groups=GROUPS, progress=False)
    assert len(compilations) >= of_a_shape(counts) > 0
    compilations.clear()
    for batch in BATCHES:
        serve_mamba3(pool, batch, 1)
        serve_mamba3(pool, batch, 4)
        admit(pool, batch)
    assert not compilations
