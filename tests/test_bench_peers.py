"""Peers of the benchmark: which are chosen, what they are given, what is skipped and why; and the cost on the host."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from benching import (
    CPU,
    CUDA,
    STAND_INS,
    TINY,
    TWO_MICROSECONDS,
    decode_pretranspose,
    pretend,
    pretend_all,
    tiny_job,
)
from printed import output_of
from torch import Tensor

from flashstate.bench import host, measure, run
from flashstate.bench.binding import IN_PLACE
from flashstate.bench.jobs import Stored
from flashstate.bench.measure import Report, storing_for
from flashstate.bench.ops import OPS
from flashstate.bench.peers import MeasurementError, choose_peers, load_peers
from flashstate.bench.results import read_csv
from flashstate.bench.timing import Timing
from flashstate.proof import make_inputs

MAMBA2 = OPS["mamba2"]
COSTS = {"torch.add_": Timing(8.0, 7.0, 9.0), "flashstate": Timing(10.0, 9.5, 11.0)}
ALL = [(op, name) for op, peers in STAND_INS.items() for name in peers]


def check_peer(op: str, name: str, stored: Stored = "last", **changes: Any) -> None:
    """Raise MeasurementError with the reason why a peer is skipped, if it is."""
    job, report = tiny_job(op, stored, **changes), Report()
    with report.skipping(name):
        bind = OPS[op].peers[name].load()
        measure.check(bind, measure.inputs_of(job.case, CPU), storing_for(job, job.case.batch, CPU))
    for reason in report.skipped.get(name, ()):
        raise MeasurementError(reason)


# What is chosen


def test_all_peers_are_chosen_unless_some_are_named() -> None:
    known = MAMBA2.peers
    assert choose_peers(known, None) == known
    assert choose_peers(known, ["none"]) == {}
    assert list(choose_peers(known, ["fla", "vllm"])) == ["fla", "vllm"]
    for names, wrong in ((["vllm", "flash"], "flash"), (["none", "vllm"], "none")):
        with pytest.raises(ValueError, match=f"there is no peer '{wrong}', only vllm, flashinfer, mamba_ssm, fla; "):
            choose_peers(known, names)


def test_peers_that_cannot_be_imported_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, peer in MAMBA2.peers.items():
        pretend(monkeypatch, peer, STAND_INS["mamba2"][name] if name == "fla" else None)
    bindings, reasons = load_peers(MAMBA2.peers, CUDA)
    assert list(bindings) == ["fla"]
    assert reasons.keys() == MAMBA2.peers.keys() - {"fla"}
    assert all(reason.startswith("cannot be imported: ") for (reason,) in reasons.values())
    assert MAMBA2.peers["fla"].version == "1.2"
    assert load_peers(MAMBA2.peers, CPU) == ({}, {name: {"only compared on a GPU"} for name in MAMBA2.peers})


# What is checked, and what is skipped

RIGHT: list[tuple[str, str, Stored, dict[str, Any]]] = [
    *(("mamba2", name, "last", {"groups": 2, "heads": 4, "dt": "bfloat16"}) for name in STAND_INS["mamba2"]),
    *(("mamba2", name, "last", {"tokens": 3, "format": "bfloat16"}) for name in ("vllm", "flashinfer", "fla")),
    *(
        ("mamba2", "flashinfer", stored, {"format": "float16", "rounding": "stochastic", "tokens": tokens})
        for tokens, stored in ((0, "last"), (3, "every"), (3, "none"))
    ),
    ("mamba2", "flashinfer", "last", {"format": "int16"}),
    *(("gated_delta", name, "last", {"format": "bfloat16", "batch": 4}) for name in STAND_INS["gated_delta"]),
    *(("gated_delta", name, "last", {"tokens": 3}) for name in STAND_INS["gated_delta"]),
    *(("gated_delta", "flashinfer", how, {"format": "bfloat16", "tokens": 3}) for how in ("none", "every")),
    ("gated_delta", "fla", "none", {"tokens": 3}),
    ("mamba3", "mamba_ssm", "last", {}),
    *(("conv1d", "vllm", "last", {"tokens": tokens}) for tokens in (0, 3)),
]  # fmt: skip


@pytest.mark.parametrize("op", STAND_INS)
def test_peers_that_are_right_pass_the_check(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_all(monkeypatch, op)
    for _, name, stored, change in (right for right in RIGHT if right[0] == op):
        check_peer(op, name, stored, **change)


def test_the_peer_of_mamba3_leaves_k_and_v_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_all(monkeypatch, "mamba3")
    inputs = measure.inputs_of(TINY["mamba3"], CPU)
    ours, theirs = inputs.fresh(), inputs.fresh()
    OPS["mamba3"].bind(ours)(ours.at())()
    OPS["mamba3"].peers["mamba_ssm"].load()(theirs, IN_PLACE)(ours.at())()
    assert torch.equal(ours.state.k, theirs.state.k)
    assert torch.equal(ours.state.v, theirs.state.v)


def spoiled(right: Callable[..., Any], part: str) -> Callable[..., Any]:
    """A function that leaves states as they were, or doubles its output."""

    @wraps(right)  # with its signature, which bindings look at
    def wrong(*tensors: Tensor, **arguments: Any) -> Any:
        name = "state" if isinstance(arguments.get("state"), Tensor) else "initial_state"
        if part == "state":
            result = right(*tensors, **{**arguments, name: arguments[name].clone()})
            return (result[0], arguments[name]) if isinstance(result, tuple) else result
        result = right(*tensors, **arguments)
        y = result[0] if isinstance(result, tuple) else result
        (arguments["out"] if y is None else y).mul_(2)
        return result

    return wrong


@pytest.mark.parametrize(("op", "name"), ALL)
def test_a_peer_that_is_wrong_fails_the_check(op: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for part in ["output"] if op == "conv1d" else ["state", "output"]:
        pretend(monkeypatch, OPS[op].peers[name], [spoiled(function, part) for function in STAND_INS[op][name]])
        for tokens in [0] if name == "mamba_ssm" else [0, 3]:
            with pytest.raises(MeasurementError, match=f"wrong: its {part} is .* times the error budget"):
                check_peer(op, name, tokens=tokens)


def test_a_peer_that_fails_is_skipped_with_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*tensors: Tensor, **arguments: Any) -> Tensor:
        raise AssertionError("only for batches of 8")

    peer = MAMBA2.peers["vllm"]
    pretend(monkeypatch, peer, None)
    with pytest.raises(MeasurementError, match=r"cannot be imported: .*vllm"):
        check_peer("mamba2", "vllm")
    pretend(monkeypatch, peer, [wraps(STAND_INS["mamba2"]["vllm"][0])(refuses)])
    with pytest.raises(MeasurementError, match="failed: AssertionError: only for batches of 8"):
        check_peer("mamba2", "vllm")


STOCHASTIC = {"format": "bfloat16", "rounding": "stochastic"}
SCALES, NEAREST = "only compared where states have no scales", "only .* rounded to nearest, not stochastic"
PLACE, ONE = "only compared where the last state is stored in place", "only compared with one token per call"
SKIPPED: list[tuple[str, str, Stored, dict[str, Any], str]] = [
    *((op, "vllm", "last", {"format": "int8"}, SCALES) for op in ("mamba2", "gated_delta")),
    *((op, "vllm", "last", STOCHASTIC, NEAREST) for op in ("mamba2", "gated_delta")),
    *((op, "vllm", how, {"tokens": 3}, PLACE) for op in ("mamba2", "gated_delta") for how in ("every", "none")),
    ("mamba2", "fla", "last", {"format": "float8_e4m3fn", "rounding": "stochastic"}, SCALES),
    ("mamba2", "fla", "every", {"tokens": 3}, PLACE),
    ("mamba2", "mamba_ssm", "last", STOCHASTIC, NEAREST),
    ("mamba2", "mamba_ssm", "last", {"tokens": 3}, ONE),
    ("gated_delta", "fla", "last", {"format": "int16"}, SCALES),
    ("gated_delta", "fla", "every", {"tokens": 3}, "only compared without snapshots"),
    ("gated_delta", "flashinfer", "last", {"format": "float16"}, "it has no float16 states rounded nearest"),
    *((op, "flashinfer", "last", {"format": "int8"}, "it has no int8 .* nearest") for op in ("mamba2", "gated_delta")),
    *((op, "flashinfer", "last", STOCHASTIC, "it has no bfloat16 .*tic") for op in ("mamba2", "gated_delta")),
    ("mamba3", "mamba_ssm", "last", {"tokens": 2}, f"{ONE}, whose B and C come turned"),
    ("mamba3", "mamba_ssm", "last", {"angles": 8}, f"{ONE}, whose B and C come turned"),
    ("mamba3", "mamba_ssm", "last", {"format": "int8"}, SCALES),
]


def test_what_a_peer_cannot_do_is_skipped_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, name, stored, change, reason in SKIPPED:
        pretend_all(monkeypatch, op)
        with pytest.raises(MeasurementError, match=f"^{reason}$"):
            check_peer(op, name, stored, **change)


def older_decode(
    q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    initial_state: Tensor, initial_state_indices: Tensor, use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As FlashInfer before it could leave states as they are."""
    gates = (A_log, a, dt_bias, b)
    return decode_pretranspose(q, k, v, state, *gates, initial_state, initial_state_indices, None, use_qk_l2norm)


