"""Peers of the benchmark: which are chosen, what they are given, what is skipped and why; and the cost on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import benching
import pytest
import torch
from benching import NEEDS_INTERPRETER, TWO_MICROSECONDS, measure_in_the_interpreter
from torch import Tensor

from flashstate import Slots, State
from flashstate.bench import host, measure, run
from flashstate.bench.jobs import Job, Stored
from flashstate.bench.mamba2 import MAMBA2, PEERS
from flashstate.bench.measure import Report, measure_on_gpu, storing_for
from flashstate.bench.peers import MeasurementError, choose_peers, load_peers, versions_of
from flashstate.bench.results import read_csv
from flashstate.bench.timing import Timing
from flashstate.cli import main
from flashstate.ops.mamba2 import mamba2_step
from flashstate.proof import Case, interpreted, make_inputs

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
TINY_CASE = Case(batch=2, heads=2, groups=1, rows=4, cols=16, slots=5)
COSTS = {"torch.add_": Timing(8.0, 7.0, 9.0), "flashstate": Timing(10.0, 9.5, 11.0)}


# Stand-ins


def selective_state_update(
    state: Tensor, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor,
    D: Tensor, z: Tensor, dt_bias: Tensor, dt_softplus: bool, state_batch_indices: Tensor, **more: Any,
) -> Tensor:  # fmt: skip
    """What mamba_ssm does, with the shapes it insists on; others pass more arguments of mamba2_step."""
    assert x.shape == dt.shape == z.shape
    assert A.shape == (state if isinstance(state, Tensor) else state.data).shape[1:]
    assert D.shape == dt_bias.shape == A.shape[:2]
    options: dict[str, Any] = {"D": D, "z": z, "dt_bias": dt_bias, "dt_softplus": dt_softplus}
    return mamba2_step(state, x, dt, A, B, C, **options, **{"slots": state_batch_indices, **more})


def vllm_update(
    state_batch_indices: Tensor, out: Tensor, null_block_id: int = 0, cu_seqlens: Tensor | None = None, **rest: Any
) -> None:
    """As vLLM: slot 0 is padding unless another is named, several tokens are packed, and nothing is returned."""
    assert out.dim() == 3
    slots = torch.where(state_batch_indices == null_block_id, -1, state_batch_indices)
    at = Slots(slots) if cu_seqlens is None else Slots(slots, cu_seqlens=cu_seqlens, max_len=out.shape[0])
    selective_state_update(state_batch_indices=slots, slots=at, out=out, **rest)


def flashinfer_update(
    state: Tensor, x: Tensor, dt: Tensor, D: Tensor, state_batch_indices: Tensor, out: Tensor, cache_steps: int = 0,
    state_scale: Tensor | None = None, rand_seed: Tensor | None = None, philox_rounds: int = 10,
    disable_state_update: bool = False, intermediate_states_buffer: Tensor | None = None,
    intermediate_state_scales: Tensor | None = None, intermediate_state_indices: Tensor | None = None, **rest: Any,
) -> Tensor:  # fmt: skip
    """As flashinfer: dt has the dtype of D, one seed serves all slots, snapshots have names of their own."""
    assert dt.dtype == D.dtype
    assert cache_steps == (x.shape[1] if x.dim() == 4 else 0)
    rounding = "nearest" if rand_seed is None else "stochastic"
    seed = None if rand_seed is None else rand_seed.expand(len(state)).contiguous()
    pool = State(state, state_scale, rounding=rounding, rounds=philox_rounds, seed=seed)
    rest["update"] = not disable_state_update
    if intermediate_states_buffer is not None:
        rest["snapshots"] = State(intermediate_states_buffer, intermediate_state_scales, rounding=rounding)
        rest["slots"] = Slots(state_batch_indices, snapshot_rows=intermediate_state_indices)
    indices = {"state_batch_indices": state_batch_indices}
    return selective_state_update(state=pool, x=x, dt=dt, D=D, out=out, **indices, **rest)


def fused_recurrent_simple_gla(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, scale: float, initial_state: Tensor, output_final_state: bool,
    state_v_first: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As fla: (batch, T, heads, ...), and states that are rows x columns only when asked."""
    assert output_final_state
    assert q.shape == k.shape == (*v.shape[:3], initial_state.shape[3 if state_v_first else 2])
    s, outputs = initial_state.float(), []
    for t in range(q.shape[1]):
        s = s * g[:, t, :, None, None].exp() + v[:, t, :, :, None] * k[:, t, :, None, :].float()
        outputs.append(scale * (s * q[:, t, :, None, :].float()).sum(-1))
    return torch.stack(outputs, 1).to(q.dtype), s


STAND_INS: dict[str, Callable[..., Any]] = {
    "vllm": vllm_update,
    "flashinfer": flashinfer_update,
    "mamba_ssm": selective_state_update,
    "fla": fused_recurrent_simple_gla,
}


