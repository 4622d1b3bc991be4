"""causal_conv1d_update of causal_conv1d and of vLLM: flashstate's doors against models of their contracts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from peer_calls import CPU, REFERENCE_AND_GPU, Implementation
from torch import Tensor

from flashstate.compat import causal_conv1d, vllm
from flashstate.proof import error_ratio, interpreted

Arguments = dict[str, Any]
DIM, SLOTS = 6, 9
INTERPRETED = pytest.mark.parametrize(
    ("device", "implementation"), [pytest.param(CPU, interpreted, id="interpreted", marks=pytest.mark.interpreted)]
)


class Model:
    """Rows that are convolved one by one, in loops: outputs in float64 and float32, and the windows after them."""

    def __init__(self, arguments: Arguments) -> None:
        self.arguments = arguments
        self.window = arguments["conv_state"].clone()
        self.exact: list[Tensor] = []
        self.plain: list[Tensor] = []

    def convolve(self, before: list[Tensor], tokens: list[Tensor]) -> None:
        """`before`: the width - 1 inputs in front of the tokens, (dim,) each."""
        weight, bias, activation = (self.arguments.get(name) for name in ("weight", "bias", "activation"))
        assert weight is not None
        width, inputs = weight.shape[1], [*before, *tokens]
        for t in range(len(tokens)):
            for dtype, outputs in ((torch.float64, self.exact), (torch.float32, self.plain)):
                y = torch.zeros(DIM, dtype=dtype) if bias is None else bias.to(dtype)
                for i in range(width):
                    y = y + weight[:, i].to(dtype) * inputs[t + i].to(dtype)
                outputs.append(y * torch.sigmoid(y) if activation else y)

    def nothing(self, tokens: list[Tensor]) -> None:
        """Zero outputs."""
        self.exact += [torch.zeros(DIM, dtype=torch.float64) for _ in tokens]
        self.plain += [torch.zeros(DIM) for _ in tokens]


def in_causal_conv1d(arguments: Arguments) -> Model:
    """The window holds the last inputs, newest last; with cache_seqlens token p is at p modulo its length."""
    model, x, lengths = Model(arguments), arguments["x"], arguments.get("cache_seqlens")
    indices = arguments.get("conv_state_indices")
    width, size = arguments["weight"].shape[1], model.window.shape[2]
    for b in range(len(x)):
        slot = b if indices is None else int(indices[b])
        tokens = [x[b]] if x.dim() == 2 else list(x[b].unbind(1))
        if slot < 0:
            model.nothing(tokens)
            continue
        window = model.window[slot]  # (dim, size)
        if lengths is None:
            model.convolve([window[:, size - width + 1 + i].clone() for i in range(width - 1)], tokens)
            window.copy_(torch.cat([window, torch.stack(tokens, 1).to(window.dtype)], 1)[:, -size:])
        else:
            position = int(lengths[b])
            model.convolve([window[:, (position - width + 1 + i) % size].clone() for i in range(width - 1)], tokens)
            for t, token in enumerate(tokens):
                window[:, (position + t) % size] = token
    return model


def in_vllm(arguments: Arguments) -> Model:
    """The window starts at entry 0. With counts the call before left width - 2 inputs and its tokens there, and this
    one does so again; without, the first width - 1 entries are the last inputs."""
    model, x, bounds = Model(arguments), arguments["x"], arguments.get("query_start_loc")
    indices, counts = arguments.get("conv_state_indices"), arguments.get("num_accepted_tokens")
    width = arguments["weight"].shape[1]
    columns = (arguments.get("initial_state_idx"), arguments.get("block_idx_last_scheduled_token"))
    for b in range(len(x) if bounds is None else len(bounds) - 1):
        rows = x[b][None] if x.dim() == 2 else x[b].mT
        tokens = list(rows if bounds is None else x[int(bounds[b]) : int(bounds[b + 1])])
        named = [b] if indices is None else indices[b].reshape(-1).tolist()
        read, write = (named[0 if column is None else int(column[b])] for column in columns)
        if indices is not None and (read < 0 or read == arguments.get("null_block_id", 0)):
            model.nothing(tokens)
            continue
        old = model.window[read].clone()
        start = 0 if counts is None else int(counts[b]) - 1
        before = [old[:, start + i] for i in range(width - 1)]
        model.convolve(before, tokens)
        if tokens and counts is None:
            model.window[write, :, : width - 1] = torch.stack([*before, *tokens], 1)[:, -(width - 1) :]
        elif tokens:
            model.window[write, :, : width - 2 + len(tokens)] = torch.stack([*before[1:], *tokens], 1)
    return model


def make_arguments(*shape: int, width: int, length: int, dtype: torch.dtype = torch.float16, **more: Any) -> Arguments:
    generator = torch.Generator().manual_seed(width + length)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype)

    given = {"x": normal(*shape), "conv_state": normal(SLOTS, DIM, length), "weight": normal(DIM, width)}
    return {**given, "bias": normal(DIM), "activation": "silu", **more}


def indices(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


CAUSAL_CONV1D: dict[str, Arguments] = {
    "one token": make_arguments(3, DIM, width=4, length=3),
    "a longer window": make_arguments(3, DIM, width=4, length=4, bias=None, activation=None),
    "several tokens": make_arguments(2, DIM, 5, width=3, length=2, activation="swish"),
    "several tokens, a longer window": make_arguments(2, DIM, 3, width=2, length=6, dtype=torch.float32),
    "slots, one of them negative": make_arguments(3, DIM, width=4, length=3, conv_state_indices=indices(7, -1, 2)),
    "a ring": make_arguments(3, DIM, width=4, length=5, cache_seqlens=indices(0, 4, 123)),
    "a ring, several tokens, slots": make_arguments(
        2, DIM, 4, width=4, length=7, cache_seqlens=indices(6, 3), conv_state_indices=indices(8, 0)
    ),
}  # fmt: skip
PACKED = {"query_start_loc": indices(0, 3, 3, 4), "max_query_len": 3, "conv_state_indices": indices(4, 0, 2)}
VLLM: dict[str, Arguments] = {
    "one token": make_arguments(3, DIM, width=4, length=3, conv_state_indices=indices(7, 0, 2)),
    "no slots": make_arguments(3, DIM, width=4, length=3, bias=None, activation=False),
    "another null block": make_arguments(
        3, DIM, width=4, length=5, conv_state_indices=indices(7, 0, -1), null_block_id=-1
    ),
    "several tokens": make_arguments(2, DIM, 5, width=3, length=2, conv_state_indices=indices(1, 5), activation=True),
    "packed": make_arguments(4, DIM, width=4, length=6, **PACKED),
    "accepted counts": make_arguments(
        3, DIM, 4, width=4, length=6, conv_state_indices=indices(8, 0, 3), num_accepted_tokens=indices(1, 1, 4)
    ),
    "accepted counts, packed": make_arguments(
        4, DIM, width=3, length=4, num_accepted_tokens=indices(3, 1, 2), **{**PACKED, "null_block_id": 5}
    ),
    "accepted counts of one token": make_arguments(
        2, DIM, width=4, length=5, conv_state_indices=indices(8, 3), num_accepted_tokens=indices(3, 1)
    ),
    "blocks to read and to write": make_arguments(
        2, DIM, width=4, length=3, conv_state_indices=torch.tensor([[1, 2, 3], [4, 5, 6]]),
        initial_state_idx=indices(0, 2), block_idx_last_scheduled_token=indices(1, 2),
    ),
}  # fmt: skip


def laid_out(conv_state: Tensor, layout: str, device: torch.device) -> Tensor:
    if layout == "channels last":
        return conv_state.mT.contiguous().to(device).mT
    return conv_state.clone().to(device)


def agrees(
    door: Callable[..., Tensor], model: Callable[[Arguments], Model], arguments: Arguments, layout: str,
    device: torch.device, implementation: Implementation,
) -> Tensor:  # fmt: skip
    """The output of the door, which is close enough, with windows that have every bit of the model's."""
    want = model(arguments)
    moved = {name: t.clone().to(device) if isinstance(t, Tensor) else t for name, t in arguments.items()}
    moved["conv_state"] = laid_out(arguments["conv_state"], layout, device)
    with implementation():
        y = door(**moved)
    assert torch.equal(moved["conv_state"].cpu(), want.window)
    assert y.shape == arguments["x"].shape
    rows = (y if y.dim() == 2 else y.mT.reshape(-1, DIM)).cpu()
    assert error_ratio(rows, torch.stack(want.exact), torch.stack(want.plain).to(y.dtype)) <= 1
    return y


