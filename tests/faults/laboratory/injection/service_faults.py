"""Faults of services and of the log: placers that die, sleep, compete or do not belong; clocks; lost
records."""

from functools import partial

import msgspec

from penstock.ledger.record.record import Draft, Head, write
from penstock.log.port import Message, Partition
from penstock.model.decisions.orders import Peer, StartTask
from penstock.model.inputs.external_events import JobCancelRequested
from penstock.model.nouns.types import TaskPlacement
from penstock.model.schema.event import Event
from penstock.model.schema.topics import INPUT_TOPICS, Topic
from tests.faults.laboratory.injection.injector import Injector
from tests.faults.laboratory.inputs.wire import message, orders_of

HOUR_MS = 3_600_000
YEAR_MS = 365 * 24 * HOUR_MS
LATEST = 40  # placements whose orders may still be under way
PLACER_STEPS = ("read inputs", "append ledger", "read ledger", "append orders")
BATCHER_STEPS = ("", "read ledger", "append inputs", "plan")
MAX_LOST = 60  # records of the ledger, at once
STUCK_S = (20.0, 60.0)


class ServiceFaults(Injector):
    """Each method is a fault."""

    def crash(self) -> None:
        """One service is killed."""
        lab = self._lab
        reporters = [node.reporter for node in lab.nodes.values()]
        alive = [
            service for service in (*lab.placers, lab.estimator, *lab.planners, *reporters) if service.alive
        ]
        if alive:
            alive[int(self._world.rng.integers(len(alive)))].kill("a crash")

    def upgrade(self) -> None:
        """One service is stopped in good order and started again; a node's tasks run on meanwhile."""
        lab = self._lab
        reporters = [node.reporter for node in lab.nodes.values() if not node.drains]
        services = (*lab.placers, lab.estimator, *lab.planners, *reporters)
        services[int(self._world.rng.integers(len(services)))].terminate()

    def zombie(self) -> None:
        """The placer in office falls asleep, whole or with one of its tasks, and another takes its place."""
        serving, rng = self._lab.serving(), self._world.rng
        if serving is not None and serving.process is not None:
            until_s = self._world.now_s + self._world.within(1, 40)
            kind = PLACER_STEPS[int(rng.integers(len(PLACER_STEPS)))] if rng.random() < 0.6 else ""
            serving.process.sleep(until_s, kind)
            self._world.trace(f"{serving.name} sleeps until {until_s:.1f} s: {kind or 'all of it'}")
        self.rival()

    def rival(self) -> None:
        """An operator starts one more placer, which takes over at once."""
        serving = self._lab.serving()
        idle = [service for service in self._lab.placers if service is not serving]
        rival = idle[int(self._world.rng.integers(len(idle)))]
        rival.kill("to be started anew")
        rival.start()

    def duel(self) -> None:
        """All placers but the one in office start at once, and each begins a term."""
        serving = self._lab.serving()
        for service in self._lab.placers:
            if service is not serving:
                service.kill("to duel for the term")
                service.start()

    def sleeper(self) -> None:
        """A dispatcher fell asleep between reading a placement back and sending its orders; now it sends
        them."""
        judge = self._lab.judge
        latest = list(judge.placed)[-LATEST:]
        unsent = [key for key in judge.placed if key not in judge.ordered]
        overtaken = [key for key in unsent if (judge.placed[key].place["node_id"], key[1]) in judge.may_stop]
        placed = overtaken[-LATEST:] or unsent[-LATEST:] or latest
        for _ in range(3):
            if placed:
                self._send_start(placed[int(self._world.rng.integers(len(placed)))])

    def overtake(self) -> None:
        """Orders are stuck while a job that was just placed is cancelled; the next placer's stop overtakes
        the start."""
        serving, judge, lab = self._lab.serving(), self._lab.judge, self._lab
        if serving is None or serving.process is None:
            return
        until_s = self._world.now_s + self._world.within(*STUCK_S)
        serving.process.sleep(until_s, "append orders")

        def unsent() -> list[tuple[int, str]]:
            jobs = judge.book.jobs
            return [
                key
                for key, own in judge.placed.items()
                if key not in judge.ordered and own.job_id in jobs and jobs[own.job_id].token == key[0]
            ]

        def cancel() -> None:
            key = unsent()[-1]
            own = judge.placed[key]
            node_id, job = own.place["node_id"], judge.book.jobs[own.job_id]
            lab.cancel(own.job_id)
            self._once(lambda: job.stop_reason is not None, self.rival, until_s)
            self._once(lambda: (node_id, key[1]) in judge.may_stop, lambda: self._send_start(key), until_s)

        self._once(lambda: bool(unsent()), cancel, until_s)

    def _send_start(self, key: tuple[int, str]) -> None:
        """The order that follows from a placement, as its placer would have sent it."""
        own = self._lab.judge.placed[key]
        order = StartTask(
            token=key[0],
            node_id=own.place["node_id"],
            task_id=key[1],
            job_id=own.job_id,
            attempt=int(key[1].rsplit(".", 2)[1]),
            boot_id=own.boot_id,
            incarnation=own.incarnation,
            command=("train",),
            place=msgspec.convert(own.place, TaskPlacement),
            gpu_uuids=own.gpus,
            peers=tuple(
                Peer(rank=place["rank"], role=place["role"], node_id=place["node_id"], address="127.0.0.1")
                for place in self._lab.judge.gang(key[0], own.job_id)
            ),
            rendezvous_port=29_500,
            grace_ms=1_000,
            checkpoint=self._checkpoint(key[0], own.job_id),
            lease_ms=self._lease_ms(key, own.job_id),
        )
        self._lab.send(message(order, f"order-{key}", "/penstock/placer"))

    def _lease_ms(self, key: tuple[int, str], job_id: str) -> int:
        """What the ledger gave the task: without a lease nothing would end it on a node that the cell has
        given up."""
        state = self._lab.judge.replica.state
        job = state.jobs.get(job_id)
        task = job.tasks.get(key[1]) if job is not None and job.token == key[0] else None
        return state.settings.lease_ms if task is None else task.lease_ms

    def _checkpoint(self, token: int, job_id: str) -> str | None:
        """What the start of such a job names; where it would have to be fetched, the sleeper's order leaves
        it at 0."""
        jobs = {job.job_id: job for job in self._lab.jobs}
        placed = self._lab.judge.rules.checkpoints.placed.get((token, job_id))
        if jobs[job_id].spec.checkpoint == "none":
            return None
        latest = None if placed is None else placed.latest
        here = latest is not None and placed is not None and set(placed.nodes) == {latest.node_id}
        return latest.name if here and latest is not None else ""

    def stranger(self) -> None:
        """The placer of another cell, or of a restored backup, writes to this ledger: nothing of it may
        count."""
        lab, rng = self._lab, self._world.rng
        replica = lab.judge.replica
        head, state = replica.head, replica.state
        fact: list[Event] = [JobCancelRequested(job_id=job_id) for job_id in list(state.jobs)[:1]]
        cause: dict[str, object] = {"timer_id": "none"}
        wrong = int(rng.integers(5))
        strange = (
            (Head(head.seq, "f" * 32, head.term), head.term),
            (head, head.term - 1),
            (head, head.term + 1),
            (Head(head.seq + 1, head.id, head.term), head.term),
        )
        value = b"\x00 no record"
        if wrong:
            parent, term = strange[wrong - 1]
            value = write(parent, Draft(term, state.now_ms, cause, "committed", None, fact))[1]
        lab.broker.put([Message(Partition(Topic.LEDGER, 0), value)])

    def propose(self) -> None:
        """A proposer proposes placements, as of what it last saw."""
        self._lab.proposer.propose()

    def stall(self) -> None:
        """The batcher hangs, whole or before it sends its plan; and what was proposed of late arrives once
        more."""
        lab, rng = self._lab, self._world.rng
        process = lab.batcher.process
        if process is not None:
            kind = BATCHER_STEPS[int(rng.integers(len(BATCHER_STEPS)))]
            process.sleep(self._world.now_s + self._world.within(*STUCK_S), kind)
            self._world.trace(f"the batcher hangs: {kind or 'all of it'}")
        proposals = Partition(Topic.PROPOSALS, 0)
        for record in lab.broker.records(proposals)[-3:]:
            self._once_more(Message(proposals, record.value, record.headers, record.key))

    def _once_more(self, copy: Message) -> None:
        self._world.at(self._world.within(0, STUCK_S[1]), lambda: self._lab.broker.put([copy]))

    def adjust(self) -> None:
        """Running tasks get other cores or less memory bandwidth, twice; the placer may die between record
        and order, a reporter between journal and deed."""
        lab, rng = self._lab, self._world.rng
        if rng.random() < 0.4:
            lab.judge.adjustments.then = lambda: self._world.at(0.0, self._end_serving)
        if rng.random() < 0.3:
            self._node().machine.dies_pinning = True
        self._adjust()
        self._world.at(self._world.within(1, 15), self._adjust)

    def _end_serving(self) -> None:
        serving = self._lab.serving()
        if serving is not None and not self._world.calm:
            serving.kill("between a record and its orders")

    def _adjust(self) -> None:
        lab = self._lab
        if self._world.calm:
            return
        for node_id in lab.nodes:
            lab.adjuster.adjust(lab.judge.replica.state, node_id)
            if self._world.rng.random() < 0.1:
                self._world.at(self._world.within(0, 30), partial(lab.adjuster.again, node_id))

    def move(self) -> None:
        """Running jobs are moved, twice; the placer may die at any moment of it, and users cancel what is on
        its way."""
        self._move()
        self._world.at(self._world.within(1, 15), self._move)

    def _move(self) -> None:
        lab, rng = self._lab, self._world.rng
        for _ in range(0 if self._world.calm else int(rng.integers(1, 6))):
            job_id = lab.mover.move(lab.judge.replica.state)
            if job_id is not None and rng.random() < 0.15:
                self._world.at(self._world.within(0, 12), partial(self._cancel_moving, job_id))
        if rng.random() < 0.5:
            self._world.at(self._world.within(0, 3), self._end_serving)

    def _cancel_moving(self, job_id: str) -> None:
        job = self._lab.judge.replica.state.jobs.get(job_id)
        if job is not None and job.target and not self._world.calm:
            self._lab.cancel(job_id)

    def group(self) -> None:
        """Waiting jobs are to share the GPUs of others, several times; the placer may die between a record
        and its orders."""
        for _ in range(3):
            self._world.at(self._world.within(0, 20), self._group)

    def _group(self) -> None:
        lab, rng = self._lab, self._world.rng
        for _ in range(0 if self._world.calm else int(rng.integers(1, 6))):
            lab.grouper.group(lab.judge.replica.state)
        if rng.random() < 0.3:
            self._world.at(self._world.within(0, 3), self._end_serving)

    def clock(self) -> None:
        """Some machine's clock jumps."""
        clocks = self._lab.clocks
        clock = clocks[int(self._world.rng.integers(len(clocks)))]
        jump_ms = int(self._world.rng.integers(-2 * HOUR_MS, 2 * HOUR_MS))
        clock.error_ms += jump_ms if self._world.rng.random() < 0.3 else jump_ms // 1_000
        self._world.trace(f"a clock jumps by {jump_ms} ms or a thousandth of it")

    def years(self) -> None:
        """A machine's battery dies, or a time server errs: its clock jumps by up to forty years, and now and
        then back."""
        clocks = self._lab.clocks
        clock = clocks[int(self._world.rng.integers(len(clocks)))]
        usual_ms, years = clock.error_ms, int(self._world.rng.integers(-40, 41))
        clock.error_ms += years * YEAR_MS
        self._world.trace(f"a clock jumps by {years} years")
        if self._world.rng.random() < 0.5:
            mended_s = self._world.within(1, 60)
            self._world.at(mended_s, lambda: setattr(clock, "error_ms", usual_ms))

    def outage(self) -> None:
        """The log cannot be reached for a while."""
        self._lab.broker.unreachable_until_s = self._world.now_s + self._world.within(0.5, 30)
        self._world.trace("the log cannot be reached")

    def retention(self) -> None:
        """The log forgets a node's old orders: a reporter that lags behind finds its position gone."""
        self._lab.broker.expire(orders_of(self._node().machine.node_id))

    def inputs(self) -> None:
        """An administrator truncates an input topic, or deletes it and creates it again: what was in it is
        lost."""
        place = Partition(INPUT_TOPICS[int(self._world.rng.integers(len(INPUT_TOPICS)))], 0)
        if self._lab.judge.rules.answered(place.topic):  # else no record names what was lost
            self._lab.lose_input(place, anew=bool(self._world.rng.random() < 0.5))

    def ledger(self) -> None:
        """The ledger is restored from an older copy, while everything else goes on."""
        self._lab.restore_ledger(int(self._world.rng.integers(1, MAX_LOST)))
