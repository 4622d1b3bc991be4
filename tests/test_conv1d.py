"""conv1d_step: what windows hold, bit by bit, and offsets that none has. The laws: test_laws.py."""

import random
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from implementations import NO_INTERPRETER
from test_formats import EVERYWHERE
from torch import Tensor

import flashstate
from flashstate import Slots
from flashstate.launch import interpreted, uses_kernels
from flashstate.reference.conv1d import conv1d_token
from flashstate.state.formats import bits_of

CPU = torch.device("cpu")
CHANNELS = 5


@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_token_is_torchs_convolution_of_the_last_inputs(activation: str | None) -> None:
    generator = torch.Generator().manual_seed(0)
    u, weight, bias = (torch.randn(*size, generator=generator).double() for size in ((3, 5, 4), (5, 4), (5,)))
    want = torch.nn.functional.conv1d(u, weight[:, None], bias, groups=5)[..., 0]
    want = torch.nn.functional.silu(want) if activation else want
    assert torch.allclose(conv1d_token(u, weight, bias, activation), want, rtol=1e-12, atol=1e-14)


@EVERYWHERE
@pytest.mark.parametrize(("history", "packed"), [(3, False), (2, True), (None, False)])
def test_kernels_roll_back_and_go_round_rings_as_the_reference_does(
    device: torch.device, history: int | None, packed: bool
) -> None:
    """After any number of accepted tokens, and with more tokens than a ring holds. The contracts of peers say what the
    reference does."""
    generator, chance = torch.Generator().manual_seed(0), random.Random(0)
    weight, least = torch.randn(CHANNELS, 4, generator=generator), 1 if history is None else 3 - history
    for tokens in (1, 2, 4, 4, 7):
        lengths = [chance.randint(1, tokens) if packed else tokens for _ in range(3)]
        window = torch.randn(8, CHANNELS, 5 if history is None else history + tokens, generator=generator)
        x = torch.randn(sum(lengths), CHANNELS, generator=generator)
        accepted = torch.tensor([chance.randint(least, least + tokens - 1) for _ in lengths])
        bounds, found = torch.tensor([0, *accumulate(lengths)]), []
        for place, kernels in ((CPU, nullcontext()), (device, interpreted() if device == CPU else nullcontext())):
            fields: dict[str, Any] = {"cu_seqlens": bounds.to(place), "max_len": tokens} if packed else {}
            fields |= {} if history is None else {"accepted": accepted.to(place)}
            options = {"positions": accepted.to(place)} if history is None else {"history": history}
            given = x.to(place) if packed else x.to(place).unflatten(0, (3, tokens))
            mine, slots = window.to(place, copy=True), Slots(torch.tensor([6, 1, 3], device=place), **fields)
            with kernels:
                y = flashstate.conv1d_step(mine, given, weight.to(place), slots=slots, **options)
            found.append((mine.cpu(), y.cpu()))
        (want, y_want), (got, y_got) = found
        assert torch.equal(got, want)
        torch.testing.assert_close(y_got, y_want)


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
