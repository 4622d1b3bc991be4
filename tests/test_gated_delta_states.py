"""gated_delta_step with extreme inputs, layouts of snapshots, several tiles, rows that are cut."""

from dataclasses import astuple, replace

import pytest
import torch
from implementations import KERNELS
from torch import Tensor

import flashstate
from flashstate import State
from flashstate.launch import override, valid_configs
from flashstate.proof import DeltaCase, make_inputs, oracle
from flashstate.proof.laws import require
from flashstate.proof.laws.require import all_tokens
from flashstate.proof.laws.steps import make_snapshots
from flashstate.state.formats import bits_of


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(bits_of(a), bits_of(b))


ONE = DeltaCase(2, 2, 1, 8, 16, x="float16", qk="float16")
SEVERAL = replace(ONE, tokens=3)
AT_ONCE = replace(SEVERAL, exact=False)


@pytest.mark.parametrize("case", [ONE, SEVERAL, AT_ONCE], ids=str)
def test_out_may_be_v(case: DeltaCase, device: torch.device) -> None:
    inputs = make_inputs(case, device)
    over = inputs.fresh()
    v = inputs.main.clone()
    assert over.step(v=v, out=v) is v
    assert same_bytes(v, inputs.step())
    require.equal_states("the pool", over.state, inputs.state)


@pytest.mark.parametrize(("transposed", "name"), [(False, "float32"), (True, "float16")])
def test_snapshots_of_either_layout_hold_the_same_states(transposed: bool, name: str, device: torch.device) -> None:
    case = replace(SEVERAL, format="bfloat16", rounding="stochastic", transposed=transposed)
    inputs = make_inputs(case, device)
    plain, want = inputs.fresh(), make_snapshots(case, name, "nearest", device)
    y = plain.step(snapshots=want)
    other = State(want.data.mT.clone(memory_format=torch.contiguous_format).fill_(1).mT)
    assert other.transposed is not want.transposed
    assert same_bytes(inputs.step(snapshots=other), y)
    require.equal_states("the pool", inputs.state, plain.state)
    require.equal_states("snapshots", other, want)


SIX = replace(SEVERAL, tokens=6)
EXTREME = [
    (SIX, 0),
    (replace(SIX, raw=False, per_channel=True, format="int8"), 5),
    (replace(SIX, exact=False, format="float16"), 0),
    (replace(SIX, exact=False, raw=False, qk_l2norm=False), 5),
]
EXTREME_A = [1e4, 0.0, -1e4, 1.0, 30.0, -30.0]  # a first token that leaves nothing of the state, and normal ones
EXTREME_B = [1e4, -1e4, 0.0, -1e4, 1e4, 2.0]
LOG_DECAYS = [-1e4, 0.0, -1e-3, -100.0, -1.0, -88.0]
BETAS = [1.0, 0.0, 0.5, 0.0, 1.0, 0.9]


@pytest.mark.parametrize(("case", "shift"), EXTREME, ids=str)
def test_extreme_gates_and_zero_keys_and_queries_keep_everything_finite_and_accurate(
    case: DeltaCase, shift: int, device: torch.device
) -> None:
    """Decays of 0 and 1, beta of 0 and 1; the extremes of the two meet at other tokens with every shift."""
    inputs = make_inputs(case, device)
    gates = (EXTREME_A, EXTREME_B) if case.raw else (LOG_DECAYS, BETAS)
    a, b = (torch.tensor(values, device=device) for values in gates)
    inputs.arguments["a"][:] = a.roll(shift).reshape(1, 6, 1, *[1] * case.per_channel)
    inputs.arguments["b"][:] = b[:, None]
    inputs.arguments["k"][:, 2] = 0
    inputs.arguments["q"][0, 3] = 0
    if case.per_channel:
        inputs.arguments["a"][:, 1, :, ::2] = a[0]  # some channels forget all, others nothing
    want = oracle(inputs)
    y = all_tokens(inputs, inputs.step())
    assert y.isfinite().all()
    assert inputs.states.isfinite().all()
    require.within_budget("the output", y, want.y, want.y_plain)
    require.within_budget("the state", inputs.states, want.state, want.state_plain)


