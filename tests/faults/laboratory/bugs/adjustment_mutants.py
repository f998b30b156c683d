"""Mutants of adjustments: cores and memory bandwidth of running tasks, in ledger, placer and
node-reporter."""

from collections.abc import Iterator
from typing import Any

from msgspec.structs import replace as but

from penstock.ledger.fold import evolve_adjustments
from penstock.ledger.state.masks import full_mask
from penstock.ledger.state.state import CellState
from penstock.model.decisions.adjustments import CoresDecided
from penstock.model.decisions.orders import SetBandwidth, SetCores
from penstock.model.nouns.transitions import TaskStatus
from penstock.proposals import validate_adjustments
from penstock_services.node_reporter.core import adjustments
from penstock_services.node_reporter.core.actions import SetAffinity
from penstock_services.node_reporter.core.inputs import Done
from penstock_services.node_reporter.core.state import Put, Status
from penstock_services.node_reporter.shell.adjustments import carry_out
from penstock_services.placer.core import guard, orders
from penstock_services.placer.core.decide import Decider
from penstock_services.placer.core.plans import proposals
from tests.faults.laboratory.patching import accepting, filtered, mutant, nothing, posing, replace

# ------------------------------------------------------------------------------------------------- the
# node-reporter


@mutant("a node compares no tokens of adjustments", faults="adjust,duplicate,rival", first=6)
def _() -> None:
    def adjust(state: Any, order: Any) -> Iterator[Any]:
        task = state.tasks.get(order.task_id)
        if task is not None and task.status is not Status.STOPPING and order.token >= task.token:
            task = adjustments._desired(state, task, order)
            yield Put(task)
            yield from (act for _, _, act in adjustments._asked(task, order.token))

    replace(adjustments.adjust, adjust)


@mutant("a node has one token for all adjustments of a task", faults="adjust,ledger", first=9)
def _() -> None:
    real = adjustments.adjust

    def adjust(state: Any, order: Any) -> Iterator[Any]:
        task = state.tasks.get(order.task_id)
        known = [] if task is None else [found.token for found in (task.cores, task.bandwidth) if found]
        if not known or order.token > max(known):
            yield from real(state, order)

    replace(real, adjust)


@mutant("a node leaves a task one core", faults="adjust")
def _() -> None:
    real = adjustments._asked

    def asked(task: Any, token: int | None = None) -> Iterator[Any]:
        for own, known, act in real(task, token):
            yield own, known, but(act, cores=act.cores[:1]) if isinstance(act, SetAffinity) else act

    replace(real, asked)


@mutant("a node answers before it has done it", faults="adjust")
def _() -> None:
    def done(host: Any, action: Any) -> Done:
        what: Any = "cores" if isinstance(action, SetAffinity) else "memory_bandwidth"
        return Done(action.task_id, action.token, action.order_token, what, "affinity", "")

    replace(carry_out, done)


@mutant("a node does not answer an adjustment", faults="adjust", first=1)
def _() -> None:
    nothing(adjustments.done)


@mutant("an order that is repeated is not obeyed again", faults="adjust", first=9)
def _() -> None:
    real = adjustments.adjust

    def adjust(state: Any, order: Any) -> Iterator[Any]:
        task = state.tasks.get(order.task_id)
        known = None if task is None else task.cores if isinstance(order, SetCores) else task.bandwidth
        if known is None or known.token != order.token:
            yield from real(state, order)

    replace(real, adjust)
    nothing(adjustments.unconfirmed)


@mutant("a restarted reporter starts tasks before it adjusts others", faults="adjust", first=54)
def _() -> None:
    nothing(adjustments.unconfirmed)


@mutant(
    "a restarted reporter adjusts tasks in the order of their starts", faults="adjust,late,steps", first=57
)
def _() -> None:
    real = adjustments.unconfirmed

    def unconfirmed(tasks: Any) -> Iterator[Any]:
        for task in tasks:
            yield from real([task])

    replace(real, unconfirmed)


# ------------------------------------------------------------------------------------------------- the placer