def test_releases_that_know_too_little_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    for op, name, older, reason in (
        ("mamba2", "fla", lambda q, k, v, **options: None, "this release has no state_v_first.*"),
        ("gated_delta", "fla", lambda q, k, v, g, beta, output_final_state: None, "this release has no state_v_first"),
        ("conv1d", "vllm", lambda x, conv_state, weight, pad_slot_id=-1: None, "this release has no out, .* padding"),
    ):
        pretend(monkeypatch, OPS[op].peers[name], [older])
        with pytest.raises(MeasurementError, match=f"^{reason}$"):
            check_peer(op, name)


def test_older_releases_of_flashinfer_are_compared_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(
        monkeypatch, OPS["gated_delta"].peers["flashinfer"], [older_decode, STAND_INS["gated_delta"]["flashinfer"][1]]
    )
    check_peer("gated_delta", "flashinfer", format="bfloat16", tokens=3)
    for stored in ("none", "every"):
        with pytest.raises(MeasurementError, match=r"^this release only updates such states in place$"):
            check_peer("gated_delta", "flashinfer", stored, format="bfloat16", tokens=3)


# The cost on the host


def test_the_cost_on_the_host_is_compared_with_an_addition(monkeypatch: pytest.MonkeyPatch) -> None:
    op = "mamba2"
    waits: list[None] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host, "CHUNK", 2)
    monkeypatch.setattr(host, "CHUNKS", 3)
    pretend_all(monkeypatch, op)
    pretend(monkeypatch, OPS[op].peers["vllm"], None)
    bindings, _ = load_peers(OPS[op].peers, CUDA)
    benched, report = replace(OPS[op], case=TINY[op]), Report()
    costs = host.host_costs(benched, {**bindings, "wrong": lambda inputs, storing: host.seconds_of}, CPU, report)
    others = [name for name in OPS[op].peers if name != "vllm"]
    assert list(costs) == ["torch.add_", "flashstate", "flashstate, plain tensors", *others]
    assert len(waits) == len(costs) * (1 + host.CHUNKS + 1)
    assert all(cost.median > 0 for cost in costs.values())
    assert report.skipped.keys() == {"wrong"}


