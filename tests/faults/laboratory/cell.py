"""A small cell of real services under faults, then a calm phase in which everything must come to its end.

Real are the placer's, the estimator's, the batcher's, the migrator's, the contention-guard's and the
node-reporter's shells and cores with all that they call; simulated are the log, the machines under the
node-reporters and the users.
"""

# clocks: all of it runs in virtual time

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import numpy as np

from penstock.errors import ConfigurationError, OffsetOutOfRange
from penstock.ledger.replica.replica import Replica
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.state import CellState
from penstock.log.port import Log, Message, Partition, Record
from penstock.model.inputs.external_events import JobCancelRequested, JobSubmitted
from penstock.model.nouns.nodes import NodeSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from penstock.runtime.following.snapshots import Written, head_id_at
from penstock.runtime.service import Run
from penstock.runtime.settings import Settings
from penstock.scheduling.profiles import own_names, profile_for
from penstock_services.batcher.shell import service as batcher
from penstock_services.estimator.shell import service as estimator
from penstock_services.node_reporter.options import Options as NodeOptions
from penstock_services.node_reporter.shell.run import runner
from penstock_services.placer.shell import service as placer
from penstock_services.placer.shell.replay import Replayer
from tests.faults.laboratory.injection.nemesis import Nemesis
from tests.faults.laboratory.injection.service_faults import HOUR_MS
from tests.faults.laboratory.inputs import profiles
from tests.faults.laboratory.inputs.jobs import EXTREMES_EVERY, SimulatedJob, at_extremes, jobs_of, nodes_of
from tests.faults.laboratory.inputs.wire import message
from tests.faults.laboratory.judging.ending import ENDS_WITHIN_S, PROFILES, RANDOM, Ending, lasting
from tests.faults.laboratory.judging.fresh import Snapshot, decide_afresh
from tests.faults.laboratory.judging.judge import Judge
from tests.faults.laboratory.machines.host import SimulatedHost
from tests.faults.laboratory.machines.log import Broker, Connection
from tests.faults.laboratory.machines.machine import Machine, Node, Program
from tests.faults.laboratory.machines.process import Clock, Process, Service
from tests.faults.laboratory.options import LOGS, Options
from tests.faults.laboratory.proposers.adjuster import Adjuster
from tests.faults.laboratory.proposers.administrator import Administrator
from tests.faults.laboratory.proposers.grouper import Grouper
from tests.faults.laboratory.proposers.mover import Mover
from tests.faults.laboratory.proposers.planning import PlanningWorker
from tests.faults.laboratory.proposers.proposer import Proposer
from tests.faults.laboratory.world import World, rates_of
from tests.faults.rules.findings import Violation
from tests.support.cluster.readers import Readers
from tests.support.node_reporter.forgeries import GATEWAYS

PLACERS = 3
SETTINGS = Settings(log_url="memory", trace_ratio=0.0)
PATIENCE_S = 1_500.0  # of calm: sound runs take 340 s at most
LAST_MESSAGES_S = 30.0  # of calm, in which the latest messages of the faulty phase have come
LOOK_S = 1.0
NOTICED_WITHIN_S = 300.0  # of the loss of an input; placers may be dead until it is calm
RESTARTED_AFTER_S = 5.0  # a service that cannot work
SNAPSHOT_EVERY = 25  # valid records
COMPARE_EVERY = 16  # records between two looks at whether placer and ledger agree
LEASES_MS = (20_000, 60_000)
SLOWEST_CLOCK = 0.846  # of a node: `penstock.ledger.state.lease.wait_ms`
LEDGER = Partition(Topic.LEDGER, 0)
OWN = {"queue_limits_gpu_s": "[20.0, 60.0]"}
"""Own settings of profiles, other than their defaults."""