def pretend(monkeypatch: pytest.MonkeyPatch, name: str, function: Callable[..., Any] | None) -> None:
    """Install a library with this function; with None one that cannot be imported."""
    benching.pretend(monkeypatch, PEERS[name], None if function is None else [function])


def check_peer(name: str, case: Case, stored: Stored = "last") -> None:
    storing = storing_for(Job("mamba2", case, stored), case.batch, CPU)
    with measure.failures_as_reasons():
        measure.check(PEERS[name].load(), make_inputs(case, CPU), storing)


# What is chosen


def test_all_peers_are_chosen_unless_some_are_named() -> None:
    assert choose_peers(PEERS, None) == PEERS
    assert choose_peers(PEERS, ["none"]) == {}
    assert list(choose_peers(PEERS, ["fla", "vllm"])) == ["fla", "vllm"]
    for names, wrong in ((["vllm", "flash"], "flash"), (["none", "vllm"], "none")):
        with pytest.raises(ValueError, match=f"there is no peer '{wrong}', only vllm, flashinfer, mamba_ssm, fla; "):
            choose_peers(PEERS, names)


def test_an_unknown_peer_is_an_error_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flashstate.bench.run.bench", None)
    assert main(["bench", "--device", "cpu", "--peers", "torch"]) == 2
    assert "there is no peer 'torch', only vllm" in capsys.readouterr().err


def test_peers_that_cannot_be_imported_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in PEERS:
        pretend(monkeypatch, name, STAND_INS[name] if name == "fla" else None)
    bindings, reasons = load_peers(PEERS, CUDA)
    assert list(bindings) == ["fla"]
    assert reasons.keys() == PEERS.keys() - {"fla"}
    assert all(reason.startswith("cannot be imported: ") for (reason,) in reasons.values())
    assert versions_of(PEERS, bindings) == "fla 1.2"
    assert load_peers(PEERS, CPU) == ({}, {name: {"only compared on a GPU"} for name in PEERS})


# What is checked, and what is skipped


@pytest.mark.parametrize("change", [{}, {"groups": 2, "heads": 4}, {"format": "bfloat16"}], ids=str)
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_right_passes_the_check(
    name: str, change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, STAND_INS[name])
    check_peer(name, replace(TINY_CASE, dt="bfloat16", batch=5, **change))  # all slots, so slot 0 too


@pytest.mark.parametrize("name", ["vllm", "flashinfer", "fla"])
def test_a_peer_that_knows_several_tokens_is_given_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, name, STAND_INS[name])
    check_peer(name, replace(TINY_CASE, tokens=3))


@pytest.mark.parametrize("form", [(0, "last"), (3, "last"), (3, "snapshots"), (3, "nothing")], ids=str)
@pytest.mark.parametrize("fmt", [("float16", "stochastic"), ("int16", "nearest")], ids=str)
def test_flashinfer_is_given_scales_seeds_and_snapshots(
    fmt: tuple[str, str], form: tuple[int, Stored], monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, "flashinfer", flashinfer_update)
    tokens, stored = form
    check_peer("flashinfer", replace(TINY_CASE, format=fmt[0], rounding=fmt[1], tokens=tokens), stored)


