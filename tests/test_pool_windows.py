"""The windows of a StatePool: clean when they are handed out, written, copied, wrapped, and stepped with the states."""

import pytest
import torch
from pools import CPU, DEVICES
from torch import Tensor

import flashstate
from flashstate import Slots, State, StatePool

HEADS, ROWS, COLS = 2, 4, 8
CHANNELS = HEADS * ROWS + 2 * COLS


def make_pool(device: torch.device = CPU, **options: object) -> StatePool:
    sizes = {"slots": 5, "layers": 2, "heads": HEADS, "rows": ROWS, "cols": COLS, "conv_channels": CHANNELS}
    return StatePool.mamba2(**{**sizes, "device": device, "seed": 0, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize(("width", "drafts", "dtype"), [(4, 0, torch.bfloat16), (2, 3, torch.float32)], ids=str)
def test_windows_have_room_for_what_a_convolution_needs_and_for_drafts(
    width: int, drafts: int, dtype: torch.dtype
) -> None:
    pool = make_pool(conv_width=width, drafts=drafts, conv_dtype=dtype)
    assert pool.has_windows
    for i in range(2):
        window = pool.window(i)
        assert window.shape == (5, CHANNELS, width - 1 + drafts)
        assert window.dtype is dtype
        assert window.stride(1) == 1  # channels are neighbours
    assert pool.window(0).data_ptr() != pool.window(1).data_ptr()
    states = 2 * HEADS * ROWS * COLS * 4
    assert pool.bytes_per_slot == states + 2 * CHANNELS * (width - 1 + drafts) * dtype.itemsize


def test_a_pool_for_the_gated_delta_rule_may_have_windows_too() -> None:
    pool = StatePool.gated_delta(slots=3, layers=1, heads=2, value_dim=4, key_dim=8, conv_channels=40)
    assert pool.window(0).shape == (3, 40, 3)


@DEVICES
def test_windows_are_written_and_copied_with_their_request(device: torch.device) -> None:
    pool = make_pool(device, drafts=2)
    one, two, three = pool.acquire(3).tolist()
    pool.window(1).fill_(7.0)
    left = torch.randn(2, 3, CHANNELS, device=device).bfloat16().mT  # what a prefill left, in its own layout
    pool.write_window(1, [three, one], left)
    assert torch.equal(pool.window(1)[[three, one], :, :3], left)
    assert not pool.window(1)[[three, one], :, 3:].any()
    assert (pool.window(1)[two] == 7).all()
    pool.copy(three, two)
    assert torch.equal(pool.window(1)[two], pool.window(1)[three])
    assert not pool.window(0).any()


@DEVICES
@pytest.mark.parametrize("prompt", [1, 2, 3])
@pytest.mark.parametrize("kind", ["plain", "drafts", "wrapped", "wrapped, longer"])
def test_a_request_continues_from_a_prompt_of_any_length(kind: str, prompt: int, device: torch.device) -> None:
    """What a prefill of the first tokens left, and steps by the others: as all tokens in one call on a new slot."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CHANNELS, 4, generator=generator).to(device)
    tokens = torch.randn(1, 6, CHANNELS, generator=generator).to(device)
    want = flashstate.conv1d_step(torch.zeros(1, CHANNELS, 3, device=device), tokens, weight)
    if "wrapped" in kind:
        window = torch.full((5, CHANNELS, 3 + 2 * ("longer" in kind)), 7.0, device=device)
        pool = StatePool.wrap([State(torch.zeros(5, 1, 1, 1, device=device))], windows=[window])
        slots = torch.tensor([3], device=device)
    else:
        pool = make_pool(device, layers=1, conv_dtype=torch.float32, drafts=3 if kind == "drafts" else 0)
        slots = pool.acquire(1)
    pool.write_window(0, slots, tokens[:, :prompt].mT)
    accepted = torch.zeros_like(slots)
    for t in range(prompt, 6):
        at = Slots(slots, accepted=accepted) if kind == "drafts" else slots
        y = flashstate.conv1d_step(pool.window(0), tokens[:, t : t + 1], weight, slots=at)
        accepted = torch.ones_like(slots)
        assert torch.equal(y[:, 0], want[:, t])


def test_float32_windows_take_inputs_of_any_dtype_as_they_are() -> None:
    pool = make_pool(conv_dtype=torch.float32)
    slots = pool.acquire(1).tolist()
    left = torch.randn(1, CHANNELS, 3).half()
    pool.write_window(0, slots, left)
    assert torch.equal(pool.window(0)[slots], left.float())


def layer(pool: StatePool, i: int, u: Tensor, slots: Slots | Tensor, weight: Tensor) -> Tensor:
    """A convolution, and the recurrence on its parts."""
    convolved = flashstate.conv1d_step(pool.window(i), u, weight, slots=slots)
    x, B, C = convolved.split([HEADS * ROWS, COLS, COLS], dim=-1)
    dt = torch.ones(*u.shape[:-1], HEADS)
    A = -torch.ones(HEADS)
    return flashstate.mamba2_step(
        pool.layer(i), x.unflatten(-1, (HEADS, ROWS)), dt, A, B.unsqueeze(-2), C.unsqueeze(-2), slots=slots
    )


def test_slots_for_every_token_serve_states_and_windows_alike() -> None:
    """Three drafts each step, of which two are kept; one Slots for both ops gives what the kept tokens alone give."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(CHANNELS, 4, generator=generator)
    drafted = torch.randn(4, 1, 3, CHANNELS, generator=generator)
    pool, plain = make_pool(conv_dtype=torch.float32), make_pool(conv_dtype=torch.float32)
    table, slot = pool.acquire(3)[None], plain.acquire(1)
    accepted = torch.tensor([1])
    for u in drafted:
        slots = Slots(table, accepted=accepted, write=table)
        y = layer(pool, 0, u, slots, weight)
        want = layer(plain, 0, u[:, :2], slot, weight)
        assert torch.equal(y[:, :2], want)
        accepted = torch.tensor([2])
    kept = table[0, 1]
    assert torch.equal(pool.window(0)[kept], plain.window(0)[slot[0]])
    assert torch.equal(pool.layer(0).data[kept], plain.layer(0).data[slot[0]])