@pytest.mark.parametrize("op", OPS)
def test_the_small_call_of_every_op_takes_plain_tensors(op: str) -> None:
    inputs = make_inputs(TINY[op], CPU)
    (OPS[op].check or measure.check)(lambda inputs, storing: OPS[op].bind(inputs, storing, bare=True), inputs, IN_PLACE)


def test_a_run_on_a_gpu_keeps_the_cost_on_the_host_and_the_versions_of_peers(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert host.host_line(COSTS) == "torch.add_ 8.0 µs; flashstate 10.0 µs (1.25x)"
    row = measure.row_of("flashstate", tiny_job("mamba2"), TWO_MICROSECONDS, 100, TWO_MICROSECONDS)
    monkeypatch.setattr(run, "bench", lambda *arguments: Report([row]))
    monkeypatch.setattr(run, "host_costs", lambda *arguments: COSTS)
    monkeypatch.setattr(run, "provenance_of", lambda device, commit: {"device": "Some GPU"})
    monkeypatch.setenv("COLUMNS", "160")
    for name, peer in MAMBA2.peers.items():
        pretend(monkeypatch, peer, STAND_INS["mamba2"][name] if name == "fla" else None)
    run.run_bench(MAMBA2, [], MAMBA2.peers, CUDA, run.Files(csv=tmp_path / "gpu.csv"), None)
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    of_run = {"slots": "int32 slots in random order", "peers": "fla 1.2", "host cost": host.host_line(COSTS)}
    assert provenance == {"device": "Some GPU", **of_run}
    assert [kept.implementation for kept in rows] == ["flashstate"]
    run.run_host(MAMBA2, MAMBA2.peers, CUDA)
    shown = output_of(capsys)
    assert f"host cost: {host.host_line(COSTS)}" in shown
    assert "flashstate 10.00 15.0% 1.25x" in shown
    assert shown.count("skipped vllm: cannot be imported: ") == 2
