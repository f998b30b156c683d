"""The verdict on real processes: what nodes really did, what users were promised and what the log holds must
agree.

Nothing here asks a service: the inputs are the nodes' histories (`judge_node`, `judge_task`), the list of
acknowledged submissions, and the raw partitions of the log. The rules are the laboratory's (`ledger_rules`,
`process_rules`); `double`, `twice`, `check` and `replay` are of this judge.
"""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import LogError
from penstock.ledger.check.check import check
from penstock.ledger.replica.replica import Replica
from penstock.log.port import Log, Partition, Record
from penstock.model.schema.topics import INPUT_TOPICS, NODE_PARTITIONS, Topic
from penstock_services.placer.shell.replay import Replayer
from tests.faults.processes.judge_node import read_history
from tests.faults.rules.findings import Violation, kind_of
from tests.faults.rules.ledger_rules import LedgerRules
from tests.faults.rules.process_rules import ProcessRules, Running
from tests.support.waiting import await_until


@dataclass(slots=True)
class Verdict:
    """`violations` is empty in a sound system; the counters are what was looked at."""

    violations: list[Violation] = field(default_factory=list)
    runs: int = 0
    records: int = 0
    void: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)
    """Ledger records by outcome."""
    jobs: Counter[str] = field(default_factory=Counter)
    terms: int = 0
    letters: int = 0
    replica: Replica = field(default_factory=Replica)

    @property
    def problems(self) -> list[str]:
        return [str(violation) for violation in self.violations]

    def count(self, *rules: str) -> int:
        """Violations of these rules."""
        return sum(violation.rule in rules for violation in self.violations)

    def add(self, rule: str, what: str) -> None:
        self.violations.append(Violation(rule, what))

    def collect(self, call: Callable[..., object], *given: object) -> None:
        """Calls, and notes what it raises as a violation."""
        try:
            call(*given)
        except Violation as violation:
            self.violations.append(violation)

    def summary(self) -> str:
        jobs = ", ".join(f"{count} {name}" for name, count in sorted(self.jobs.items()))
        return (
            f"{sum(self.jobs.values())} jobs ({jobs}), {self.runs} processes, {self.records} valid records "
            f"({dict(self.outcomes)}), {self.void} void, {self.terms} terms, {self.letters} dead letters"
        )


# ---------------------------------------------------------------------------------------- histories


def judge_runs(verdict: Verdict, folder: Path) -> set[str]:
    """Judges every history in the folder; see `judge_histories`."""
    return judge_histories(verdict, [read_history(path) for path in sorted(folder.glob("*.jsonl"))])


def judge_histories(verdict: Verdict, histories: Iterable[Sequence[dict[str, Any]]]) -> set[str]:
    """Looks for processes that should not have met. Returns the jobs of which one ran to a good end."""
    entries = [entry for history in histories for entry in history]
    entries.sort(key=lambda entry: (entry["at_ns"], entry["kind"] == "start"))  # one clock for all nodes
    rules = ProcessRules()
    living: dict[tuple[str, int], Running] = {}
    for entry in entries:
        kind = entry["kind"]
        if kind in ("double", "twice"):
            verdict.add(kind, entry["what"])
        elif kind in ("exit", "died"):
            living.pop((entry["task"], entry["token"]), None)
        elif kind == "start":
            gpus = tuple(f"{entry['node']}/{gpu}" for gpu in entry["gpus"])
            new = Running(entry["node"], entry["job"], entry["task"], entry["token"], gpus)
            verdict.collect(rules.starts_once, new)
            verdict.collect(rules.no_other_attempt, new, living.values())
            verdict.collect(rules.gpus_are_free, new, living.values())
            living[entry["task"], entry["token"]] = new
    verdict.runs += sum(entry["kind"] in ("start", "ran") for entry in entries)
    return {entry["job"] for entry in entries if entry["kind"] in ("exit", "done") and entry["code"] == 0}


# -------------------------------------------------------------------------------------------- the log


async def ends_of(log: Log, partitions: Sequence[Partition]) -> Mapping[Partition, int]:
    """Where these end; asks again where the log does not answer in time, as on a busy machine."""

    async def asked() -> Mapping[Partition, int]:
        try:
            return await log.end_offsets(partitions)
        except LogError:
            return {}

    found: Mapping[Partition, int] = await await_until(asked, "an answer of the log")
    return found


