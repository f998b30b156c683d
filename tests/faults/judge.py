"""The verdict: what nodes really did, what users were promised and what the ledger says must agree.

Nothing here asks a service: the inputs are the nodes' histories (`judge_node`, `judge_task`), the list of
acknowledged submissions, and the raw partitions of the log.
"""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from penstock.ledger.check import check
from penstock.ledger.record import GENESIS, RawRecord, read_valid
from penstock.ledger.replica import Replica
from penstock.log.port import Log, Partition, Record
from penstock.model.envelope import from_wire
from penstock.model.errors import EventError
from penstock.model.external_events import NodeJoined
from penstock.model.ledger_events import JobEnded, Order, PlacementDecided, StartTask
from penstock.model.topics import INPUT_TOPICS, NODE_PARTITIONS, Topic
from penstock_services.placer.shell.replay import Replayer
from tests.faults.judge_node import read_history

READ_WAIT_MS = 5_000
PLACER = "/penstock/placer"


class Run(NamedTuple):
    """One process that really ran: CLOCK_MONOTONIC, ns; `end_ns` None: it still runs."""

    node: str
    gpus: tuple[int, ...]
    job: str
    attempt: int
    task: str
    token: int
    start_ns: int
    end_ns: int | None
    code: int | None

    def overlaps(self, other: "Run") -> bool:
        return (other.end_ns is None or self.start_ns < other.end_ns) and (
            self.end_ns is None or other.start_ns < self.end_ns
        )


@dataclass(slots=True)
class Verdict:
    """Each list is empty in a sound system; the counters say what was looked at."""

    doubles: list[str] = field(default_factory=list)
    """Two living processes on one GPU."""
    twice: list[str] = field(default_factory=list)
    """Two attempts of one job alive at once, or one task started twice."""
    lost: list[str] = field(default_factory=list)
    """Acknowledged jobs that did not end, ended wrongly, or `succeeded` without having run."""
    unsound: list[str] = field(default_factory=list)
    """Violations of the cell's invariants, and replays that differ."""
    accounting: list[str] = field(default_factory=list)
    """Input records without exactly one ledger record; dead letters that do not match."""
    forged: list[str] = field(default_factory=list)
    """Orders that no valid ledger record stands behind."""
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
        return [
            *self.doubles, *self.twice, *self.lost, *self.unsound, *self.accounting, *self.forged,
        ]  # fmt: skip

    def summary(self) -> str:
        jobs = ", ".join(f"{count} {name}" for name, count in sorted(self.jobs.items()))
        return (
            f"{sum(self.jobs.values())} jobs ({jobs}), {self.runs} processes, {self.records} valid records "
            f"({dict(self.outcomes)}), {self.void} void, {self.terms} terms, {self.letters} dead letters"
        )


# ---------------------------------------------------------------------------------------- histories


def runs_of(history: Sequence[dict[str, Any]]) -> list[Run]:
    """The processes of one node's history."""
    ends: dict[tuple[str, int], dict[str, Any]] = {}
    for entry in history:
        if entry["kind"] in ("exit", "died"):
            ends[entry["task"], entry["token"]] = entry
    found = []
    for entry in history:
        if entry["kind"] == "start":
            end = ends.get((entry["task"], entry["token"]))
            found.append(
                Run(
                    entry["node"], tuple(entry["gpus"]), entry["job"], entry["attempt"], entry["task"],
                    entry["token"], entry["at_ns"], None if end is None else end["at_ns"],
                    None if end is None else end.get("code"),
                )
            )  # fmt: skip
    return found


def judge_runs(verdict: Verdict, folder: Path) -> set[str]:
    """Judges every history in the folder; see `judge_histories`."""
    return judge_histories(verdict, [read_history(path) for path in sorted(folder.glob("*.jsonl"))])


