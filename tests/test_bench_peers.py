"""Peers of the benchmark: which are chosen, what they are given, what is skipped and why; and the cost on the host."""

import re
from contextlib import nullcontext
from dataclasses import replace
from functools import update_wrapper
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from benching import CPU, CUDA, STAND_INS, TINY, TWO_MICROSECONDS, pretend, pretend_all, tiny_job
from printed import output_of
from torch import Tensor

from flashstate.bench import host, measure, run
from flashstate.bench.binding import IN_PLACE
from flashstate.bench.jobs import Stored
from flashstate.bench.measure import Report, storing_for
from flashstate.bench.ops import OPS
from flashstate.bench.peers import choose_peers, load_peers
from flashstate.bench.results import read_csv
from flashstate.bench.timing import Timing
from flashstate.proof import make_inputs

MAMBA2 = OPS["mamba2"]


def why_skipped(op: str, name: str, stored: Stored = "last", **changes: Any) -> str:
    """The reason why a peer is skipped; nothing if it is right."""
    job, report = tiny_job(op, stored, **changes), Report()
    with report.skipping(name):
        bind = OPS[op].peers[name].load()
        measure.check(bind, measure.inputs_of(job.case, CPU), storing_for(job, job.case.batch, CPU))
    return "".join(report.skipped.get(name, ()))


# What is chosen


def test_peers_are_all_or_those_named_and_which_cannot_be_imported_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert choose_peers(MAMBA2.peers, None) == MAMBA2.peers
    assert choose_peers(MAMBA2.peers, ["none"]) == {}
    assert list(choose_peers(MAMBA2.peers, ["fla", "vllm"])) == ["fla", "vllm"]
    for name, peer in MAMBA2.peers.items():
        pretend(monkeypatch, peer, STAND_INS["mamba2"][name] if name == "fla" else None)
    bindings, reasons = load_peers(MAMBA2.peers, CUDA)
    assert list(bindings) == ["fla"]
    assert reasons.keys() == MAMBA2.peers.keys() - {"fla"}
    assert all(reason.startswith("cannot be imported: ") for (reason,) in reasons.values())
    assert MAMBA2.peers["fla"].version == "1.2"
    assert load_peers(MAMBA2.peers, CPU) == ({}, {name: {"only compared on a GPU"} for name in MAMBA2.peers})


# What is checked, and what is skipped

SCALES, NEAREST = "only compared where states have no scales", "only .* rounded to nearest, not stochastic"
PLACE, ONE = "only compared where the last state is stored in place", "only compared with one token per call"
COMPARED: list[tuple[str, str, Stored, dict[str, Any], str]] = [  # what is right has no reason to be skipped
    *(("mamba2", name, "last", {"groups": 2, "heads": 4, "dt": "bfloat16"}, "") for name in STAND_INS["mamba2"]),
    *(("mamba2", name, "last", {"tokens": 3, "format": "bfloat16"}, "") for name in ("vllm", "flashinfer", "fla")),
    ("mamba2", "flashinfer", "every", {"format": "float16", "rounding": "stochastic", "tokens": 3}, ""),
    ("mamba2", "flashinfer", "last", {"format": "int16"}, ""),
    *(("gated_delta", name, "last", {"format": "bfloat16", "batch": 4}, "") for name in STAND_INS["gated_delta"]),
    *(("gated_delta", name, "last", {"tokens": 3}, "") for name in STAND_INS["gated_delta"]),
    ("gated_delta", "flashinfer", "every", {"format": "bfloat16", "tokens": 3}, ""),
    ("gated_delta", "fla", "none", {"tokens": 3}, ""),
    ("mamba3", "mamba_ssm", "last", {}, ""),
    *(("conv1d", "vllm", "last", {"tokens": tokens}, "") for tokens in (0, 3)),
    ("mamba2", "vllm", "last", {"format": "int8"}, SCALES),
    ("gated_delta", "vllm", "last", {"format": "bfloat16", "rounding": "stochastic"}, NEAREST),
    ("mamba2", "vllm", "every", {"tokens": 3}, PLACE),
    ("mamba2", "fla", "last", {"format": "float8_e4m3fn", "rounding": "stochastic"}, SCALES),
    ("mamba2", "mamba_ssm", "last", {"tokens": 3}, ONE),
    ("gated_delta", "fla", "every", {"tokens": 3}, "only compared without snapshots"),
    ("gated_delta", "flashinfer", "last", {"format": "float16"}, "it has no float16 states rounded nearest"),
    ("mamba2", "flashinfer", "last", {"format": "int8"}, "it has no int8 .* nearest"),
    ("mamba3", "mamba_ssm", "last", {"angles": 8}, f"{ONE}, whose B and C come turned"),
]  # fmt: skip


