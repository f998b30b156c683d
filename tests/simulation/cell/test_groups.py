"""Groups in a simulated cell: members run beside each other, their speeds know of it, and no GPU counts
twice."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.inputs.estimates import JobEstimated
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.proposals import PlanProposed, ProposedJob, ProposedUnit
from penstock.model.schema.event import Event, wire_type
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.model import Constant, JobModel, Neighbour, Placement
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.results.figures import figures_of
from penstock.simulator.results.series import series_of
from penstock.simulator.results.timeline import Timeline
from penstock.simulator.services.port import Attached
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.cell.test_services import Proposer
from tests.simulation.scenarios import ends, job


class Halves(JobModel):
    """Two on the same GPUs are half as fast each."""

    name = "halves"
    neighbours_matter = True

    def speed(self, job: TraceJob, placement: Placement, neighbours: Sequence[Neighbour]) -> float:
        shared = any(
            set(held.gpus) & set(other.placement[node_id].gpus)
            for other in neighbours
            for node_id, held in placement.items()
            if node_id in other.placement
        )
        return 0.5 if shared else 1.0


class Grouper(Proposer):
    """Asks that `b` shares the GPUs of `a` as soon as `b` waits."""

    def __init__(self) -> None:
        super().__init__(self._ask)
        self.nodes: tuple[str, ...] = ()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Sequence[Event]:
        if kind == wire_type(PlacementDecided) and data["job_id"] == "a":
            self.nodes = tuple(place["node_id"] for place in data["tasks"])
        if kind != wire_type(JobEstimated) or data["job_id"] != "b":
            return []
        jobs = tuple(ProposedJob(job_id=job_id, nodes=self.nodes) for job_id in ("a", "b"))
        unit = ProposedUnit(jobs=jobs, kind="group", explanation="they take turns")
        return [PlanProposed(proposal_id="g", proposer="batcher", units=(unit,))]


@pytest.mark.parametrize(
    ("model", "expected"), [(Constant(), {"a": 100, "b": 65}), (Halves(), {"a": 150, "b": 115})]
)
def test_two_gangs_share_all_gpus_of_a_cell(model: JobModel, expected: dict[str, float]) -> None:
    """`b` comes at 10 s, its group is planned for 5 s: from 15 s on both compute, on two GPUs and not on
    four."""
    timeline = Timeline()
    found = Simulation(
        nodes_of("1x2"),
        PlacerSettings(profile="fifo"),
        SteadyWork(model),
        [job("a", 0, 100, 2), job("b", 10, 50, 2)],
        Options(check_every_step=True, services=(Attached(Grouper(), planning_s=5),)),
        timeline.take,
    )
    assert ends(found) == expected
    measured = found.figures(1, 1)._asdict()
    assert measured["gpu_allocation"] == pytest.approx(1.0)
    figures = dict(figures_of(timeline))
    assert figures["gpu_allocation"] == pytest.approx(1.0, abs=1e-3)
    series = series_of(timeline)
    assert np.max(series.held.value) == np.max(series.working.value) == 1.0
