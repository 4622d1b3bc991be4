"""flashstate.compat.mamba_ssm keeps the contract of mamba_ssm's mamba3_step_fn."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models_of_peers import Arguments, Outcome, rounded, simulate_mamba3
from peer_calls import (
    CPU,
    LAYOUTS,
    REFERENCE_AND_GPU,
    SLOTS,
    Implementation,
    copied,
    equal_bytes,
    in_pages,
    make_mamba3_arguments,
    signature_of,
)
from torch import Tensor

import flashstate
from flashstate.compat.mamba_ssm import mamba3_step_fn
from flashstate.proof import error_ratio, interpreted

POOLS = ("state", "Bstate", "Xstate", "state_out")
PER_ROW = ("A", "B", "C", "x", "dt", "trap", "z")
PARAMETERS = ("D", "xproj", "zproj", "outproj")
READ: dict[str, list[int] | None] = {
    "in order": None,
    "indexed": [12, 0, 9],
    "a row of padding": [12, -1, 9],
    "rows of padding": [-7, 3, -1],
    "padding alone": [-1, -2, -1],
    "a slot past the pool": [12, SLOTS, 0],
}
KINDS = {"int32": torch.int32, "int64": torch.int64}
FORMS: dict[str, Arguments] = {
    "all": {},
    "no zproj": {"zproj": None},
    "no gate": {"z": None, "zproj": None},
    "no outproj": {"outproj": None},
    "no outproj, no zproj": {"outproj": None, "zproj": None},
    "no outproj, no gate": {"outproj": None, "z": None, "zproj": None},
    "no xproj, no D": {"xproj": None, "D": None},
    "no projections": {"xproj": None, "zproj": None, "outproj": None},
}
EVERY_RANK = pytest.mark.parametrize("rank", [1, 4])
EVERY_READ = pytest.mark.parametrize("read", READ)
UPDATES = pytest.mark.parametrize("update_kv_state", [False, True], ids=["k and v stay", "k and v are stored"])
PLACES = pytest.mark.parametrize("elsewhere", [False, True], ids=["in place", "elsewhere"])


def arguments_of(
    device: torch.device, read: str = "in order", kind: str = "int32", elsewhere: bool = False, **options: Any
) -> Arguments:
    """Arguments whose rows read these slots. What rows of padding bring is NaN. With `elsewhere`, states go to a
    state_out that has something else in it."""
    arguments = make_mamba3_arguments(device, **options)
    slots = READ[read]
    if slots is not None:
        arguments["state_batch_indices"] = torch.tensor(slots, dtype=KINDS[kind], device=device)
        for name in PER_ROW:
            arguments[name][[not 0 <= slot < SLOTS for slot in slots]] = torch.nan
    if elsewhere:
        arguments["state_out"] = torch.full_like(arguments["state"], 7.0)
    return arguments


def slots_of(arguments: Arguments) -> list[int]:
    slots = arguments.get("state_batch_indices")
    return list(range(len(arguments["x"]))) if slots is None else slots.tolist()


def compare(arguments: Arguments, implementation: Implementation = contextlib.nullcontext) -> None:
    """Call the door and require of the output and the pools what the model says, and that all else stays."""
    before = copied(arguments, CPU)
    exact, plain = (simulate_mamba3(before, dtype) for dtype in (torch.float64, torch.float32))
    with implementation():
        y = mamba3_step_fn(**arguments)
    assert arguments.get("out") is None or y is arguments["out"]
    assert (y.shape, y.dtype) == (exact.y.shape, before["x"].dtype)
    live = torch.tensor([0 <= slot < SLOTS for slot in slots_of(before)], dtype=torch.bool)
    assert not y.cpu()[~live].any()
    if live.any():
        assert error_ratio(y.cpu()[live], exact.y[live], plain.y[live].to(y.dtype)) <= 1
    require_pools(before, copied(arguments, CPU), exact, plain)
    require_faults(slots_of(before))


def require_pools(before: Arguments, after: Arguments, exact: Outcome, plain: Outcome) -> None:
    """What was to be stored is: states within budget, B and x to the byte. All else stayed."""
    for name in (name for name in POOLS if name in before):
        expected, places = before[name].clone(), [place for place in exact.stored if place[0] == name]
        for place in places:
            kept = name in ("Bstate", "Xstate")
            expected[place[1]] = exact.stored[place] if kept else after[name][place[1]]
        assert equal_bytes(after[name], expected)
        if places:
            want, plainly = (torch.stack([outcome.stored[place] for place in places]) for outcome in (exact, plain))
            got = torch.stack([after[name][entry] for _, entry in places])
            assert error_ratio(got, want.double(), rounded(plainly, got.dtype)) <= 1
    for name in (*PER_ROW, *PARAMETERS):
        assert before[name] is None or equal_bytes(after[name], before[name])


def require_faults(slots: list[int]) -> None:
    """A slot past the pool was noticed, and nothing else."""
    past = [slot for slot in slots if slot >= SLOTS]
    with pytest.raises(IndexError, match=f"read slot {past[0]}") if past else contextlib.nullcontext():
        flashstate.check_faults()


def results(arguments: Arguments, implementation: Implementation) -> dict[str, Tensor]:
    """The output of a call, and the pools after it."""
    with implementation():
        y = mamba3_step_fn(**arguments)
    return {"y": y, **{name: arguments[name] for name in POOLS if arguments.get(name) is not None}}


def require_equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert equal_bytes(tensor, other[name]), name


@REFERENCE_AND_GPU
@EVERY_RANK
@pytest.mark.parametrize(("read", "update_kv_state"), [("in order", False), ("a row of padding", True)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_the_arguments_gives_what_the_contract_says(
    form: str, read: str, update_kv_state: bool, rank: int, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**arguments_of(device, read, rank=rank), **FORMS[form], "update_kv_state": update_kv_state}
    compare(arguments, implementation)


@REFERENCE_AND_GPU
@UPDATES
@PLACES
@pytest.mark.parametrize("kind", KINDS)
@EVERY_READ
def test_rows_are_read_and_stored_where_their_indices_say(
    read: str, kind: str, elsewhere: bool, update_kv_state: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(device, read, kind, elsewhere, rank=2)
    compare({**arguments, "update_kv_state": update_kv_state}, implementation)


@REFERENCE_AND_GPU
@EVERY_RANK
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_heads_share_groups_of_b_and_c(
    groups: int, rank: int, device: torch.device, implementation: Implementation
) -> None:
    compare({**arguments_of(device, "indexed", groups=groups, rank=rank), "update_kv_state": True}, implementation)


HALF, BRAIN = torch.float16, torch.bfloat16
DTYPES: dict[str, dict[str, torch.dtype]] = {
    "a bfloat16 model": {"x": BRAIN, "kv": BRAIN},
    "bfloat16 weights too": {"x": BRAIN, "kv": BRAIN, "weights": BRAIN},
    "a bfloat16 state": {"state": BRAIN, "x": BRAIN, "kv": BRAIN},
    "a float16 state": {"state": HALF, "x": BRAIN, "weights": HALF},
    "k and v wider than tokens": {"x": HALF},
    "k and v narrower than tokens": {"kv": BRAIN},
}


@REFERENCE_AND_GPU
@PLACES
@pytest.mark.parametrize("outproj", [True, False], ids=["summed", "per rank"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_every_dtype_gives_what_the_contract_says(
    dtypes: str, outproj: bool, elsewhere: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(device, "a row of padding", elsewhere=elsewhere, rank=2, **DTYPES[dtypes])
    changes = {} if outproj else {"outproj": None}
    compare({**arguments, **changes, "update_kv_state": True}, implementation)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    ("form", "rank", "elsewhere"), [("all", 4, True), ("no outproj", 4, False), ("no outproj", 1, False)]
)
def test_kernels_in_the_interpreter_do_the_same(form: str, rank: int, elsewhere: bool) -> None:
    arguments = {**arguments_of(CPU, "a row of padding", elsewhere=elsewhere, rank=rank, groups=2), **FORMS[form]}
    compare({**arguments, "update_kv_state": rank > 1}, interpreted)


@REFERENCE_AND_GPU
@EVERY_RANK
@pytest.mark.parametrize("outproj", [True, False], ids=["summed", "per rank"])
def test_an_output_that_is_given_is_filled_and_returned(
    outproj: bool, rank: int, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(device, "a row of padding", rank=rank)
    if not outproj:
        arguments["outproj"] = None
    shape = [3, *([] if outproj else [rank]), *arguments["x"].shape[1:]]
    compare({**arguments, "out": in_pages(torch.full(shape, 5.0, device=device))}, implementation)


@REFERENCE_AND_GPU
def test_an_output_may_take_the_place_of_x(device: torch.device, implementation: Implementation) -> None:
    arguments = {**arguments_of(device, "indexed"), "update_kv_state": True}
    reused = copied(arguments)
    require_equal(results(arguments, implementation), results({**reused, "out": reused["x"]}, implementation))


@REFERENCE_AND_GPU
@UPDATES
@EVERY_RANK
@EVERY_READ
def test_a_pool_gives_the_bytes_of_gathering_stepping_and_scattering(
    read: str, rank: int, update_kv_state: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = {**arguments_of(device, read, rank=rank), "update_kv_state": update_kv_state}
    rows = [b for b, slot in enumerate(slots_of(arguments)) if 0 <= slot < SLOTS]
    slots = [slots_of(arguments)[b] for b in rows]
    dense = {**copied(arguments), **{name: arguments[name][rows] for name in PER_ROW}, "state_batch_indices": None}
    pools = {name: arguments[name].clone() for name in POOLS[:3]}
    if rows:
        gathered = results({**dense, **{name: arguments[name][slots] for name in pools}}, implementation)
        for name, pool in pools.items():
            pool[slots] = gathered[name]
    got = results(arguments, implementation)
    require_equal({name: got[name] for name in pools}, pools)
    assert not rows or equal_bytes(got["y"][rows], gathered["y"])
    require_faults(slots_of(arguments))


@REFERENCE_AND_GPU
@EVERY_READ
def test_a_state_that_goes_elsewhere_has_the_bytes_of_one_in_place(
    read: str, device: torch.device, implementation: Implementation
) -> None:
    here, there = ({**arguments_of(device, read, elsewhere=e), "update_kv_state": True} for e in (False, True))
    before = here["state"].clone()
    stepped, left = results(here, implementation), results(there, implementation)
    slots = [slot for slot in slots_of(here) if 0 <= slot < SLOTS]
    others = [slot for slot in range(SLOTS) if slot not in slots]
    assert equal_bytes(stepped.pop("state")[slots], left["state_out"][slots])
    assert (left.pop("state_out")[others] == 7.0).all()
    assert equal_bytes(left.pop("state"), before)
    require_equal(stepped, left)
    require_faults(slots_of(here) + slots_of(there))


@REFERENCE_AND_GPU
def test_a_state_that_goes_to_itself_is_updated_in_place(device: torch.device, implementation: Implementation) -> None:
    arguments, itself = (arguments_of(device, "a row of padding") for _ in range(2))
    itself["state_out"] = itself["state"]
    stepped = results(arguments, implementation)
    require_equal({**stepped, "state_out": stepped["state"]}, results(itself, implementation))


@REFERENCE_AND_GPU
@EVERY_READ
def test_state_and_state_out_may_take_turns_in_pages(
    read: str, device: torch.device, implementation: Implementation
) -> None:
    apart, paged = (arguments_of(device, read, elsewhere=True) for _ in range(2))
    pages = torch.stack([paged["state"], paged["state_out"], torch.full_like(paged["state"], 5.0)], 1)
    paged["state"], paged["state_out"] = pages[:, 0], pages[:, 1]
    require_equal(results(apart, implementation), results(paged, implementation))
    assert (pages[:, 2] == 5.0).all()
    require_faults(slots_of(apart))


@REFERENCE_AND_GPU
@pytest.mark.parametrize("outproj", [True, False], ids=["summed", "per rank"])
def test_b_and_x_stored_by_the_caller_are_those_of_update_kv_state(
    outproj: bool, device: torch.device, implementation: Implementation
) -> None:
    """The same bytes after three tokens, as the layers of mamba_ssm store them."""
    stored = arguments_of(device, "indexed", x=BRAIN, kv=BRAIN)
    stored |= {} if outproj else {"outproj": None}
    by_hand, slots = copied(stored), slots_of(stored)
    for _ in range(3):
        one = results({**stored, "update_kv_state": True}, implementation)
        other = results(by_hand, implementation)
        by_hand["Bstate"][slots], by_hand["Xstate"][slots] = by_hand["B"], by_hand["x"]
        require_equal(one, other)
        for arguments in (stored, by_hand):
            for name in PER_ROW:
                arguments[name] = arguments[name].roll(1, 0)


@REFERENCE_AND_GPU
@PLACES
@LAYOUTS
@pytest.mark.parametrize("groups", [1, 4])
def test_strides_change_no_byte(
    groups: int,
    layout: Callable[[Tensor], Tensor],
    elsewhere: bool,
    device: torch.device,
    implementation: Implementation,
) -> None:
    arguments = arguments_of(device, "a row of padding", elsewhere=elsewhere, groups=groups)
    arguments["update_kv_state"] = True
    names = (*PER_ROW, *PARAMETERS, "state_batch_indices")
    other = {**copied(arguments), **{name: layout(arguments[name]) for name in names}}
    other |= {name: in_pages(arguments[name]) for name in POOLS if name in arguments}
    require_equal(results(arguments, implementation), results(other, implementation))


@REFERENCE_AND_GPU
def test_groups_expanded_to_heads_change_no_byte(device: torch.device, implementation: Implementation) -> None:
    arguments = {**arguments_of(device, "indexed", groups=1), "update_kv_state": True}
    heads = arguments["state"].shape[1]
    expanded = {**copied(arguments), **{name: arguments[name].expand(-1, -1, heads, -1) for name in "BC"}}
    require_equal(results(arguments, implementation), results(expanded, implementation))


def test_tiles_and_warps_change_nothing() -> None:
    arguments = arguments_of(CPU, "indexed")
    other = {**copied(arguments), "tile_D": 8, "num_warps": 4, "update_kv_state": False}
    require_equal(results(arguments, contextlib.nullcontext), results(other, contextlib.nullcontext))


@REFERENCE_AND_GPU
@PLACES
@pytest.mark.parametrize("indexed", [True, False])
def test_a_batch_of_no_rows_changes_nothing(
    indexed: bool, elsewhere: bool, device: torch.device, implementation: Implementation
) -> None:
    arguments = arguments_of(device, elsewhere=elsewhere, batch=0)
    if indexed:
        arguments["state_batch_indices"] = torch.empty(0, dtype=torch.int32, device=device)
    compare({**arguments, "update_kv_state": True}, implementation)


@pytest.mark.parametrize(
    ("rank", "outproj", "given", "elsewhere"),
    [(1, False, False, True), (4, True, True, False)],
    ids=["rank 1, elsewhere", "summed, out given"],
)
def test_torch_compile_makes_one_graph_of_a_call(rank: int, outproj: bool, given: bool, elsewhere: bool) -> None:
    arguments = {**arguments_of(CPU, "a row of padding", elsewhere=elsewhere, rank=rank), "update_kv_state": True}
    arguments |= {} if outproj else {"outproj": None}
    if given:
        arguments["out"] = torch.full([3, *([] if outproj else [rank]), *arguments["x"].shape[1:]], 5.0)
    again = copied(arguments)
    y = torch.compile(mamba3_step_fn, fullgraph=True, dynamic=False, backend="aot_eager")(**arguments)
    pools = {name: arguments[name] for name in POOLS if name in arguments}
    require_equal({"y": y, **pools}, results(again, contextlib.nullcontext))


@pytest.mark.gpu
@PLACES
def test_a_cuda_graph_reads_slots_and_tokens_when_it_is_replayed(elsewhere: bool) -> None:
    torch.use_deterministic_algorithms(False)  # else an indexed copy may wait for the device, in some versions of torch
    device = torch.device("cuda")
    arguments, other = (
        {**arguments_of(device, "a row of padding", elsewhere=elsewhere, x=BRAIN, kv=BRAIN), "update_kv_state": True}
        for _ in range(2)
    )
    for name in (*PER_ROW, "state_batch_indices"):
        other[name] = other[name].roll(1, 0)
    mamba3_step_fn(**copied(arguments))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = mamba3_step_fn(**arguments)
    for name, tensor in other.items():
        if isinstance(tensor, Tensor):
            arguments[name].copy_(tensor)
    graph.replay()
    pools = {name: arguments[name] for name in POOLS if name in arguments}
    require_equal({"y": y, **pools}, results(other, contextlib.nullcontext))


def test_the_signature_is_mamba_ssms_with_what_servers_add() -> None:
    assert signature_of(mamba3_step_fn) == (
        "state, Bstate, Xstate, A, B, C, D, x, dt, trap, xproj, outproj=None, state_out=None, out=None, z=None, "
        "zproj=None, tile_D=64, num_warps=2, state_batch_indices=None, update_kv_state=False"
    )