async def read_all(log: Log, partition: Partition) -> list[Record]:
    """The whole partition as it is now."""
    end = (await ends_of(log, [partition]))[partition]
    reader = log.reader({partition: 0})
    records: list[Record] = []
    try:
        while reader.position(partition) < end:
            records += await reader.read()
    finally:
        await reader.close()
    return [record for record in records if record.offset < end]


async def judge_ledger(verdict: Verdict, log: Log, answered: Mapping[str, int]) -> LedgerRules:
    """Every record, order and dead letter by the rules; the cell's invariants at the end; the whole ledger
    decided again."""
    inputs: dict[str, list[int]] = {
        topic: [record.offset for record in await read_all(log, Partition(topic, 0))]
        for topic in INPUT_TOPICS
    }

    def next_input(topic: str, offset: int) -> int | None:
        at = bisect_left(inputs[topic], offset)
        return inputs[topic][at] if at < len(inputs[topic]) else None

    rules = LedgerRules(next_input)
    for record in await read_all(log, Partition(Topic.DEAD_LETTERS, 0)):
        verdict.letters += 1
        rules.letter(record.value)
    for record in await read_all(log, Partition(Topic.LEDGER, 0)):
        verdict.replica.take(record.value, record.offset)
        found = rules.take(record.value)
        if found is not None:
            verdict.collect(rules.record, found)
            for entry in found["facts"]:
                verdict.collect(rules.fact, kind_of(entry["type"]), entry["data"])
    for index in range(NODE_PARTITIONS):
        for record in await read_all(log, Partition(Topic.ORDERS, index)):
            verdict.collect(rules.order, record.headers, record.value)
    for topic in INPUT_TOPICS:
        offset = rules.unanswered(topic)
        if offset is not None and offset < answered[topic]:
            verdict.add("law2", f"{topic}/{offset} has no ledger record")
    for place, offset in rules.unexplained_letters():
        verdict.add("letter", f"{place}/{offset} has a dead letter and was answered otherwise")
    for problem in check(verdict.replica.state):
        verdict.add("check", problem)
    book, head = rules.book, verdict.replica.head
    verdict.records, verdict.void, verdict.terms = book.records, book.void, book.term
    verdict.outcomes, verdict.jobs = rules.outcomes, Counter(rules.ended.values())
    if (book.seq, book.id, book.term) != (head.seq, head.id, head.term):
        verdict.add(
            "chain", f"the product's head is {head}, not seq {book.seq} {book.id} of term {book.term}"
        )
    report = await Replayer(log, 0).run()
    if report.different or report.records != book.records:
        found_differences = json.dumps(report.differences)[:2_000]
        verdict.add("replay", f"{report.different} of {report.records} records differ: {found_differences}")
    return rules


def judge_jobs(
    verdict: Verdict, ended: Mapping[str, str], acknowledged: Mapping[str, frozenset[str]], good: set[str]
) -> None:
    """`acknowledged`: job id → outcomes it may have. `good`: jobs that really ran to a good end."""
    for job, allowed in acknowledged.items():
        outcome = ended.get(job, "never")
        if outcome not in allowed:
            verdict.add("outcome", f"{job} ended {outcome}, not in {sorted(allowed)}")
        elif outcome == "succeeded" and job not in good:
            verdict.add("outcome", f"{job} succeeded, but no node ran it to its end")


async def judge(
    log: Log,
    histories: Path,
    acknowledged: Mapping[str, frozenset[str]],
    answered: Mapping[str, int],
    *,
    exact_letters: bool = False,
) -> Verdict:
    """Everything. The cell must be quiet: all services stopped.

    `answered`: topic → offset before which all inputs must have their records; what landed later found no
    placer any more.

    `exact_letters`: no dead letter is there twice, since nobody was killed (a restart may send one again).
    """
    verdict = Verdict()
    good = judge_runs(verdict, histories)
    rules = await judge_ledger(verdict, log, answered)
    judge_jobs(verdict, rules.ended, acknowledged, good)
    for (topic, offset), count in rules.letters.items():
        if exact_letters and count > 1:
            verdict.add("letter", f"{topic}/{offset} has {count} dead letters")
    return verdict
