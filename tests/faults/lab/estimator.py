"""The estimator over its lives: its own fold and its own rule, over the lab's log; it keeps nothing."""

from penstock.model.envelope import from_wire
from penstock.model.errors import EventError
from penstock.model.external_events import JobEstimated, JobSubmitted
from penstock.model.topics import Topic
from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.estimate import HistoryTier, estimate
from penstock_services.estimator.core.state import Ledger
from tests.faults.lab.log import Append, Log, Record, wire
from tests.faults.lab.world import Clock, Life, Loop, World

NAME = "estimator"
LONGEST_PAUSE_S = 30.0


class Estimator:
    """The process, life after life."""

    def __init__(self, world: World, log: Log, clock: Clock) -> None:
        self.world = world
        self.log = log
        self.clock = clock
        self.lives = 0
        self.work: _Work | None = None

    def start(self) -> None:
        """Nothing, if it lives."""
        if self.work is None or not self.work.life.alive:
            self.lives += 1
            self.work = _Work(self)

    def died(self) -> None:
        pause_s = 0.05 if self.world.calm else self.world.within(0.05, LONGEST_PAUSE_S)
        self.world.at(pause_s, self.start)


class _Work:
    """One life: folds the ledger that exists, estimates what it left open, then whatever is submitted."""

    def __init__(self, service: Estimator) -> None:
        self._service = service
        self._log = service.log
        self.life = Life(service.world, NAME, self._died)
        self._jobs, self._ledger = (self._log.partition(topic) for topic in (Topic.JOBS, Topic.LEDGER))
        self._estimates = self._log.partition(Topic.ESTIMATES)
        self._fold = Ledger(Topic.JOBS, 0)
        self._tiers = (HistoryTier(self._fold.history),)
        self._folded = self._read = 0
        self._caught_up = False
        self._in_flight: Append | None = None
        self._loop = Loop(self.life, self._turn, "estimating")
        self._log.read(self._loop, self._jobs, self._ledger)
        self._loop.kick()

    def _died(self) -> None:
        if self._in_flight is not None:
            self._log.cut_off(self._in_flight)
        self._service.died()

    def _turn(self) -> None:
        """One read, one append; waits for the append before the next read."""
        if self._in_flight is not None:
            return
        for record in self._ledger.records[self._folded :]:
            self._fold.fold(record.value)
        self._folded = self._ledger.end
        records: list[Record] = []
        if not self._caught_up:
            self._caught_up = True
            self._read = self._fold.jobs_offset
            records += [self._estimate(job_id, spec) for job_id, _, spec in self._fold.unestimated()]
            self._fold.forgotten()
        for record in self._jobs.records[self._read :]:
            try:
                event = from_wire(record.headers, record.value, Topic.JOBS).data
            except EventError:
                continue
            if isinstance(event, JobSubmitted):
                records.append(self._estimate(event.job_id, event.spec))
        self._read = self._jobs.end
        records += [self._estimate(job_id, spec) for job_id, _, spec in self._fold.forgotten()]
        if records:
            self._in_flight = self._log.append(NAME, self._estimates, records, self._sent)

    def _sent(self) -> None:
        self._in_flight = None
        if self.life.alive:
            self._loop.kick()

    def _estimate(self, job_id: str, spec: JobSpec) -> Record:
        event = JobEstimated(job_id=job_id, estimate=estimate(spec, self._tiers))
        return wire(event, f"estimate-{job_id}", "/penstock/estimator", self._service.clock.wall_ms())