LAYOUTS = pytest.mark.parametrize("layout", ["channels first", "channels last"])


@REFERENCE_AND_GPU
@LAYOUTS
@pytest.mark.parametrize("form", CAUSAL_CONV1D)
def test_causal_conv1d_keeps_its_contract(
    form: str, layout: str, device: torch.device, implementation: Implementation
) -> None:
    agrees(causal_conv1d.causal_conv1d_update, in_causal_conv1d, CAUSAL_CONV1D[form], layout, device, implementation)


@REFERENCE_AND_GPU
@LAYOUTS
@pytest.mark.parametrize("form", VLLM)
def test_vllm_keeps_its_contract(form: str, layout: str, device: torch.device, implementation: Implementation) -> None:
    agrees(vllm.causal_conv1d_update, in_vllm, VLLM[form], layout, device, implementation)


@INTERPRETED
@pytest.mark.parametrize("form", CAUSAL_CONV1D)
def test_interpreted_causal_conv1d_keeps_its_contract(
    form: str, device: torch.device, implementation: Implementation
) -> None:
    arguments = CAUSAL_CONV1D[form]
    agrees(causal_conv1d.causal_conv1d_update, in_causal_conv1d, arguments, "channels first", device, implementation)


@INTERPRETED
@pytest.mark.parametrize("form", VLLM)
def test_interpreted_vllm_keeps_its_contract(form: str, device: torch.device, implementation: Implementation) -> None:
    agrees(vllm.causal_conv1d_update, in_vllm, VLLM[form], "channels last", device, implementation)


