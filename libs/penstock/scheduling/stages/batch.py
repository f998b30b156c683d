"""Interface of batch stages: the placements of a burst of waiting jobs are planned at once.

Three steps as in a regroup stage (`penstock.scheduling.stages.regroup`), all pure; no running job is stopped:

    question = stage.question(state)       # what the plan depends on; passes between processes
    answer = question and solve(question)  # the long part; the same question gives the same answer
    units = stage.units(state, answer)     # on a state that may have changed
"""

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.ledger.state.state import CellState
from penstock.model.proposals import ProposedUnit


class Batch(Protocol):
    """A stage of a profile, see the module's docstring. Questions and answers have types of the stage, and
    can be pickled."""

    def question(self, state: CellState) -> Any | None:
        """The question about the jobs in the queue. None: there is nothing to plan."""
        ...

    def solve(self, question: Any) -> Any:
        """The long part. Uses no state, so it may run in another process."""
        ...

    def units(self, state: CellState, answer: Any) -> Sequence[ProposedUnit]:
        """The jobs that shall start, and where, in order.
        Jobs of the answer that no longer wait are left out."""
        ...
