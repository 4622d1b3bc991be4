"""python -m tools.mutants: whether the tests find every mistake of tests/mutants/, and which test finds which.

A mutant is made in a copy of the repository, and tried in a process forked from this one, which has imported all that
is slow to import and no part of flashstate."""

import argparse
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
COPIED = ("flashstate", "tests", "tools", "docs", "results", "*.md", "*.toml", "*.yml", "*.txt", "*.in", "LICENSE")
SLOW = ("torch", "pytest", "numpy")  # to import
SLOW_AND_INTERPRETED = ("triton.experimental.gluon.language", "triton.language.extra.libdevice", "interpreting")
LIMIT = 300  # seconds that a process may take
TOGETHER = 12  # tests that a process runs of the library as it is
PASSED, FAILED, ENDED = 0, 1, 2  # exit codes: ENDED without a verdict
LAW = re.compile(r"(reference|kernels)(?::([^|]*)(?:\|(.*))?)?")


class Try(NamedTuple):
    """The test of a mutant, or several tests of the library as it is: laws, or tests of one file."""

    killers: tuple[str, ...]
    mutant: Any = None  # a Mutant; None: nothing is wrong


class Verdict(NamedTuple):
    """The result of a test: its exit code, the failure or the log of a test without verdict, and its seconds."""

    code: int
    what: str
    seconds: float


def met(killed_by: str, on: str) -> list[Any]:
    """Return the meetings that may kill a mutant: all of the suite with a law, an op or both, or a law with a case."""
    from flashstate import proof
    from flashstate.proof.laws import LAWS

    obeying = import_module("obeying")
    room, words, of = (part.strip() for part in LAW.findall(killed_by)[0])
    if of.endswith(")"):
        return [obeying.Meeting(law, eval(of, {}, vars(proof))) for law in LAWS if law.startswith(words)]
    there = obeying.meetings("reference" if room == "reference" else "interpreter" if on == "cpu" else "gpu")
    return [each for each in there if each.law.startswith(words) and of in ("", obeying.OPS[type(each.case)])]


def failure_of(killers: Sequence[str], on: str) -> str | None:
    """Run laws, or tests of one file, with the library in this directory; return the first failure, or None."""
    if LAW.fullmatch(killers[0]):
        return next(filter(None, (broken_law(killed_by, on) for killed_by in killers)), None)
    return failed_test([killed_by.removeprefix("compiled: ") for killed_by in killers])


def broken_law(killed_by: str, on: str) -> str | None:
    """Return the first meeting whose law is broken, and how. Memory is NaN until it is written."""
    import torch

    from flashstate.launch import interpreted
    from flashstate.proof.laws import LAWS

    torch.set_deterministic_debug_mode("warn")
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    by_kernels, there = killed_by.startswith("kernels"), met(killed_by, on)
    if not there:
        raise RuntimeError(f"the suite has no meeting of {killed_by}")
    with interpreted() if by_kernels and on == "cpu" else nullcontext():
        for meeting in there:
            try:
                with import_module("obeying").every_config(meeting.config, meeting.case):
                    LAWS[meeting.law](meeting.case, torch.device(on if by_kernels else "cpu"))
            except Exception as broken:  # LawBroken, or what CUDA says
                return f"{meeting}: {broken or type(broken).__name__}"
    return None


def failed_test(targets: Sequence[str]) -> str | None:
    """Run ids below tests/, or a file with words behind -k; return the first test that fails."""
    import pytest

    class Heard:
        passed, failed = 0, ""

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            self.passed += report.passed and report.when == "call"
            self.failed = self.failed or (report.nodeid.removeprefix("tests/") if report.failed else "")

    heard = Heard()
    chosen = [word for target in targets for word in f"tests/{target}".replace(" -k ", "\n-k\n").split("\n")]
    code = pytest.main(["-xq", "-p", "no:cacheprovider", *chosen], plugins=[heard])
    if not heard.failed and (code or not heard.passed):
        raise RuntimeError(f"pytest did not run all of {chosen}, and ended with {code!r}")
    return heard.failed or None


