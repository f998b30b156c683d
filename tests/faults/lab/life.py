"""One life: a small cell with bad jobs in bad weather, then a calm in which everything must come to its end."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from penstock.ledger.snapshot import dump
from penstock.model.external_events import JobCancelRequested, JobSubmitted
from penstock.model.ledger_events import PlacerSettings
from penstock.model.topics import INPUT_TOPICS, Topic
from penstock.model.transitions import IllegalMove, NodeStatus
from penstock.model.types import NodeSpec
from penstock.policies.profiles import PROFILES
from tests.faults.lab.estimator import Estimator
from tests.faults.lab.jobs import LabJob, jobs_of, nodes_of
from tests.faults.lab.judge import SNAPSHOT_EVERY, Judge, Violation, landed
from tests.faults.lab.log import Log, Partition, Record, wire
from tests.faults.lab.machine import Machine, Program
from tests.faults.lab.nemesis import FAULTS, HOUR_MS, Nemesis
from tests.faults.lab.placer import Placer, Snapshot
from tests.faults.lab.proposer import Proposer
from tests.faults.lab.replay import replay
from tests.faults.lab.reporter import Reporter
from tests.faults.lab.world import Clock, Rates, World

NAMES = tuple(sorted(PROFILES))
PLACERS = 3
PATIENCE_S = 20_000.0  # of calm: a life that has come to nothing by then never will
LAST_WORDS_S = 30.0  # of calm, in which the latest messages of the storm have come
MAX_STEPS = 300_000
REPLAY_EVERY = 4  # lives of which the whole ledger is decided again
FOLD_EVERY = 16  # records between two looks at whether placer and ledger agree


WRONG = (
    ArithmeticError, AssertionError, AttributeError, IllegalMove, LookupError, TypeError, ValueError,
)  # fmt: skip
"""What a core raises that has gone wrong: a finding like any other."""


class Options(NamedTuple):
    """A life. None: drawn from the seed."""

    seed: int
    faults: tuple[str, ...] = tuple(FAULTS)
    profile: str | None = None
    jobs: int | None = None
    nodes: int | None = None
    storm_s: float | None = None

    def arguments(self) -> str:
        """As the command line takes them."""
        parts = [f"--seed {self.seed}"]
        if self.faults != tuple(FAULTS):
            parts.append(f"--faults {','.join(self.faults) or 'none'}")
        given = {"profile": self.profile, "jobs": self.jobs, "nodes": self.nodes, "storm": self.storm_s}
        parts += [f"--{name} {value}" for name, value in given.items() if value is not None]
        return " ".join(parts)


class Outcome(NamedTuple):
    """What came of a life."""

    seed: int
    profile: str
    judge: str
    """Which judge was violated; empty: none."""
    what: str
    records: int
    void: int
    terms: int
    jobs: int
    virtual_s: float
    ledger_hash: str
    happened: Mapping[str, int]
    story: tuple[str, ...]


class Laboratory:
    """Everything of one life, wired up."""

    def __init__(self, options: Options) -> None:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((options.seed, 0x5CE))))
        faults = options.faults
        self.storm_s = float(rng.uniform(60, 300)) if options.storm_s is None else options.storm_s
        self.world = World(options.seed, _rates(rng, faults))
        self.profile = options.profile or NAMES[int(rng.integers(len(NAMES)))]
        specs = nodes_of(rng, options.nodes or int(rng.integers(3, 7)))
        jobs = jobs_of(rng, options.jobs or int(rng.integers(8, 20)), specs, self.storm_s)
        self.log = Log(self.world, self._landed)
        inputs = {str(topic): self.log.partition(topic) for topic in INPUT_TOPICS}
        self.judge = Judge(self.world, inputs)
        self.judge.programs = {job.job_id: Program(job) for job in jobs}
        self.snapshots: list[Snapshot] = []
        self.clocks = [self._clock(rng, "clock" in faults) for _ in range(PLACERS + 1 + len(specs))]
        self.clock = self.clocks[0]
        settings = PlacerSettings(
            profile=self.profile,
            seed=options.seed,
            queue_limits_gpu_s=(20.0, 60.0),
            launch_timeout_ms=30_000,
            unschedulable_grace_ms=int(rng.integers(10_000, 120_000)),
            backfill_window=int(rng.choice([1, 8, 64])),
            max_overtakes=int(rng.choice([1, 4, 256])),
        )
        self.placers = [
            Placer(self.world, self.log, f"placer-{i}", settings, self.clocks[i], self.snapshots)
            for i in range(PLACERS)
        ]
        self.estimator = Estimator(self.world, self.log, self.clocks[PLACERS])
        self.machines: dict[str, Machine] = {}
        self.reporters: dict[str, Reporter] = {}
        for spec, clock in zip(specs, self.clocks[PLACERS + 1 :], strict=True):
            self._add_machine(spec, clock)
        self.judge.machines = self.machines
        self.proposer = Proposer(self.world, self.log)
        self.jobs = jobs
        self._start()
        self.nemesis = Nemesis(self, faults, every_s=float(rng.uniform(4, 20)))

    def _clock(self, rng: np.random.Generator, wrong: bool) -> Clock:
        return Clock(self.world, int(rng.integers(-6 * HOUR_MS, 6 * HOUR_MS)) if wrong else 0)

    def _add_machine(self, spec: NodeSpec, clock: Clock) -> None:
        machine = Machine(self.world, spec, clock, self.judge.programs, self.judge.starts)
        self.machines[spec.node_id] = machine
        self.reporters[spec.node_id] = Reporter(self.log, machine, self.judge)

    def _start(self) -> None:
        self.placers[0].start()
        self.placers[1].start(standing_by=True)
        self.estimator.start()
        for reporter in self.reporters.values():
            self.world.at(self.world.within(0, 5), reporter.start)
        for job in self.jobs:
            self.world.at(job.submit_s, lambda job=job: self._submit(job))  # type: ignore[misc]

    def _submit(self, job: LabJob) -> None:
        jobs = self.log.partition(Topic.JOBS)
        event = JobSubmitted(job_id=job.job_id, spec=job.spec)
        record = wire(event, f"submit-{job.job_id}", "/penstock/gateway", self.clock.wall_ms())
        self.log.append("gateway", jobs, [record])
        if self.world.chance(self.world.rates.twice):
            self.world.at(self.world.within(0, 100), lambda: self._append_job(record))
        if job.cancel_s is not None:
            cancel = wire(
                JobCancelRequested(job_id=job.job_id), f"cancel-{job.job_id}", "/penstock/gateway", 1
            )
            self.world.at(job.cancel_s, lambda: self._append_job(cancel))
            if self.world.chance(self.world.rates.twice):
                self.world.at(job.cancel_s + 1.0, lambda: self._append_job(cancel))

    def _append_job(self, record: Record) -> None:
        self.log.append("gateway", self.log.partition(Topic.JOBS), [record])

    def power_on(self, machine: Machine) -> None:
        """Nothing, if it runs or is no more."""
        if not machine.up and not machine.destroyed:
            machine.come_up()
            self.world.at(self.world.delay_s(), self.reporters[machine.node_id].start)

    # -------------------------------------------------------------------------------------- judging

    def _landed(self, partition: Partition, offset: int, record: Record) -> None:
        if partition.topic != Topic.LEDGER:
            landed(self.judge, record, partition)
            return
        judge = self.judge
        if judge.ledger(record.value):
            if judge.records % SNAPSHOT_EVERY == 0:
                self.snapshots.append(Snapshot(dump(judge.state), judge.head, offset + 1))
            if judge.records % FOLD_EVERY == 0:
                self.world.at(0.0, self._compare)

    def _compare(self) -> None:
        """A placer with nothing on its way knows what the ledger says, neither more nor less."""
        for placer in self.placers:
            term = placer.serving
            if (
                term is not None
                and term.core is not None
                and term.settled
                and term.core.state.seq == self.judge.state.seq
                and term.core.state.term == self.judge.state.term
                and dump(term.core.state) != dump(self.judge.state)
            ):
                raise Violation(
                    "fold", f"seq {self.judge.head.seq}: {placer.name} knows another state than the ledger"
                )

    @property
    def over(self) -> bool:
        """All jobs have ended, all inputs are answered, nothing runs and nobody has anything to say."""
        judge = self.judge
        if len(judge.submitted) < len(self.jobs) or judge.submitted.keys() != judge.ended.keys():
            return False
        if any(judge.answered(str(topic)) < self.log.partition(topic).end for topic in INPUT_TOPICS):
            return False
        return all(
            not machine.processes
            and not (machine.written and (machine.written[-1].outbox or machine.written[-1].state.tasks))
            for machine in self.machines.values()
            if not machine.destroyed
        )

    # ---------------------------------------------------------------------------------- two phases

    def run(self) -> None:
        """Raises `Violation`, or whatever a core raises."""
        while (next_s := self.world.next_s()) is not None and next_s <= self.storm_s:
            self._step()
        self._clear_up()
        until_s = self.world.now_s + PATIENCE_S
        while not self.over:
            if not self._step() or self.world.now_s > until_s:
                self._never_ended()
        self._rest()

    def _step(self) -> bool:
        if self.world.steps > MAX_STEPS:
            raise Violation("liveness", f"{MAX_STEPS} steps, and no end")
        return self.world.step()

    def _clear_up(self) -> None:
        """The weather clears: all services and machines come back, what was slandered speaks again."""
        world = self.world
        world.now_s = max(world.now_s, self.storm_s)
        world.calm = True
        world.tell("the weather clears")
        for machine in self.machines.values():
            self.power_on(machine)
            reporter = self.reporters[machine.node_id]
            work = reporter.work
            if machine.node_id in self.nemesis.suspected and work is not None:
                work.life.crash("restarted by its operator")
            reporter.start()
        self.nemesis.swear()
        world.at(LAST_WORDS_S, self._heal)
        self.estimator.start()
        for placer in self.placers[:2]:
            placer.start(standing_by=any(other.serving for other in self.placers))

    def _heal(self) -> None:
        """What was still under way when the weather cleared has arrived: who was slandered by it speaks up."""
        for node_id, node in self.judge.state.nodes.items():
            reporter = self.reporters[node_id]
            wronged = node.status is NodeStatus.GONE or (
                node.status is NodeStatus.SUSPECT and node_id in self.nemesis.suspected
            )
            if wronged and self.machines[node_id].up and reporter.work is not None:
                reporter.work.life.crash("restarted by its operator")

    def _never_ended(self) -> None:
        state = self.judge.state
        waiting = [f"{job.job_id} is {job.status}" for job in state.jobs.values()]
        lost = sorted(self.judge.submitted.keys() - self.judge.ended.keys() - state.jobs.keys())
        nodes = [f"{node_id} {node.status}" for node_id, node in state.nodes.items()]
        raise Violation(
            "liveness",
            f"calm for {PATIENCE_S:g} s, and it goes on: {waiting}; unknown to the ledger: {lost}; "
            f"frozen: {state.frozen!r}; nodes: {nodes}",
        )

    def _rest(self) -> None:
        """At the end nothing is held, nothing waits, and all agree."""
        state = self.judge.state
        for node in state.nodes.values():
            held = (len(node.spec.gpus) - node.free_gpu_mask.bit_count(), node.shared, node.tasks)
            if held != (0, {}, {}):
                raise Violation("rest", f"{node.spec.node_id} still holds {held}")
        left = [timer_id for timer_id, timer in state.timers.items() if timer.about.id in self.judge.ended]
        if state.jobs or state.queue or left:
            raise Violation("rest", f"left over: {list(state.jobs)}, {list(state.queue)}, timers {left}")
        self._compare()


def _rates(rng: np.random.Generator, faults: tuple[str, ...]) -> Rates:
    drawn = Rates(
        crash=float(rng.choice([0.0, 0.002, 0.01, 0.02])),
        late=float(rng.uniform(0, 0.3)),
        longest_s=float(rng.choice([0.5, 3.0, 10.0])),
        usual_s=float(rng.choice([0.01, 0.05, 0.3])),
        twice=float(rng.uniform(0, 0.4)),
    )
    return drawn._replace(
        crash=drawn.crash if "turns" in faults else 0.0,
        late=drawn.late if "late" in faults else 0.0,
        twice=drawn.twice if "twice" in faults else 0.0,
    )


def live(options: Options) -> Outcome:
    """Lives one life. Whatever a core raises is a finding like a judge's: `crash` with the exception."""
    laboratory = Laboratory(options)
    judge, what = "", ""
    try:
        laboratory.run()
        if options.seed % REPLAY_EVERY == 0:
            replay(laboratory.log)
    except Violation as violation:
        judge, what = violation.judge, violation.what
    except WRONG as error:
        judge, what = "crash", f"{type(error).__name__}: {error}"
    found = laboratory.judge
    services = {
        "lives of placers": sum(placer.lives for placer in laboratory.placers),
        "placers replaced": sum(placer.fenced for placer in laboratory.placers),
        "lives of the estimator": laboratory.estimator.lives,
        "lives of reporters": sum(reporter.lives for reporter in laboratory.reporters.values()),
        "boots": sum(machine.boots for machine in laboratory.machines.values()),
        "freezes": found.froze,
    }
    return Outcome(
        options.seed,
        laboratory.profile,
        judge,
        what,
        found.records,
        found.void,
        found.head.term,
        len(found.ended),
        laboratory.world.now_s,
        found.head.id,
        laboratory.nemesis.happened | services,
        tuple(laboratory.world.story),
    )