@pytest.mark.parametrize(("padding", "tiles"), [("zero", 1), ("keep", 4)])
def test_a_packed_row_longer_than_max_len_is_cut_where_tokens_go_at_once(
    padding: str, tiles: int, device: torch.device
) -> None:
    case = replace(AT_ONCE, batch=4, rows=40, tokens=5, packed=True, raw=False)  # the last of four tiles is past them
    inputs, config = make_inputs(case, device), min(valid_configs(case.problem), key=astuple)
    assert inputs.lengths == [5, 4, 3, 2]
    read = torch.where(torch.arange(4, device=device) == 1, -1, inputs.slots)  # one row is padding
    there = torch.tensor([0, 1, 2, 5, 6, 7, 9, 10, 11, 12, 13], device=device)  # the first three tokens of each row
    short = replace(inputs.fresh(), lengths=[3, 3, 3, 2]).changed(lambda t: t[there])
    out = torch.full_like(inputs.main, 7.0)
    with override(replace(config, tiles=tiles)):
        y = inputs.step(slots=inputs.at(read=read, max_len=3, padding=padding), out=out)
        want = short.step(slots=short.at(read=read, padding=padding), out=out[there].fill_(7.0))
    assert same_bytes(y[there], want)
    require.equal_states("the pool", inputs.state, short.state)
    assert (y[3:5] == 0).all()
    assert (y[5:9] == (7.0 if padding == "keep" else 0.0)).all()


TILED = (  # 13 rows in tiles of four, or 52 in tiles of 16: the fourth has few rows
    DeltaCase(2, 2, 1, 13, 64, format="float16", rounding="stochastic", qk="float16"),
    DeltaCase(2, 2, 1, 13, 16, format="float16", qk="float16", transposed=True),
    DeltaCase(2, 2, 1, 52, 32, format="int8", rounding="stochastic", x="float16", qk="float16", exact=False, tokens=9),
)


@pytest.mark.parametrize("case", TILED, ids=str)
@pytest.mark.parametrize("device", KERNELS, indirect=True)
def test_programs_of_several_tiles_give_what_those_of_one_give(case: DeltaCase, device: torch.device) -> None:
    smallest = min(valid_configs(case.problem), key=lambda config: (config.block_rows, astuple(config)))
    assert 3 * smallest.block_rows < case.rows <= 4 * smallest.block_rows

    def results(tiles: int) -> list[Tensor]:
        inputs = make_inputs(case, device)
        taken = make_snapshots(replace(case, tokens=1), "float32", "nearest", device) if case.exact else None
        with override(replace(smallest, tiles=tiles)):
            y = inputs.step(snapshots=taken)
        found = (y, inputs.state.data, inputs.state.scale, None if taken is None else taken.data)
        return [t for t in found if t is not None]

    want = results(1)
    for tiles in (2, 8):  # the last of eight are past the head
        assert all(map(same_bytes, results(tiles), want))


@pytest.mark.gpu
def test_what_every_thread_is_handed_is_what_they_share() -> None:
    from device_functions import per_thread_kernel

    for index in (torch.int32, torch.int64):
        given = torch.tensor([0, 7, -1, torch.iinfo(index).max, torch.iinfo(index).min], dtype=index, device="cuda")
        found = torch.empty(len(given), 64, dtype=index, device="cuda")
        per_thread_kernel[(len(given),)](given, found, num_warps=2)
        assert torch.equal(found, given[:, None].expand_as(found))


def test_only_tokens_with_a_way_to_the_root_run_and_store(device: torch.device) -> None:
    """It may name whatever row of snapshots; the root beside it stores its state in its slot and its snapshot."""
    plain, inputs = make_inputs(ONE, device), make_inputs(ONE, device).fresh(extra=2)
    write = torch.arange(len(inputs.state.data) - 2, len(inputs.state.data), device=device).view(2, 1)
    parents, rows = torch.tensor([[-1], [9]], device=device), torch.tensor([0, 99], device=device)
    taken, root = (torch.full((2, 1, *ONE.state_axes), 7.0, device=device) for _ in range(2))
    want, before = plain.step(snapshots=root), inputs.state.data.clone()
    y = inputs.step(slots=inputs.at(write=write, parents=parents, snapshot_rows=rows), snapshots=taken)
    assert same_bytes(y[0], want[0])
    assert same_bytes(taken[0], root[0])
    assert same_bytes(inputs.state.data[write[0]], root[0])
    assert not y[1].any()
    assert (taken[1] == 7.0).all()
    assert same_bytes(inputs.state.data[write[1]], before[write[1]])
    flashstate.check_faults()
