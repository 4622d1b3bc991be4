"""The command line, and what it runs: info and check; the other commands have files of their own."""

import contextlib
import itertools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from printed import output_of

from flashstate import basics, check
from flashstate.bench.ops import OPS
from flashstate.bench.ways import WAYS
from flashstate.check import SHOWN_FAILURES, cases_on
from flashstate.cli import COMMANDS, main
from flashstate.info import versions
from flashstate.launch import Gpu, choose
from flashstate.proof import CASES, Case
from flashstate.proof.laws import LawBroken, laws_for, pairs
from flashstate.state.formats import FORMATS, PORTABLE_FORMATS

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def test_info_shows_versions_formats_and_the_configs_that_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    case = Case(heads=16, rows=80, cols=20, format="int8", rounding="stochastic")
    options = "--gpu none --format int8 --rounding stochastic --rows 80 --cols 20 --batch 1 256"
    assert main(["info", *options.split()]) == 0
    out = output_of(capsys)
    assert all(f"{name} {version}" in out for name, version in versions().items())
    for fmt in FORMATS.values():
        assert f"{fmt.name} {fmt.dtype.itemsize} {', '.join(fmt.roundings)}" in out
    assert "80 x 20, int8, stochastic, one token, on none, compute capability 9.0" in out
    assert out.count("heuristic: no table") == 1
    for batch in (1, 256):
        config = choose(replace(case, batch=batch).problem, Gpu("none", (9, 0)))
        assert f" {batch} {16 * batch} {config.block_rows} {config.num_warps} {config.lanes} -" in out


SHOWN = {  # what `flashstate info --gpu none` shows with other words behind it
    "mamba2": "Launch configs of mamba2_step, 64 x 128, float32, nearest, one token",
    "mamba2_replay": "Launch configs of mamba2_replay either, 64 x 128, float32, nearest, one token",
    "gated_delta": "Launch configs of gated_delta_step, 128 x 128, float32, nearest, one token",
    "gated_delta_replay": "Launch configs of gated_delta_replay either, 128 x 128, bfloat16, nearest, one token",
    "mamba3": "Launch configs of mamba3_step rank 4, 64 x 128, float32, nearest, one token",
    "conv1d": "Launch configs of conv1d_step, 1280 x 4, bfloat16, nearest, one token",
    "span": "Launch configs of mamba2_step, 64 x 128, float32, nearest, one token",
    "mamba2_replay --batch 1": "Replay reads rings",
    "gated_delta_replay --batch 1": " int8, per channel none ",
    "mamba2 --tokens 4 --snapshots": "mamba2_step, 64 x 128, float32, nearest, several tokens, every stored, on",
    "mamba2 --tokens 4 --at-once": "mamba2_at_once, 64 x 128, float32, nearest, several tokens, on none",
    "gated_delta --tokens 4 --batch 64 --format bfloat16 --at-once": " 64 4096 16 1 4 - tiles 8",
    "mamba2 --tokens 4 --batch 64 --capability 9.0": " 64 1024 8 1 8 - ",
    "mamba2 --tokens 4 --batch 64 --capability 10.0": " 64 1024 8 1 4 - ",
    "--gpu a_GPU_of_mine": "on a_GPU_of_mine, compute capability 9.0",
}


