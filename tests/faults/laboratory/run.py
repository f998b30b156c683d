"""One run from its seed to its outcome, in virtual time."""

from collections.abc import Mapping
from typing import NamedTuple

from penstock.errors import LogError
from penstock.ledger.record.record import UndecodableRecord
from penstock.model.nouns.transitions import IllegalTransition
from penstock_services.placer.core import orders
from penstock_services.placer.shell import service as placer
from tests.faults.laboratory.cell import Laboratory
from tests.faults.laboratory.machines.environment import environment, on_loop_error
from tests.faults.laboratory.machines.process import clock_error_ms, clock_rate
from tests.faults.laboratory.options import Options
from tests.faults.laboratory.patching import posing
from tests.faults.laboratory.world import UNEXPECTED
from tests.faults.rules.findings import Violation
from tests.support.virtual_time import run_virtually

REPLAY_EVERY = 4  # runs of which the whole ledger is decided again
LASTING_TURNS = 20
"""As often as many where services die for good: such a run takes an hour."""
MAX_TURNS = (
    200_000  # of the event loop; 333 sound runs took 21,919 at most, and a service may go round in circles
)
DIGEST_EVERY = 16
"""Records, between two of which a placer states the digest of its state: a run has hundreds."""
PEERS_EACH = (64, 1)  # gangs here are small: in every other run their orders are those of large ones


class Outcome(NamedTuple):
    """What came of a run."""

    seed: int
    profile: str
    rule: str
    """Which rule was violated; empty: none."""
    what: str
    records: int
    void: int
    terms: int
    jobs: int
    virtual_s: float
    ledger_hash: str
    happened: Mapping[str, int]
    trace: tuple[str, ...]


def _services(laboratory: Laboratory) -> dict[str, int]:
    """What the services did, and what was done to them."""
    judge = laboratory.judge
    reporters = [node.reporter for node in laboratory.nodes.values()]
    return {
        "processes of placers": sum(service.processes for service in laboratory.placers),
        "processes of the estimator": laboratory.estimator.processes,
        "processes of the batcher": laboratory.batcher.processes,
        **{f"processes of the {name}": service.processes for name, service in laboratory.watchers.items()},
        "cores tried": judge.adjustments.tried,
        "jobs slowed for trainings": judge.adjustments.slowed,
        "jobs judged by convergence": judge.rules.moves.converged,
        "moves for services": judge.rules.moves.for_services,
        "bursts planned": laboratory.planned.count("batch"),
        "plans of who runs": laboratory.planned.count("regroup"),
        "processes of reporters": sum(service.processes for service in reporters),
        "boots": sum(node.machine.boots for node in laboratory.nodes.values()),
        "freezes": judge.rules.freezes,
        "undecided records": judge.rules.undecided,
        "changes of cores": judge.adjustments.cores,
        "caps of memory bandwidth": judge.adjustments.caps,
        "moves that arrived": judge.rules.moves.arrived,
        "jobs that joined a group": judge.rules.groups.joined,
        "groups that take turns": judge.rules.groups.rotations,
        "moves given up": judge.rules.moves.given_up,
        "jobs placed by plans": judge.rules.plans.started,
        "of these after stops": judge.rules.plans.waited,
        "of these in groups": judge.rules.plans.groups_waited,
        "jobs of plans ordered beside stops": judge.rules.plans.next_members,
        "jobs stopped for plans": judge.rules.plans.stops,
        "copies of plans": judge.rules.plans.copies,
        "plans that expired": judge.rules.plans.expired,
        "batch windows": judge.rules.plans.windows,
        "starts at checkpoints": judge.checkpoints.resumed,
        "checkpoints fetched": judge.checkpoints.fetched,
        "checkpoints that could not be fetched": judge.checkpoints.failed,
        "adjustments left by the dead": laboratory.ending.left if laboratory.ending else 0,
        "refused commits": laboratory.broker.refused,
        "accepted by operators": laboratory.administrator.accepted,
    }


async def _live(options: Options) -> Outcome:
    laboratory = Laboratory(options)
    world, judge = laboratory.world, laboratory.judge
    world.loop.set_exception_handler(on_loop_error(world))
    rule = what = ""
    packed_above = PEERS_EACH[options.seed % len(PEERS_EACH)]
    with (
        environment(world, laboratory.environment),
        posing(orders, "MAX_PEERS_EACH", packed_above),
        posing(placer, "DIGEST_EVERY", DIGEST_EVERY),
    ):
        try:
            await laboratory.run()
            if options.seed % REPLAY_EVERY == 0 and not laboratory.inputs_lost:
                await laboratory.replay()
        except Violation as violation:
            rule, what = violation.rule, violation.what
        except (IllegalTransition, LogError, UndecodableRecord, *UNEXPECTED) as error:
            rule, what = "crash", f"{type(error).__name__}: {error}"
        services = _services(laboratory)
        world.calm = True
        reporters = (node.reporter for node in laboratory.nodes.values())
        for service in (*laboratory.placers, laboratory.estimator, *laboratory.planners, *reporters):
            service.enabled = False
            service.kill("the run is over")
        return Outcome(
            options.seed,
            laboratory.profile,
            rule,
            what,
            judge.book.records,
            judge.book.void,
            judge.book.term,
            len(judge.ended),
            world.now_s,
            judge.book.id,
            laboratory.nemesis.happened | services,
            tuple(world.lines),
        )


def live(options: Options) -> Outcome:
    """One run, in virtual time. Raises `Endless`."""
    most = MAX_TURNS * LASTING_TURNS if options.lost else MAX_TURNS
    return run_virtually(_live(options), clock_error_ms, clock_rate, most)
