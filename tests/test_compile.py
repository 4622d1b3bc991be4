"""What the compiler makes of the kernels of all ops, for every architecture, without a GPU: how wide they access
states, and that nothing spills."""

import re
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from asking import access_bytes, expected_accesses, require_one_order, spilled_bytes, state_loads
from compiling import ARCHITECTURES, Call, calls_told_apart, chosen, collected, compile_launch, compiled
from kernel_forms import (
    BASES,
    CONV,
    DELTA_REPLAY,
    FORMS,
    MAMBA2,
    MAMBA2_AT_ONCE,
    ODD,
    ODD_WITH_TENSOR_CORES,
    STORES_NOTHING,
    Form,
    calls_of,
    fold,
    keep,
)
from tables import by_turns, case_of, risky_by_turns
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompilationError

from flashstate import Slots, State, StatePool
from flashstate.launch import Config, Problem
from flashstate.launch.start import Launch
from flashstate.ops.rings import place_counts
from flashstate.proof import AnyCase, AnyReplayCase, Case, ConvCase, DeltaCase, Mamba3Case, dtype
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

pytestmark = pytest.mark.compiled


def test_forms_have_all_formats() -> None:
    """Of the first op with all their roundings; of replay all but one, which an odd shape has."""
    found = {op: {(case.format, case.rounding) for case, *_ in forms.values()} for op, forms in FORMS.items()}
    assert found["mamba2"] == set(PORTABLE_FORMATS)
    found["replay"] |= found.pop("replay elsewhere") | {("float8_e4m3fn", "nearest")}
    found["delta replay"] |= found.pop("delta replay elsewhere")
    found["mamba3"] |= found.pop("mamba3 elsewhere")
    for op in found.keys() - {"convolution"}:
        assert {name for name, _ in found[op]} == {fmt.name for fmt in FORMATS.values()}, op


# Architectures that have no table have a form of every op, and both makers kernels of one token and of several. Mamba-3
# and replay on those that are not here are below.
OTHERS: dict[str, dict[int | str, tuple[str, ...]]] = {
    "mamba2": {
        80: ("plain",), 89: ("int8",), 100: ("int16",), 103: ("paged",), 120: ("packed tokens",),
        "gfx942": ("several tokens",), "gfx950": ("Mamba-1",),
    },
    "mamba2 at once": {80: ("float8",), 100: ("bfloat16",), "gfx950": ("without update",)},
    "gated delta": {
        80: ("several tokens",), 100: ("one token, kept padding",), "gfx942": ("log-decay",),
        "gfx950": ("several tokens, packed",),
    },
    "gated delta at once": {89: ("bfloat16",), 103: ("without update",), 120: ("float8",), "gfx950": ("plain",)},
    "mamba3": {},
    "mamba3 elsewhere": {89: ("rank 1, turned",), 103: ("int8",), 120: ("rank 1",), "gfx942": ("plain",)},
    "convolution": {
        80: ("plain",), 89: ("packed",), 100: ("rolled back",), 103: ("a ring",),
        120: ("snapshots",), "gfx942": ("width 8, no bias",),
        "gfx950": ("longer windows",),
    },
    "replay": {},
    "replay elsewhere": {
        80: ("fold, 16 tokens",), 89: ("mamba2_fold",), 100: ("fold",), 103: ("keep",), "gfx950": ("either",),
    },
    "delta replay": {},
    "delta replay elsewhere": {
        80: ("gated_delta_fold of KDA",), 100: ("KDA, two tokens",), 120: ("fold, nine tokens",), "gfx942": ("either",),
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "op", "form"),
    [
        *((90, op, form) for op in FORMS if not op.endswith("elsewhere") for form in FORMS[op]
          if form == "plain" or form not in chain(*OTHERS[op].values())),
        *((architecture, op, form) for op in FORMS for architecture, forms in OTHERS[op].items() for form in forms),
    ],
)  # fmt: skip
def test_every_form_compiles_with_wide_accesses_of_the_state_and_without_spills(
    architecture: int | str, op: str, form: str
) -> None:
    """All forms and formats, those on the GPU that has a table that no other architecture has; every architecture has a
    form of every op. Rows are summed in the order that all configs have."""
    case, call, spills = FORMS[op][form]
    kernel = compiled(case, architecture, call)
    if isinstance(case, ConvCase):
        require_wide_windows(kernel, case, architecture)
    else:
        require_wide_states(kernel, case, call, architecture)
    if type(case) is Case and case.exact and not case.mamba1 and architecture == 90:
        require_one_order(kernel, chosen(case, 90), case.problem.vector)
    if not op.endswith("elsewhere"):
        assert spilled_bytes(kernel) <= spills
    if call is fold and isinstance(architecture, int) and architecture >= 90:  # it starts beside the kernel in front
        assert "griddepcontrol.wait" in kernel.asm["ptx"]


