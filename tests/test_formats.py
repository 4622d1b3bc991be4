"""Stored bytes: Philox, encoders and their bounds, and equal bytes from torch and Triton."""

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from implementations import KERNELS
from torch import Tensor

from flashstate.launch import Config, machine_of, override
from flashstate.launch.arguments import as_bytes
from flashstate.proof import Case, DeltaCase, StateCase, make_inputs
from flashstate.proof.laws import LAWS, require
from flashstate.state.formats import DTYPES, FORMATS, PORTABLE_FORMATS, Encoded, decode, encode
from flashstate.state.rounding import philox, random_bits, to_bfloat16_stochastic, to_float16_stochastic

CPU = torch.device("cpu")
CUDA = torch.device("cuda")
ALL_RANDOM = torch.arange(65536)
STOCHASTIC = {torch.float16: to_float16_stochastic, torch.bfloat16: to_bfloat16_stochastic}
UNSCALED = [(name, rounding) for name, rounding in PORTABLE_FORMATS if not FORMATS[DTYPES[name]].scaled]
EVERYWHERE = pytest.mark.parametrize(
    "device", [pytest.param(CPU, marks=pytest.mark.interpreted), pytest.param(CUDA, marks=pytest.mark.gpu)], ids=str
)


def bits_to_float(*bits: int) -> Tensor:
    return torch.tensor([b - (1 << 32) if b >> 31 else b for b in bits], dtype=torch.int32).view(torch.float32)


def values_of_all_exponents(per_exponent: int = 8) -> Tensor:
    """Every float32 exponent with random mantissas, both signs; exact powers; the edges of each format; inf and NaN."""
    generator = torch.Generator().manual_seed(0)
    exponent = torch.arange(256).repeat_interleave(per_exponent)
    mantissa = torch.randint(0, 1 << 23, (len(exponent),), generator=generator)
    mantissa[::per_exponent], mantissa[1::per_exponent] = 0, (1 << 23) - 1
    positive = (exponent << 23 | mantissa).int().view(torch.float32)
    edges = torch.tensor([65504.0, 65519.99, 65520.0, 65535.99, 65536.0, 2.0**-14, 2.0**-24, 2.0**-25, 2.0**-40, 1e-8])
    ulps = torch.cat([edges.nextafter(torch.tensor(0.0)), edges, edges.nextafter(torch.tensor(torch.inf))])
    quiet = bits_to_float(0x7FFFFFFF, 0x7FC00000, 0x7F7F0000, 0x7F7F0001, 0x7F7FFFFF, 0x00000001, 0x007FFFFF)
    every = torch.cat([positive, ulps, quiet])
    every = torch.cat([every, -every])
    return torch.cat([every, torch.zeros(-len(every) % 64)])  # kernels take 64 at a time


def codes(stored: Tensor | None) -> Tensor:
    """Stored bytes as integers, all NaNs as one; nothing where nothing is stored."""
    if stored is None:
        return torch.empty(0)
    if not stored.is_floating_point():
        return stored.long()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[stored.element_size()]
    return torch.where(stored.float().isnan(), 1 << 32, stored.view(integers).long())


def same_bytes(got: Encoded, want: Encoded) -> bool:
    return all(torch.equal(codes(a), codes(b)) for a, b in zip(got, want, strict=True))