def judge_histories(verdict: Verdict, histories: Iterable[Sequence[dict[str, Any]]]) -> set[str]:
    """Looks for processes that should not have met. Returns the jobs of which one ran to a good end."""
    runs: list[Run] = []
    good: set[str] = set()
    for entries in histories:
        runs += runs_of(entries)
        good |= {
            entry["job"] for entry in entries if entry["kind"] in ("exit", "done") and entry["code"] == 0
        }
        verdict.runs += sum(entry["kind"] in ("start", "ran") for entry in entries)
        verdict.doubles += [entry["what"] for entry in entries if entry["kind"] == "double"]
        verdict.twice += [entry["what"] for entry in entries if entry["kind"] == "twice"]
    by_gpu: dict[tuple[str, int], list[Run]] = defaultdict(list)
    by_job: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_job[run.job].append(run)
        for gpu in run.gpus:
            by_gpu[run.node, gpu].append(run)
    for (node, gpu), users in by_gpu.items():
        users.sort(key=lambda run: run.start_ns)
        verdict.doubles += [
            f"{node} gpu {gpu}: {one.task}@{one.token} and {two.task}@{two.token} at once"
            for one, two in pairwise(users)
            if one.overlaps(two)
        ]
    for job, members in by_job.items():
        started = Counter((run.task, run.token) for run in members)
        verdict.twice += [f"{job}: {task}@{token} started {n} times" for (task, token), n in started.items() if n > 1]  # fmt: skip
        verdict.twice += [
            f"{job}: attempts {one.attempt} ({one.task}@{one.token}) and {two.attempt} ({two.task}@{two.token}) at once"
            for at, one in enumerate(members)
            for two in members[at + 1 :]
            if one.token != two.token and one.overlaps(two)
        ]
    return good


# -------------------------------------------------------------------------------------------- the log


async def read_all(log: Log, partition: Partition) -> list[Record]:
    """The whole partition as it is now."""
    end = (await log.end_offsets([partition]))[partition]
    reader = log.reader({partition: 0})
    records: list[Record] = []
    try:
        while reader.position(partition) < end:
            found = await reader.read(timeout_ms=READ_WAIT_MS)
            assert found, f"{partition} ends before {end}"
            records += found
    finally:
        await reader.close()
    return [record for record in records if record.offset < end]


async def judge_ledger(verdict: Verdict, log: Log, cell_index: int = 0) -> list[RawRecord]:
    """Folds the ledger afresh, checks the cell, counts records by cause, replays."""
    head, valid = GENESIS, []
    replica = verdict.replica
    for record in await read_all(log, Partition(Topic.LEDGER, cell_index)):
        found = read_valid(head, record.value)
        if found is None:
            verdict.void += 1
            continue
        head, raw = found
        valid.append(raw)
        replica.take(record.value, record.offset)
    verdict.records, verdict.terms = len(valid), head.term
    verdict.outcomes = Counter(raw.outcome for raw in valid if raw.cause.topic is not None)
    verdict.unsound += check(replica.state)
    answered = Counter((raw.cause.topic, raw.cause.offset) for raw in valid if raw.cause.topic is not None)
    for topic in INPUT_TOPICS:
        offsets = {record.offset for record in await read_all(log, Partition(topic, cell_index))}
        for offset in sorted(offsets):
            if answered[topic, offset] != 1:
                verdict.accounting.append(
                    f"{topic}/{offset} has {answered[topic, offset]} ledger records, not 1"
                )
        verdict.accounting += [
            f"{topic}/{offset} is answered but not there"
            for named, offset in answered
            if named == topic and offset not in offsets
        ]
    report = await Replayer(log, cell_index).run()
    if report.different or report.records != len(valid):
        verdict.unsound.append(
            f"replay: {report.different} of {report.records} records differ ({len(valid)} are valid): "
            f"{json.dumps(report.differences)[:2_000]}"
        )
    return valid


