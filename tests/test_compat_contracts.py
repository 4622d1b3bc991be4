"""Every door of flashstate/compat keeps the contract of the function that it stands in for, call by call."""

import inspect
from collections.abc import Callable
from itertools import product
from typing import Any

import implementations
import pytest
import torch
from launchers import Launcher, launcher, parameters
from models_of_conv1d import WINDOWS
from models_of_peers import Arguments
from peer_calls import (
    CPU,
    REFERENCE_AND_GPU,
    SLOTS,
    Door,
    copied,
    doors_and,
    equal_bytes,
    in_pages,
    require_contract,
    require_equal,
    require_untouched_between,
)
from peer_conv1d import CONV, VLLM_CONV
from peer_delta import DECODING, SEVERAL
from peer_mamba3 import MAMBA3, RANKS, READS, UPDATES
from peer_replay import BUFFERED, CHECKPOINTING, TRACKED
from peer_rules import RULES, SGLANG_RULE, VLLM_DECODE, VLLM_RULE
from peer_selective import FLASHINFER, FORMS, SSM, VLLM
from peer_sglang import SGLANG_CONV, SGLANG_STATE
from torch import Tensor

from flashstate.launch.environment import suspended

__all__ = ["launcher"]  # a fixture
SELECTIVE = (SSM, VLLM, FLASHINFER, SGLANG_STATE, CHECKPOINTING, TRACKED, BUFFERED)
DOORS = (*SELECTIVE, DECODING, SEVERAL, *RULES, MAMBA3, CONV, VLLM_CONV, SGLANG_CONV)
Change = Callable[[Arguments], Arguments]  # arguments of a call, in memory of their own: those to change

DELTA_CALLS = [
    (DECODING, "in order, {}"),
    (DECODING, "rows skipped and not written, {}"),
    (SEVERAL, "a row skipped, 3 tokens, {}"),
    (SEVERAL, "a buffer, elsewhere, 4 tokens, {}"),
    (SEVERAL, "every token, a row skipped, 5 tokens, {}"),
]
EVERY_CALL = [(door, call) for door in DOORS for call in door.calls]
INTERPRETED = [
    *[(SSM, f"{form}, a row of padding") for form in ("headless, per channel", "float16")],
    *[(VLLM, f"null block 0, {mode}, stochastic") for mode in ("elsewhere", "packed in place")],
    (VLLM, "null block 0, accepted tokens elsewhere, stochastic"),
    (VLLM, "accepted counts out of range"),
    (FLASHINFER, "padding, elsewhere, one token"),
    (FLASHINFER, "padding, every int16 token, several tokens"),
    (FLASHINFER, "padding, accepted, every token, packed"),
    (FLASHINFER, "padding, an int16 buffer, packed"),
    *[(door, call.format(f"small{given}")) for door, call in DELTA_CALLS for given in ("", ", float16, output given")],
    *[
        (SEVERAL, f"{mode}, 2 tokens, not normalised")
        for mode in ("output alone", "a large buffer", "every token, the last also elsewhere")
    ],
    (MAMBA3, "2 groups, padded, rank 4, summed, elsewhere, k and v too"),
    (MAMBA3, "2 groups, padded, rank 4, per rank, here, k and v too"),
    (MAMBA3, "2 groups, padded, rank 1, per rank, here"),
    (CHECKPOINTING, "packed, heads apart"),
    (TRACKED, "stochastic"),
    (BUFFERED, "a table, the null block"),
    *[(CONV, call) for call in CONV.calls if "first" in call],
    *[(VLLM_CONV, call) for call in VLLM_CONV.calls if "last" in call and "given" not in call],
    (SGLANG_RULE, "a tree"),
    (SGLANG_CONV, "a tree, channels first"),
]


@REFERENCE_AND_GPU
@doors_and("call", EVERY_CALL)
def test_every_call_gives_what_the_contract_says(door: Door, call: str, device: torch.device) -> None:
    require_contract(door, door.arguments(call, device), door.calls[call].get("fault"))


