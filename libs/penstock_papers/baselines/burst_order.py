"""Order of a burst that needs more GPUs than the cell has: critical jobs first, then shortest job first.

Liquid §5.3 names no order: there a burst fits at once. Shortest first is best for the mean time and leaves
the longest job for the end; longest first has the opposite effect. Here a job waits behind shorter ones until
its run time is CRITICAL of the time that all remaining work takes on all GPUs: started later, it alone would
determine the end of the burst. Critical jobs come longest first.

Run times are the estimator's; jobs without one come last. Ties, and a burst without run times: by submission.
"""

from collections.abc import Iterable, Iterator
from math import isinf

from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.scheduling.remaining_time import remaining_s
from penstock.scheduling.stages.protocols import Turns
from penstock_papers.baselines.key_order import Ranked
from penstock_papers.baselines.preempting.claims import remaining_text

CRITICAL = 0.76  # of the time that the remaining work takes; `python -m tests.papers.liquid.liquid_tables`


class CriticalThenShortest(Ranked):
    """Implements `penstock.scheduling.stages.protocols.Order`."""

    def order(self, state: CellState) -> Iterator[str]:
        """O(jobs · log jobs)."""
        waiting = [state.jobs[job_id] for job_id in state.queue.values()]
        for job in self.ranked(state, waiting, state.holding.values(), state.now_ms):
            yield job.job_id

    def ranked(
        self, state: CellState, waiting: Iterable[JobState], holding: Iterable[JobState], at_ms: int
    ) -> Turns:
        """A job that does not start is skipped. O(jobs · log jobs)."""
        del at_ms
        left = [(remaining_s(state, job), job) for job in waiting]
        running = [(remaining_s(state, job), job) for job in holding]
        work = sum(left_s * _gpus(job) for left_s, job in (*left, *running) if not isinf(left_s))
        critical_s = CRITICAL * work / max(1, state.total_sound_gpus)

        def rank(one: tuple[float, JobState]) -> tuple[bool, float, int]:
            left_s, job = one
            if critical_s <= left_s and not isinf(left_s):
                return False, -left_s, job.order
            return True, left_s, job.order

        for _, job in sorted(left, key=rank):
            yield job

    def claim(self, state: CellState, job: JobState) -> str:
        """Its remaining time."""
        return remaining_text(state, job)


def _gpus(job: JobState) -> int:
    demand = job.demand
    return demand.workers * demand.worker.gpus + demand.parameter_servers * demand.parameter_server.gpus