def neighbours(v: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The values of the format around finite `v`, toward zero and away from it, in float64."""
    near = v.double().to(dtype)
    near = torch.where(near.isinf(), torch.tensor(torch.finfo(dtype).max, dtype=dtype).copysign(near), near)
    code = near.view(torch.int16)
    toward = torch.where(near.double().abs() > v.double().abs(), code - 1, code).view(dtype).double()
    away = torch.where(toward == v.double(), toward, (toward.to(dtype).view(torch.int16) + 1).view(dtype).double())
    return toward, away


@pytest.mark.parametrize("dtype", STOCHASTIC, ids=str)
def test_rounding_up_is_as_likely_as_the_discarded_fraction_and_makes_neither_inf_nor_nan(dtype: torch.dtype) -> None:
    """Not by sampling: over all 65536 random values, at every exponent that float32 has."""
    largest, limit = torch.finfo(dtype).max, 2.0**16 if dtype is torch.float16 else torch.inf
    values = torch.cat([values_of_all_exponents(3), bits_to_float(0x7F800001)])  # and a NaN of one bit
    finite = torch.where(values.abs() <= largest, values, 0.0)
    for v, low, high in zip(values, *neighbours(finite, dtype), strict=True):
        stored = STOCHASTIC[dtype](v.expand(65536).contiguous(), ALL_RANDOM).float()
        if v.isnan():
            assert stored.isnan().all()
        elif v.abs() > largest:
            assert (stored == v.sign() * (largest if v.abs() < limit else torch.inf)).all(), v
        else:
            fraction = (v.double() - low) / (high - low) if low != high else torch.zeros(())
            ups = (stored == high).double().mean() if low != high else 0.0
            assert ((stored == low) | (stored == high)).all(), f"{v} became neither {low} nor {high}"
            assert abs(ups - fraction) <= 2.0**-16, f"{v} is rounded up in {ups} of all cases, not {fraction}"


@pytest.mark.parametrize("dtype", [torch.float16, torch.int8, torch.float8_e4m3fn], ids=str)
def test_a_column_finds_its_two_bytes_of_its_word(dtype: torch.dtype) -> None:
    """From byte to byte where a column is stored in 8 bits, else from one pair to the next."""
    heads, rows, cols, apart = 2, 3, 20, dtype.itemsize
    seed, per_call = torch.tensor([-123456789012345]), 16 // apart
    bits = random_bits(seed, (heads, rows, cols), 4, 9, 10, dtype)
    for head, row, col in ((0, 0, 0), (0, 2, 7), (1, 1, 17), (1, 2, 19)):
        counter = torch.tensor([(head * rows + row) * -(-cols // per_call) + col // per_call])
        first = col % per_call * apart  # byte of a call
        word = int(philox(seed, counter, 4, 9, 0, 10)[first // 4]).to_bytes(4, "little")
        assert bits[0, head, row, col] == word[first % 4] + 256 * word[(first + 1) % 4]


def test_philox_gives_the_published_words() -> None:
    """Known answers of Philox4x32-10 from the Random123 distribution."""
    zero = philox(torch.tensor([0]), torch.tensor([0]), 0, 0, 0, 10)
    assert [int(w) for w in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = philox(torch.tensor([-1]), torch.tensor([0xFFFFFFFF]), 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 10)
    assert [int(w) for w in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


class Form(NamedTuple):
    """One way to compile a kernel; none may change a byte."""

    target: str
    fusion: bool  # contraction of a * b + c
    chunk: int | None  # columns; None: the whole row


def forms(device: torch.device) -> list[Form]:
    """Every target a kernel can be compiled for on this device, without and with contraction, in chunks and without."""
    own = machine_of(device).target
    if own == "interpreter":
        return [Form(own, False, 8), Form(own, False, None)]
    targets = {"interpreter", "portable", "sm_80", own} if own == "sm_89" else {"interpreter", "portable", own}
    variants = ((False, 8), (True, 8), (True, None))
    return [Form(target, fusion, chunk) for target in sorted(targets) for fusion, chunk in variants]


def launch_options(device: torch.device, rows: int, cols: int, form: Form) -> dict[str, Any]:
    """Tiles of several rows; few of them in the interpreter, which takes a while for each."""
    block_rows = 4 if rows < 64 else 256 if device.type == "cpu" else 32
    block_cols = max(16, 1 << (cols - 1).bit_length())
    return {
        "COLS": cols, "BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "CHUNK": form.chunk or block_cols,
        "TARGET": form.target, "enable_fp_fusion": form.fusion,
    }  # fmt: skip


def encoded_by_triton(
    values: Tensor, random: Tensor | None, dtype: torch.dtype, device: torch.device, form: Form
) -> Encoded:
    """values (slots, rows, cols) as store_state stores them; a slot behind the last is not live and must stay as is."""
    from device_functions import encode_kernel

    slots, rows, cols = values.shape
    values, bits = (
        torch.cat([torch.zeros_like(values) if t is None else t, torch.ones(1, rows, cols)]) for t in (values, random)
    )
    data = torch.full((slots + 1, rows, cols), 3.0, device=device).to(dtype)
    scale = torch.full((slots + 1, rows), 3.0, device=device) if FORMATS[dtype].scaled else None
    options = launch_options(device, rows, cols, form)
    encode_kernel[(-(-rows // options["BLOCK_ROWS"]), slots + 1)](
        as_bytes(data), scale, values.to(device), bits.int().to(device), rows,
        ROUNDING="nearest" if random is None else "stochastic", **options,
    )  # fmt: skip
    assert (data[slots].float() == 3.0).all()
    assert scale is None or (scale[slots] == 3.0).all()
    return Encoded(data[:slots].cpu(), None if scale is None else scale[:slots].cpu())


def decoded_by_triton(data: Tensor, scale: Tensor | None, device: torch.device, form: Form) -> Tensor:
    """The values that load_state finds in data (slots, rows, cols) and scale (slots, rows)."""
    from device_functions import decode_kernel

    slots, rows, cols = data.shape
    values = torch.empty(data.shape, device=device)
    options = launch_options(device, rows, cols, form)
    decode_kernel[(-(-rows // options["BLOCK_ROWS"]), slots)](
        values, as_bytes(data).to(device), None if scale is None else scale.to(device), rows, **options
    )
    return values.cpu()


def repeated_values() -> tuple[Tensor, Tensor]:
    """Every value of the list with 16 random values, the extremes among them, in random order: a thread that rounds
    eight values at once then meets every mixture of cases. Both (1, rows, 64)."""
    values = values_of_all_exponents()
    random = torch.randint(0, 65536, (len(values), 16), generator=torch.Generator().manual_seed(1))
    random[:, 0], random[:, 1], random[:, 2], random[:, 3] = 0, 65535, 0x1FFF, 0xE000
    order = torch.randperm(random.numel(), generator=torch.Generator().manual_seed(2))
    return values.repeat_interleave(16)[order].view(1, -1, 64), random.flatten()[order].view(1, -1, 64)


@EVERYWHERE
@pytest.mark.parametrize(("name", "rounding"), UNSCALED)
@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")
def test_triton_and_torch_round_to_equal_bytes(device: torch.device, name: str, rounding: str) -> None:
    values, random = repeated_values()
    if rounding == "nearest":
        values, random = values_of_all_exponents(64).view(1, -1, 64), None
    require_equal_bytes(values, random, DTYPES[name], device, forms(device))


def require_equal_bytes(
    values: Tensor, random: Tensor | None, dtype: torch.dtype, device: torch.device, ways: list[Form]
) -> None:
    want = encode(values, dtype, random)
    for form in ways:
        assert same_bytes(encoded_by_triton(values, random, dtype, device, form), want), form


EVERY_VALUE = [
    (torch.bfloat16, "nearest", 1.0),
    (torch.bfloat16, "stochastic", 1.0),
    (torch.float16, "stochastic", 1.0),
]
EVERY_VALUE += [
    (dtype, rounding, factor)
    for dtype in (torch.int16, torch.int8, torch.float8_e4m3fn)
    for rounding, factor in product(("nearest", "stochastic"), (1.0, 0.7))
]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "rounding", "factor"), EVERY_VALUE)
def test_portable_arithmetic_and_instructions_round_every_float32_to_equal_bytes(
    dtype: torch.dtype, rounding: str, factor: float
) -> None:
    """Of formats with a scale every product with a factor: with 1 all ties are among them, then products that are
    rounded."""
    import triton.language as tl
    from device_functions import count_differences_kernel

    target = machine_of(CUDA).target
    if dtype is torch.float8_e4m3fn and rounding == "nearest" and target != "sm_89":
        pytest.skip("this GPU has no float8 conversion")
    element = tl.uint8 if dtype is torch.float8_e4m3fn else getattr(tl, FORMATS[dtype].name)
    count = torch.zeros(1, dtype=torch.int32, device=CUDA)
    count_differences_kernel[(1 << 20,)](count, factor, element, rounding, target, BLOCK=1 << 12)
    assert count.item() == 0


@EVERYWHERE
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.filterwarnings("ignore:.*encountered in multiply:RuntimeWarning")
def test_triton_and_torch_decode_every_code_to_equal_values(device: torch.device, dtype: torch.dtype) -> None:
    """With scales that encode never gives, too: zero, subnormal, negative, too large, inf, NaN."""
    every = torch.arange(256).to(torch.uint8) if dtype.itemsize == 1 else torch.arange(65536).to(torch.uint16)
    data = (values_of_all_exponents() if dtype is torch.float32 else every.view(dtype)).view(1, -1, 64)
    scale = None
    if FORMATS[dtype].scaled:
        scales = [1.0, 0.3, 2.0**-115, 1e-38, 1e-40, 1e-45, 0.0, -0.0, -2.5, 1e30, 3e38, torch.inf, torch.nan]
        data = data.repeat(len(scales), 1, 1)
        scale = torch.tensor(scales)[:, None].expand(data.shape[:2]).contiguous()
    for form in forms(device):
        assert torch.equal(codes(decoded_by_triton(data, scale, device, form)), codes(decode(data, scale))), form


@pytest.mark.parametrize("device", KERNELS, indirect=True)
@pytest.mark.parametrize("name", ["int8", "float8_e4m3fn", "float16"])
@pytest.mark.parametrize(("cols", "lanes"), [(40, 1), (20, 2), (33, 8)])
def test_a_step_draws_the_bits_that_the_seed_decides_whoever_has_a_column(
    device: torch.device, name: str, cols: int, lanes: int
) -> None:
    """Threads, or those of a row, have half of a Philox call at once."""
    case = Case(2, 2, 1, 6, cols, format=name, rounding="stochastic")
    with override(Config(32 // lanes, 1, lanes)):
        LAWS["snapshots hold the state after every token, in any format, at their rows, and change nothing else"](
            case, device
        )


@pytest.mark.interpreted  # where products for float32 are those for float16
@pytest.mark.parametrize(
    "case",
    [
        Case(2, 2, 1, 5, 16, tokens=3, bc="float16", exact=False),
        DeltaCase(2, 2, 1, 5, 16, tokens=3, qk="float16", exact=False),
    ],
    ids=["mamba2", "gated_delta"],
)
@pytest.mark.parametrize("device", ["interpreter"], indirect=True)
def test_tokens_at_once_draw_the_bits_of_the_last(case: StateCase, device: torch.device) -> None:
    inputs = make_inputs(case.in_format("float16", "stochastic"), device)
    wide, slots = inputs.fresh(), inputs.slots.long()
    wide.state = replace(wide.state, data=wide.state.data.float(), rounding="nearest")
    for run in (wide, inputs):
        run.step()
    require.stored("the pool", inputs.state, slots, wide.state.data[slots], inputs.state, slots, 2)
