"""Calls of the doors in flashstate/compat: their arguments, and how what they do is compared with a model."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_of_peers import Arguments, Model, Outcome, decoded, rounded, simulate, simulate_delta
from torch import Tensor

import flashstate
from flashstate.proof import error_ratio

CPU = torch.device("cpu")
HEADS, GROUPS, DIM, DSTATE, SLOTS = 4, 2, 8, 16, 14
BUFFERS = {
    "state": "state_scale", "initial_state": "no scale", "intermediate_states_buffer": "intermediate_state_scales",
}  # fmt: skip
Implementation = Callable[[], contextlib.AbstractContextManager[None]]
Door = Callable[..., Any]

REFERENCE = pytest.param(CPU, contextlib.nullcontext, id="reference")
GPU = pytest.param(torch.device("cuda"), contextlib.nullcontext, id="gpu", marks=pytest.mark.gpu)
REFERENCE_AND_GPU = pytest.mark.parametrize(("device", "implementation"), [REFERENCE, GPU])


def make_arguments(
    device: torch.device,
    tokens: tuple[int, ...] = (3,),
    *,
    heads: int | None = HEADS,
    state: torch.dtype = torch.float32,
    x: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    tied: bool = True,
    optional: bool = True,
    dt_softplus: bool = True,
) -> Arguments:
    """Random arguments that all doors have, for these token axes; with an int16 state its scale.

    heads: None: no head axis. x: the dtype of x, z, B and C. weights: that of dt, D and dt_bias. tied: dt, A, D and
    dt_bias are expanded from one value per head. optional: D, z and dt_bias are there.
    """
    generator = torch.Generator().manual_seed(sum(tokens))
    of_heads, of_groups = ((), ()) if heads is None else ((heads,), (GROUPS,))

    def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    def per_head(*sizes: int, of: int, dtype: torch.dtype, sign: int = 0) -> Tensor:
        """Expanded along the last `of` axes if parameters are tied; of one sign, or of both."""
        values = normal(*sizes[:-of], *((1,) * of if tied else sizes[-of:]), dtype=dtype)
        return (sign * values.abs() if sign else values).expand(sizes)

    positive = 0 if dt_softplus else 1
    arguments = {
        **encoded(normal(SLOTS, *of_heads, DIM, DSTATE, dtype=torch.float32), state),
        "x": normal(*tokens, *of_heads, DIM, dtype=x),
        "dt": per_head(*tokens, *of_heads, DIM, of=1, dtype=weights, sign=positive),
        "A": per_head(*of_heads, DIM, DSTATE, of=2, dtype=torch.float32, sign=-1),
        "B": normal(*tokens, *of_groups, DSTATE, dtype=x),
        "C": normal(*tokens, *of_groups, DSTATE, dtype=x),
        "dt_softplus": dt_softplus,
    }
    others = {
        "D": per_head(*of_heads, DIM, of=1, dtype=weights),
        "z": normal(*tokens, *of_heads, DIM, dtype=x),
        "dt_bias": per_head(*of_heads, DIM, of=1, dtype=weights, sign=positive),
    }
    return {**arguments, **(others if optional else dict.fromkeys(others))}


def make_delta_arguments(
    device: torch.device,
    tokens: int = 1,
    *,
    batch: int = 3,
    heads: tuple[int, int] = (2, HEADS),
    state: torch.dtype = torch.float32,
    x: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
    pool: bool = True,
) -> Arguments:
    """Random arguments that doors of gated delta rules have.

    heads: of q and k, and of v. x: the dtype of what tokens bring. weights: that of A_log and dt_bias. pool: the states
    are in a pool of SLOTS slots, not in one for every row.
    """
    generator = torch.Generator().manual_seed(tokens + batch)
    H, HV = heads

    def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    states = normal(SLOTS if pool else batch, HV, DIM, DSTATE, dtype=state)
    return {
        "q": normal(batch, tokens, H, DSTATE, dtype=x),
        "k": normal(batch, tokens, H, DSTATE, dtype=x),
        "v": normal(batch, tokens, HV, DIM, dtype=x),
        **({"initial_state": states} if pool else {"state": states}),
        "A_log": normal(HV, dtype=weights),
        "a": normal(batch, tokens, HV, dtype=x),
        "dt_bias": normal(HV, dtype=weights),
        "b": normal(batch, tokens, HV, dtype=x),
    }


def make_mamba3_arguments(
    device: torch.device,
    *,
    batch: int = 3,
    rank: int = 4,
    groups: int = HEADS,
    state: torch.dtype = torch.float32,
    x: torch.dtype = torch.float32,
    kv: torch.dtype = torch.float32,
    weights: torch.dtype = torch.float32,
) -> Arguments:
    """Random arguments of mamba3_step_fn, on a pool of SLOTS slots; all but those of outputs and slots.

    x: the dtype of x, z, B and C. kv: that of Bstate and Xstate. weights: that of A, dt, trap, D and the projections.
    """
    generator = torch.Generator().manual_seed(batch + rank)

    def normal(*sizes: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(sizes, generator=generator).to(dtype).to(device)

    def uniform(dtype: torch.dtype) -> Tensor:
        return torch.rand(batch, HEADS, generator=generator).to(dtype).to(device)

    return {
        "state": normal(SLOTS, HEADS, DIM, DSTATE, dtype=state),
        "Bstate": normal(SLOTS, rank, HEADS, DSTATE, dtype=kv),
        "Xstate": normal(SLOTS, HEADS, DIM, dtype=kv),
        "A": -uniform(weights),
        "B": normal(batch, rank, groups, DSTATE, dtype=x),
        "C": normal(batch, rank, groups, DSTATE, dtype=x),
        "D": normal(HEADS, dtype=weights),
        "x": normal(batch, HEADS, DIM, dtype=x),
        "dt": uniform(weights),
        "trap": uniform(weights),
        "z": normal(batch, HEADS, DIM, dtype=x),
        **{name: normal(rank, HEADS, DIM, dtype=weights) for name in ("xproj", "zproj", "outproj")},
    }


def encoded(values: Tensor, dtype: torch.dtype) -> Arguments:
    """A state of this dtype, and its scale if it needs one."""
    if dtype.is_floating_point:
        return {"state": values.to(dtype)}
    scale = values.abs().amax(-1) / torch.iinfo(dtype).max
    return {"state": (values / scale[..., None]).round().to(dtype), "state_scale": scale}


def packed(device: torch.device, lengths: list[int], unused: int = 0, **options: Any) -> Arguments:
    """The same for rows of these lengths, one after the other, and tokens of no row, which are NaN."""
    arguments = make_arguments(device, (sum(lengths) + unused,), **options)
    for name in ("x", "B", "C"):
        arguments[name][sum(lengths) :] = torch.nan
    return {**arguments, "cu_seqlens": torch.tensor([0, *lengths], device=device).cumsum(0).int()}


def copied(arguments: Arguments, device: torch.device | None = None) -> Arguments:
    """The same arguments in memory of their own, on a device or where they are; expanded ones are no longer."""
    copies = {name: t.clone() if isinstance(t, Tensor) else t for name, t in arguments.items()}
    return {name: t.to(device) if isinstance(t, Tensor) and device else t for name, t in copies.items()}


def compare(door: Door, model: Model, arguments: Arguments, implementation: Implementation) -> Tensor:
    """Call the door and require of output and states what the model says, within budget, and that all else stays."""
    before = copied(arguments, CPU)
    exact, plain = (simulate(model, before, dtype) for dtype in (torch.float64, torch.float32))
    with implementation():
        y = door(**arguments)
    assert (y.shape, y.dtype) == (arguments["x"].shape, arguments["x"].dtype)
    flat = y.cpu().reshape(exact.y.shape)
    assert error_ratio(flat, exact.y, plain.y.to(y.dtype)) <= 1
    assert not flat[(exact.y == 0).flatten(1).all(1)].any()
    require_states(before, copied(arguments, CPU), exact, plain)
    return y


def compare_delta(
    door: Door, model: Model, arguments: Arguments, implementation: Implementation, keeps: bool = False
) -> None:
    """The same for a gated delta rule, which returns its state too. What rows that do nothing leave in the output is
    zero, or with `keeps` what was there, if one was given."""
    before = copied(arguments, CPU)
    exact, plain = (simulate_delta(model, before, dtype) for dtype in (torch.float64, torch.float32))
    with implementation():
        y, state = door(**arguments)
    assert state is (arguments["state"] if arguments.get("initial_state") is None else arguments["initial_state"])
    assert arguments.get("output") is None or y is arguments["output"]
    assert (y.shape, y.dtype) == (arguments["v"].shape, arguments["v"].dtype)
    flat, ran = y.cpu().flatten(0, 1), torch.zeros(len(exact.y), dtype=torch.bool)
    for row in model(before):
        ran[row.tokens] = True
    assert error_ratio(flat[ran], exact.y[ran], plain.y[ran].to(y.dtype)) <= 1
    left = before["output"].flatten(0, 1) if keeps and before.get("output") is not None else torch.zeros_like(flat)
    assert equal_bytes(flat[~ran], left[~ran])
    require_states(before, copied(arguments, CPU), exact, plain)


def require_states(before: Arguments, after: Arguments, exact: Outcome, plain: Outcome) -> None:
    """What was to be stored is, within budget, and all else stayed."""
    for name, scale in BUFFERS.items():
        if before.get(name) is not None:
            require_stored(name, after[name], after.get(scale), exact, plain)
            require_untouched(name, scale, before, after, exact)
    with contextlib.suppress(IndexError):  # of numbers out of range, which some calls have
        flashstate.check_faults()


def require_stored(name: str, data: Tensor, scale: Tensor | None, exact: Outcome, plain: Outcome) -> None:
    places = [place for place in exact.stored if place[0] == name]
    if places:
        want, plainly = (torch.stack([outcome.stored[place] for place in places]) for outcome in (exact, plain))
        entries = [decoded(data[entry], None if scale is None else scale[entry]) for _, entry in places]
        assert error_ratio(torch.stack(entries).reshape(want.shape), want, rounded(plainly, data.dtype)) <= 1


def require_untouched(name: str, scale: str, before: Arguments, after: Arguments, exact: Outcome) -> None:
    axes = 2 if name == "intermediate_states_buffer" else 1
    kept = torch.ones(before[name].shape[:axes], dtype=torch.bool)
    for place in exact.stored:
        if place[0] == name:
            kept[place[1]] = False
    for tensor in (name, scale):
        if before.get(tensor) is not None:
            assert equal_bytes(after[tensor][kept], before[tensor][kept])


def equal_bytes(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def require_equal_results(door: Door, one: Arguments, other: Arguments, implementation: Implementation) -> None:
    """Both calls give the same bytes."""
    with implementation():
        assert equal_bytes(door(**one), door(**other))
    for name in (name for pair in BUFFERS.items() for name in pair):
        if one.get(name) is not None:
            assert equal_bytes(one[name], other[name])


def in_pages(tensor: Tensor) -> Tensor:
    """The same entries of the first axis, with memory of others between them."""
    return torch.stack([tensor, tensor.clone()], 1)[:, 0]


def part_of_wider_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor, tensor], -1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


def every_second_element(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


LAYOUTS = pytest.mark.parametrize("layout", [part_of_wider_rows, every_second_element])


def laid_out(arguments: Arguments, layout: Callable[[Tensor], Tensor]) -> Arguments:
    """The same values, the state in pages, activations and parameters in another layout."""
    names = [name for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias") if arguments.get(name) is not None]
    pages = {name: in_pages(arguments[name]) for name in BUFFERS if arguments.get(name) is not None}
    return {**copied(arguments), **{name: layout(arguments[name]) for name in names}, **pages}


def signature_of(door: Door) -> str:
    """Names and defaults of a door's arguments."""
    parameters = inspect.signature(door).parameters.values()
    return ", ".join(str(parameter.replace(annotation=inspect.Parameter.empty)) for parameter in parameters)
