"""Muri's regroup stages: `muri-s` for known run times, and `muri-l` for unknown ones.

Source: Muri §4.2 and the published program; the algorithm is `penstock_papers.muri.grouping`. Jobs are sorted
by remaining time × GPUs (SRSF), or by attained time × GPUs (2D-LAS). The sort is stable over the list of the
previous plan, which the program leaves sorted by GPUs, most first: so among equal keys jobs of an earlier
plan come first, of these the ones with most GPUs, then by the order of the list. That a job was in an earlier
plan is stored as its rank, and so is the order in which keys last differed: each job that has overtaken
another one with the same number of GPUs has its own rank. Departure: of the waiting jobs only those that
might be taken are ranked.
"""

from collections.abc import Callable

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.remaining_time import Key, attained_s, gpus_of
from penstock.scheduling.stages.regroup import Answer, GroupPlan, Question
from penstock_papers.baselines.preempting.ordered import shortest_remaining_service
from penstock_papers.muri.authors import authors
from penstock_papers.muri.grouping import Grouper
from penstock_papers.muri.list_order import Listed, list_order
from penstock_papers.settings import Grouping

Plan = Callable[[CellState, Answer], GroupPlan]
"""As `Regroup.plan`."""


def least_attained_service(state: CellState, job: JobState, cost_s: float = 0.0) -> float:
    """GPU seconds: attained time × GPUs of the gang."""
    return attained_s(state, job) * gpus_of(job)


class Muri:
    """Implements `penstock.scheduling.stages.regroup.Regroup`. As in the source no job is started on GPUs
    that a plan leaves idle. `key`: sort key of jobs; `key_of`: see `Source`."""

    exact = True
    fills = False
    beside = False

    def __init__(
        self,
        name: str,
        key: Key,
        key_of: Callable[[float, float, int], float],
        grouping: Grouping,
        plan: Plan,
        *,
        expects: bool,
    ) -> None:
        self.expects = expects
        """Whether a job that has not run yet is sorted by its expected run time."""
        self.grouping = grouping
        self._candidates = Listed(name, key, key_of=key_of, per_gpus=grouping.max_members)
        self._key_of = key_of
        self._grouper = Grouper(authors(matched=grouping.matching, worst=grouping.worst_order), grouping)
        self._plan = plan

    def question(self, state: CellState) -> Question | None:
        return self._candidates.question(state)

    def solve(self, question: Question) -> Answer:
        jobs = question.jobs
        keys = [
            self._key_of(job.remaining_s, job.attained_s, job.gpus) if job.movable or not job.group else -1.0
            for job in jobs
        ]
        groups = self._grouper.groups(jobs, keys, question.node_gpus, question.gpu_memory_mib)
        return Answer(tuple(self._grouper.planned(jobs, members) for members in groups), list_order(question))

    def plan(self, state: CellState, answer: Answer) -> GroupPlan:
        return self._plan(state, answer)


def muri_s(grouping: Grouping, plan: Plan) -> Muri:
    """By remaining time × GPUs; a job that has not run yet: by its expected run time."""
    return Muri(
        "muri-s",
        shortest_remaining_service,
        lambda remaining_s, _, gpus: remaining_s * gpus,
        grouping,
        plan,
        expects=True,
    )


def muri_l(grouping: Grouping, plan: Plan) -> Muri:
    """By attained time × GPUs."""
    return Muri(
        "muri-l",
        least_attained_service,
        lambda _, attained, gpus: attained * gpus,
        grouping,
        plan,
        expects=False,
    )
