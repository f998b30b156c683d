"""Plausible bugs, put into the product's code one at a time, and how soon the fault laboratory notices each.

    python -m tests.faults.lab_mutants [--seeds 150] [-o json]

A mutant is a line of a core replaced by another. It is put into a process of its own by exchanging the code of the
functions concerned in place, so that whoever imported them by name has them too. The laboratory then lives seed
after seed until a judge objects. A mutant whose line is no longer in the code is an error, not a survivor.
"""

import argparse
import inspect
import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from types import CodeType, FunctionType, MappingProxyType, ModuleType
from typing import NamedTuple

from tests.faults.lab.crowd import cores, guarded
from tests.faults.lab.life import Options

SEEDS = 150  # lives until a mutant counts as a survivor; most are seen in the first ten
LIFE_CPU_S = 8.0  # of a life in which a mutant goes round in circles

EVOLVE, STATE, RECORD = "penstock.ledger.evolve", "penstock.ledger.state", "penstock.ledger.record"
DECIDE, GUARD, ORDERS = (
    "penstock_services.placer.core.decide",
    "penstock_services.placer.core.guard",
    "penstock_services.placer.core.orders",
)
NODE, NODE_STATE = (
    "penstock_services.node_reporter.core.machine",
    "penstock_services.node_reporter.core.state",
)


class Mutant(NamedTuple):
    """One bug. `old` stands exactly once in the module."""

    name: str
    module: str
    old: str
    new: str


class Hunt(NamedTuple):
    """Who caught a mutant, and when; `judge` is empty for a survivor."""

    name: str
    judge: str
    seed: int
    what: str


class Misfit(LookupError):
    """The code has changed: the mutant's line is not there, or more than once."""