def require_wide_states(kernel: Any, case: AnyCase, call: Call, architecture: int | str) -> None:
    """Loads and stores of 16 bytes of data, and of scales where there are some. Loads of some kernels have no hint that
    tells them from others."""
    (loads, stores), want = access_bytes(kernel), expected_accesses(architecture, case.format)
    nvidia = isinstance(architecture, int)
    if isinstance(case, AnyReplayCase) and nvidia:
        loads = loads | state_loads(kernel, case.format)
    tiled = case.tokens if isinstance(case, DeltaCase) else isinstance(case, Case) and not case.exact
    hidden = {16} if tiled else want if isinstance(case, Mamba3Case) else set()
    assert loads >= {16} if isinstance(case, AnyReplayCase) else loads >= want - (hidden if nvidia else set())
    if type(case) in (Case, DeltaCase) and nvidia:
        assert loads <= want
    if call in STORES_NOTHING:
        assert not nvidia or not stores
    else:
        assert stores >= want


def require_wide_windows(kernel: Any, case: ConvCase, architecture: int | str) -> None:
    """The four channels of a thread at once, or 16 bytes of them."""
    if isinstance(architecture, int):
        loads, stores = access_bytes(kernel)
        assert loads | stores == {16 if case.window == "float32" else 8}


def test_tensor_cores_sum_what_was_just_rounded_in_the_order_of_what_is_loaded() -> None:
    """So that a call that folds gives the bytes of a call after a fold. Random bits would make it another order, and so
    would loads of 8 bits."""
    for name, call in (("float16", fold), ("float8_e4m3fn", keep)):
        kernel = compiled(replace(DELTA_REPLAY, cols=32, format=name, rounding="stochastic"), 90, call)
        assert {*re.findall(r"kWidth = (\d)", kernel.asm["ttgir"])} == {"2"}


@pytest.mark.parametrize("name", ["float32", "int8"])
def test_tokens_of_mamba2_at_once_are_summed_in_one_order_with_every_config(name: str) -> None:
    """Operands of tensor cores are as many, and laid out alike, however many tiles of how many rows a program has."""
    case, configs = replace(MAMBA2_AT_ONCE, cols=32, format=name), ((16, 4), (32, 1))
    kernels = [compiled(case, 90, config=Config(rows, 1, 4, tiles=tiles)) for rows, tiles in configs]
    widths = [re.findall(r"kWidth = (\d)", kernel.asm["ttgir"]) for kernel in kernels]
    assert {*widths[0]} == {"2"}
    assert widths == [widths[0]] * len(configs)


@triton.jit
def lengths(x, y):
    return len(x) * 10 + len(y)


@triton.jit
def two_calls(ptr, THE_SAME: tl.constexpr):
    number = tl.load(ptr)
    first = lengths((number,), (number, number, number))
    second = lengths((number,), (number, number, number)) if THE_SAME else lengths((number, number), (number, number))
    tl.store(ptr, first + second)


def test_calls_that_triton_would_take_for_each_other_are_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    target, signature = GPUTarget("cuda", 90, 32), {"ptr": "*i32", "THE_SAME": "constexpr"}
    same, others = (ASTSource(two_calls, signature, {(1,): the_same}) for the_same in (True, False))
    with calls_told_apart():
        triton.compile(same, target=target)
        with pytest.raises(CompilationError, match="cannot tell two calls of lengths apart"):
            triton.compile(others, target=target)