@pytest.mark.parametrize("part", ["state", "output"])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_wrong_fails_the_check(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = STAND_INS[name]

    @wraps(right)  # with its signature, which bindings look at
    def wrong(*tensors: Tensor, **arguments: Any) -> Any:
        if name == "fla":
            y, after = right(*tensors, **arguments)
            return (y, arguments["initial_state"]) if part == "state" else (2 * y, after)
        change = {"state": arguments["state"].clone()} if part == "state" else {"C": 2 * arguments["C"]}
        return right(**{**arguments, **change})

    pretend(monkeypatch, name, wrong)
    with pytest.raises(MeasurementError, match=f"wrong: its {part} is .* times the error budget"):
        check_peer(name, TINY_CASE)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_fails_is_skipped_with_its_words(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*tensors: Tensor, state_v_first: bool = False, **arguments: Any) -> Tensor:
        raise AssertionError("only for batches of 8")

    pretend(monkeypatch, name, None)
    with pytest.raises(MeasurementError, match=r"cannot be imported: .*" + PEERS[name].module.split(".")[0]):
        check_peer(name, TINY_CASE)
    pretend(monkeypatch, name, refuses)
    with pytest.raises(MeasurementError, match="failed: AssertionError: only for batches of 8"):
        check_peer(name, TINY_CASE)


SKIPPED = [
    ("vllm", {"format": "float16", "rounding": "stochastic"}, "only .* rounded to nearest, not stochastic"),
    ("vllm", {"format": "int8"}, "only compared where states have no scales"),
    ("vllm", {"tokens": 3, "stored": "snapshots"}, "only compared where the last state is stored in place"),
    ("vllm", {"tokens": 3, "stored": "nothing"}, "only compared where the last state is stored in place"),
    ("fla", {"format": "float8_e4m3fn", "rounding": "stochastic"}, "only compared where states have no scales"),
    ("fla", {"tokens": 3, "stored": "snapshots"}, "only compared where the last state is stored in place"),
    ("mamba_ssm", {"format": "bfloat16", "rounding": "stochastic"}, "only .* rounded to nearest, not stochastic"),
    ("mamba_ssm", {"tokens": 3}, "only compared with one token per call"),
    ("flashinfer", {"format": "int8"}, "it has no int8 states rounded nearest"),
    ("flashinfer", {"format": "bfloat16", "rounding": "stochastic"}, "it has no bfloat16 states rounded stochastic"),
]


@pytest.mark.parametrize(("name", "change", "reason"), SKIPPED)
def test_what_a_peer_cannot_do_is_skipped_with_a_reason(
    name: str, change: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend(monkeypatch, name, STAND_INS[name])
    stored = change.get("stored", "last")
    case = replace(TINY_CASE, **{key: value for key, value in change.items() if key != "stored"})
    with pytest.raises(MeasurementError, match=f"^{reason}$"):
        check_peer(name, case, stored)


def test_fla_without_our_layout_of_states_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "fla", lambda q, k, v, **options: (v, options["initial_state"]))
    with pytest.raises(MeasurementError, match="this release has no state_v_first"):
        check_peer("fla", TINY_CASE)


# What is measured


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize("form", ["", ", 3 tokens", ", 3 tokens, snapshots", ", 3 tokens, nothing stored"])
def test_on_a_gpu_flashstate_and_right_peers_are_measured_beside_the_roofs(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_in_the_interpreter(monkeypatch)
    for name in PEERS:
        pretend(monkeypatch, name, STAND_INS[name])
    bindings, _ = load_peers(PEERS, CUDA)
    stored: Stored = "snapshots" if "snapshots" in form else "nothing" if "nothing" in form else "last"
    job = Job("mamba2", replace(TINY_CASE, tokens=3 if form else 0), stored)
    report = Report()
    with interpreted():
        measure_on_gpu(MAMBA2, job, bindings, CPU, report)
    skipped = {"": set(), ", 3 tokens": {"mamba_ssm"}}.get(form, {"mamba_ssm", "vllm", "fla"})
    roofs_of_job = ["read"] if stored == "nothing" else ["touch", "read"]
    measured = [*roofs_of_job, "flashstate", *(name for name in PEERS if name not in skipped)]
    assert [(row.implementation, row.percent_of_roof) for row in report.rows] == [(name, 100.0) for name in measured]
    assert {row.label for row in report.rows} == {f"float32{form}"}
    assert report.skipped.keys() == skipped


def test_the_cost_on_the_host_is_compared_with_an_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host, "CHUNK", 2)
    monkeypatch.setattr(host, "CHUNKS", 3)
    for name in PEERS:
        pretend(monkeypatch, name, None if name == "vllm" else STAND_INS[name])
    bindings, _ = load_peers(PEERS, CUDA)
    op = replace(MAMBA2, host_case=TINY_CASE)
    report = Report()
    costs = host.host_costs(op, {**bindings, "wrong": lambda inputs, storing: host.seconds_of}, CPU, report)
    assert list(costs) == ["torch.add_", "flashstate", "flashstate, plain tensors", *bindings]
    assert len(waits) == len(costs) * (1 + host.CHUNKS + 1)
    assert all(cost.median > 0 for cost in costs.values())
    assert report.skipped["wrong"]


def test_the_line_of_costs_has_ratios() -> None:
    assert host.host_line(COSTS) == "torch.add_ 8.0 µs; flashstate 10.0 µs (1.25x)"


def test_a_run_on_a_gpu_keeps_the_cost_on_the_host_and_the_versions_of_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = measure.row_of("flashstate", Job("mamba2", TINY_CASE), TWO_MICROSECONDS, 100, TWO_MICROSECONDS)
    monkeypatch.setattr(run, "bench", lambda *arguments: Report([row]))
    monkeypatch.setattr(run, "host_costs", lambda *arguments: COSTS)
    monkeypatch.setattr(run, "provenance_of", lambda device, commit: {"device": "Some GPU"})
    monkeypatch.setenv("COLUMNS", "160")
    for name in PEERS:
        pretend(monkeypatch, name, STAND_INS[name] if name == "fla" else None)
    assert run.run_bench(MAMBA2, [], PEERS, CUDA, run.Files(csv=tmp_path / "gpu.csv")) == 0
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    assert provenance == {"device": "Some GPU", "peers": "fla 1.2", "host cost": host.host_line(COSTS)}
    assert [kept.implementation for kept in rows] == ["flashstate"]
    assert run.run_host(MAMBA2, PEERS, CUDA) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert f"host cost: {host.host_line(COSTS)}" in shown
    assert "flashstate 10.00 15.0% 1.25x" in shown
    assert shown.count("skipped vllm: cannot be imported: ") == 2
