"""Every adapter of flashstate/compat keeps the contract of the function that it stands in for, call by call."""

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import implementations
import pytest
import torch
from launchers import Launcher, launcher
from models_of_peers import Arguments
from peer_calls import CPU, SLOTS, Adapter, copied, equal_bytes, in_pages, require_contract, require_equal, signature_of
from peer_conv1d import CONV, SGLANG_CONV, TREE, VLLM_CONV, WINDOWS, parents_of
from peer_replay import BUFFERED, CHECKPOINTING, CURSORS, LENGTH, TRACKED, replay_arguments
from peer_rules import DECODING, FLA_KDA, FLA_RULE, RULES, SEVERAL, SGLANG_RULE, VLLM_DECAYS, VLLM_RULE
from peer_selective import FLASHINFER, MAMBA3, SGLANG_STATE, SSM, VLLM
from torch import Tensor

import flashstate
from flashstate import Ring
from flashstate.compat import flashinfer, vllm
from flashstate.compat.flashinfer import gated_delta_rule_decode
from flashstate.compat.trees import parents_from
from flashstate.proof import error_ratio

ADAPTERS = (
    SSM, VLLM, FLASHINFER, SGLANG_STATE, CHECKPOINTING, TRACKED, BUFFERED, *RULES, MAMBA3, CONV, VLLM_CONV, SGLANG_CONV,
    FLA_RULE, FLA_KDA,
)  # fmt: skip
EACH_ADAPTER = pytest.mark.parametrize("adapter", ADAPTERS, ids=lambda adapter: adapter.name)
__all__ = ["launcher"]  # a fixture
Change = Callable[[Arguments], Arguments]  # arguments of a call, in memory of their own: those to change
FULL = "a buffer that is full"
ON_A_GPU = 4  # calls of each adapter, which show what it makes itself: laws show what kernels do


def met() -> Iterator[Any]:
    """Calls, and where they run: edges in the reference alone, one of each adapter in the interpreter,
    and there a full buffer, which a kernel finds."""
    interpreter, gpu = implementations.KERNELS
    for adapter in ADAPTERS:
        for n, call in enumerate([*adapter.calls, *adapter.edges]):
            on_gpu = n < min(ON_A_GPU, len(adapter.calls))
            for where in (pytest.param("reference"), *[gpu] * on_gpu, *[interpreter] * (n == 0 or call == FULL)):
                (place,) = where.values
                yield pytest.param(adapter, call, place, marks=where.marks, id=f"{adapter.name}-{call}-{place}")


@pytest.mark.parametrize(("adapter", "call", "device"), list(met()), indirect=["device"])
def test_every_call_gives_what_the_contract_says(adapter: Adapter, call: str, device: torch.device) -> None:
    """On a GPU also when it is repeated, and then starts its kernels directly."""
    arguments = adapter.arguments(call, device)
    again = [adapter.arguments(call, device) for _ in range(3 if device.type == "cuda" else 0)]
    if adapter.model is FLA_RULE.model:
        require_functional(adapter, arguments)
    else:
        require_contract(adapter, arguments, (adapter.calls | adapter.edges)[call].get("fault"))
    results = [adapter.results(one) for one in again]
    for other in results[1:] if "stochastic" not in call else ():
        require_equal(results[0], other)


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


FILE = Path(__file__).parent / "signatures_of_peers.txt"
SIGNATURES = dict(line.split("(", 1) for line in FILE.read_text("utf-8").splitlines() if not line.startswith("#"))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_of_peers(name: str) -> None:
    module, _, function = name.partition(".")
    assert f"{signature_of(getattr(import_module(f'flashstate.compat.{module}'), function))})" == SIGNATURES[name]
    assert {adapter.name for adapter in ADAPTERS} <= SIGNATURES.keys()


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
    for pool in (other[name] for name in adapter.pools.keys() & other.keys()):
        paged = pool._base is not None and pool._base.dim() == pool.dim() + 1
        assert not paged or (pool._base[:, -1] == 5).all()  # between entries


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
    call = "elsewhere, stochastic, several tokens" if adapter is FLASHINFER else next(iter(adapter.calls))
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