MUTANTS = (
    # -- the chain: what counts at all
    Mutant("a record need not name its parent", RECORD, " or record.parent != head.id", ""),
    Mutant("a record of an older term counts", RECORD, "if record.term != head.term + (1 if starts_term else 0):", "if record.term > head.term + 1:"),
    Mutant("void records are folded", "penstock.ledger.replica", "        if found is None:\n            return None\n", "        if found is None:\n            from penstock.ledger.record import read\n\n            fold(self.state, read(value))\n            return None\n"),
    # -- guards of the placer
    Mutant("a task's word under an older token counts", GUARD, 'return None if event.token == job.token else "stale_token"', "return None"),
    Mutant("a task may start twice", GUARD, 'return "duplicate_start"', "return None"),
    Mutant("an ended job may be submitted again", GUARD, " or event.job_id in state.ended else None", " else None"),
    Mutant("a second estimate queues the job again", GUARD, 'return None if job.status is JobStatus.SUBMITTED else "duplicate_estimate"', "return None"),
    Mutant("late copies of joinings count", GUARD, "0 < event.incarnation <= node.incarnation", "False"),
    Mutant("an older boot's departure counts", GUARD, "    if node.spec.boot_id != event.boot_id:\n", "    if False:\n"),
    Mutant("an exit under the token of its stop is stale", GUARD, "return job.token < token <= job.stop_token", "return False"),
    Mutant("a cancelled job may be cancelled again", GUARD, 'return "already_stopping" if job.stop_reason in FINAL_STOPS else None', "return None"),
    # -- decisions
    Mutant("retries know no bound", DECIDE, "if used >= retry.max_attempts:", "if False:"),
    Mutant("one retry too few", DECIDE, "if used >= retry.max_attempts:", "if used + 1 >= retry.max_attempts:"),
    Mutant("lost attempts cost the user his own", EVOLVE, "        job.infrastructure_retries += 1\n", "        pass\n"),
    Mutant("the cell never freezes", DECIDE, "if missing > of * self.settings.freeze_fraction and of > 1:", "if False:"),
    Mutant("the cell never thaws", DECIDE, "        if missing > of * self.settings.freeze_fraction:\n            return\n", "        return\n"),
    Mutant("a frozen cell places", DECIDE, "if state.frozen or not state.queue:", "if not state.queue:"),
    Mutant("a frozen cell gives up nodes", DECIDE, "        if state.frozen:\n            return\n        if event.proof", "        if event.proof"),
    Mutant("what a joining node does not name lives on", DECIDE, "if node.rebooted or task.started_ms is not None:", "if False:"),
    Mutant("the rest of a broken gang runs on", DECIDE, 'yield stop(job, "gang_member_failed")', "return"),
    Mutant("a gang is judged before all have ended", DECIDE, "            if not living:\n                yield from self._stopped(state, job)\n", "            yield from self._stopped(state, job)\n"),
    Mutant("a stopped gang is forgotten", DECIDE, "            if not living:\n                yield from self._stopped(state, job)\n            return\n", "            return\n"),
    Mutant("a run time-out is never set", DECIDE, "job.status is JobStatus.RUNNING and job.spec.run_timeout_ms is not None", "False"),
    Mutant("nobody is tried when something is freed", DECIDE, "        yield from self._after_exit(state, state.jobs[event.task_id.rsplit(\".\", 2)[0]])\n        yield from self._place_waiting(state)\n", "        yield from self._after_exit(state, state.jobs[event.task_id.rsplit(\".\", 2)[0]])\n"),
    Mutant("back-off never ends", DECIDE, 'case "backoff" if job.status is JobStatus.BACKOFF:', 'case "backoff" if job.status is JobStatus.QUEUED:'),
    Mutant("a completed gang's parameter servers run on", DECIDE, 'yield stop(job, "completed")', "return"),
    Mutant("a suspect node stays suspect", DECIDE, "            yield ledger_events.NodeRestored(node_id=node_id)\n", "            yield from ()\n"),
    # -- the fold
    Mutant("resources of the dead are not freed", EVOLVE, "    node.take_back(task.place)\n", ""),
    Mutant("resources are freed when the stop is decided", EVOLVE, "            task.status = move(TASK_MOVES, task.status, TaskStatus.STOPPING, task.place.task_id)\n", "            task.status = move(TASK_MOVES, task.status, TaskStatus.STOPPING, task.place.task_id)\n            state.nodes[task.place.node_id].take_back(task.place)\n"),
    Mutant("the index of nodes lags behind", EVOLVE, "        node.tasks[place.task_id] = job.job_id\n        state.reindex(node)\n", "        node.tasks[place.task_id] = job.job_id\n"),
    Mutant("a suspect node is still used", STATE, "NodeStatus.READY:\n            return NOT_PLACEABLE", "NodeStatus.READY and self.status is not NodeStatus.SUSPECT:\n            return NOT_PLACEABLE"),
    Mutant("a faulted GPU is still counted", STATE, "(self.free_gpu_mask & ~self.faulted_gpu_mask).bit_count()", "self.free_gpu_mask.bit_count()"),
    Mutant("a share frees its whole GPU", STATE, "if left.milli + place.gpu_share_milli == WHOLE_GPU:", "if left.milli + place.gpu_share_milli >= 500:"),
    Mutant("timers are lost with a snapshot", "penstock.ledger.snapshot", "state.timer_heap = [(timer.at_ms, timer_id) for timer_id, timer in state.timers.items()]", "state.timer_heap = []"),
    Mutant("timers of ended jobs stay", EVOLVE, '        state, job.job_id, "queue_timeout", "run_timeout", "launch_timeout", "backoff", "unschedulable"\n', '        state, job.job_id, "launch_timeout"\n'),
    Mutant("half of a gang is placed", "penstock.policies.base", "    for rank, node_id in enumerate(plan.nodes):", "    for rank, node_id in enumerate(plan.nodes[:2]):"),
    Mutant("two tasks of a gang get the same GPUs", "penstock.policies.base", "        here.gpus &= ~mask_of(gpus)\n", ""),
    Mutant("nodes that are gone count as room", "penstock.policies.capacity", "        if each:\n            room += each * (nodes & ~index.gone).bit_count()\n", "        if each:\n            room += each * nodes.bit_count()\n"),
    Mutant("a proposal may take what is not free", "penstock.policies.validate",
        "    if place.gpu_share_milli == WHOLE_GPU and gpus & ~here.gpus:\n", "    if False:\n",
    ),
    # -- orders
    Mutant("orders are not repeated by a new term", ORDERS, "            if task.status is TaskStatus.ASSIGNED and job.token <= up_to:\n", "            if False:\n"),
    Mutant("stops are not repeated by a new term", ORDERS, "            elif task.status is TaskStatus.STOPPING and job.stop_token <= up_to:\n", "            elif False:\n"),
    Mutant("orders run ahead of the records read back", ORDERS, "task.status is TaskStatus.ASSIGNED and job.token <= up_to", "task.status is TaskStatus.ASSIGNED"),
    Mutant("starts are ordered of tasks that have ended", ORDERS, "for task in job.tasks.values() if task.status is TaskStatus.ASSIGNED", "for task in job.tasks.values()"),
    # -- the node
    Mutant("a node compares no tokens", NODE, "    if order.token < highest:\n", "    if False:\n"),
    Mutant("a node obeys orders of before it joined", NODE, "    if 0 < order.incarnation < state.incarnation:", "    if False:"),
    Mutant("a node waits for no predecessor", NODE, "    if not _room(state.tasks.values(), task):\n", "    if False:\n"),
    Mutant("who waited is never started", NODE, "        if _room((*state.live(), *older), heir):\n", "        if False:\n"),
    Mutant("a stop that overtook its start is forgotten", NODE, "    yield Put(replace(task, status=Status.ENDED, answer=exited))\n    yield Emit(exited, task.context)\n\n\n# ", "    yield Emit(exited, task.context)\n\n\n# "),
    Mutant("a stop of a starting task is forgotten", NODE, "    if task.stop_grace_ms is not None:\n        yield from _terminate(task, task.stop_grace_ms, given.now_ms)\n", "    return\n"),
    Mutant("nobody is killed when the grace is over", NODE, "        yield Signal(task.task_id, task.token, signal.SIGKILL)\n", "        yield from ()\n"),
    # -- around the cores
    Mutant("the ledger's clock may go back", "penstock.clock", "max(gone_on_ms, last_ms, self._wall_ms())", "self._wall_ms()"),
    Mutant("the estimator forgets what it had not estimated", "penstock_services.estimator.core.state", "return [(job_id, job, job.spec) for job_id, job in self.live.items() if job.spec is not None]", "return []"),
)  # fmt: skip


