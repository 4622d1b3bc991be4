"""conv1d_step: where inputs are in a window, held against histories kept in Python lists. The laws: test_laws.py."""

import random

import pytest
import torch
from implementations import NO_INTERPRETER
from torch import Tensor

import flashstate
from flashstate import Slots
from flashstate.launch import uses_kernels
from flashstate.reference.conv1d import conv1d_token
from flashstate.state.formats import bits_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
CHANNELS, STEPS = 5, 12


def make_rows(width: int, batch: int, dtype: torch.dtype, generator: torch.Generator) -> list[list[Tensor]]:
    """The inputs that a prefill left: K - 1 of each row."""
    before = torch.randn(batch, width - 1, CHANNELS, generator=generator).to(dtype)
    return [list(row.unbind()) for row in before]


def require_convolved(seen: list[Tensor], x: Tensor, y: Tensor, weight: Tensor) -> None:
    """The outputs of one row's tokens are those of a plain window that holds the last inputs of its history."""
    window = torch.stack(seen[1 - weight.shape[1] :], 1)[None].to(x.device)
    assert torch.equal(flashstate.conv1d_step(window, x[None].contiguous(), weight)[0], y)


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_token_is_torchs_convolution_of_the_last_inputs(activation: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    u, weight, bias = (torch.randn(*size, generator=generator).double() for size in ((3, 5, 4), (5, 4), (5,)))
    want = torch.nn.functional.conv1d(u, weight[:, None], bias, groups=5)[..., 0]
    want = torch.nn.functional.silu(want) if activation else want
    assert torch.allclose(conv1d_token(u, weight, bias, activation), want, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(("packed", "less"), [(False, 0), (True, 1)])
def test_rolling_back_continues_from_the_accepted_history(packed: bool, less: int, device: torch.device) -> None:
    """Every step drafts tokens; a random number of them is kept, from none (with K - 2 entries of history: one) to all.
    The window must hold the kept history and the drafts, bit for bit, and outputs must be of the whole history."""
    generator, chance = torch.Generator().manual_seed(less), random.Random(packed)
    width, batch, drafts, dtype = 4, 3, 4, torch.float16
    history = width - 1 - less
    rows, weight = (
        make_rows(width, batch, dtype, generator),
        torch.randn(CHANNELS, width, generator=generator).to(device),
    )
    slots = [6, 1, 3]
    window = torch.full((8, CHANNELS, history + drafts), torch.nan, dtype=dtype)
    for slot, seen in zip(slots, rows, strict=True):
        window[slot, :, : width - 1] = torch.stack(seen, 1)
    window = window.to(device)
    accepted = [less] * batch  # the window starts where the prefill left it
    drafted: list[Tensor] = [torch.empty(0, CHANNELS, dtype=dtype)] * batch
    for _ in range(STEPS):
        for row in range(batch):
            rows[row] += drafted[row][: accepted[row]].unbind()
        lengths = [chance.randint(1, drafts) for _ in range(batch)] if packed else [drafts] * batch
        drafted = [torch.randn(n, CHANNELS, generator=generator).to(dtype) for n in lengths]
        x = torch.cat(drafted) if packed else torch.stack(drafted)
        bounds = torch.tensor([0, *lengths]).cumsum(0) if packed else None
        at = Slots(
            torch.tensor(slots, device=device), accepted=torch.tensor(accepted, device=device),
            cu_seqlens=None if bounds is None else bounds.to(device), max_len=drafts if packed else None,
        )  # fmt: skip
        y = flashstate.conv1d_step(window, x.to(device), weight, history=history, slots=at)
        outputs = y.split(lengths) if packed else y.unbind()
        for row, (slot, tokens) in enumerate(zip(slots, drafted, strict=True)):
            require_convolved(rows[row], tokens.to(device), outputs[row], weight)
            kept = torch.stack([*rows[row][len(rows[row]) - history :], *tokens.unbind()], 1)
            assert torch.equal(bits_of(window[slot, :, : kept.shape[1]].cpu()), bits_of(kept.contiguous()))
        accepted = [chance.randint(less, n) for n in lengths]
    assert window[[0, 2, 4, 5, 7]].isnan().all()


@pytest.mark.parametrize("length", [2, 7])
def test_a_ring_keeps_token_p_at_entry_p_modulo_its_length(length: int, device: torch.device) -> None:
    """Positions grow by the tokens of each call; token p of a row is at entry p mod length, others stay."""
    generator, chance = torch.Generator().manual_seed(length), random.Random(length)
    width, batch, dtype = 3, 2, torch.float32
    rows, weight = (
        make_rows(width, batch, dtype, generator),
        torch.randn(CHANNELS, width, generator=generator).to(device),
    )
    window, position = torch.zeros(batch, CHANNELS, length), [width - 1, width - 1]
    for row in range(batch):
        window[row, :, : width - 1] = torch.stack(rows[row], 1)
    expected, window = window.clone(), window.to(device)
    for _ in range(STEPS):
        count = chance.randint(1, length + 2)  # sometimes more than the ring holds
        x = torch.randn(batch, count, CHANNELS, generator=generator)
        positions = torch.tensor(position, device=device)
        y = flashstate.conv1d_step(window, x.to(device), weight, positions=positions)
        for row in range(batch):
            require_convolved(rows[row], x[row].to(device), y[row], weight)
            rows[row] += x[row].unbind()
            for t in range(count):
                expected[row, :, (position[row] + t) % length] = x[row, t]
            position[row] += count
        assert torch.equal(window.cpu(), expected)


def odd_values(dtype: torch.dtype) -> Tensor:
    """Values that arithmetic would change: NaNs with payloads, quiet and not, both zeros, subnormals, infinities."""
    patterns = {
        torch.float32: [0x7F800001, 0x7FC12345, -0x7FEDCB, -0x80000000, 1, 0x7F800000, -0x800000, 0x3F800000],
        torch.float16: [0x7C01, 0x7E55, -0x155, -0x8000, 1, 0x7C00, -0x400, 0x3C00],
        torch.bfloat16: [0x7F81, 0x7FC5, -0x35, -0x8000, 1, 0x7F80, -0x80, 0x3F80],
    }[dtype]
    return torch.tensor(patterns, dtype=torch.int32 if dtype is torch.float32 else torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_windows_keep_every_bit(dtype: torch.dtype, device: torch.device) -> None:
    """Through a shift, a rollback, a ring, snapshots and slots of every token."""
    if uses_kernels(device) and device.type == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter's bfloat16 is wrong")
    values = odd_values(dtype)
    x = torch.stack([values.roll(i) for i in range(2)])[None].to(device)  # (1, 2, channels)
    old = torch.stack([values.roll(-i) for i in range(1, 4)], 1)[None]  # (1, channels, 3)
    weight = torch.ones(len(values), 4, device=device)
    stream = torch.cat([old, x.cpu().transpose(1, 2)], 2)  # (1, channels, 5)

    def after(entries: int, want: Tensor, **options: object) -> None:
        window = torch.zeros(3, len(values), entries, dtype=dtype)
        window[:1, :, :3] = old
        window = window.to(device)
        flashstate.conv1d_step(window, x, weight, **options)  # type: ignore[arg-type]
        assert torch.equal(bits_of(window[: len(want)].cpu()), bits_of(want.contiguous()))

    first = torch.zeros(1, dtype=torch.int64, device=device)
    snapshots = torch.zeros(1, 2, len(values), 3, dtype=dtype, device=device)
    after(3, stream[..., 2:], snapshots=snapshots, slots=first)
    assert torch.equal(bits_of(snapshots[0, 0].cpu()), bits_of(stream[0, :, 1:4].contiguous()))
    assert torch.equal(bits_of(snapshots[0, 1].cpu()), bits_of(stream[0, :, 2:].contiguous()))
    after(5, stream, slots=Slots(first, accepted=first))
    after(5, stream, positions=first + 3, slots=first)
    each = Slots(first, write=torch.tensor([[1, 2]], device=device))
    after(3, torch.cat([old, stream[..., 1:4], stream[..., 2:]]), slots=each)


def test_an_offset_that_no_window_has_makes_a_row_padding(device: torch.device) -> None:
    """Only an offset past the window is a fault; the offset of a row without a request is nobody's."""
    window = torch.randn(2, CHANNELS, 5, device=device)
    before, x = window.clone(), torch.randn(2, CHANNELS, device=device)
    weight = torch.randn(CHANNELS, 4, device=device)
    for rows, offsets, faulty in (((0, 1), (2, 3), True), ((0, 1), (2, -1), False), ((0, -1), (0, 99), False)):
        at = Slots(torch.tensor(rows, device=device), accepted=torch.tensor(offsets, device=device))
        y = flashstate.conv1d_step(window, x, weight, slots=at)
        assert y[0].any()
        assert not y[1].any()
        assert torch.equal(window[1], before[1])
        assert not torch.equal(window[0], before[0])
        if faulty:
            with pytest.raises(IndexError, match="accepted 3"):
                flashstate.check_faults()
        flashstate.check_faults()


@pytest.mark.parametrize("device", NO_INTERPRETER, indirect=True)
def test_debug_finds_an_offset_that_no_window_has_before_anything_is_written(device: torch.device) -> None:
    window, x = torch.randn(3, CHANNELS, 5, device=device), torch.randn(2, CHANNELS, device=device)
    before, weight = window.clone(), torch.randn(CHANNELS, 4, device=device)
    for read, offsets, wrong in (([2, 1], [99, 0], "accepted 99"), ([1, 1], [0, 1], "write slot 1 more than once")):
        at = Slots(torch.tensor(read, device=device), accepted=torch.tensor(offsets, device=device))
        with flashstate.debug(), pytest.raises((IndexError, ValueError), match=wrong):
            flashstate.conv1d_step(window, x, weight, slots=at)
        assert torch.equal(window, before)
