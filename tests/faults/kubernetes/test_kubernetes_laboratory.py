"""Random faults of a cell on Kubernetes: nothing runs twice, nothing is lost, everything ends.

More seeds: `SEEDS=1000 pytest tests/faults/kubernetes`.
"""

import os
from collections.abc import Callable, Iterator

import pytest

from penstock_services.node_reporter.kubernetes.core import orders, pods, proof
from penstock_services.node_reporter.kubernetes.core.objects import Pod
from penstock_services.node_reporter.kubernetes.core.state import ReporterState, Stage, Task
from tests.faults.kubernetes.laboratory import Laboratory

SEEDS = int(os.environ.get("SEEDS", "25"))
MUTANT_SEEDS = 60  # each of them was found within 1 s: by one of the first ten


@pytest.mark.parametrize("fenced", [True, False], ids=["fence", "no-fence"])
def test_no_double_no_loss(fenced: bool) -> None:
    """Without the door's policy, uids and names must be enough alone."""
    for seed in range(SEEDS):
        laboratory = Laboratory(seed, fenced=fenced)
        assert laboratory.run() == [], f"seed {seed}:\n" + "\n".join(laboratory.world.story[-80:])


def removal_is_death(patch: pytest.MonkeyPatch) -> None:
    """A pod that was removed by force counts as ended."""

    def bar(state: ReporterState, task: Task, not_before_ms: int = 0) -> Iterator[pods.Decision]:
        if task.stage is Stage.VANISHED:
            return pods.lose(state, task, "gone", 1)
        return sound(state, task, not_before_ms)

    sound = pods.bar
    patch.setattr(pods, "bar", bar)


def deletion_is_death(patch: pytest.MonkeyPatch) -> None:
    """A pod with a deletion timestamp counts as ended."""

    def ended(pod: Pod) -> proof.Ended | None:
        return proof.Ended("exited") if pod.metadata.deletion_timestamp else proof.ended(pod)

    patch.setattr(pods, "ended", ended)


def joins_without_tasks(patch: pytest.MonkeyPatch) -> None:
    """A joining names no task."""
    patch.setattr(ReporterState, "on", lambda *_: [])


def names_by_chance(patch: pytest.MonkeyPatch) -> None:
    """A second order for the same task makes a second pod."""
    count = iter(range(1_000_000))
    patch.setattr(orders, "pod_name", lambda _: f"pod-{next(count)}")


@pytest.mark.parametrize(
    "mutant", [removal_is_death, deletion_is_death, joins_without_tasks, names_by_chance]
)
def test_the_judge_sees(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these breaks the reporter; some seed shows it."""
    mutant(monkeypatch)
    assert any(Laboratory(seed).run() for seed in range(MUTANT_SEEDS))