def put_in(mutant: Mutant) -> None:
    """Changes this process for good. Raises `Misfit`."""
    module = import_module(mutant.module)
    source = inspect.getsource(module)
    if source.count(mutant.old) != 1:
        raise Misfit(
            f"{mutant.name}: {mutant.module} has its line {source.count(mutant.old)} times, not once"
        )
    changed = ModuleType(module.__name__)
    changed.__dict__.update(module.__dict__)
    text = source.replace(mutant.old, mutant.new)
    exec(compile(text, module.__file__ or mutant.module, "exec"), changed.__dict__)
    swapped = sum(_swap(module.__dict__[name], found) for name, found in _own(changed, module.__name__))
    if not swapped:
        raise Misfit(f"{mutant.name}: the line is in no function of {mutant.module}")


def _own(changed: ModuleType, name: str) -> Iterator[tuple[str, object]]:
    """What the module itself defines."""
    for attribute, found in list(vars(changed).items()):
        if getattr(found, "__module__", None) == name and isinstance(found, type | FunctionType):
            yield attribute, found


def _swap(kept: object, changed: object) -> int:
    """Gives the functions of `kept` the code of those of `changed`; how many differed."""
    if isinstance(kept, type) and isinstance(changed, type):
        return sum(
            _swap(_bare(kept.__dict__[name]), _bare(found))
            for name, found in vars(changed).items()
            if name in kept.__dict__
        )
    if not isinstance(kept, FunctionType) or not isinstance(changed, FunctionType):
        return 0
    if _meaning(kept.__code__) == _meaning(changed.__code__):
        return 0
    kept.__code__ = changed.__code__
    return 1


def _bare(found: object) -> object:
    """The function under `staticmethod`, `classmethod` or `property`."""
    if isinstance(found, property):
        return found.fget
    return getattr(found, "__func__", found)


def _meaning(code: CodeType) -> tuple[object, ...]:
    """What a function does, without where it stands."""
    constants = tuple(_meaning(c) if isinstance(c, CodeType) else repr(c) for c in code.co_consts)
    return code.co_code, code.co_names, code.co_varnames, constants


def hunt(mutant: Mutant, seeds: int = SEEDS) -> Hunt:
    """Lives in this process, which is spoilt afterwards. Raises `Misfit`."""
    put_in(mutant)
    for seed in range(seeds):
        outcome = guarded(Options(seed), LIFE_CPU_S)
        if outcome.judge:
            return Hunt(mutant.name, outcome.judge, seed, outcome.what)
    return Hunt(mutant.name, "", seeds, "")


def _hunt_one(task: tuple[Mutant, int]) -> Hunt:
    try:
        return hunt(*task)
    except Misfit as misfit:
        return Hunt(task[0].name, "misfit", -1, str(misfit))


def hunt_all(
    mutants: Sequence[Mutant] = MUTANTS,
    seeds: int = SEEDS,
    told: Callable[[Hunt], None] = lambda hunt: None,
) -> Mapping[str, Hunt]:
    """Every mutant in a process of its own. A misfit is told as judge `misfit`."""
    found: dict[str, Hunt] = {}
    with multiprocessing.get_context("fork").Pool(cores(), maxtasksperchild=1) as pool:
        for result in pool.imap_unordered(_hunt_one, [(mutant, seeds) for mutant in mutants]):
            told(result)
            found[result.name] = result
    return MappingProxyType({mutant.name: found[mutant.name] for mutant in mutants})


def main() -> int:
    """0: all caught, 1: some survive, 2: some do not fit the code any more."""
    options = argparse.ArgumentParser(prog="python -m tests.faults.lab_mutants", description=__doc__)
    options.add_argument("--seeds", type=int, default=SEEDS, help="lives until a mutant counts as a survivor")
    options.add_argument("--only", default="", help="part of a name")
    options.add_argument("-o", "--output", choices=("text", "json"), default="text")
    given = options.parse_args()
    chosen = [mutant for mutant in MUTANTS if given.only in mutant.name]
    found = hunt_all(chosen, given.seeds, lambda hunt: print(".", end="", file=sys.stderr, flush=True))
    print(file=sys.stderr)
    if given.output == "json":
        print(json.dumps([result._asdict() for result in found.values()], indent=1))
    else:
        for name, result in found.items():
            print(f"{name:58} {result.judge or 'SURVIVED':10} {result.seed:4}  {result.what[:90]}")
    judges = [result.judge for result in found.values()]
    caught = sum(bool(judge) and judge != "misfit" for judge in judges)
    print(f"{caught} of {len(judges)} mutants caught", file=sys.stderr)
    return 2 if "misfit" in judges else 1 if caught < len(judges) else 0


if __name__ == "__main__":
    sys.exit(main())
