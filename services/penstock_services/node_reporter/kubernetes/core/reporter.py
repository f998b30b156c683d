"""State machine of the reporter of a cluster: one input leads to changes and actions."""

from collections.abc import Iterator

from penstock_services.node_reporter.kubernetes.core.messages import Action, Input, RaiseFence
from penstock_services.node_reporter.kubernetes.core.state import Change, Options, ReporterState, evolve


def begin(options: Options) -> tuple[ReporterState, list[Action]]:
    """An empty state, and the first actions of a session."""
    return ReporterState(options), [RaiseFence()]


def step(state: ReporterState, given: Input) -> list[Action]:
    """Decides, folds each own change at once, and returns the actions in order."""
    actions: list[Action] = []
    for decision in decide(state, given):
        if isinstance(decision, Change):
            evolve(state, decision)
        else:
            actions.append(decision)
    return actions


def decide(state: ReporterState, given: Input) -> Iterator[Change | Action]:
    """The decisions from one input. A generator: `step` folds each change before the next decision."""
    raise NotImplementedError