def test_parents_are_found_of_first_children_and_next_siblings() -> None:
    """In rows of siblings of every length, and with 0 for the root and for what nothing names."""
    random = torch.Generator().manual_seed(1)
    for tokens in (1, 2, 5, 9, 17):
        parents = [[int(torch.randint(t, (), generator=random)) for t in range(1, tokens)] for _ in range(4)]
        tables = torch.full((2, 4, tokens), -1)
        for b, row in enumerate(parents):
            last: dict[int, int] = {}  # of each parent, the child before
            for t, parent in enumerate(row, 1):
                tables[1 if parent in last else 0, b, last.get(parent, parent)] = t
                last[parent] = t
        assert parents_from(*tables).tolist() == [[0, *row] for row in parents]


def test_a_convolution_writes_the_parents_of_its_tree_and_its_output_lies_in_memory_as_x_does() -> None:
    arguments = SGLANG_CONV.arguments("a tree, channels last")
    arguments["x"] = arguments["x"].mT.contiguous().mT
    assert SGLANG_CONV.function(**arguments).stride() == arguments["x"].stride()
    written = arguments["retrieve_parent_token"]
    tables = {name: torch.tensor(table) for name, table in TREE.items()}
    assert written.tolist() == [[0, *parents_of(tables, b)[1:]] for b in range(len(written))]


def test_states_of_every_token_are_new_where_they_do_not_stay_in_place() -> None:
    arguments = VLLM_RULE.arguments("several tokens")
    before, in_place = copied(arguments), copied(arguments)
    y, states = VLLM_RULE.function(**arguments, inplace_final_state=False)
    assert equal_bytes(arguments["initial_state"], before["initial_state"])
    assert equal_bytes(y, VLLM_RULE.function(**in_place)[0])
    slots = arguments["ssm_state_indices"].long()
    assert equal_bytes(states.unflatten(0, y.shape[:2])[:, -1], in_place["initial_state"][slots])


def test_flashinfer_keeps_states_of_every_token_alone_where_the_last_would_go_where_it_was_read() -> None:
    """As its bfloat16 kernel does, which asks whether both lists are one tensor."""
    arguments = SEVERAL.arguments("every token")
    wanted = SEVERAL.results(copied(arguments))
    got = SEVERAL.results({**arguments, "output_state_indices": arguments["initial_state_indices"]})
    assert all(equal_bytes(got[name], tensor) for name, tensor in wanted.items())


def test_sglang_reads_states_in_the_order_v_k_whatever_their_axes_are_called() -> None:
    arguments = SGLANG_RULE.arguments("several tokens, bfloat16")
    pool = arguments["initial_state_source"]
    named = {**arguments, "initial_state_source": pool.clone().reshape(*pool.shape[:2], *pool.shape[:1:-1])}
    assert equal_bytes(SGLANG_RULE.function(**arguments), SGLANG_RULE.function(**named))
    assert equal_bytes(pool.flatten(), named["initial_state_source"].flatten())


def test_views_of_a_longer_state_say_which_of_sglangs_two_convolutions_is_meant() -> None:
    """The function in Triton reads the first entries, as vLLM has it, and the compiled one the last ones."""
    for part, peer in ((slice(3), VLLM_CONV), (slice(2, 5), CONV)):
        ours, theirs = (made.arguments({"conv_state_indices": [7, 1, 2], "length": 5}) for made in (SGLANG_CONV, peer))
        state = ours["conv_state"]
        y = SGLANG_CONV.function(**{**ours, "conv_state": state[..., part]})
        assert equal_bytes(y, peer.function(**theirs))
        assert equal_bytes(state[..., part], theirs["conv_state"][..., part])


READ = {"initial_state_indices": [12, 7, 9]}