def copy_repository(root: Path) -> Path:
    for pattern in COPIED:
        for path in ROOT.glob(pattern):
            if path.is_dir():
                shutil.copytree(path, root / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copy2(path, root)
    return root


def mutate(mutant: Any, root: Path, number: int) -> None:
    """Edit the copy. Each edit gets a file time of its own, or Python would load bytecode of another version."""
    path = root / "flashstate" / mutant.where
    text = path.read_text()
    if text.count(mutant.old) != 1:
        raise ValueError(f"{mutant.where} has {text.count(mutant.old)} times what this replaces: {mutant.what}")
    path.write_text(text.replace(mutant.old, mutant.new))
    os.utime(path, (number, number))


def start(task: Try, root: Path, number: int, on: str) -> int:
    """Fork a process that tries a mutant in this copy and writes the failure to `found` there; return its number."""
    sys.stdout.flush()
    if child := os.fork():
        return child
    code, found = ENDED, root / "found"
    try:
        signal.alarm(LIMIT)
        log = os.open(root / "log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.chdir(root)
        os.environ |= {"PYTHONPATH": str(root)}
        sys.path[:1] = [str(root / "tests"), str(root)]
        if task.mutant:
            mutate(task.mutant, root, number)
        failure = failure_of(task.killers, on)
        code = FAILED if failure else PASSED
        found.write_text((failure or "").split("\n")[0])
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def tried(tasks: Iterable[Try], idle: list[Path], on: str) -> Iterator[tuple[Try, Verdict]]:
    """Run tasks side by side, one in each copy; yield each with its verdict as it ends."""
    waiting, running = list(enumerate(tasks, 1))[::-1], dict[int, tuple[Try, Path, float]]()
    while waiting or running:
        while waiting and idle:
            number, task = waiting.pop()
            root = idle.pop()
            running[start(task, root, number, on)] = task, root, time.monotonic()
        child, status = os.wait()
        task, root, since = running.pop(child)
        code = os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            code, what = FAILED, f"no end within {LIMIT} s"
        else:
            what = (root / ("log" if code not in (PASSED, FAILED) else "found")).read_text()
        if task.mutant:
            shutil.copy2(ROOT / "flashstate" / task.mutant.where, root / "flashstate" / task.mutant.where)
        idle.append(root)
        yield task, Verdict(code, what, time.monotonic() - since)


def report(mutant: Any, verdict: Verdict) -> None:
    says = {PASSED: "SURVIVED", FAILED: "killed  "}.get(verdict.code, "NO TEST ")
    print(f"{says} {verdict.seconds:5.1f} s  {mutant.where}: {mutant.what}")
    if verdict.code == FAILED:
        print(f"{'':18}by {verdict.what}")
    else:
        print("\n".join(f"{'':18}{line}" for line in [mutant.killed_by, *verdict.what.splitlines()[-12:]]))
    sys.stdout.flush()


def every_mutant() -> list[Any]:
    """Return all mutants of tests/mutants/."""
    lists = sorted((ROOT / "tests" / "mutants").glob("[a-z]*.py"))
    return [mutant for path in lists for mutant in import_module(f"mutants.{path.stem}").MUTANTS]


def in_two_turns(tasks: list[Try], copies: list[Path], gpu: bool) -> Iterator[tuple[Try, Verdict]]:
    """Run tests of compiled kernels, then all others with Triton's interpreter, as triton decides at its import."""
    compiled = [task for task in tasks if gpu or task.killers[0].startswith("compiled: ")]
    yield from tried(compiled, copies, "cuda" if gpu else "cpu")
    if rest := [task for task in tasks if task not in compiled]:
        os.environ["TRITON_INTERPRET"] = "1"
        for name in SLOW_AND_INTERPRETED:
            import_module(name)
        import_module("interpreting").spare_the_interpreter()
        yield from tried(rest, copies, "cpu")


def without_mutants(killers: Iterable[str]) -> list[Try]:
    """Return tries of the library as it is: a few laws, or ids of one file, in a process that imports once for all."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for killed_by in killers:
        law, (path, _, words) = LAW.fullmatch(killed_by), killed_by.partition(" -k ")
        groups[law[1] if law else killed_by if words else path.partition("::")[0]].append(killed_by)
    return [
        Try(tuple(group[start : start + TOGETHER]))
        for group in groups.values()
        for start in range(0, len(group), TOGETHER)
    ]


def print_table(verdicts: dict[Any, Verdict]) -> None:
    """Print how many mutants of each room were killed."""
    rooms = {mutant.where.split("/")[0]: Counter[str]() for mutant in verdicts}
    for mutant, verdict in verdicts.items():
        rooms[mutant.where.split("/")[0]]["killed" if verdict.code == FAILED else "survived"] += 1
    print(f"\n{'room':<14}{'mutants':>9}{'killed':>9}{'survived':>10}")
    for room, counts in [*rooms.items(), ("all", sum(rooms.values(), Counter[str]()))]:
        print(f"{room:<14}{counts.total():>9}{counts['killed']:>9}{counts['survived']:>10}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", default="", metavar="REGEX", help="mutants in whose file or words this is found")
    parser.add_argument("--gpu", action="store_true", help="those that only a GPU finds, on one")
    parser.add_argument(
        "--find", metavar="TEST", help="what else kills them: a test, or 'kernels' or 'reference': laws"
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes at a time (default: %(default)s)")
    chosen, began = parser.parse_args(arguments), time.monotonic()
    for name in SLOW:
        import_module(name)
    mutants = [mutant for mutant in every_mutant() if mutant.gpu == chosen.gpu]
    mutants = [mutant for mutant in mutants if re.search(chosen.only, f"{mutant.where}: {mutant.what}")]
    tasks = [Try((chosen.find or mutant.killed_by,), mutant) for mutant in mutants]
    before = without_mutants(dict.fromkeys(killed_by for task in tasks for killed_by in task.killers))
    verdicts: dict[Any, Verdict] = {}
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copies = [copy_repository(Path(folder, str(job))) for job in range(chosen.jobs)]
        for task, verdict in in_two_turns([*before, *tasks], copies, chosen.gpu):
            if task.mutant:
                verdicts[task.mutant] = verdict
                report(task.mutant, verdict)
            elif verdict.code != PASSED:
                wrong += 1
                print(f"FAILS WITHOUT A MUTANT: {', '.join(task.killers)}\n{verdict.what}", flush=True)
    print_table(verdicts)
    print(f"{time.monotonic() - began:.0f} s" + (f"; {wrong} tests fail without a mutant" if wrong else ""))
    return int(wrong > 0 or any(verdict.code != FAILED for verdict in verdicts.values()))


if __name__ == "__main__":
    sys.exit(main())
