"""Account of a run on a GPU: failures as they happen; at its end, also when cut off, what passed and what did not."""

import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import pytest
from compiling_once import share_compilations
from obeying import OPS, Meeting, meetings

SHOWN = 12  # lines of a long list
GRACE = 3  # seconds that a test may go on for after the end of a run


def pytest_configure(config: pytest.Config) -> None:
    share_compilations()
    minutes, given = config.getoption("minutes"), getattr(config, "workerinput", {})
    ends = given["ends"] if given else time.monotonic() + 60 * minutes if minutes else None
    if not given and not config.option.collectonly:
        config.pluginmanager.register(Account(config, ends))
    if ends is not None:
        config.pluginmanager.register(Limit(ends))


class Limit:
    """Time limit of a run, in every process that runs tests: after it no test starts, and a running test is cut off.
    Neither counts as run."""

    def __init__(self, ends: float) -> None:
        self.ends = ends

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self) -> bool | None:
        return True if time.monotonic() > self.ends else None

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        def cut_off(*_: object) -> None:
            item.user_properties.append(("cut off", True))
            pytest.skip("the time is over")

        before = signal.signal(signal.SIGALRM, cut_off)
        signal.setitimer(signal.ITIMER_REAL, max(0.01, self.ends + GRACE - time.monotonic()))
        try:
            return (yield)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)


class Account:
    """Results of all tests, in the process that hands them out."""

    def __init__(self, config: pytest.Config, ends: float | None) -> None:
        self.config, self.began, self.ends = config, time.monotonic(), ends
        self.planned: Collection[str] = ()
        self.told = False
        self.outcomes: dict[str, str] = {}
        self.met: set[str] = set()  # meetings of laws whose test passed
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that a run cut off ends with its account

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.planned = self.planned or [item.nodeid for item in session.items]

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Collection[str]) -> None:
        self.planned = ids

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Take a file that cannot be imported for a test that failed. Several processes may report it."""
        if report.failed and report.nodeid not in self.outcomes:
            self.outcomes[report.nodeid] = "failed"
            self.tell_failure(report)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        properties = dict(report.user_properties)
        if "cut off" in properties:
            self.outcomes.pop(report.nodeid, None)
            return
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = "failed" if report.failed else report.outcome
        if report.when == "call" and report.passed and "meeting" in properties:
            self.met.add(properties["meeting"])
        if report.failed:
            self.tell_failure(report)

    def tell_failure(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        self.tell(f"\n{self.clock()} FAILED {report.nodeid}")
        crash = getattr(report.longrepr, "reprcrash", None)
        why = crash.message.partition("\n")[0] if crash else str(report.longrepr).rpartition("\n")[2]
        self.tell(f"  {why}")
        self.tell(f"  again: {self.again(report.nodeid)}")

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["ends"] = self.ends

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """Fail a run that did not reach all of its tests."""
        if self.not_reached() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.INTERRUPTED

    def not_reached(self) -> list[str]:
        return [test for test in self.planned if test not in self.outcomes]

    def pytest_keyboard_interrupt(self) -> None:
        """Give the account before processes are waited for, which may take longer than a run that is ended is given."""
        self.tell_all()

    def pytest_terminal_summary(self) -> None:
        if not self.told:
            self.tell_all()

    def tell_all(self) -> None:
        self.told = True
        count = Counter(self.outcomes.values())
        left = self.not_reached()
        self.tell(f"\naccount, after {self.clock()}, seed {self.config.getoption('seed')}")
        self.tell(
            f"  {len(self.planned)} tests: {count['passed']} passed, {count['failed']} failed, "
            f"{count['skipped']} skipped, {len(left)} not reached"
        )
        self.tell_some("not reached", left)
        self.tell_some("failed", [self.again(test) for test, outcome in self.outcomes.items() if outcome == "failed"])
        if self.met:
            self.tell_meetings()

    def tell_meetings(self) -> None:
        """Tell how many of the planned pairs of laws with ops, formats and configs passed."""
        wanted = {str(meeting): meeting for meeting in meetings("gpu", self.config.getoption("seed"))}
        there = [wanted[meeting] for meeting in self.met if meeting in wanted]
        for what, pairs in PAIRS.items():
            all_pairs, met = pairs(wanted.values()), pairs(there)
            self.tell(f"  {what}: {len(met)} of {len(all_pairs)} met")
            self.tell_some("  without", sorted(map(str, all_pairs - met)))

    def tell_some(self, what: str, tests: Collection[str]) -> None:
        if tests:
            self.tell(f"  {what}:")
            for test in list(tests)[:SHOWN]:
                self.tell(f"    {test}")
            if len(tests) > SHOWN:
                self.tell(f"    and {len(tests) - SHOWN} more")

    def tell(self, line: str) -> None:
        self.config.get_terminal_writer().line(line)

    def clock(self) -> str:
        return "{:.0f}:{:02.0f}".format(*divmod(time.monotonic() - self.began, 60))

    def again(self, test: str) -> str:
        return f"python -m pytest --seed {self.config.getoption('seed')} '{test}'"


def _pairs(name: str) -> Any:
    def found(met: Iterable[Meeting]) -> set[tuple[object, ...]]:
        values = {
            "ops": lambda m: OPS[type(m.case)], "formats": lambda m: (m.case.format, m.case.rounding),
            "configs": lambda m: m.config,
        }  # fmt: skip
        return {(meeting.law, values[name](meeting)) for meeting in met}

    return found


PAIRS = {f"laws x {name}": _pairs(name) for name in ("ops", "formats", "configs")}