@mutant("adjustments are not repeated", faults="adjust", log="kafka", first=1)
def _() -> None:
    filtered(orders.outstanding, lambda order: not isinstance(order, SetCores | SetBandwidth))


@mutant("adjustments are repeated after starts", faults="adjust", log="kafka", first=10)
def _() -> None:
    real = orders.outstanding

    def outstanding(*given: Any) -> Iterator[Any]:
        found = list(real(*given))
        yield from sorted(found, key=lambda order: isinstance(order, SetCores | SetBandwidth))

    replace(real, outstanding)


@mutant("room is given before the record that frees it", faults="adjust")
def _() -> None:
    def proposed(self: Decider, state: CellState, event: Any) -> Iterator[Any]:
        decisions = list(proposals.answer(state, event, self.profile, self.explanations.append))
        for fact in decisions:
            if isinstance(fact, CoresDecided):
                had = state.jobs[fact.job_id].tasks[fact.task_id].place.cores
                given_up = tuple(core for core in had if core not in fact.cores)
                state.nodes[fact.node_id].take_back_cores(given_up)
                state.rebook(state.nodes[fact.node_id])
        yield from self._place_waiting(state)
        yield from decisions

    replace(Decider._proposed, proposed)


@mutant("a task is given cores that others have", faults="adjust")
def _() -> None:
    real = validate_adjustments.cores_of

    def cores_of(state: CellState, found: Any, count: int) -> tuple[int, ...]:
        with posing(found.node, "free_core_mask", full_mask(found.node.spec.cores)):
            return real(state, found, count)

    replace(real, cores_of)


@mutant("a task that is to be stopped is adjusted", faults="adjust,cancel")
def _() -> None:
    real = validate_adjustments.running

    def running(state: CellState, task_id: str) -> Any:
        job = state.jobs.get(task_id.rsplit(".", 2)[0])
        task = None if job is None else job.tasks.get(task_id)
        if task is None or task.status is not TaskStatus.STOPPING:
            return real(state, task_id)
        with posing(task, "status", TaskStatus.RUNNING):
            return real(state, task_id)

    replace(real, running)


@mutant("an answer to an earlier order counts", faults="adjust,steps,crash,late", first=9)
def _() -> None:
    accepting(guard._adjusted, "stale_adjustment")


@mutant("an adjustment that was overtaken is ordered", faults="adjust,steps,crash,late,append")
def _() -> None:
    def adjusted(state: CellState, fact: Any, token: int) -> Iterator[Any]:
        about = {"node_id": fact.node_id, "task_id": fact.task_id, "token": state.token}
        if isinstance(fact, CoresDecided):
            yield SetCores(**about, cores=fact.cores)
        else:
            yield SetBandwidth(**about, memory_bandwidth_percent=fact.memory_bandwidth_percent)

    replace(orders._adjusted, adjusted)


# ------------------------------------------------------------------------------------------------- the ledger


@mutant("cores that a task is given are not taken", faults="adjust")
def _() -> None:
    real = evolve_adjustments.cores_decided

    def cores_decided(state: CellState, fact: Any) -> None:
        free = state.nodes[fact.node_id].free_core_mask
        real(state, fact)
        state.nodes[fact.node_id].free_core_mask |= free

    replace(real, cores_decided)


@mutant("an exit frees the cores that a task was placed with", faults="adjust")
def _() -> None:
    real = evolve_adjustments.cores_decided

    def cores_decided(state: CellState, fact: Any) -> None:
        task = state.jobs[fact.job_id].tasks[fact.task_id]
        placed = task.place.cores
        real(state, fact)
        task.place = but(task.place, cores=placed)

    replace(real, cores_decided)


@mutant("what lost records had adjusted is left as it is", faults="adjust,ledger,crash")
def _() -> None:
    replace(evolve_adjustments.ledger_lost, lambda state: None)


@mutant("a service may slow trainings", faults="adjust")
def _() -> None:
    replace(validate_adjustments._slows_training, lambda *about: None)