@pytest.mark.parametrize(
    ("adapter", "call"),
    [
        (FLASHINFER, {"tokens": (3, 3), "state_batch_indices": [5, 9, 8]}),
        (FLASHINFER, {"lengths": [3, 1, 2], "cache_steps": 3, "state_batch_indices": [5, 9, 8]}),
        (VLLM, {"lengths": [13, 1, 2], "state_batch_indices": [5, 9, 8]}),
        (VLLM, {"lengths": [8, 9, 7], "state_batch_indices": [5, 9, 8], "max_query_len": 9}),
        (VLLM_RULE, {**VLLM_RULE.calls["packed, not normalised"], "shape": (1, 17), "max_query_len": 3}),
        (DECODING, {**READ, "shape": (3, 2), "disable_state_update": 1, "state": None}),
        (SEVERAL, {**READ, "shape": (3, 3), "disable_state_update": False}),
        *[(adapter, VLLM_DECAYS.calls[call]) for adapter in (VLLM_RULE, VLLM_DECAYS)
          for call in ("packed", "several tokens")],
    ],
)  # fmt: skip
def test_several_tokens_go_through_tensor_cores_at_once_for_callers_who_ask_for_it(
    adapter: Adapter, call: Any, launcher: Launcher
) -> None:
    """A partial function can be put in the place of a peer's."""
    call = {**call, "x_dtype": torch.float16, "state_dtype": torch.float16}
    for exact, function in ((True, adapter.function), (False, partial(adapter.function, exact=False))):
        for _ in range(2):
            function(**adapter.arguments(call))
        assert launcher.ordinary[-1].kernel.__name__.endswith("at_once_kernel") != exact
    assert launcher.counts == (2, 2)
    with pytest.raises(TypeError, match=r"^exact must be True or False, got 0$"):
        adapter.function(**adapter.arguments(call), exact=0)


def test_flashinfer_decodes_states_of_either_layout() -> None:
    """The order of sums is another, and so are the last bits."""
    rows = DECODING.arguments("in order")
    columns = copied(rows) | {"state": rows["state"].mT.contiguous()}
    y, state = gated_delta_rule_decode(**columns)
    wanted, _ = DECODING.function(**rows)
    assert state is columns["state"]
    torch.testing.assert_close(y, wanted)
    torch.testing.assert_close(state.mT, rows["state"])
    for wrong, words in (
        ({"v": rows["v"].expand(-1, 2, -1, -1)}, "^v must have one token per row, got shape"),
        ({"state": columns["state"][:2]}, "^state must have 3 slots, as the batch has rows, got shape"),
        ({"backend": "rubin"}, "^backend must be"),
    ):
        with pytest.raises(ValueError, match=words):
            gated_delta_rule_decode(**columns | wrong)


def test_a_buffer_is_filled_and_flushed_as_vllm_counts() -> None:
    """Fifteen tokens of three rows, one after the other: outputs have the bytes of selective_state_update, and so has
    the state wherever a buffer is flushed, because nothing is rounded in between."""
    stepped, buffered = BUFFERED.arguments("in place"), BUFFERED.arguments("in place")
    drawn = {name: buffered[name] for name in ("x", "B")}
    for name in ("x_cache", "B_cache", "dt_cache", "max_cache_len", "bc_pre", "write_pos", "is_flush"):
        del stepped[name]
    for t in range(2 * LENGTH + 1):
        token = {name: tensor.roll(t, 0) for name, tensor in drawn.items()}
        at = torch.full((3,), t % LENGTH, dtype=torch.int32)
        buffered |= {**token, "write_pos": at, "is_flush": (at == LENGTH - 1).to(torch.int8)}
        y = vllm.selective_state_update_replayssm_output_only(**buffered)
        assert torch.equal(y, vllm.selective_state_update(**{**stepped, **token}))
        if t % LENGTH == LENGTH - 1:
            assert torch.equal(buffered["state"], stepped["state"])


def test_padding_rows_of_an_output_that_was_not_given_are_zero() -> None:
    given = BUFFERED.arguments("a table, the null block, bfloat16")
    y = BUFFERED.function(**{**given, "out": None})
    assert y.shape == given["x"].shape
    assert y.flatten(1).any(1).tolist() == [True, False, True]


def test_debug_finds_a_ring_as_long_as_its_window_that_was_not_folded_in_time() -> None:
    given = replay_arguments(CPU, tokens=(2,), gate=False)
    start, count = torch.zeros(2, SLOTS, dtype=torch.int32)
    ring = Ring(given["x_cache"], given["B_cache"], given["dt_cache"], start, count, LENGTH, folds_by_hand=True)
    tokens = {name: given[name] for name in ("x", "dt", "B", "C", "D", "A")}
    assert ring.longest_call == LENGTH
    with flashstate.debug():
        count[:2] = LENGTH - 1
        flashstate.mamba2_replay(given["state"], ring, **tokens)
        count[1] = LENGTH
        with pytest.raises(ValueError, match=r"ring.count at most 6, as .* in slot 1 they are 0 and 7"):
            flashstate.mamba2_replay(given["state"], ring, **tokens)
