"""What a member of a group waits for its turns, from its script to its node's reports: soon where it changes,
and seldom where it does not."""

import os

import pytest

from penstock.model.decisions.groups import SPEED_STEP
from penstock.model.inputs.external_events import StepsMeasured
from penstock.sdk import progress, stages
from penstock.sdk.progress import Meter
from penstock.sdk.sharing.turns import Waits
from penstock.sdk.stages import Recorder
from penstock_services.node_reporter.core.reports.progress import MAX_STEPS, ProgressParser


class Member:
    """A training on a clock of its own, and the node that reads its lines."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PENSTOCK_PHASE_FILE", os.devnull)
        monkeypatch.delenv("RANK", raising=False)
        self.now_s, self.done, self.waited_s, self.lines = 1_000.0, 0, 0.0, 0
        self.loses = False
        self.reports: list[tuple[float, StepsMeasured]] = []
        self._node = ProgressParser("n1", "job-1.1.w0", 9, leads=True)
        self.meter = Meter(lambda: self.now_s, self._write, lambda: Waits(self.waited_s, 0))

    def _write(self, line: str) -> bool:
        self.lines += 1
        if self.loses:
            return True
        for report in self._node.parse(f"{line}\n".encode(), round(1_000 * self.now_s)):
            if isinstance(report.event, StepsMeasured):
                self.reports.append((self.now_s, report.event))
        return True

    def trains(self, seconds: float, step_s: float = 1.0, waits_s: float = 0.0) -> list[float]:
        """Parts of its time without waits that its node reports meanwhile."""
        before, until_s = len(self.reports), self.now_s + seconds
        while self.now_s < until_s:
            self.now_s += step_s + waits_s
            self.waited_s += waits_s
            if waits_s > 0.5:
                self.meter.look_soon()
            self.done += 1
            self.meter.step(self.done, None, None)
        found = [event for _, event in self.reports[before:] if event.steps]
        return [round(1 - event.waited_ms / event.step_ms, 2) for event in found]


@pytest.fixture
def member(monkeypatch: pytest.MonkeyPatch) -> Member:
    return Member(monkeypatch)


def test_a_member_that_waits_says_so_within_seconds_after_days_alone(member: Member) -> None:
    """Its next line of progress were due in hours. The other one holds its turn for 9.9 s, so the first
    iteration is told, and no later one until it has changed."""
    member.trains(100_000)
    first, *_, last = member.trains(60, step_s=0.1, waits_s=9.9)
    assert first < 0.2, "it was alone in the beginning of that window"
    assert last == 0.01
    at_s = member.reports[-1][0]
    assert at_s <= member.now_s - 40
    assert member.trains(3_600, step_s=0.1, waits_s=9.9) == []
    assert member.trains(20, step_s=0.1)[-1] == 1.0


def test_a_report_that_was_lost_comes_again(member: Member) -> None:
    """The reporter restarts just then. Nothing changes for the member, which is told some seconds later."""
    member.trains(1_000)
    member.loses = True
    member.trains(12, step_s=1.0, waits_s=3.0)
    member.loses = False
    assert member.trains(16, step_s=1.0, waits_s=3.0) == [0.25]


def test_a_group_that_works_costs_a_report(member: Member) -> None:
    """A day of steady turns."""
    member.trains(1_000)
    alone = len(member.reports)
    member.trains(86_400, step_s=6.0, waits_s=4.0)
    assert len(member.reports) - alone <= 2 + 30, "the usual reports of progress, which grow apart"


def test_a_job_alone_writes_no_line_more(member: Member) -> None:
    """An hour: the lines of its progress, and its step time each half minute."""
    member.trains(3_600, step_s=0.01)
    assert member.lines <= 130 + 121


def test_waits_that_change_all_the_time_are_reported_at_a_bounded_rate(member: Member) -> None:
    """A hostile script; and the last part comes in the end."""
    member.trains(1_000)
    before = len(member.reports)
    for number in range(600):
        member.trains(5, step_s=0.5, waits_s=4.0 if number % 2 else 0.0)
    assert len(member.reports) - before <= 10 + 3_600 / 30 + 20
    assert len(member.reports) - before > 60
    member.trains(120, step_s=0.5, waits_s=1.0)
    latest = member.reports[-1][1]
    assert 1 / SPEED_STEP < 3 * (1 - latest.waited_ms / latest.step_ms) < SPEED_STEP


def test_reports_of_waits_go_on_when_there_have_been_many_of_progress(member: Member) -> None:
    member.trains(1_000)
    member._node._steps = MAX_STEPS
    assert 0.5 in member.trains(60, step_s=1.0, waits_s=1.0)


def test_a_long_wait_for_a_turn_is_told_to_the_meter_of_progress(monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks at the clock at the next iteration: by the number of iterations it would have in ten
    minutes."""
    monkeypatch.setenv("PENSTOCK_PHASE_FILE", os.devnull)
    now_s, told, waits_s = [100.0], list[float](), [0.0]

    class Waiting:
        waits = Waits()

        def change(self, index: int | None) -> None:
            now_s[0] += waits_s[0] if index is not None else 0.0

    marks = Recorder(lambda: now_s[0], lambda line: True, lambda: Waiting())
    marks.waited_long = lambda: told.append(now_s[0])
    marks.iteration()
    for waits_s[0] in (0.4, 0.6, 9.9, 0.1):
        with marks.stage("gpu"):
            now_s[0] += 1.0
    assert len(told) == 2
    assert stages._RECORDER.waited_long == progress._METER.look_soon


def test_a_gangs_other_ranks_report_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    line = b'{"steps":{"done":5,"steps":4,"step_ms":10.0,"waited_ms":9.0}}\n'
    assert ProgressParser("n1", "job-1.1.w1", 9, leads=False).parse(line, 1) == []