class Laboratory:
    """Everything of one run, wired up."""

    settings = SETTINGS

    def __init__(self, options: Options) -> None:
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((options.seed, 0x5CE))))
        faults = options.faults
        self.storm_s = float(rng.uniform(60, 300)) if options.storm_s is None else options.storm_s
        rates = rates_of(rng, faults)
        if "policy" in faults:
            rates = rates._replace(policy=profiles.POLICY_RATES[options.seed % len(profiles.POLICY_RATES)])
        self.world = World(options.seed, rates)
        given = options.profile or (
            PROFILES[options.seed % len(PROFILES)] if options.lost == RANDOM else None
        )
        self.profile = profiles.profile_of(rng, options.seed, given)
        specs = nodes_of(rng, options.nodes or int(rng.integers(3, 7)))
        self.jobs = jobs_of(
            rng,
            options.jobs or int(rng.integers(8, 20)),
            specs,
            self.storm_s,
            saving="save" in faults,
            early="prelaunch" in faults,
            alike=profile_for(PlacerSettings(profile=self.profile)).regroup is not None,
        )
        if options.lost:
            self.jobs = lasting(self.jobs)
        if extremes := "extremes" in faults and options.seed % EXTREMES_EVERY == 0:
            self.jobs = at_extremes(options.seed, self.jobs)
        self.environment = self._environment(rng, options.seed)
        guarded = self.profile in profiles.GUARDED
        if moves := self.profile in profiles.MIGRATING:
            self.environment["PENSTOCK_CONVERGENCE"] = profiles.CONVERGENCE
        self.judge = Judge(self.world)
        self.judge.readers = Readers() if extremes else None
        log = options.log or LOGS[options.seed % len(LOGS)]
        self.broker = self.judge.broker = Broker(self.world, self._landed, conditional=log == "embedded")
        self.judge.programs = {job.job_id: Program(job) for job in self.jobs}
        self.snapshots: list[Snapshot] = []
        self.replicas: dict[str, Replica] = {}
        """By placer: what its present term folds into and decides on."""
        self.clocks = [_clock(rng, "clock" in faults) for _ in range(PLACERS + 2 + len(specs))]
        self.placers = [self._placer(number) for number in range(PLACERS)]
        self.projected: Written | None = None
        """The head of read models that are always up to date."""
        self.planned: list[str] = []  # kind of each question that the batcher's worker has answered
        self.administrator = Administrator(self)
        self.inputs_lost = self.nodes_lost = False
        """Whether inputs that the ledger names are gone: it cannot be decided again."""
        self.estimator = Service(self.world, "estimator", self.clocks[PLACERS], self._estimate, 30.0)
        self.batcher = Service(self.world, "batcher", self.clocks[PLACERS + 1], self._batch, 30.0)
        self.watchers = {
            name: Service(self.world, name, _clock(rng, "clock" in faults), self._watches(run), 30.0)
            for name, run in profiles.watching(self.profile).items()
        }
        self.nodes: dict[str, Node] = {}
        for spec, clock in zip(specs, self.clocks[PLACERS + 2 :], strict=True):
            clock.rate = float(rng.uniform(SLOWEST_CLOCK, 1.0)) if "clock" in faults else 1.0
            self._add_node(spec, clock, drain=bool(rng.random() < 0.5))
        for node in self.nodes.values():
            node.machine.reports_losses, node.machine.reports_steps = moves, guarded
        self.judge.machines = {node_id: node.machine for node_id, node in self.nodes.items()}
        self.proposer = Proposer(self.world, self.broker, active="propose" in faults)
        self.adjuster = Adjuster(self.world, self.broker, named=guarded)
        self.mover = Mover(self.world, self.broker)
        self.grouper = Grouper(self.world, self.broker)
        self._standing_by = {"placer-1"}
        self._start()
        self.nemesis = Nemesis(self, faults, every_s=float(rng.uniform(4, 20)))
        self.ending = Ending(self, options.lost, options.seed) if options.lost else None

    def _environment(self, rng: np.random.Generator, seed: int) -> dict[str, str]:
        return {
            "PENSTOCK_PROFILE": self.profile,
            "PENSTOCK_SEED": str(seed),
            **{f"PENSTOCK_{name.upper()}": OWN[name] for name in own_names(self.profile) if name in OWN},
            "PENSTOCK_LAUNCH_TIMEOUT_MS": "30000",
            "PENSTOCK_UNSCHEDULABLE_GRACE_MS": str(int(rng.integers(10_000, 120_000))),
            "PENSTOCK_LEASE_MS": str(int(rng.integers(*LEASES_MS))),
            "PENSTOCK_BATCH_WINDOW_MS": str(profiles.WINDOWS_MS[seed % len(profiles.WINDOWS_MS)]),
            "PENSTOCK_BATCH_ARRIVALS": "2",
            "PENSTOCK_BACKFILL_WINDOW": str(int(rng.choice([1, 8, 64]))),
            "PENSTOCK_MAX_OVERTAKES": str(int(rng.choice([1, 4, 256]))),
        }

    # ------------------------------------------------------------------------------------- services

    def _placer(self, number: int) -> Service:
        name = f"placer-{number}"

        async def load_replica(settings: Settings, log: Log) -> Replica:
            replica = self.replicas[name] = await self.load_replica(settings, log)
            return replica

        async def work(process: Process) -> None:
            standing_by = name in self._standing_by
            self._standing_by.discard(name)
            start = placer.Start(
                name,
                standing_by,
                load_replica,
                self.newest_projected,
                sha256(name.encode()).digest(),
                GATEWAYS,
            )
            log = Connection(self.broker, process)
            try:
                await placer.run(SETTINGS, process.stop, log=log, start=start)
            except ConfigurationError as error:
                self.administrator.reads(error)

        return Service(self.world, name, self.clocks[number], work, 20.0)

    async def load_replica(self, settings: Settings, log: Log) -> Replica:
        """From the latest snapshot; now and then there is none to be had, and it folds from the beginning."""
        del settings
        if self.snapshots and self.world.rng.random() >= 0.2:
            for latest in reversed(self.snapshots):
                if await head_id_at(log, LEDGER, latest.offset - 1) == latest.head.id:
                    return Replica(load(latest.state), latest.head, latest.offset, latest.offset - 1)
        return Replica()

    async def newest_projected(self, settings: Settings) -> Written | None:
        """What the read models hold."""
        del settings
        return self.projected

    async def _estimate(self, process: Process) -> None:
        try:
            await estimator.run(SETTINGS, process.stop, log=Connection(self.broker, process))
        except OffsetOutOfRange:
            if not (self.inputs_lost or self.judge.has_lost):
                raise
            await asyncio.sleep(RESTARTED_AFTER_S)

    async def _batch(self, process: Process) -> None:
        worker = PlanningWorker(self.world, process, self.planned)
        await batcher.run(SETTINGS, process.stop, log=Connection(self.broker, process), worker=worker)

    def _watches(self, run: Run) -> Callable[[Process], Coroutine[object, object, None]]:
        async def work(process: Process) -> None:
            await run(SETTINGS, process.stop, log=Connection(self.broker, process))

        return work

    @property
    def planners(self) -> tuple[Service, ...]:
        """Services that propose."""
        return (self.batcher, *self.watchers.values())

    def _add_node(self, spec: NodeSpec, clock: Clock, *, drain: bool) -> None:
        judge = self.judge
        machine = Machine(
            self.world,
            spec,
            clock,
            judge.programs,
            judge.starts,
            judge.signalled,
            judge.unstopped,
            judge.adjusted,
        )
        machine.others = lambda: judge.machines
        nowhere = Path("nowhere")
        plain = NodeOptions(spec.node_id, nowhere, nowhere, drain=drain, drain_grace_ms=5_000)

        async def work(process: Process) -> None:
            options = replace(plain, clear_gpu_faults=machine.repaired)
            host = SimulatedHost(machine, process)
            await runner(options, host)(SETTINGS, process.stop, log=Connection(self.broker, process))

        reporter = Service(self.world, f"reporter of {spec.node_id}", clock, work, 40.0)
        self.nodes[spec.node_id] = Node(machine, reporter, drain)

    def serving(self) -> Service | None:
        """The placer in office, if it lives."""
        name = self.judge.book.placer_id
        return next((service for service in self.placers if service.name == name and service.alive), None)

    # ---------------------------------------------------------------------------------------- users

    def _start(self) -> None:
        for service in (*self.placers[:2], self.estimator, *self.planners):
            service.start()
        for node in self.nodes.values():
            self.world.at(self.world.within(0, 5), node.reporter.start)
        for job in self.jobs:
            self.world.at(job.submit_s, lambda job=job: self._submit(job))  # type: ignore[misc]

    def _submit(self, job: SimulatedJob) -> None:
        submission = message(JobSubmitted(job_id=job.job_id, spec=job.spec), f"submit-{job.job_id}", "/users")
        self.send(submission)
        if self.world.happens(self.world.rates.twice):
            self.world.at(self.world.within(0, 100), lambda: self.send(submission))
        if job.cancel_s is not None:
            self.world.at(job.cancel_s, lambda: self.cancel(job.job_id))
            if self.world.happens(self.world.rates.twice):
                self.world.at(job.cancel_s + 1.0, lambda: self.cancel(job.job_id))

    def lose_input(self, place: Partition, *, anew: bool) -> None:
        """It is truncated at its end, or created anew. But not both ledger and joinings: then no record is
        left of the nodes."""
        if place.topic == Topic.NODES and self.judge.has_lost:
            return
        self.nodes_lost = self.nodes_lost or place.topic == Topic.NODES
        self.world.trace(f"{place.topic} is {'created anew' if anew else 'truncated'}")
        self.inputs_lost = True
        (self.broker.restore if anew else self.broker.expire)(place)
        self.world.at(NOTICED_WITHIN_S, lambda: self._noticed(place))

    def _noticed(self, place: Partition) -> None:
        position = self.judge.rules.answered(place.topic)
        if not self.broker.first(place) <= position <= self.broker.end(place):
            raise Violation(
                "loss", f"{place.topic} was lost {NOTICED_WITHIN_S:g} s ago, and no service has reported it"
            )

    def restore_ledger(self, lost: int) -> None:
        """So many records are lost, but not the first."""
        end = self.broker.end(LEDGER)
        if end > 1 and not self.nodes_lost:
            self.broker.restore(LEDGER, max(1, end - lost))
            self.world.trace(
                f"the ledger is restored: it ends at {self.broker.end(LEDGER)}, and ended at {end}"
            )
            self.judge.restored(self.broker.records(LEDGER))
            self._end_unaware()

    def _end_unaware(self) -> None:
        """Placers that would be in office again, asleep or with no record of those that are lost: neither can
        notice the loss, so an administrator ends them before a restore (placer's README)."""
        term, end = self.judge.replica.state.term, self.broker.end(LEDGER)
        for candidate in self.placers:
            replica = self.replicas.get(candidate.name)
            if replica is None or replica.state.term > term:
                continue
            if candidate.asleep or replica.offset <= end:
                candidate.kill("it would not notice that the ledger is restored")

    def resubmit(self) -> None:
        """Users look for their jobs, and submit again what the cell does not know."""
        for job in self.jobs:
            if job.job_id in self.judge.submitted and job.job_id not in self.judge.rules.submissions:
                self.send(
                    message(JobSubmitted(job_id=job.job_id, spec=job.spec), f"submit-{job.job_id}", "/users")
                )

    def cancel(self, job_id: str) -> None:
        self.judge.cancelled[job_id] = None
        self.send(message(JobCancelRequested(job_id=job_id), f"cancel-{job_id}", "/users"))

    def send(self, *messages: Message) -> None:
        """Lands after a while."""
        self.world.at(self.world.delay_s(), lambda: self.broker.put(messages))

    # -------------------------------------------------------------------------------------- judging

    def _landed(self, record: Record) -> None:
        judge = self.judge
        if record.partition.topic != Topic.LEDGER:
            judge.landed(record)
        elif judge.ledger(record):
            self.proposer.reads(record.value)
            replica = judge.replica
            self.projected = Written(replica.head, record.offset, replica.state.epoch)
            if judge.book.records % SNAPSHOT_EVERY == 0:
                self.snapshots.append(Snapshot(dump(replica.state), replica.head, replica.offset))
            if judge.book.records % COMPARE_EVERY == 0:
                self.world.at(0.0, self._compare)

    def _compare(self) -> None:
        """A placer at the same record of the same term has the same state as the ledger, neither more nor
        less."""
        state = self.judge.replica.state
        for name, replica in self.replicas.items():
            same = _moment(replica.state) == _moment(state)
            if same and dump(replica.state) != dump(state):
                raise Violation("fold", f"seq {state.seq}: {name} has another state than the ledger")

    def over(self) -> bool:
        """All jobs have ended, all inputs are answered, nothing runs and nobody has anything to send."""
        judge = self.judge
        if len(judge.submitted) < len(self.jobs) or judge.submitted.keys() != judge.ended.keys():
            return False
        if any(judge.rules.answered(topic) < self.broker.end(Partition(topic, 0)) for topic in INPUT_TOPICS):
            return False
        return all(
            not node.machine.processes and node.machine.disk.idle
            for node in self.nodes.values()
            if not (node.machine.destroyed or node.machine.silent)
        )

    # ---------------------------------------------------------------------------------- two phases

    async def run(self) -> None:
        """Raises `Violation`."""
        await self._wait(self.storm_s)
        self._clear_up()
        calm_s = self.world.now_s + LAST_MESSAGES_S
        patience_s = ENDS_WITHIN_S if self.ending else PATIENCE_S
        until_s = self.world.now_s + patience_s
        while not self.over():
            self.judge.adjustments.look(calm_s)
            if self.ending:
                self.ending.look(calm_s)
            if self.world.now_s > until_s:
                self._never_ended(patience_s)
            await self._wait(LOOK_S)
        self._rest()

    async def _wait(self, seconds: float) -> None:
        await asyncio.wait({self.world.failed}, timeout=seconds)
        if self.world.failed.done():
            raise self.world.failed.result()

    def _clear_up(self) -> None:
        """No faults any more: all services and machines come back, what was suspected reports again."""
        world = self.world
        world.calm = True
        world.trace("calm")
        for node_id, node in self.nodes.items():
            node.machine.disk.full = node.machine.disk.sync_fails = node.machine.slow_start = False
            node.power_on()
            if node.machine.broken:
                node.machine.repair_gpus()
                node.reporter.kill("restarted by its operator, who has repaired GPUs")
            if node.machine.pulled:
                node.machine.put_gpus_back()
                node.reporter.kill("restarted, since its GPUs are back")
            if node_id in self.nemesis.suspected:
                node.reporter.kill("restarted by its operator")
            node.reporter.start()
        self.nemesis.confirm()
        self.nemesis.suspect_again()
        if self.ending:
            self.ending.calm(LAST_MESSAGES_S)
        world.at(LAST_MESSAGES_S, self._heal)
        for service in (self.estimator, self.batcher, *self.placers[:2]):
            service.start()

    def _heal(self) -> None:
        """What was still under way has arrived: who was reported gone or silent by it reports again."""
        self.nemesis.confirm()  # a restored ledger may have come to know of what is gone only now
        self.nemesis.uncordon_all()
        self.nemesis.release_all()
        for node_id, node in self.judge.book.nodes.items():
            wronged = node.status == "gone" or (
                node.status == "suspect" and node_id in self.nemesis.suspected
            )
            if wronged and self.nodes[node_id].machine.up:
                self.nodes[node_id].reporter.kill("restarted by its operator")

    def _never_ended(self, patience_s: float) -> None:
        state = self.judge.replica.state
        waiting = [f"{job.job_id} is {job.status}" for job in state.jobs.values()]
        lost = sorted(self.judge.submitted.keys() - self.judge.ended.keys() - state.jobs.keys())
        nodes = [f"{node_id} {node.status}" for node_id, node in state.nodes.items()]
        processes = {node_id: list(node.machine.processes) for node_id, node in self.nodes.items()}
        raise Violation(
            "liveness",
            f"calm for {patience_s:g} s, and it goes on: {waiting}; unknown to the ledger: {lost}; "
            f"frozen: {state.frozen!r}; nodes: {nodes}; processes: {processes}",
        )

    def _rest(self) -> None:
        """At the end nothing is held, nothing waits, and all agree."""
        state = self.judge.replica.state
        for node in state.nodes.values():
            held = (len(node.spec.gpus) - node.free_gpu_mask.bit_count(), node.shared, node.tasks)
            if held != (0, {}, {}):
                raise Violation("rest", f"{node.spec.node_id} still holds {held}")
        if state.jobs or state.queue or self.judge.book.jobs:
            raise Violation("rest", f"left over: {list(state.jobs)}, {list(state.queue)}")
        letters = self.judge.rules.unexplained_letters()
        if letters:
            raise Violation("letter", f"of inputs that were answered otherwise: {letters}")
        self._compare()

    async def replay(self) -> None:
        """Decides the whole ledger again from its inputs and compares byte for byte; and parts of it by
        deciders that know nothing of before."""
        report = await Replayer(Connection(self.broker), 0).run()
        if report.different:
            raise Violation("replay", f"{report.different} records differ: {report.differences[:2]}")
        if not self.judge.has_lost:  # else snapshots are of two histories
            await decide_afresh(self.broker, self.snapshots)


def _moment(state: CellState) -> tuple[int, int, int]:
    return state.seq, state.term, state.epoch  # another epoch is another history


def _clock(rng: np.random.Generator, wrong: bool) -> Clock:
    return Clock(int(rng.integers(-6 * HOUR_MS, 6 * HOUR_MS)) if wrong else 0)