@pytest.mark.parametrize("op", STAND_INS)
def test_peers_that_are_right_pass_the_check_and_what_they_cannot_do_is_skipped_with_a_reason(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretend_all(monkeypatch, op)
    for _, name, stored, changes, reason in (row for row in COMPARED if row[0] == op):
        assert re.fullmatch(reason, why_skipped(op, name, stored, **changes)), (name, stored, changes)


def test_a_peer_that_is_wrong_or_fails_or_knows_too_little_is_skipped_with_a_reason(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (right,) = STAND_INS["mamba2"]["vllm"]

    def wrong_state(state: Tensor, *tensors: Tensor, **arguments: Any) -> Any:
        return right(state.clone(), *tensors, **arguments)

    def wrong_output(*tensors: Tensor, **arguments: Any) -> None:
        right(*tensors, **arguments)
        arguments["out"].mul_(2)

    fails = Mock(side_effect=AssertionError("only for batches of 8"))
    for op, name, function, reason in (
        ("mamba2", "vllm", update_wrapper(wrong_state, right), "wrong: its state is .* times the error budget.*"),
        ("mamba2", "vllm", update_wrapper(wrong_output, right), "wrong: its output is .* times the error budget.*"),
        ("mamba2", "vllm", update_wrapper(fails, right), "failed: AssertionError: only for batches of 8"),
        ("mamba2", "fla", lambda q, k, v, **options: None, "this release has no state_v_first.*"),
        ("gated_delta", "fla", lambda q, k, v, g, beta, output_final_state: None, "this release has no state_v_first"),
        ("conv1d", "vllm", lambda x, conv_state, weight, pad_slot_id=-1: None, "this release has no out, .* padding"),
    ):
        pretend(monkeypatch, OPS[op].peers[name], [function])
        assert re.fullmatch(reason, why_skipped(op, name))


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
    costs = {"torch.add_": Timing(8.0, 7.0, 9.0), "flashstate": Timing(10.0, 9.5, 11.0)}
    assert host.host_line(costs) == "torch.add_ 8.0 µs; flashstate 10.0 µs (1.25x)"
    row = measure.row_of("flashstate", tiny_job("mamba2"), TWO_MICROSECONDS, 100, TWO_MICROSECONDS)
    monkeypatch.setattr(run, "bench", lambda *arguments: Report([row]))
    monkeypatch.setattr(run, "host_costs", lambda *arguments: costs)
    monkeypatch.setattr(run, "provenance_of", lambda device, commit: {"device": "Some GPU"})
    monkeypatch.setenv("COLUMNS", "160")
    for name, peer in MAMBA2.peers.items():
        pretend(monkeypatch, peer, STAND_INS["mamba2"][name] if name == "fla" else None)
    run.run_bench(MAMBA2, [], MAMBA2.peers, CUDA, run.Files(csv=tmp_path / "gpu.csv"), None)
    provenance, rows = read_csv(tmp_path / "gpu.csv")
    of_run = {"slots": "int32 slots in random order", "peers": "fla 1.2", "host cost": host.host_line(costs)}
    assert provenance == {"device": "Some GPU", **of_run}
    assert [kept.implementation for kept in rows] == ["flashstate"]
    run.run_host(MAMBA2, MAMBA2.peers, CUDA)
    shown = output_of(capsys)
    assert f"host cost: {host.host_line(costs)}" in shown
    assert "flashstate 10.00 15.0% 1.25x" in shown
    assert shown.count("skipped vllm: cannot be imported: ") == 2
