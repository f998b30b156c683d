"""The estimator as it runs, watched: `python -m tests.bench.services.watched_estimator FILE` writes down how
long each read took.

Two names of its shell are replaced before it starts, by ones that take the time: the function that makes one
estimate, and the model's tier, whose questions for many jobs are timed. The log is wrapped. All else is the
service itself.
"""

import asyncio
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any, Self, cast

from penstock.log.open import open_log
from penstock.log.port import MAX_READ_RECORDS, Log, Message, Partition, Reader, Record
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.types import Estimate
from penstock.model.schema.topics import Topic
from penstock.runtime.service import main
from penstock.runtime.settings import Settings
from penstock_services.estimator.core.resource_model.tier import ModelTier
from penstock_services.estimator.core.resources.estimate import estimate
from penstock_services.estimator.shell import service

MARK = b"estimate-"  # how the id of an estimate's event begins


@dataclass(slots=True)
class Read:
    """One read of the service with submissions in it, until its estimates were appended. Times in ms."""

    jobs: list[str] = field(default_factory=list)
    together_ms: float = 0.0
    """For asking the model about all of them."""
    together_cpu_ms: float = 0.0
    """The same of the processor alone: what others on the machine do hardly shows in it."""
    each_ms: list[float] = field(default_factory=list)
    """For each estimate besides."""
    each_cpu_ms: list[float] = field(default_factory=list)
    computed_ms: float = 0.0
    """From the read's return to the call of append: decoding, estimates, encoding."""
    appended_ms: float = 0.0
    """From the read's return to the append's."""


class Watch:
    """What is written down. The service does one read, then one append, so there is one open read at most."""

    def __init__(self) -> None:
        self.reads: list[Read] = []
        self.open = Read()
        self.began_s = 0.0

    def begin(self) -> None:
        """A read returned."""
        self.open, self.began_s = Read(), perf_counter()

    def end(self, jobs: list[str], computed_s: float) -> None:
        """Its append returned, with the estimates of these jobs; `computed_s`: when it was called."""
        self.open.jobs = jobs
        self.open.computed_ms = (computed_s - self.began_s) * 1_000
        self.open.appended_ms = (perf_counter() - self.began_s) * 1_000
        self.reads.append(self.open)
        self.open = Read()


class WatchedReader:
    def __init__(self, reader: Reader, watch: Watch) -> None:
        self._reader = reader
        self._watch = watch

    async def read(
        self, *, max_records: int = MAX_READ_RECORDS, timeout_ms: int | None = None
    ) -> list[Record]:
        found = await self._reader.read(max_records=max_records, timeout_ms=timeout_ms)
        self._watch.begin()
        return found

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


class WatchedLog:
    def __init__(self, log: Log, watch: Watch) -> None:
        self._log = log
        self._watch = watch

    async def append(self, messages: Sequence[Message]) -> list[int]:
        called_s = perf_counter()
        found = await self._log.append(messages)
        jobs = [job for message in messages if (job := _job_of(message))]
        if jobs:
            self._watch.end(jobs, called_s)
        return found

    def reader(self, start: Mapping[Partition, int], *, batch_ms: int = 0) -> Reader:
        reader = self._log.reader(start, batch_ms=batch_ms)
        if not any(partition.topic == Topic.JOBS for partition in start):
            return reader  # the fold at the start
        return cast(Reader, WatchedReader(reader, self._watch))

    async def start(self) -> Self:
        await self._log.start()
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


def _job_of(message: Message) -> str:
    """The job that this record is the estimate of; empty: it is something else."""
    ids = (value for _, value in message.headers if value.startswith(MARK))
    return next(ids, MARK)[len(MARK) :].decode()


async def run(
    settings: Settings, stop: asyncio.Event, *, log: Log | None = None, ready: asyncio.Event | None = None
) -> None:
    """The service, and at its end what was seen of it."""
    watch = Watch()

    made = estimate

    def watched_estimate(*about: Any) -> Estimate:
        began_s, cpu_s = perf_counter(), thread_time()
        found = made(*about)
        watch.open.each_cpu_ms.append((thread_time() - cpu_s) * 1_000)
        watch.open.each_ms.append((perf_counter() - began_s) * 1_000)
        return found

    class WatchedTier(ModelTier):
        def prepare(self, specs: Iterable[JobSpec]) -> None:
            began_s, cpu_s = perf_counter(), thread_time()
            super().prepare(specs)
            watch.open.together_cpu_ms += (thread_time() - cpu_s) * 1_000
            watch.open.together_ms += (perf_counter() - began_s) * 1_000

    for name, watched in (("ModelTier", WatchedTier), ("estimate", watched_estimate)):
        assert hasattr(service, name), f"the service has no {name} any more: this bench would watch nothing"
        setattr(service, name, watched)
    opened = WatchedLog(await open_log(settings.log_url, "estimator").start(), watch)
    await service.run(settings, stop, log=cast(Log, opened), ready=ready)
    await opened.close()
    reads = json.dumps([asdict(read) for read in watch.reads])
    Path(sys.argv[1]).write_text(reads)  # noqa: ASYNC240 - at the end


if __name__ == "__main__":
    main("estimator", run)