def test_info_shows_configs_as_they_are_measured_or_asked_for_and_where_replay_pays(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for words, shown in SHOWN.items():
        assert main(["info", "--gpu", "none", *words.split()]) == 0
        out = output_of(capsys)
        assert shown in out
        assert ("Replay reads rings" in out) == ("replay" in words)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert main(["info"]) == 0
    out = output_of(capsys)
    assert "no GPU: ops run the reference on the CPU" in out
    assert out.count("table of NVIDIA H200") == out.count("on NVIDIA H200") == 1


def test_help_and_info_fit_80_columns_and_leave_no_word_alone(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = [f"{command} --help".split() for command in ("", *COMMANDS)]
    words += [["info", op, "--gpu", gpu] for op in OPS for gpu in ("NVIDIA H200", "a GPU without a table")]
    words += [["info", op, "--format", "float16", "--rounding", "stochastic"] for op in ("mamba2", "gated_delta")]
    for argv in words:
        with contextlib.suppress(SystemExit):
            main(argv)
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) > 3
        assert max(map(len, lines)) <= 80
        indented = (line for line in lines if line.startswith(" "))  # headings stand at the margin
        assert all(" " in line.strip(" ─") for line in indented if line.strip(" ─")), argv


def test_the_program_runs_as_a_module_without_triton_and_silently_without_numpy() -> None:
    code = (
        "import sys; sys.modules['triton'] = sys.modules['numpy'] = None; import runpy; "
        "sys.argv = ['flashstate', 'info', '--gpu', 'none']; runpy.run_module('flashstate', run_name='__main__')"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.returncode, result.stderr) == (0, "")
    assert "triton      not installed" in result.stdout


BEFORE_TORCH = [  # what is said, and the exit status, with torch that cannot be imported
    ("--version", 0, f"flashstate {versions()['flashstate']}"),
    ("--help", 0, "Step the recurrent state"),
    ("bench --help", 0, "--batches"),
    ("", 2, "info | check"),
    ("bensh", 2, "there is no command 'bensh'; did you mean bench?"),
    ("nonsense", 2, "there is no command 'nonsense', only info, check"),
    ("bench --tokns 4", 2, "there is no option --tokns; did you mean --tokens?"),
    ("bench --markdown=README.md", 2, "there is no option --markdown"),
    ("bench mamba4", 2, "argument OP: must be one of mamba2, gated_delta, mamba3"),
    ("bench gated", 2, "got 'gated'; did you mean gated_delta or gated_delta_replay?"),
    ("--verison", 2, "there is no option --verison; did you mean --version?"),
    ("-V", 2, "there is no option -V; did you mean --version?"),
    ("bench -peers none", 2, "there is no option -peers; did you mean --peers?"),
    ("bench --peers flashinfr", 2, "got 'flashinfr'; did you mean flashinfer?"),
    ("bench --ways again fast", 2, "--ways: must be one of plain, again, int64, ascending, no-gate, float32-dt, got"),
    ("generate --family qwen3next", 2, "got 'qwen3next'; did you mean qwen3_next?"),
    ("bench --tokens 0", 2, "--tokens: must be from 1 to 1048576, got 0"),
    ("generate --replay -1", 2, "--replay: must be from 0 to 64, got -1"),
    ("demo --steps many", 2, "--steps: must be a whole number, got 'many'"),
    ("check --quick yes", 2, "unrecognized arguments: yes"),
    ("check --device tpu", 2, "--device: must be cpu, cuda or cuda:N, got 'tpu'"),
    ("info --capability ten", 2, "--capability: must be two numbers, as in 10.0, got 'ten'"),
    ("info --format flaot16", 2, "got 'flaot16'; did you mean float16?"),
    ("tune --formats float7", 2, "must be one of float32, bfloat16, float16, int16, int8, float8_e4m3fn, got 'float7'"),
    ("bench --formats int16:up", 2, "int16 has no rounding 'up', only nearest, stochastic"),
    ("bench --formats float16:stochastc", 2, "stochastic, stochastic_hw; did you mean stochastic?"),
    *((f"plan --model {name}", 2, "did you mean qwen3-next-80b or qwen3.5-397b?") for name in ("qwen3", "qwn3")),
    ("plan --memory 40Gib", 2, "memory must be a number above 0 and a unit of B, KiB"),
    ("plan --memory 9999999TiB", 2, "1048576TiB at most"),
    *(
        (f"{name} {option} 99999999999999999999", 2, f"{option}: must be from ")
        for name, command in COMMANDS.items()
        for option, given in {**command.options, **command.shape}.items()
        if given.get("metavar") == "N"
    ),
]


def test_version_help_and_typos_need_no_torch() -> None:
    code = f"""
import contextlib, io, sys
sys.modules["torch"] = None  # importing it fails
from flashstate.cli import main
for words, status, said in {BEFORE_TORCH!r}:
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
        try:
            got = main(words.split())
        except SystemExit as exit:
            got = exit.code
    assert (got, said in " ".join(out.getvalue().split())) == (status, True), (words, got, out.getvalue())
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_the_command_line_knows_the_names_there_are() -> None:
    assert sorted(basics.BENCHED) == sorted(OPS)
    assert list(basics.WAYS) == list(WAYS)
    assert set(basics.PEER_NAMES) == {name for op in OPS.values() for name in op.peers}
    assert list(basics.ROUNDINGS_OF) == [format.name for format in FORMATS.values()]


BAD_OPTIONS = [
    (["info", "--rounding", "stochastic_hw"], "float32 has no rounding 'stochastic_hw', only nearest"),
    (["info", "conv1d", "--format", "int8"], "windows are float32, bfloat16, float16, rounded to nearest, got int8"),
    (["info", "mamba3", "--at-once"], "mamba3 has no --at-once"),
    (["info", "gated_delta", "--at-once"], "--at-once: only for calls of 2 to 16 tokens"),
    (["info", "--channels", "8"], "mamba2 has no --channels, only --heads, --groups, --rows, --cols"),
    (["bench", "conv1d", "--device", "cpu", "--rows", "8"], "conv1d has no --rows, only --channels, --width"),
    (["tune", "mamba2_replay"], "tune finds no configs of mamba2_replay yet"),
    (["tune", "--device", "cpu"], "tune measures kernels on a GPU, and there is none"),
    (["tune", "--quick", "--device", "cpu"], "tune measures kernels on a GPU, and there is none"),
    (["tune", "--quick", "--resume"], "--quick goes without --resume"),
    (["tune", "--seconds", "3"], "--seconds goes with --quick only"),
    (["plan", "--heads", "3", "--cols", "8"], "without a preset or a config.json a shape also needs layers, rows, gro"),
    (["plan", "--model", "mamba2-2.7b", "--config", "."], "from a preset or from a config.json, got both"),
    (["plan", "--config", "no/such/folder"], "No such file"),
    (["bench", "--ways", "--device", "cpu"], "--ways compares times of kernels: it needs a GPU"),
    (["bench", "--ways", "--plot", "a.png"], "--ways has a table of its own: it draws nothing, and takes no --host"),
    (["bench", "--quick", "--batches", "1"], "--quick goes without --batches"),
    (["bench", "--quick", "--json", "no/such/folder/a.json"], "to write a.json to"),
    (["bench", "span", "--quick"], "--quick measures nothing of span"),
    (["bench", "--from-json", "a.json", "mamba2"], "--from-json goes without op"),
    (["bench", "--from-json", __file__], "is not a file that flashstate bench --quick wrote"),
    (["info", "mamba2_replay", "--snapshots"], "mamba2_replay has no --snapshots"),
    (["bench", "mamba2_replay", "--device", "cpu", "--tokens", "17"], "replay is measured with a window of 16"),
    *((["check", "--device", f"cuda:{n}"], f"--device cuda:{n}: this machine has") for n in (99, 10**20)),
    (["bench", "conv1d", "--device", "cpu", "--channels", "1283"], "not whole 32-bit words"),
    (["bench", "--device", "cpu", "--csv", "no/such/folder/a.csv"], "to write a.csv to"),
    (["bench", "conv1d", "--device", "cpu", "--peers", "fla"], "there is no peer 'fla', only vllm; 'none' alone"),
    (["bench", "--device", "cpu", *(f"--{name}=65536" for name in ("heads", "rows", "cols"))], "is not enough memory"),
    (["bench", "--host", "--csv", "a.csv"], "--host measures only what a call costs the host"),
    (["bench", "--from-csv", __file__], "is not a file that flashstate bench wrote"),
    (["bench", "--from-csv", sys.executable], f"{sys.executable} is not a file that flashstate bench wrote"),
]


def test_a_bad_option_is_one_line_and_exits_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, complaint in BAD_OPTIONS:
        assert main(argv) == 2
        error = capsys.readouterr().err
        assert complaint in error
        assert error.strip().count("\n") == 0


def test_check_proves_the_reference(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """With a case of every op; test_laws.py tries more."""
    few = [cases.quick[0] for cases in CASES.values()]
    monkeypatch.setattr(check, "cases_on", lambda device, quick: few)
    assert main(["check", "--quick", "--device", "cpu"]) == 0
    tried = len({words for words, _ in pairs(laws_for(CPU), few)})
    assert f"All {tried} laws hold for the reference on the CPU." in output_of(capsys)


@pytest.mark.parametrize("device", [CPU, CUDA], ids=str)
def test_a_check_tries_every_law_on_cases_of_every_op_and_a_quick_one_on_one_case_per_format(
    device: torch.device,
) -> None:
    every, quick = (cases_on(device, quick=quick) for quick in (False, True))
    formats = [(case.format, case.rounding) for case in quick if type(case) is Case]
    assert sorted(formats) == sorted(PORTABLE_FORMATS)
    assert set(quick) < set(every)
    for cases in (every, quick):
        assert {type(case) for case in cases} == {type(of_op.real[0]) for of_op in CASES.values()}
        assert {words for words, _ in pairs(laws_for(device), cases)} == laws_for(device).keys()


def test_check_reports_broken_laws_and_crashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def breaks(case: Case, device: torch.device) -> None:
        raise LawBroken("3 of [4] elements differ")

    def crashes(case: Case, device: torch.device) -> None:
        raise RuntimeError("out of luck")

    laws = {"fine": lambda case, device: None, "is broken": breaks, "does crash": crashes}
    monkeypatch.setattr("flashstate.check.laws_for", lambda device: laws)
    monkeypatch.setattr("flashstate.check.pairs", itertools.product)
    assert main(["check", "--quick", "--device", "cpu"]) == 1
    out = output_of(capsys)
    cases = len(cases_on(CPU, quick=True))
    assert f"fine {cases} holds" in out
    assert f"is broken {cases} broken by {cases}" in out
    assert f"{cases_on(CPU, quick=True)[0]} 3 of [4] elements differ" in out
    assert f"and {cases - SHOWN_FAILURES} more cases" in out
    assert "RuntimeError: out of luck" in out
    assert "2 of 3 laws are broken by the reference on the CPU." in out
