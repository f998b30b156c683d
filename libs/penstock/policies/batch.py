"""Interface of batch stages: a burst of waiting jobs is planned at once, where they are to start.

Three steps as of a regroup stage (`penstock.policies.regroup`), all pure; nobody who runs is stopped:

    question = stage.question(state)       # what the plan depends on; passes between processes
    answer = question and solve(question)  # the long part; the same question gives the same answer
    units = stage.units(state, answer)     # on a state that may have moved on
"""

from collections.abc import Sequence
from typing import Any, Protocol

from penstock.ledger.state import CellState
from penstock.model.proposals import ProposedUnit


class Batch(Protocol):
    """A stage of a profile, see the module's docstring. Questions and answers are the stage's own types, and can be pickled."""

    def question(self, state: CellState) -> Any | None:
        """About the jobs that wait in the queue. None: there is nothing to plan."""
        ...

    def solve(self, question: Any) -> Any:
        """The long part. Touches no state, so it may run in another process."""
        ...

    def units(self, state: CellState, answer: Any) -> Sequence[ProposedUnit]:
        """Who shall start and where, first first. Who of the answer does not wait any more is left out."""
        ...