@REFERENCE_AND_GPU
def test_vllm_overwrites_x_unless_it_is_given_out(device: torch.device, implementation: Implementation) -> None:
    arguments = {name: t.to(device) if isinstance(t, Tensor) else t for name, t in VLLM["several tokens"].items()}
    arguments["conv_state"] = arguments["conv_state"].clone()
    before, window = arguments["x"].clone(), arguments["conv_state"].clone()
    out = torch.empty_like(before)
    assert vllm.causal_conv1d_update(**arguments, out=out) is out
    assert torch.equal(arguments["x"], before)
    arguments.update(x=before.clone(), conv_state=window)
    assert vllm.causal_conv1d_update(**arguments) is arguments["x"]
    assert torch.equal(arguments["x"], out)


def test_parameters_and_counts_may_have_any_strides() -> None:
    for door, model, arguments in (
        (causal_conv1d.causal_conv1d_update, in_causal_conv1d, CAUSAL_CONV1D["a ring"]),
        (vllm.causal_conv1d_update, in_vllm, VLLM["accepted counts"]),
    ):
        apart = {
            name: torch.stack([t, t], -1)[..., 0] if isinstance(t, Tensor) and name not in ("x", "conv_state") else t
            for name, t in arguments.items()
        }
        assert not apart["weight"].is_contiguous()
        y = agrees(door, model, apart, "channels first", CPU, contextlib.nullcontext)
        fresh = {**arguments, "x": arguments["x"].clone(), "conv_state": arguments["conv_state"].clone()}
        assert torch.equal(y, door(**fresh))


