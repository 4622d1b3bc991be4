"""The benchmark of gated_delta_step: its jobs, tokens at once, bytes, roofs, checks, peers and configs."""

from __future__ import annotations

from collections import Counter
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

from flashstate import Slots, gated_delta_step
from flashstate.bench import host, measure, timing
from flashstate.bench.gated_delta import GATED_DELTA, LARGE, LAYERS, PEERS, SMALL, at_once, in_split_pool, one_token
from flashstate.bench.jobs import Grid, Job, Shape, Stored
from flashstate.bench.measure import Report, measure_on_gpu, row_of, storing_for
from flashstate.bench.peers import MeasurementError, load_peers
from flashstate.bench.results import read_csv
from flashstate.bench.timing import MIN_LAUNCHES, Timing
from flashstate.cli import main
from flashstate.launch import Config, TensorCoreProblem
from flashstate.launch.config import mode_key, table_key
from flashstate.proof import DeltaCase, interpreted, make_inputs
from flashstate.reference.gated_delta import gated_delta_token
from flashstate.state.formats import PORTABLE_FORMATS, bits_of
from flashstate.tune import GpuStopwatch, jobs_by_problem, with_variants

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
HALF = {"x": "float16", "qk": "float16", "gates": "float16"}  # the interpreter's bfloat16 is wrong
TINY_CASE = DeltaCase(batch=2, heads=4, key_heads=2, rows=4, cols=16, slots=5, **HALF)
TINIEST_CASE = replace(TINY_CASE, batch=1, heads=1, key_heads=1, rows=2, tokens=2)  # for kernels, interpreted
TINY_GRID = Grid((Shape(4, 2, 4, 16),), (("float32", "nearest"),), (1, 3), ("last", "snapshots", "nothing"), (2,))


# Jobs, and what a row says of them


def test_a_plain_run_measures_what_the_op_is_for() -> None:
    jobs = GATED_DELTA.jobs(GATED_DELTA.grids)
    found = Counter((job.case.measured_axes, job.case.format, job.case.tokens, job.stored) for job in jobs)
    want = {(LARGE, name, 0, "last"): 5 for name in ("float32", "bfloat16", "int8", "float8_e4m3fn")}
    want[SMALL, "bfloat16", 0, "last"] = 5
    for name, tokens in (("float32", 4), ("bfloat16", 4), ("bfloat16", 8)):
        want |= {(LARGE, name, tokens, stored): 5 for stored in ("last", "nothing")}
    want[LARGE, "bfloat16", 4, "snapshots"] = 5
    assert found == want
    assert {job.case.batch for job in jobs} == {1, 4, 16, 64, 256}
    assert {(job.case.x, job.case.qk, job.case.gates, job.case.parameters) for job in jobs} == {
        ("bfloat16", "bfloat16", "bfloat16", "float32")
    }
    assert all(job.case.qk_l2norm and job.case.exact and job.case.slots > job.case.batch for job in jobs)


def test_a_row_counts_every_byte_and_says_how_many_heads_and_what_is_stored() -> None:
    jobs = GATED_DELTA.jobs([TINY_GRID])
    labels = ["", ", 3 tokens", ", 3 tokens, snapshots", ", 3 tokens, nothing stored"]
    assert [job.stores for job in jobs] == [1, 1, 3, 0]
    for job, form in zip(jobs, labels, strict=True):
        inputs = make_inputs(job.case, CPU)
        tensors = (t for t in (*inputs.arguments.values(), *inputs.options.values()) if isinstance(t, Tensor))
        others = sum(t.nbytes for t in tensors) + inputs.main.nbytes + inputs.slots.nbytes
        states = inputs.state.data[:2].nbytes
        assert job.counted_bytes == (1 + job.stores) * states + others
        assert (job.touched_bytes, job.read_bytes) == ((1 + job.stores) * states, states)
        row = row_of("flashstate", job, TWO_MICROSECONDS, 1, TWO_MICROSECONDS)
        assert (row.label, row.shape) == (f"4 heads, float32{form}", "gated_delta, 2 key heads, 4 x 16")


def test_key_heads_that_do_not_divide_heads_are_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "gated_delta", "--device", "cpu", "--heads", "6", "--groups", "4"]) == 2
    assert "the number of groups, which are key heads, must divide the 6 heads, got 4" in capsys.readouterr().err


# Tokens at once