def test_eight_tokens_in_tiles_of_sixteen_rows_compile() -> None:
    """Keys, weights and tiles have one shape then: nothing but where tuples end tells some calls apart."""
    case = replace(DELTA_REPLAY, cols=32, tokens=8, format="bfloat16")
    assert spilled_bytes(compiled(case, 90, keep, Config(16, 1, 4))) == 0


@pytest.mark.parametrize("shape", ODD)
def test_odd_shapes_compile_without_spills(shape: str) -> None:
    case, call, spills = ODD[shape]
    assert spilled_bytes(compiled(case, 90, call)) <= spills


def test_wide_rows_of_several_tokens_do_not_spill_on_blackwell() -> None:
    assert spilled_bytes(compiled(replace(MAMBA2, heads=2, cols=256, tokens=2), 100)) == 0


@pytest.mark.parametrize(("architecture", "form"), by_turns(ARCHITECTURES, ODD_WITH_TENSOR_CORES), ids=str)
def test_every_architecture_compiles_odd_shapes_and_several_tokens_of_kernels_with_tensor_cores(
    architecture: int | str, form: Form
) -> None:
    kernel = compiled(form.case, architecture, form.call)
    assert not form.spills or spilled_bytes(kernel) <= form.spills


SMALL_KERNELS = [
    f"{name}_kernel" for name in ("advance_seeds", "write_states", "read_states", "place_counts", "draw_seeds",
                                  "move_slots", "copy_slots", "copy_slots", "move_slots", "move_slots")
]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_architecture_compiles_the_small_kernels_of_which_slots_of_all_layers_are_one_launch(
    architecture: int | str,
) -> None:
    """In accesses of 8 bytes where slots are moved, as wide as a seed is."""
    shape = {"slots": 4, "layers": 3, "heads": 2, "rows": 64, "cols": 128}
    pool = StatePool.mamba2(**shape, dtype=torch.int8, rounding="stochastic", seed=0)
    slots, of_rows, of_slots = torch.tensor([0, 2]), *torch.zeros(2, 3, 4, dtype=torch.int32)
    pool.acquire(4)
    with collected(architecture) as launches:
        pool.advance(slots)
        pool.write(0, [0, 2], torch.zeros(2, 2, 64, 128))
        pool.read(0, [0, 2])
        parts, *rows = of_rows[:, :2]
        place_counts(Slots(slots), parts, parts.char(), 8, *of_slots[:2], *rows)
        pool.reset(slots)
        pool.copy(slots[:1], slots[1:], keep_seed=True)
        pool.copy(slots, slots, keep_seed=True)
        pool.load(slots, pool.export(slots))
    assert [launch.kernel.__name__ for launch in launches] == SMALL_KERNELS
    for launch in launches:
        assert launch.values.get("WIDTH", 8) == 8
        assert spilled_bytes(compile_launch(launch, architecture)) == 0


def launches_on_a_transposed_layer(architecture: int | str, name: str, rounding: str, cols: int) -> list[Launch]:
    """Of a write and a read."""
    data = torch.zeros(4, 2, cols, 64, dtype=dtype(name)).mT
    pool = StatePool.wrap([State(data, rounding=rounding, seed=torch.arange(4))])
    with collected(architecture) as launches:
        pool.write(0, [0, 2], torch.zeros(2, 2, 64, cols))
        pool.read(0, [0, 2])
    return launches


@pytest.mark.parametrize(
    ("architecture", "of_state"), by_turns(ARCHITECTURES, [("float32", "nearest"), ("bfloat16", "stochastic")])
)
def test_every_architecture_compiles_the_kernels_of_a_transposed_layer(
    architecture: int | str, of_state: tuple[str, str]
) -> None:
    """Of a model's width on the GPU that has a table; narrower ones take less time."""
    launches = launches_on_a_transposed_layer(architecture, *of_state, cols=128 if architecture == 90 else 32)
    write, read = (compile_launch(launch, architecture) for launch in launches)
    assert spilled_bytes(write) == spilled_bytes(read) == 0
    if isinstance(architecture, int):
        assert access_bytes(write) == (set(), {16})
        assert access_bytes(read) == ({16}, set())