@pytest.mark.parametrize("door", [causal_conv1d.causal_conv1d_update, vllm.causal_conv1d_update])
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"activation": "gelu"}, ValueError, "^activation must be silu, swish, True, False or None, got 'gelu'"),
        ({"x": torch.ones(6)}, ValueError, r"^x must have 2 axes or more, got shape \(6,\)"),
        ({"x": torch.ones(1, 1, DIM, 1)}, ValueError, r"^x must have shape \(batch, dim\) or \(batch, dim, seqlen\)"),
        ({"x": [1.0]}, TypeError, "^x must be a tensor, got list"),
        ({"conv_state": torch.ones(3, DIM, 2)}, ValueError, "^window must have 3 entries or more"),
        ({"conv_state": torch.ones(3, DIM, 3).bfloat16()}, TypeError, "^window must be float16 or float32"),
        ({"weight": None}, TypeError, "^weight must be a tensor, got NoneType"),
        ({"conv_state_indices": torch.ones(3)}, TypeError, "must be int32 or int64, got float32"),
        ({"conv_state_indices": torch.ones(2, dtype=torch.int32)}, ValueError, "must have 3 rows"),
    ],
)
def test_wrong_calls_are_refused(
    door: Callable[..., Tensor], change: Arguments, error: type[Exception], message: str
) -> None:
    arguments = make_arguments(3, DIM, width=4, length=3)
    before = arguments["conv_state"].clone()
    with pytest.raises(error, match=message):
        door(**{**arguments, **change})
    assert torch.equal(arguments["conv_state"], before)


@REFERENCE_AND_GPU
def test_vllm_takes_tables_that_are_longer_than_the_batch(device: torch.device, implementation: Implementation) -> None:
    """As its layers have them for CUDA graphs: bounds and counts go on behind the rows."""
    arguments = VLLM["accepted counts, packed"]
    longer = {
        **arguments,
        "query_start_loc": torch.cat([arguments["query_start_loc"], indices(4, 4)]),
        "num_accepted_tokens": torch.cat([arguments["num_accepted_tokens"], indices(1, 1)]),
    }
    y, padded = (
        agrees(vllm.causal_conv1d_update, lambda _: in_vllm(arguments), given, "channels last", device, implementation)
        for given in (arguments, longer)
    )
    assert torch.equal(y, padded)


@REFERENCE_AND_GPU
def test_vllm_takes_a_column_that_is_not_there_for_padding(
    device: torch.device, implementation: Implementation
) -> None:
    arguments = {
        name: t.clone().to(device) if isinstance(t, Tensor) else t
        for name, t in VLLM["blocks to read and to write"].items()
    }
    before = arguments["conv_state"].clone()
    arguments["initial_state_idx"] = torch.tensor([-1, 3], device=device)
    assert not vllm.causal_conv1d_update(**arguments).any()
    assert torch.equal(arguments["conv_state"], before)
    arguments.update(
        x=torch.ones_like(arguments["x"]), initial_state_idx=torch.tensor([0, 0], device=device),
        block_idx_last_scheduled_token=torch.tensor([3, -1], device=device),
    )  # fmt: skip
    assert vllm.causal_conv1d_update(**arguments).all()
    assert torch.equal(arguments["conv_state"], before)  # read, and not written


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"max_query_len": None}, TypeError, r"^max_query_len must be an int, got None"),
        ({"conv_state_indices": None}, ValueError, r"^conv_state_indices must be given with query_start_loc"),
        ({"query_start_loc": indices(0, 3)}, ValueError, r"^query_start_loc must have 4 entries or more"),
        ({"num_accepted_tokens": indices(1)}, ValueError, r"^num_accepted_tokens must have 3 entries or more"),
        ({"null_block_id": None}, TypeError, r"^null_block_id must be an int, got None"),
    ],
)
def test_vllm_refuses_wrong_calls_of_its_own(change: Arguments, error: type[Exception], message: str) -> None:
    arguments = {**VLLM["accepted counts, packed"], **change}
    with pytest.raises(error, match=message):
        vllm.causal_conv1d_update(**arguments)


def test_vllm_refuses_windows_without_room_for_drafts() -> None:
    arguments = make_arguments(3, DIM, 4, width=4, length=5, num_accepted_tokens=indices(1, 1, 1))
    with pytest.raises(ValueError, match=r"^window must have 6 entries or more to roll back 4 tokens, got 5"):
        vllm.causal_conv1d_update(**arguments)