@pytest.mark.parametrize(
    ("tokens", "stored", "reason"),
    [
        (0, "last", "only for calls of 2 to 16 tokens"),
        (17, "last", "only for calls of 2 to 16 tokens"),
        (3, "snapshots", "only where no state between tokens is stored"),
    ],
)
def test_what_cannot_go_at_once_is_skipped_with_a_reason(tokens: int, stored: Stored, reason: str) -> None:
    with pytest.raises(MeasurementError, match=f"^{reason}$"):
        at_once(Job("gated_delta", replace(TINY_CASE, tokens=tokens), stored))


@NEEDS_INTERPRETER
@pytest.mark.interpreted
@pytest.mark.parametrize(("tokens", "stored"), [(0, "last"), (2, "last"), (2, "snapshots"), (2, "nothing")])
def test_tokens_at_once_are_checked_with_their_own_budget_and_measured_beside_the_roofs(
    tokens: int, stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure_in_the_interpreter(monkeypatch)
    checked: list[bool] = []
    oracle = measure.oracle

    def noted(inputs: Any) -> Any:
        checked.append(inputs.options["exact"])
        return oracle(inputs)

    monkeypatch.setattr(measure, "oracle", noted)
    report = Report()
    job = Job("gated_delta", replace(TINIEST_CASE, tokens=tokens), stored)
    with interpreted():
        measure_on_gpu(GATED_DELTA, job, {}, CPU, report)
    goes = tokens > 1 and stored != "snapshots"
    names = [*(["read"] if stored == "nothing" else ["touch", "read"]), "flashstate"]
    names += ["flashstate, at once"] if goes else ["touch, split pool", "flashstate, split pool"] if not tokens else []
    assert [row.implementation for row in report.rows] == names
    assert all(row.percent_of_roof == 100.0 and row.stored == stored for row in report.rows)
    assert (False in checked) == goes
    assert report.skipped.keys() == {"flashstate, at once", "flashstate, split pool"}.difference(names)


@pytest.mark.parametrize("name", ["bfloat16", "int8"])
def test_a_split_pool_has_the_same_states_far_apart_and_a_step_changes_nothing_around_them(name: str) -> None:
    inputs = make_inputs(replace(TINY_CASE, format=name), CPU)
    split = in_split_pool(inputs.fresh())
    assert split.state.data.stride() == (LAYERS * inputs.state.data.stride(0), *inputs.state.data.stride()[1:])
    assert torch.equal(split.state.data, inputs.state.data)
    size, page = inputs.state.data[0].numel(), split.state.data.stride(0)
    around = bits_of(split.state.data.as_strided((len(split.state.data), page - size), (page, 1), 0))
    before = around.clone()
    assert torch.equal(split.step(), inputs.step())
    assert torch.equal(split.state.data, inputs.state.data)
    assert torch.equal(around, before)


def test_split_pools_are_measured_with_one_token() -> None:
    assert one_token(Job("gated_delta", TINY_CASE)) == Job("gated_delta", TINY_CASE)
    with pytest.raises(MeasurementError, match=r"^only compared with one token per call$"):
        one_token(Job("gated_delta", replace(TINY_CASE, tokens=2)))


# Peers: stand-ins by their contracts


def packed_decode(
    mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor, scale: float, initial_state: Tensor,
    out: Tensor, ssm_state_indices: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As vLLM: q, k and v of a token side by side, and slot 0 is padding."""
    _, HV, V, K = initial_state.shape
    assert out.shape == (len(a), 1, HV, V)
    keys = (mixed_qkv.shape[1] - HV * V) // 2
    q, k, v = mixed_qkv.split([keys, keys, HV * V], dim=1)
    q, k, v = q.reshape(-1, keys // K, K), k.reshape(-1, keys // K, K), v.reshape(-1, HV, V)
    gated_delta_step(
        initial_state, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, scale=scale, qk_l2norm=use_qk_l2norm_in_kernel,
        slots=Slots(ssm_state_indices, null=0), out=out[:, 0],
    )  # fmt: skip
    return out, initial_state


def sigmoid_gating_update(
    A_log: Tensor, a: Tensor, b: Tensor, dt_bias: Tensor, q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor,
    ssm_state_indices: Tensor, num_accepted_tokens: Tensor, use_qk_l2norm_in_kernel: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As vLLM: the state after every token is stored in its slot, unless that is 0; a row reads the last accepted."""
    slots = Slots(ssm_state_indices, accepted=num_accepted_tokens, write=ssm_state_indices, null=0)
    gates = {"A_log": A_log, "dt_bias": dt_bias, "qk_l2norm": use_qk_l2norm_in_kernel}
    return gated_delta_step(initial_state, q, k, v, a, b, **gates, slots=slots), initial_state


def decode_pretranspose(
    q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    output: Tensor | None = None, use_qk_l2norm: bool = True, initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None, *, intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As FlashInfer: a token axis always, and several tokens only of bfloat16 states."""
    assert initial_state is not None
    assert v.shape[1] == 1 or initial_state.dtype == torch.bfloat16
    assert v.shape[1] > 1 or not disable_state_update
    y = gated_delta_step(
        initial_state, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, qk_l2norm=use_qk_l2norm, out=output,
        slots=initial_state_indices, snapshots=intermediate_states_buffer, update=not disable_state_update,
    )  # fmt: skip
    return y, initial_state


def older_decode_pretranspose(
    q: Tensor, k: Tensor, v: Tensor, state: None, A_log: Tensor, a: Tensor, dt_bias: Tensor, b: Tensor,
    output: Tensor | None = None, use_qk_l2norm: bool = True, initial_state: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same before it could leave states as they are."""
    given = {"A_log": A_log, "a": a, "dt_bias": dt_bias, "b": b, "output": output, "use_qk_l2norm": use_qk_l2norm}
    pool = {"initial_state": initial_state, "initial_state_indices": initial_state_indices}
    return decode_pretranspose(q, k, v, state, **given, **pool)


def mtp(
    q: Tensor, k: Tensor, v: Tensor, initial_state: Tensor, initial_state_indices: Tensor, A_log: Tensor, a: Tensor,
    dt_bias: Tensor, b: Tensor, output: Tensor | None = None, intermediate_states_buffer: Tensor | None = None,
    disable_state_update: bool | None = None, use_qk_l2norm: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """As FlashInfer: several tokens of float32 states, which it leaves as they are unless told otherwise."""
    assert initial_state.dtype == torch.float32
    assert disable_state_update is not None
    y = gated_delta_step(
        initial_state, q, k, v, a, b, A_log=A_log, dt_bias=dt_bias, qk_l2norm=use_qk_l2norm, out=output,
        slots=initial_state_indices, snapshots=intermediate_states_buffer, update=not disable_state_update,
    )  # fmt: skip
    return y, initial_state


def fused_recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, A_log: Tensor, dt_bias: Tensor, initial_state: Tensor,
    output_final_state: bool, use_qk_l2norm_in_kernel: bool, use_gate_in_kernel: bool,
    use_beta_sigmoid_in_kernel: bool, state_v_first: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """As fla: a token axis always, a state per row of the batch, and a new one in float32 where it is asked for."""
    assert use_gate_in_kernel
    assert use_beta_sigmoid_in_kernel
    assert state_v_first
    s, outputs = initial_state.float(), []
    for t in range(q.shape[1]):
        token = (x[:, t] for x in (q, k, v, g, beta))
        o, s = gated_delta_token(s, *token, A_log, dt_bias, None, use_qk_l2norm_in_kernel)
        outputs.append(o)
    return torch.stack(outputs, 1).to(v.dtype), s if output_final_state else None


STAND_INS: dict[str, list[Callable[..., Any]]] = {
    "vllm": [packed_decode, sigmoid_gating_update],
    "flashinfer": [decode_pretranspose, mtp],
    "fla": [fused_recurrent],
}


def check_peer(name: str, case: DeltaCase, stored: Stored = "last") -> None:
    storing = storing_for(Job("gated_delta", case, stored), case.batch, CPU)
    with measure.failures_as_reasons():
        measure.check(PEERS[name].load(), measure.inputs_of(case, CPU), storing)


FORMS: list[tuple[str, dict[str, Any], Stored]] = [
    *[(name, {"format": fmt}, "last") for name in PEERS for fmt in ("float32", "bfloat16")],
    *[(name, {"format": fmt, "tokens": 3}, "last") for name in PEERS for fmt in ("float32", "bfloat16")],
    ("vllm", {"format": "float16", "batch": 4}, "last"),
    ("fla", {"tokens": 3}, "nothing"),
    *[("flashinfer", {"format": fmt, "tokens": 3}, "nothing") for fmt in ("float32", "bfloat16")],
    *[("flashinfer", {"format": fmt, "tokens": 3}, "snapshots") for fmt in ("float32", "bfloat16")],
]


@pytest.mark.parametrize(("name", "change", "stored"), FORMS)
def test_a_peer_that_is_right_passes_the_check(
    name: str, change: dict[str, Any], stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    benching.pretend(monkeypatch, PEERS[name], STAND_INS[name])
    check_peer(name, replace(TINY_CASE, **change), stored)


@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("part", ["state", "output"])
@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_wrong_fails_the_check(
    name: str, part: str, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(right: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(right)  # with its signature, which bindings look at
        def wrong(*tensors: Tensor, **arguments: Any) -> Any:
            if part == "state":
                before = arguments["initial_state"]
                return right(*tensors, **{**arguments, "initial_state": before.clone()})[0], before
            o, after = right(*tensors, **arguments)
            return 2 * o, after

        return wrong

    benching.pretend(monkeypatch, PEERS[name], [spoiled(function) for function in STAND_INS[name]])
    with pytest.raises(MeasurementError, match=f"wrong: its {part} is .* times the error budget"):
        check_peer(name, replace(TINY_CASE, tokens=tokens))


SKIPPED: list[tuple[str, dict[str, Any], Stored, str]] = [
    ("vllm", {"format": "int8"}, "last", "only compared where states have no scales"),
    ("vllm", {"format": "bfloat16", "rounding": "stochastic"}, "last", "only .* rounded to nearest, not stochastic"),
    ("vllm", {"tokens": 3}, "nothing", "only compared where the last state is stored in place"),
    ("vllm", {"tokens": 3}, "snapshots", "only compared where the last state is stored in place"),
    ("fla", {"format": "int16"}, "last", "only compared where states have no scales"),
    ("fla", {"tokens": 3}, "snapshots", "only compared without snapshots"),
    ("flashinfer", {"format": "float16"}, "last", "it has no float16 states rounded nearest"),
    ("flashinfer", {"format": "int8"}, "last", "it has no int8 states rounded nearest"),
    ("flashinfer", {"format": "bfloat16", "rounding": "stochastic"}, "last", "it has no .* rounded stochastic"),
]


@pytest.mark.parametrize(("name", "change", "stored", "reason"), SKIPPED)
def test_what_a_peer_cannot_do_is_skipped_with_a_reason(
    name: str, change: dict[str, Any], stored: Stored, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    benching.pretend(monkeypatch, PEERS[name], STAND_INS[name])
    with pytest.raises(MeasurementError, match=f"^{reason}$"):
        check_peer(name, replace(TINY_CASE, **change), stored)


def test_releases_that_know_less_are_compared_as_far_as_they_go(monkeypatch: pytest.MonkeyPatch) -> None:
    several = replace(TINY_CASE, format="bfloat16", tokens=3)
    benching.pretend(monkeypatch, PEERS["flashinfer"], [older_decode_pretranspose, mtp])
    check_peer("flashinfer", several)
    for stored in ("nothing", "snapshots"):
        with pytest.raises(MeasurementError, match=r"^this release only updates such states in place$"):
            check_peer("flashinfer", several, stored)
    benching.pretend(monkeypatch, PEERS["fla"], [lambda q, k, v, g, beta, initial_state, output_final_state: None])
    with pytest.raises(MeasurementError, match=r"^this release has no state_v_first$"):
        check_peer("fla", TINY_CASE)


@NEEDS_INTERPRETER
@pytest.mark.interpreted
def test_on_a_gpu_right_peers_are_measured_on_cold_slots_and_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_in_the_interpreter(monkeypatch)
    for name in PEERS:
        benching.pretend(monkeypatch, PEERS[name], STAND_INS[name])
    bindings, _ = load_peers(PEERS, CUDA)
    measured: dict[Stored, list[str]] = {
        "last": [*PEERS],
        "nothing": ["flashinfer", "fla"],
        "snapshots": ["flashinfer"],
    }
    for stored, names in measured.items():
        report = Report()
        measure_on_gpu(GATED_DELTA, Job("gated_delta", replace(TINY_CASE, tokens=3), stored), bindings, CPU, report)
        assert [row.implementation for row in report.rows if row.implementation in PEERS] == names


def test_the_cost_on_the_host_is_measured_of_flashstate_and_of_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(host, "CHUNK", 1)
    monkeypatch.setattr(host, "CHUNKS", 1)
    for name in PEERS:
        benching.pretend(monkeypatch, PEERS[name], STAND_INS[name])
    bindings, _ = load_peers(PEERS, CUDA)
    report = Report()
    costs = host.host_costs(replace(GATED_DELTA, host_case=TINY_CASE), bindings, CPU, report)
    assert list(costs) == ["torch.add_", "flashstate", "flashstate, plain tensors", *PEERS]
    assert not report.skipped


# Configs


def test_a_plain_tune_finds_configs_of_six_modes_in_every_format() -> None:
    jobs = with_variants(GATED_DELTA, GATED_DELTA.jobs(GATED_DELTA.tuned_grids))
    by_problem = jobs_by_problem(jobs)
    assert len(by_problem) == len(jobs) == len(PORTABLE_FORMATS) * 6 * 5
    modes = {(problem.op, mode_key(problem).split(", ", 1)[1]) for problem in by_problem}
    several, nothing = "several tokens", "several tokens, nothing stored"
    assert modes == {
        *(("gated_delta_step", mode) for mode in ("one token", several, f"{several}, each stored", nothing)),
        *(("gated_delta_at_once", mode) for mode in (several, nothing)),
    }
    for problem, job in by_problem.items():
        assert (
            isinstance(problem, TensorCoreProblem)
            == (not job.case.exact)
            == table_key(problem).startswith("gated_delta_at_once 128x128 ")
        )


@pytest.mark.interpreted
def test_the_stopwatch_times_every_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[int] = []

    def run_them(launches: Any, replays: int, flush: bool) -> Timing:
        launches[0]()
        timed.append(len(launches))
        return Timing.of([7.0] * replays)

    monkeypatch.setattr("flashstate.tune.time_launches", run_them)
    monkeypatch.setattr("flashstate.tune.CHECKED_ROWS", 1)
    for module in (timing, measure):
        monkeypatch.setattr(module, "COLD_BYTES", 1 << 11)
    forms: list[tuple[int, Stored]] = [(0, "last"), (2, "last"), (2, "snapshots")]
    jobs = [Job("gated_delta", replace(TINIEST_CASE, tokens=tokens), stored) for tokens, stored in forms]
    by_problem = jobs_by_problem(with_variants(GATED_DELTA, jobs))
    assert len(by_problem) == 4
    stopwatch = GpuStopwatch(GATED_DELTA, by_problem, CPU)
    with interpreted():
        for problem in by_problem:
            tensor_cores = isinstance(problem, TensorCoreProblem)
            for rows in (16, 32) if tensor_cores else (32, 64):
                lanes = problem.lane_choices[0] if tensor_cores else 4
                assert stopwatch.microseconds(problem, Config(rows, 1, lanes)) == 7.0
    assert timed == [MIN_LAUNCHES] * 2 * 4


# The commands


def test_bench_on_a_cpu_measures_the_reference(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(timing, "CPU_SECONDS", 0.001)
    sizes = ["--batches", "1", "--heads", "2", "4", "--groups", "2", "--rows", "4", "--cols", "16"]
    options = ["--device", "cpu", "--formats", "int8", "--tokens", "1", "3", "--csv", str(tmp_path / "cpu.csv")]
    assert main(["bench", "gated_delta", *sizes, *options]) == 0
    _, rows = read_csv(tmp_path / "cpu.csv")
    forms = ["", ", 3 tokens", ", 3 tokens, snapshots", ", 3 tokens, nothing stored"]
    assert sorted(row.label for row in rows) == sorted(f"{n} heads, int8{form}" for n in (2, 4) for form in forms)
    assert "skipped vllm: only compared on a GPU" in capsys.readouterr().out


@pytest.mark.gpu
def test_bench_on_a_gpu_measures_tokens_at_once(tmp_path: Path) -> None:
    sizes = ["--batches", "2", "--heads", "4", "--groups", "2", "--formats", "bfloat16", "--tokens", "1", "4"]
    csv_file = tmp_path / "gpu.csv"
    assert main(["bench", "gated_delta", *sizes, "--peers", "none", "--device", "cuda", "--csv", str(csv_file)]) == 0
    _, rows = read_csv(csv_file)
    found = [(row.tokens, row.stored) for row in rows if row.implementation == "flashstate, at once"]
    assert sorted(found) == [(4, "last"), (4, "nothing")]
