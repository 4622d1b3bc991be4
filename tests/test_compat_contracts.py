"""Every adapter of flashstate/compat keeps the contract of the function that it stands in for, call by call."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import implementations
import pytest
import torch
from models_of_conv1d import WINDOWS
from models_of_peers import Arguments
from peer_calls import (
    CPU,
    CURSORS,
    SLOTS,
    Adapter,
    copied,
    equal_bytes,
    in_pages,
    require_contract,
    require_equal,
    require_untouched_between,
)
from peer_conv1d import CONV, SGLANG_CONV, VLLM_CONV
from peer_mamba3 import MAMBA3
from peer_replay import BUFFERED, CHECKPOINTING, TRACKED
from peer_rules import DECODING, FLA_KDA, FLA_RULE, RULES, SEVERAL, SGLANG_RULE, VLLM_RULE
from peer_selective import FLASHINFER, SGLANG_STATE, SSM, VLLM
from torch import Tensor

from flashstate.compat import flashinfer
from flashstate.proof import error_ratio

IN_PLACE = (
    SSM, VLLM, FLASHINFER, SGLANG_STATE, CHECKPOINTING, TRACKED, BUFFERED, *RULES, MAMBA3, CONV, VLLM_CONV, SGLANG_CONV,
)  # fmt: skip
ADAPTERS = (*IN_PLACE, FLA_RULE, FLA_KDA)
EACH_ADAPTER = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
Change = Callable[[Arguments], Arguments]  # arguments of a call, in memory of their own: those to change


def met() -> Iterator[Any]:
    """Calls, and where they run: edges in the reference alone, one of each adapter in the interpreter."""
    for adapter in ADAPTERS:
        for call in [*adapter.calls, *adapter.edges]:
            places = ["reference", *[implementations.KERNELS[1]] * (call in adapter.calls)]
            for place in [*places, *[implementations.KERNELS[0]] * (call == next(iter(adapter.calls)))]:
                where, marks = (place, ()) if isinstance(place, str) else (place.values[0], place.marks)
                yield pytest.param(adapter, call, where, marks=marks, id=f"{adapter.name}-{call}-{where}")


@pytest.mark.parametrize(("adapter", "call", "device"), list(met()), indirect=["device"])
def test_every_call_gives_what_the_contract_says(adapter: Adapter, call: str, device: torch.device) -> None:
    """On a GPU also when it is repeated, and then starts its kernels directly."""
    arguments = adapter.arguments(call, device)
    again = [adapter.arguments(call, device) for _ in range(3 if device.type == "cuda" else 0)]
    if adapter.model is FLA_RULE.model:
        require_functional(adapter, arguments)
    else:
        require_contract(adapter, arguments, (adapter.calls | adapter.edges)[call].get("fault"))
    torch.manual_seed(0)
    results = [[*tensors_in(adapter.function(**one)), *tensors_in(one.values())] for one in again]
    for one, *others in zip(*results, strict=True):
        assert "stochastic" in call or all(equal_bytes(one, other) for other in others)


def tensors_in(result: Any) -> list[Tensor]:
    found = [result] if isinstance(result, Tensor) else result
    return [one for one in found if isinstance(one, Tensor)]


def require_functional(adapter: Adapter, arguments: Arguments) -> None:
    """Outputs and new states are those of the model, and no argument changes."""
    before, given = copied(arguments), copied(arguments, CPU)
    (y, states), (plain, plainly) = (adapter.model(given, dtype) for dtype in (torch.float64, torch.float32))
    got, final = adapter.function(**arguments)
    assert (got.shape, got.dtype) == (y.shape, arguments["v"].dtype)
    assert error_ratio(got.cpu(), y, plain.to(got.dtype)) <= 1
    assert (final is not None) == arguments["output_final_state"]
    if final is not None:
        v_first = arguments.get("state_v_first") or arguments.get("transpose_state_layout")
        assert (final.dtype, final.is_contiguous()) == (torch.float32, True)
        assert error_ratio((final if v_first else final.mT).cpu(), states, plainly) <= 1
    assert all(equal_bytes(t, before[name]) for name, t in arguments.items() if isinstance(t, Tensor))


@EACH_ADAPTER
def test_signatures_are_those_of_peers(adapter: Adapter) -> None:
    assert adapter.signature == signature_of(adapter.function)


def signature_of(function: Callable[..., Any]) -> str:
    given = inspect.signature(function).parameters.values()
    return ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in given)


# Changes of a call that change no byte


def part_of_wider_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor, tensor], -1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


def every_second_element(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


@pytest.mark.parametrize("layout", [part_of_wider_rows, every_second_element])
@EACH_ADAPTER
def test_strides_pages_and_a_given_output_change_no_byte(adapter: Adapter, layout: Callable[[Tensor], Tensor]) -> None:
    """States and outputs in pages, all else that is not tied in another layout."""
    paged = {*adapter.pools, *adapter.pools.values(), adapter.out, *adapter.fills}
    takes_room = "out" in inspect.signature(adapter.function).parameters
    for call in [*adapter.calls, *adapter.edges]:
        arguments, again = adapter.arguments(call), adapter.arguments(call)
        again |= {
            name: in_pages(t) if name in paged else layout(t)
            for name, t in again.items()
            if isinstance(t, Tensor) and 0 not in t.stride() and t.numel() > 1 and name not in CURSORS
        }
        room = takes_room and arguments.get("out") is None and "mixed_qkv" not in arguments
        require_same(adapter, arguments, adapter.with_room(again) if room else again)


def require_same(adapter: Adapter, arguments: Arguments, again: Arguments) -> None:
    one, other = (torch.manual_seed(3) and adapter.results(a) for a in (arguments, again))
    require_equal(one, other)
    for name in adapter.pools.keys() & other.keys():
        require_untouched_between(other[name])


def other(**values: Any) -> Change:
    return lambda a: values


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda a: {name: change(a[name])}


def taking_turns_in_pages(a: Arguments) -> Arguments:
    pages = torch.stack([a["state"], a["state_out"], torch.full_like(a["state"], 5.0)], 1)
    return {"state": pages[:, 0], "state_out": pages[:, 1]}


def every_third_head(pool: Tensor) -> Tensor:
    wide = pool.new_full((pool.shape[0], 3 * pool.shape[1], *pool.shape[2:]), 5.0)
    wide[:, ::3] = pool
    return wide[:, ::3]


def longer(**more: list[int]) -> Change:
    return lambda a: {name: torch.cat([a[name], a[name].new_tensor(entries)]) for name, entries in more.items()}


def past_the_pool(a: Arguments) -> Arguments:
    return {name: torch.where(t < 0, SLOTS + 3, t) for name, t in a.items() if name.endswith("indices")}


CHANGES: list[tuple[Adapter, str, Change]] = [
    (SSM, "headless, in order", lambda a: {"state": a["state"][:, None], "D": a["D"][None]}),
    (VLLM, "in place", other(is_blackwell=True, cache_philox_rounds=10)),
    *[(FLASHINFER, "in place, several tokens", other(algorithm=algorithm, backend=backend))
      for algorithm, backend in zip(flashinfer.ALGORITHMS, flashinfer.BACKENDS * 2, strict=False)],
    (FLASHINFER, "padding, in place, one token", changed("state_scale", lambda t: t[..., None])),
    (DECODING, "rows skipped and not written, not normalised", past_the_pool),
    (SEVERAL, "every token, a row skipped", past_the_pool),
    (MAMBA3, "in order, rank 4", other(tile_D=8, num_warps=4, update_kv_state=False)),
    (MAMBA3, "padded, per rank, 1 group, k and v wider than tokens",
     lambda a: {name: a[name].expand(-1, -1, a["state"].shape[1], -1) for name in "BC"}),
    (MAMBA3, "in order, rank 4", lambda a: {"out": a["x"]}),
    (MAMBA3, "in order, rank 4", lambda a: {"state_out": a["state"]}),
    (MAMBA3, "padded, elsewhere, rank 1, a bfloat16 model", taking_turns_in_pages),
    (VLLM_CONV, "accepted counts, packed, channels first", longer(query_start_loc=[4, 4], num_accepted_tokens=[1, 1])),
    (VLLM_CONV, "one token, channels first", other(validate_data=True)),
    (DECODING, "in place, output given", other(backend="flashinfer")),
    (SEVERAL, "output alone, 1 token", other(disable_state_update=1)),
    (SEVERAL, "in place", other(disable_state_update=0)),
    *[(adapter, call, changed(name, every_third_head)) for adapter, call, name in (
        (DECODING, "in place, output given", "initial_state"), (VLLM_RULE, "accepted", "initial_state"),
        (SGLANG_RULE, "several tokens, bfloat16", "initial_state_source"), (SGLANG_STATE, "padding", "state"))],
    (SGLANG_RULE, "several tokens, bfloat16", lambda a: {name: a[name].flatten(0, 1) for name in "ab"}),
    (SGLANG_CONV, "windows, channels last",
     lambda a: {WINDOWS: SGLANG_CONV.arguments("windows that share their inputs")[WINDOWS]}),
]  # fmt: skip


@pytest.mark.parametrize(("adapter", "call", "change"), CHANGES)
def test_what_changes_no_byte(adapter: Adapter, call: str, change: Change) -> None:
    arguments = adapter.arguments(call)
    again = copied(arguments)
    require_same(adapter, arguments, {**again, **change(again)})


@pytest.mark.parametrize(
    ("adapter", "call"),
    [
        (VLLM, "accepted tokens elsewhere, nothing optional"),
        (MAMBA3, "padded, elsewhere, rank 1, a bfloat16 model"),
        (SGLANG_RULE, "a tree"),
        (SGLANG_CONV, "a tree, channels last"),
        (BUFFERED, "in place"),
        (FLA_RULE, "one token, states transposed"),
    ],
)
def test_torch_compile_makes_one_graph_of_a_call(adapter: Adapter, call: str) -> None:
    arguments, again = (adapter.arguments(call) for _ in range(2))
    compiled = torch.compile(adapter.function, fullgraph=True, dynamic=False, backend="aot_eager")
    y = compiled(**arguments)
    want = adapter.results(again)
    got = {"y": y[0] if isinstance(y, tuple) else y}
    require_equal({**got, **{name: arguments[name] for name in want.keys() & arguments}}, want)


GRAPHS = [  # the first call of each of these, which is compiled anyway
    VLLM, FLASHINFER, SGLANG_STATE, SGLANG_CONV, DECODING, SEVERAL, VLLM_RULE, SGLANG_RULE, MAMBA3, CHECKPOINTING,
    TRACKED, BUFFERED,
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("adapter", GRAPHS, ids=lambda adapter: adapter.name)
def test_a_cuda_graph_reads_slots_tokens_and_seeds_when_it_is_replayed(adapter: Adapter) -> None:
    torch.use_deterministic_algorithms(False)  # else an indexed copy may wait for the device, in some versions of torch
    call = "stochastic, in place, packed" if adapter is FLASHINFER else next(iter(adapter.calls))
    arguments, other, first = (adapter.arguments(call, torch.device("cuda")) for _ in range(3))
    for name, tensor in other.items():
        of_rows = name in adapter.tokens or name.endswith(("indices", "num_accepted_tokens"))
        if of_rows and tensor is not None and 0 not in tensor.stride():
            other[name] = tensor.roll(1, 0).contiguous()
    if "rand_seed" in other:
        other["rand_seed"] += 1
    adapter.function(**first)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = adapter.results(arguments)
    for name, tensor in other.items():
        if isinstance(tensor, Tensor):
            once = [slice(None, 1 if stride == 0 else None) for stride in tensor.stride()]  # of what is expanded
            arguments[name][tuple(once)].copy_(tensor[tuple(once)])
    graph.replay()
    require_equal(captured, adapter.results(other))


@pytest.mark.parametrize(
    ("adapter", "rounds"), [(VLLM, "cache_philox_rounds"), (FLASHINFER, "philox_rounds")], ids=["vllm", "flashinfer"]
)
def test_random_bits_follow_from_the_seed_and_differ_from_slot_to_slot(adapter: Adapter, rounds: str) -> None:
    """vLLM draws new bits at every call, from torch's seed on; FlashInfer is given a seed."""
    arguments = adapter.arguments({"state_batch_indices": [5, 9, 8], "state_dtype": torch.float16})
    arguments["state"][:] = arguments["state"][5]
    for name in adapter.tokens:
        arguments[name] = arguments[name][:1].expand(arguments[name].shape).clone()
    states = []
    for seed, change in ((1, {}), (1, {}), (2, {}), (1, {rounds: 9}), (1, {rounds: 10})):
        torch.manual_seed(seed)
        seeds = {"enable_stochastic_rounding": True} if adapter is VLLM else {"rand_seed": torch.tensor([seed])}
        states.append(adapter.results({**copied(arguments), **seeds, **change})["state"])
    assert [equal_bytes(states[0], state) for state in states] == [True, True, False, False, True]
    assert not equal_bytes(states[0][5], states[0][9])
    if adapter is VLLM:
        torch.manual_seed(1)
        one, two = (adapter.results({**copied(arguments), **seeds})["state"] for _ in range(2))
        assert not equal_bytes(one, two)