@pytest.mark.parametrize(("rounding", "lanes"), [("nearest", 8), ("stochastic", 16)])
def test_a_thread_has_one_column_of_each_chunk_of_a_transposed_layer(rounding: str, lanes: int) -> None:
    launches = launches_on_a_transposed_layer(90, "bfloat16", rounding, 128)
    for launch, access in zip(launches, ("store", "load"), strict=True):
        text = compile_launch(launch, 90).asm["ttgir"]
        (name,) = set(re.findall(rf"tt\.{access} [^\n]* : tensor<\d+x{lanes}x8x!tt\.ptr<\w+>, (#\w+)>", text))
        (layout,) = re.findall(rf"^{name} = #ttg\.blocked<\{{(.*)\}}>$", text, re.M)
        assert f"sizePerThread = [1, 1, 8], threadsPerWarp = [{32 // lanes}, {lanes}, 1]" in layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offset", [0, 1])
def test_plain_states_go_in_and_out_in_16_byte_accesses_where_their_rows_are_aligned(
    dtype: torch.dtype, offset: int
) -> None:
    pool = StatePool.mamba2(slots=4, layers=1, heads=2, rows=64, cols=128, dtype=torch.int8)
    pool.acquire(4)
    with collected(90) as launches:
        slots = torch.tensor([0, 2])  # int64, which `widest_access` tells from values
        pool.write(0, slots, torch.zeros(2, 2, 64, 128 + offset, dtype=dtype)[..., offset:])
        pool.read(0, slots)
    write, read = (compile_launch(launch, 90).asm["ptx"] for launch in launches)
    assert widest_access(write, "ld") == (dtype.itemsize if offset else 16)
    assert widest_access(read, "st") == 16


def widest_access(ptx: str, kind: str) -> int:
    """Bytes of the widest loads or stores of plain values: those of state have a hint, slot numbers 64 bits."""
    found = re.findall(rf"\b{kind}\.global(?:\.v(\d))?\.b(16|32)\b", ptx)
    return max(int(n or 1) * int(bits) // 8 for n, bits in found)


def test_windows_whose_channels_are_apart_are_accessed_one_by_one() -> None:
    for case in (replace(CONV, layout="channels_first"), replace(CONV, channels=1283)):
        assert set.union(*access_bytes(compiled(case, 90))) == {2}


MAMBA3_OPS = [f"mamba3_step rank {rank}{turned}" for rank in (1, 4) for turned in ("", " turned")]


@pytest.mark.parametrize(
    ("mode", "config", "call"),
    [
        *risky_by_turns(["mamba2_step"], calls_of, every=16),
        *risky_by_turns(["gated_delta_step"], calls_of, every=12),
        *risky_by_turns(["gated_delta_at_once"], calls_of, every=12),
        *risky_by_turns(["mamba2_at_once"], calls_of, every=8),
        *risky_by_turns(MAMBA3_OPS, calls_of, every=24),
        *risky_by_turns([f"mamba2_replay {form}" for form in ("either", "keep", "fold")], calls_of, every=12),
        *risky_by_turns(["conv1d_step"], calls_of, every=1),
    ],
)
def test_table_entries_that_may_spill_do_not_or_little_where_that_was_faster(
    mode: Problem, config: Config, call: Call
) -> None:
    """A few registers on the stack are worth more programs at once, where a limit of registers was measured fastest."""
    case, spilled = case_of(mode, BASES, 32), 0
    assert case.problem.vector == mode.vector
    if mode.op.startswith("mamba2_replay"):
        spilled = 128
    elif config.registers or mode.op.startswith(("gated_delta", "mamba3")):
        spilled = 64
    assert spilled_bytes(compiled(case, 90, call, config)) <= spilled