@pytest.mark.parametrize("device", [implementations.KERNELS[0]], indirect=True)
@doors_and("call", INTERPRETED)
def test_kernels_in_the_interpreter_do_so_too(door: Door, call: str, device: torch.device) -> None:
    require_contract(door, door.arguments(call, device), door.calls[call].get("fault"))


@pytest.mark.parametrize("door", DOORS, ids=lambda door: door.name)
def test_signatures_are_those_of_peers(door: Door) -> None:
    wanted = inspect.signature(door.function).parameters.values()
    assert door.signature == ", ".join(str(p.replace(annotation=inspect.Parameter.empty)) for p in wanted)


def other(**values: Any) -> Change:
    return lambda a: values


def changed(name: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda a: {name: change(a[name])}


def part_of_wider_rows(tensor: Tensor) -> Tensor:
    return torch.cat([tensor, tensor, tensor], -1)[..., tensor.shape[-1] : 2 * tensor.shape[-1]]


def every_second_element(tensor: Tensor) -> Tensor:
    return torch.stack([tensor, tensor], -1)[..., 0]


def laid_out(door: Door, layout: Callable[[Tensor], Tensor]) -> Change:
    """States in pages, all else in another layout."""
    states = {*door.pools, *door.pools.values()}
    return lambda a: {
        name: in_pages(t) if name in states else layout(t) for name, t in a.items() if isinstance(t, Tensor)
    }


def parts_of_one_projection(a: Arguments) -> Arguments:
    """q, k and v as a convolution leaves them: side by side on one axis."""
    parts = [a[name].flatten(2) for name in "qkv"]
    together = torch.cat(parts, -1).split([part.shape[-1] for part in parts], -1)
    return {name: part.view(a[name].shape) for name, part in zip("qkv", together, strict=True)}


def taking_turns_in_pages(a: Arguments) -> Arguments:
    pages = torch.stack([a["state"], a["state_out"], torch.full_like(a["state"], 5.0)], 1)
    return {"state": pages[:, 0], "state_out": pages[:, 1]}


def every_third_head(name: str) -> Change:
    """The states of a pool as every third head of a wider one."""

    def change(a: Arguments) -> Arguments:
        slots, heads, *inner = a[name].shape
        wide = torch.full((slots, 3 * heads, *inner), 5.0, dtype=a[name].dtype, device=a[name].device)
        wide[:, ::3] = a[name]
        return {name: wide[:, ::3]}

    return change


def past_the_pool(a: Arguments) -> Arguments:
    return {name: torch.where(t < 0, SLOTS + 3, t) for name, t in a.items() if name.endswith("indices")}


def longer(**more: list[int]) -> Change:
    return lambda a: {name: torch.cat([a[name], a[name].new_tensor(entries)]) for name, entries in more.items()}


IN_OTHER_STRIDES = [
    *[(SSM, f"{form}, indexed") for form in ("per channel", "headless, per channel")],
    *[(VLLM, f"per channel, {mode}") for mode in ("in place", "accepted tokens elsewhere")],
    *[(FLASHINFER, f"per channel, every token, {form}") for form in FORMS],
    *[(FLASHINFER, f"{what}, a buffer, several tokens") for what in ("int16", "stochastic")],
    *[(door, call.format("a scale")) for door, call in DELTA_CALLS],
    (MAMBA3, "a row of padding, int32, here, k and v too, rank 2"),
    (MAMBA3, "a row of padding, int64, elsewhere, k and v too, rank 2"),
    (MAMBA3, "1 groups, rank 4"),
    (CONV, "a ring, several tokens, slots, channels first"),
    (VLLM_CONV, "accepted counts, channels first"),
    (VLLM_CONV, "blocks to read and to write, channels first"),
    (VLLM_RULE, "accepted, kda"),
    (SGLANG_RULE, "a tree"),
    (SGLANG_CONV, "a tree, channels first"),
]
NO_OUTPUT_YET = [
    *[(VLLM, call) for call in ("in place", "headless, per channel, in place")],
    *[(FLASHINFER, f"in place, {form}") for form in FORMS],
    (DECODING, "in place, int32"),
    (SEVERAL, "in place, 3 tokens"),
    *[(MAMBA3, f"no {what}, in order, rank 1") for what in ("outproj", "gate")],
]
CHANGES: list[tuple[Door, str, str, Change]] = [
    *[(d, call, layout.__name__, laid_out(d, layout)) for d, call in IN_OTHER_STRIDES
      for layout in (part_of_wider_rows, every_second_element)],
    *[(door, call, "an output", door.with_room) for door, call in NO_OUTPUT_YET],
    (SSM, "headless, indexed", "with heads", lambda a: {"state": a["state"][:, None], "D": a["D"][None]}),
    (VLLM, "stochastic, in place", "ten rounds", other(cache_philox_rounds=10)),
    (VLLM, "stochastic, in place", "a blackwell", other(is_blackwell=True)),
    *[(FLASHINFER, "in place, one token", f"{algorithm} {backend}", other(algorithm=algorithm, backend=backend))
      for algorithm, backend in product(
          ("auto", "simple", "vertical", "horizontal", "async_horizontal"), ("auto", "flashinfer", "cake"))],
    *[(FLASHINFER, f"int16, {mode}, several tokens", "scales (…, 1)", changed("state_scale", lambda t: t[..., None]))
      for mode in ("in place", "a buffer")],
    *[(door, call.format("a scale"), "parts of one projection", parts_of_one_projection) for door, call in DELTA_CALLS],
    *[(door, call.format("a scale"), "slots past the pool", past_the_pool) for door, call in DELTA_CALLS],
    (MAMBA3, "all, in order, rank 4", "tiles and warps", other(tile_D=8, num_warps=4, update_kv_state=False)),
    (MAMBA3, "1 groups, rank 4", "expanded groups",
     lambda a: {name: a[name].expand(-1, -1, a["state"].shape[1], -1) for name in "BC"}),
    (MAMBA3, "4 groups, rank 4", "an output in the place of x", lambda a: {"out": a["x"]}),
    (MAMBA3, "a row of padding, rank 4", "a state that goes to itself", lambda a: {"state_out": a["state"]}),
    *[(MAMBA3, f"{read}, int32, elsewhere, rank 2", "turns in pages", taking_turns_in_pages) for read in READS],
    (VLLM_CONV, "accepted counts, packed, channels last", "longer tables",
     longer(query_start_loc=[4, 4], num_accepted_tokens=[1, 1])),
    (VLLM_CONV, "one token, channels first", "validated data", other(validate_data=True)),
    (DECODING, "in place, int32", "a backend", other(backend="flashinfer")),
    (SEVERAL, "output alone, 2 tokens", "one for True", other(disable_state_update=1)),
    (SEVERAL, "in place, 2 tokens", "zero for False", other(disable_state_update=0)),
    *[(door, call, "every third head of a pool", every_third_head(name)) for door, call, name in (
        (DECODING, "in place, int32", "initial_state"), (SEVERAL, "a buffer, in place, 3 tokens", "initial_state"),
        (VLLM_RULE, "accepted", "initial_state"), (SGLANG_RULE, "several tokens", "initial_state_source"),
        (SGLANG_STATE, "padding", "state"))],
    (SGLANG_RULE, "several tokens", "gates in one row", lambda a: {name: a[name].flatten(0, 1) for name in "ab"}),
    (SGLANG_CONV, "windows, channels first", "windows that share their inputs",
     lambda a: {WINDOWS: SGLANG_CONV.arguments("windows that share their inputs")[WINDOWS].to(a["x"].device)}),
]  # fmt: skip


@REFERENCE_AND_GPU
@doors_and("call what change", CHANGES)
def test_what_changes_no_byte(door: Door, call: str, what: str, change: Change, device: torch.device) -> None:
    arguments = door.arguments(call, device)
    again = copied(arguments)
    again |= change(again)
    one, other = (torch.manual_seed(3) and door.results(a) for a in (arguments, again))
    require_equal(one, other)
    for name in door.pools.keys() & other.keys():
        require_untouched_between(other[name])


ALONE = [
    *[(SSM, f"{form}, indexed") for form in ("plain", "headless, per channel")],
    (VLLM, "per channel, in place"),
    *[(FLASHINFER, f"{what}, in place, several tokens") for what in ("per channel", "int16")],
    *[(door, call.format("a scale")) for door, call in DELTA_CALLS],
    (MAMBA3, "indexed, rank 4, k and v too"),
    (CONV, "a ring, several tokens, slots, channels first"),
    (VLLM_CONV, "accepted counts, channels first"),
]


@REFERENCE_AND_GPU
@doors_and("call", ALONE)
def test_a_row_alone_gives_what_it_gives_in_a_batch(door: Door, call: str, device: torch.device) -> None:
    arguments = door.arguments(call, device)
    of_rows = {*door.tokens, *door.indices}
    of_rows |= {name for name in door.pools if arguments.get(name) is not None and len(arguments[name]) == 3}

    def last(named: Arguments) -> Arguments:
        return {name: t[-1:] if name in of_rows and t is not None else t for name, t in named.items()}

    alone = last(copied(arguments))
    stored = door.model(copied(alone, CPU), torch.float32).stored
    together, apart = last(door.results(arguments)), door.results(alone)
    assert equal_bytes(together["y"][-1:], apart["y"])
    for name, entry in stored:
        assert equal_bytes(together[name][entry], apart[name][entry])


GATHERED = [
    *[(SSM, f"plain, {read}") for read in ("indexed", "a row of padding")],
    (VLLM, "null block 0, in place"),
    *[(FLASHINFER, f"{what}, in place, several tokens") for what in ("bfloat16", "int16")],
    *[(MAMBA3, ", ".join(filter(None, names))) for names in product(READS, RANKS, UPDATES)],
    (CONV, "slots, one of them negative, channels first"),
    (VLLM_CONV, "one token, channels last"),
]


@REFERENCE_AND_GPU
@doors_and("call", GATHERED)
def test_a_pool_gives_the_bytes_of_gathering_stepping_and_scattering(
    door: Door, call: str, device: torch.device
) -> None:
    arguments = door.arguments(call, device)
    rows = door.model(copied(arguments, CPU), torch.float32).ran.flatten(1).any(1).nonzero()[:, 0]
    index = arguments.get(door.indices[0])
    slots = rows.to(device) if index is None else index[rows].long()
    states = [name for pair in door.pools.items() for name in pair if arguments.get(name) is not None]
    wanted = {name: arguments[name].clone() for name in states}
    dense = {**arguments, door.indices[0]: None, **{name: arguments[name][slots] for name in states}}
    dense |= {name: arguments[name][rows] for name in door.tokens if arguments.get(name) is not None}
    gathered = door.results(dense) if len(rows) else {}
    got = door.results(arguments)
    for name in states if len(rows) else []:
        wanted[name][slots] = gathered[name]
    require_equal(wanted, got)
    assert not len(rows) or equal_bytes(got["y"][rows], gathered["y"])


COMPILED = [
    (VLLM, "accepted tokens elsewhere"),
    (FLASHINFER, "stochastic, a buffer, packed"),
    *[(door, call.format("a scale, output given")) for door, call in DELTA_CALLS[4:]],
    (MAMBA3, "no outproj, padded, rank 1"),
    (MAMBA3, "2 groups, padded, rank 4, summed, elsewhere, k and v too"),
    (CONV, "a ring, channels first"),
    (VLLM_CONV, "accepted counts, packed, channels first"),
    (SGLANG_RULE, "a tree"),
    (SGLANG_CONV, "a tree, channels first"),
    (BUFFERED, "a table, the null block"),
]  # fmt: skip


@doors_and("call", COMPILED)
def test_torch_compile_makes_one_graph_of_a_call(door: Door, call: str) -> None:
    arguments, again = (door.arguments(call) for _ in range(2))
    compiled = torch.compile(door.function, fullgraph=True, dynamic=False, backend="aot_eager")
    y = compiled(**arguments)
    want = door.results(again)
    require_equal({"y": y[0] if isinstance(y, tuple) else y, **{n: arguments[n] for n in want if n != "y"}}, want)


GRAPHS = [
    (FLASHINFER, "stochastic, in place, one token"),
    *[(door, call.format("bfloat16 tokens, output given")) for door, call in DELTA_CALLS],
    *[(MAMBA3, f"a bfloat16 model, summed, {place}") for place in ("here", "elsewhere")],
    (VLLM_RULE, "accepted"),
    (VLLM_DECODE, ""),
    (SGLANG_RULE, "a tree"),
    (SGLANG_CONV, "a tree, channels first"),
    (SGLANG_STATE, "a tree"),
    (CHECKPOINTING, "3 tokens, heads apart"),
    (TRACKED, "one token, bfloat16"),
    (BUFFERED, "in place, bfloat16"),
]


@pytest.mark.gpu
@doors_and("call", GRAPHS)
def test_a_cuda_graph_reads_slots_tokens_and_seeds_when_it_is_replayed(door: Door, call: str) -> None:
    torch.use_deterministic_algorithms(False)  # else an indexed copy may wait for the device, in some versions of torch
    arguments, other = (door.arguments(call, torch.device("cuda")) for _ in range(2))
    for name in (*door.tokens, *door.indices):
        if other.get(name) is not None and 0 not in other[name].stride():
            other[name] = other[name].roll(1, 0).contiguous()
    if "rand_seed" in other:
        other["rand_seed"] += 1
    door.function(**door.arguments(call, torch.device("cuda")))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = door.results(arguments)
    for name, tensor in other.items():
        if isinstance(tensor, Tensor):
            once = [slice(None, 1 if stride == 0 else None) for stride in tensor.stride()]  # of what is expanded
            arguments[name][tuple(once)].copy_(tensor[tuple(once)])
    graph.replay()
    require_equal(captured, door.results(other))


REPEATED = [
    *[(door, call.format("a scale, output given")) for door, call in DELTA_CALLS],
    *[(VLLM, f"stochastic, {mode}") for mode in ("in place", "accepted tokens elsewhere")],
    *[(FLASHINFER, f"{what}, {mode}, packed") for what in ("int16", "stochastic") for mode in ("in place", "a buffer")],
    (FLASHINFER, "float16, a buffer, several tokens"),
    *[(MAMBA3, f"2 groups, padded, {rest}") for rest in ("rank 4, summed, here", "rank 1, per rank, elsewhere")],
    (VLLM_RULE, "accepted"),
    (VLLM_DECODE, ""),
    (SGLANG_RULE, "verify"),
    (SGLANG_CONV, "windows, channels first"),
    (SGLANG_STATE, "verify, an output given"),
    *[(CHECKPOINTING, call) for call in ("packed, heads apart", "int8", "stochastic")],
    (TRACKED, "not moved"),
]


@doors_and("call", REPEATED)
def test_a_repeated_call_starts_its_kernel_directly(
    door: Door, call: str, launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    seed = torch.tensor(3)  # at one address in all calls
    monkeypatch.setattr(torch, "randint", lambda *drawn, **options: seed)
    takes_room = door.out in inspect.signature(door.function).parameters
    first, second, again = (door.arguments(door.calls[call] | {"given": takes_room}) for _ in range(3))
    door.results(first)
    door.results(second)  # where torch computes, only this one is remembered, by the op
    ordinary = len(launcher.ordinary)
    door.results(again)
    assert len(launcher.ordinary) == ordinary <= 2
    with suspended():
        door.results(again)
    got, want = launcher.directly[-1], parameters(launcher.ordinary[-1].arguments)
    new = 0 if again.get(door.out) is not None else 1  # where an output is not given, each call makes one
    assert sum(one != other for one, other in zip(got, want, strict=True)) <= new


RANDOM = [
    *[(VLLM, f"stochastic, {mode}") for mode in ("in place", "packed in place", "accepted tokens elsewhere")],
    *[(FLASHINFER, f"stochastic, {mode}, one token") for mode in ("in place", "every token")],
]


@REFERENCE_AND_GPU
@doors_and("call", RANDOM)
def test_random_bits_follow_from_the_seed_and_differ_from_slot_to_slot(
    door: Door, call: str, device: torch.device
) -> None:
    """vLLM draws new bits at every call, from torch's seed on; FlashInfer is given a seed."""
    arguments = door.arguments(call, device)
    arguments["state"][:] = arguments["state"][5]
    for name in door.tokens:
        arguments[name] = arguments[name][:1].expand(arguments[name].shape).clone()
    rounds, states = "cache_philox_rounds" if door is VLLM else "philox_rounds", []
    for seed, change in ((1, {}), (1, {}), (None, {}), (1, {rounds: 9}), (1, {rounds: 10})):
        if seed is not None:
            torch.manual_seed(seed)
        seeds = {} if door is VLLM else {"rand_seed": torch.tensor([2] if seed is None else seed, device=device)}
        states.append(door.results({**copied(arguments), **seeds, **change})["state"])
    assert [equal_bytes(states[0], state) for state in states] == [True, True, False, False, True]
    written = arguments.get("dst_state_batch_indices", arguments["state_batch_indices"])
    one, another = (states[0][int(written[row].flatten()[0])] for row in (0, 1))
    assert not equal_bytes(one, another)


@REFERENCE_AND_GPU
def test_several_tokens_of_a_delta_rule_are_one_token_after_another(device: torch.device) -> None:
    """The bytes agree, because no state is rounded in between."""
    several = SEVERAL.arguments("in place, 5 tokens", device)
    one = {**copied(several), "state": None}
    del one["disable_state_update"]
    y = SEVERAL.results(several)["y"]
    for t in range(5):
        token = {name: one[name][:, t : t + 1] for name in "qkvab"}
        assert equal_bytes(y[:, t : t + 1], DECODING.results({**one, **token})["y"])
    assert equal_bytes(several["initial_state"], one["initial_state"])


@REFERENCE_AND_GPU
@pytest.mark.parametrize("read", READS)
def test_a_mamba3_state_that_goes_elsewhere_has_the_bytes_of_one_in_place(read: str, device: torch.device) -> None:
    here, there = (
        MAMBA3.arguments(f"{read}, int32, {place}, k and v too, rank 2", device) for place in ("here", "elsewhere")
    )
    stored = MAMBA3.model(copied(there, CPU), torch.float32).stored
    expected = {name: there[name].clone() for name in ("state", "state_out")}
    want, got = MAMBA3.results(here), MAMBA3.results(there)
    for _, (slot,) in (place for place in stored if place[0] == "state_out"):
        expected["state_out"][slot] = want["state"][slot]
    require_equal({**want, **expected}, got)


@REFERENCE_AND_GPU
@pytest.mark.parametrize("summed", ["summed", "per rank"])
def test_b_and_x_stored_by_the_caller_are_those_of_update_kv_state(summed: str, device: torch.device) -> None:
    """The bytes agree after three tokens, stored as the layers of mamba_ssm do."""
    call = MAMBA3.calls[f"a bfloat16 model, {summed}, here"]
    stored = MAMBA3.arguments({**call, **READS["indexed"]}, device)
    by_hand, slots = {**copied(stored), "update_kv_state": False}, stored["state_batch_indices"].long()
    for _ in range(3):
        one, other = MAMBA3.results(stored), MAMBA3.results(by_hand)
        by_hand["Bstate"][slots], by_hand["Xstate"][slots] = by_hand["B"], by_hand["x"]
        require_equal(one, other)
        for arguments in (stored, by_hand):
            arguments |= {name: arguments[name].roll(1, 0) for name in MAMBA3.tokens}