async def judge_orders(verdict: Verdict, log: Log, valid: Sequence[RawRecord]) -> None:
    """Every order must follow from a valid record: its token is that record's seq (LAW 4)."""
    placed: set[tuple[int, str]] = set()
    stopped: set[int] = set()
    strays: set[tuple[int, str]] = set()
    for raw in valid:
        for fact in raw.facts:
            event = fact.event() if "placement" in fact.type else None
            if event is not None and event.TYPE == PlacementDecided.TYPE:
                placed.update((raw.seq, task.task_id) for task in event.tasks)  # type: ignore[attr-defined]
            elif "stop.decided" in fact.type:
                stopped.add(raw.seq)
            elif fact.type.startswith(NodeJoined.TYPE):  # it is told to stop what the cell has given up there
                joined: Any = fact.event()
                strays.update((raw.seq, task.task_id) for task in joined.tasks)
    for index in range(NODE_PARTITIONS):
        for record in await read_all(log, Partition(Topic.ORDERS, index)):
            try:
                envelope = from_wire(record.headers, record.value, Topic.ORDERS)
            except EventError:
                continue
            order = envelope.data
            if envelope.source != PLACER:
                continue  # thrown in by a test
            if isinstance(order, StartTask):
                if (order.token, order.task_id) not in placed:
                    verdict.forged.append(f"start of {order.task_id} with token {order.token}")
            elif (
                isinstance(order, Order)
                and order.token not in stopped
                and (order.token, order.task_id) not in strays
            ):
                verdict.forged.append(f"stop of {order.task_id} with token {order.token}")


async def judge_letters(verdict: Verdict, log: Log, valid: Sequence[RawRecord], *, exact: bool) -> None:
    """Dead letters of the placer against dead-lettered records. `exact`: and none twice, since nobody was killed."""
    wanted: Counter[tuple[str | None, int]] = Counter(
        (raw.cause.topic, raw.cause.offset)
        for raw in valid
        if raw.outcome == "dead_lettered" and raw.cause.topic
    )
    found: Counter[tuple[str | None, int]] = Counter()
    for record in await read_all(log, Partition(Topic.DEAD_LETTERS, 0)):
        letter: Any = from_wire(record.headers, record.value, Topic.DEAD_LETTERS).data
        verdict.letters += 1
        if letter.service == "placer":
            found[letter.source_topic, letter.source_offset] += 1
    seen = found if exact else Counter(found.keys())  # a restart may send a letter again
    wrong = (seen - wanted) + (wanted - seen)
    verdict.accounting += [f"dead letter of {topic}/{offset}: off by {n}" for (topic, offset), n in wrong.items()]  # fmt: skip


def judge_jobs(
    verdict: Verdict, valid: Iterable[RawRecord], acknowledged: Mapping[str, frozenset[str]], good: set[str]
) -> None:
    """`acknowledged`: job id → outcomes it may have. `good`: jobs that really ran to a good end."""
    ended: dict[str, list[str]] = defaultdict(list)
    for raw in valid:
        for fact in raw.facts:
            if fact.type.startswith(JobEnded.TYPE):
                event: Any = fact.event()
                ended[event.job_id].append(event.outcome)
    for job, allowed in acknowledged.items():
        outcomes = ended.get(job, [])
        if len(outcomes) != 1 or outcomes[0] not in allowed:
            verdict.lost.append(f"{job} ended {outcomes or 'never'}, not in {sorted(allowed)}")
        elif outcomes[0] == "succeeded" and job not in good:
            verdict.lost.append(f"{job} succeeded, but no node ran it to its end")
    verdict.jobs = Counter(outcome for outcomes in ended.values() for outcome in outcomes)


async def judge(
    log: Log, histories: Path, acknowledged: Mapping[str, frozenset[str]], *, exact_letters: bool = False
) -> Verdict:
    """Everything. The cell must be quiet: all inputs answered, all services stopped."""
    verdict = Verdict()
    good = judge_runs(verdict, histories)
    await judge_log(verdict, log, acknowledged, good, exact_letters=exact_letters)
    return verdict


async def judge_log(
    verdict: Verdict, log: Log, acknowledged: Mapping[str, frozenset[str]], good: set[str], *, exact_letters: bool
) -> None:  # fmt: skip
    """All that the log can tell; `good` as `judge_histories` returned it."""
    valid = await judge_ledger(verdict, log)
    await judge_orders(verdict, log, valid)
    await judge_letters(verdict, log, valid, exact=exact_letters)
    judge_jobs(verdict, valid, acknowledged, good)
