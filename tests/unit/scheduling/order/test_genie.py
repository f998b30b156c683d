"""GENIE's Alg. 1 by hand and against brute force, and what becomes of it in a cell."""

from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import Reason
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.ledger_events import PlacementDecided
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import Estimate, ResourceVector, ShapeOption
from penstock.scheduling.order.deadlines import expected_ms, latency_ms, odds
from penstock.scheduling.order.genie import Genie, cost
from penstock.scheduling.profiles import profile_for
from penstock.why.explain import explain
from penstock_papers.settings import Genie as Settings
from penstock_papers.settings import GenieSettings
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, node_spec
from tests.support.own_settings import with_own

LAUNCH_MS, ALONE_MS = 30_000, 600_000
STEPS = {(1, 1): 100.0, (1, 2): 52.0, (1, 4): 28.0, (2, 1): 60.0, (2, 2): 34.0, (2, 4): 20.0}
"""⟨n, g⟩ → ms of an iteration."""


UNEVEN = ShapeOption(workers=5, nodes=2, gpus_per_node=4, step_ms=1, low_ms=1, high_ms=1)


def options(steps: dict[tuple[int, int], float] = STEPS) -> tuple[ShapeOption, ...]:
    return tuple(
        ShapeOption(workers=n * g, nodes=n, gpus_per_node=g, step_ms=ms, low_ms=ms, high_ms=ms)
        for (n, g), ms in steps.items()
    )


def estimate(**more: Any) -> Estimate:
    fields: dict[str, Any] = {
        "worker": ResourceVector(gpus=1),
        "confidence": 1.0,
        "tier": "user",
        "source": "test",
        "run_ms": ALONE_MS,
        "launch_ms": LAUNCH_MS,
        "options": options(),
    }
    return Estimate(**fields | more)


def spec(**more: Any) -> JobSpec:
    fields: dict[str, Any] = {"command": ("x",), "workers": 8, "min_workers": 1, "global_batch_size": 64}
    return JobSpec(**fields | more)


def job(found: Estimate | None = None, **more: Any) -> JobState:
    return JobState("j", spec(**more), 1, submitted_ms=0, estimate=found or estimate())


class Cell(CellDriver):
    """Two nodes of four GPUs."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(with_own("genie", GenieSettings(genie=Settings(**settings))))
        self.join(node_spec("n1"), node_spec("n2"))

    def submitted(self, job_id: str, need: Estimate | None = None, **more: Any) -> dict[str, list[str]]:
        return placed(self.submit(job_id, spec(**more), need or estimate()))

    @property
    def genie(self) -> Genie:
        return profile_for(self.state.settings).place  # type: ignore[return-value]


def placed(step: Step) -> dict[str, list[str]]:
    return {
        fact.job_id: [task.node_id for task in fact.tasks]
        for fact in step.facts
        if isinstance(fact, PlacementDecided)
    }


def test_cost_and_expected_completion_are_the_printed_equations() -> None:
    """Eq. 5 and eq. 4: ⟨2, 3⟩ on 4 × 4 GPUs with θ 0.5; nothing, once and twice the latency alone; a user's
    deadline wins."""
    assert cost(2, 3, 4, 4, 0.5) == pytest.approx(6 / 16 + 0.5 * 2 / 4)
    expected = {qos: expected_ms(spec(qos=qos), 1_000.0) for qos in ("urgent", "prior", "normal", None)}
    assert expected == {"urgent": 0.0, "prior": 1_000.0, "normal": 2_000.0, None: 2_000.0}
    assert expected_ms(spec(qos="urgent", deadline_ms=7), 1_000.0) == 7
    assert expected_ms(spec(qos="urgent"), inf) == 0


def test_latency_has_the_launch_once() -> None:
    """Eq. 2: ν is 30 s whatever the shape, the iterations take as long as they do there."""
    four = options()[2]
    assert latency_ms(job(), four) == pytest.approx(LAUNCH_MS + (ALONE_MS - LAUNCH_MS) * 0.28)
    assert latency_ms(job(estimate(run_ms=None)), four) == inf


def test_the_best_ratio_in_time_then_the_best_of_all() -> None:
    """A normal job takes the best ratio of all as long as that is in time; as its time runs out, what is fast
    enough; late, the best ratio again."""
    cell = Cell(theta=0.0)
    assert cell.genie.name == "genie"
    waits = job()
    found = [shape_at(cell, waits, now_ms) for now_ms in (0, 700_000, 900_000, 1_050_000, 1_100_000)]
    assert found == [(1, 1), (1, 2), (1, 4), (2, 4), (1, 1)]
    assert shape_at(cell, job(qos="urgent"), 0) == (1, 1), "nothing is in time for it"
    allowance = cell.genie.choice(cell.state, waits).allowance_ms
    assert allowance == 2 * ALONE_MS - ALONE_MS


def shape_at(cell: Cell, waits: JobState, now_ms: int) -> tuple[int, int]:
    cell.state.now_ms = now_ms
    option = cell.genie.choice(cell.state, waits).option
    assert option is not None
    return option.nodes, option.gpus_per_node


def test_who_may_wait_least_comes_first() -> None:
    """The cell is full; an urgent, a prior and a normal job wait in the reverse order. When it is free they
    start in the order of their allowance."""
    cell = Cell()
    cell.submitted("full", estimate(options=options({(1, 1): 100.0, (2, 4): 1.0})))
    cell.start("full")
    for name, qos in (("normal", "normal"), ("prior", "prior"), ("urgent", "urgent")):
        assert cell.submitted(name, qos=qos) == {}
    order = list(cell.genie.order(cell.state))
    assert order == ["urgent", "prior", "normal"]
    assert "it is late by" in cell.genie.claim(cell.state, cell.job("urgent"))


def test_who_is_late_protects_the_others() -> None:
    """Under `protect` a late job takes the placement with the fewest GPU seconds and comes after one that can
    still be in time; an urgent one comes first."""
    cell = Cell(choose="protect")
    cell.submitted("full", estimate(options=options({(1, 1): 100.0, (2, 4): 1.0})))
    cell.start("full")
    for name, more in (("late", {"deadline_ms": 1}), ("normal", {}), ("urgent", {"qos": "urgent"})):
        assert cell.submitted(name, **more) == {}
    assert list(cell.genie.order(cell.state)) == ["urgent", "normal", "late"]
    found = {name: cell.genie.choice(cell.state, cell.job(name)).option for name in ("late", "urgent")}
    assert [(one.nodes, one.gpus_per_node) for one in found.values() if one is not None] == [(1, 1), (1, 4)]


def test_who_may_be_late_gets_the_best_odds_where_gpus_are_left_over() -> None:
    """A job is in time with odds of 60 % on a whole node, and of 92 % on both. It gets both, unless another
    job waits; who is sure to be late takes one GPU."""
    steps = {(1, 1): 100.0, (1, 4): 28.0, (2, 4): 21.0}
    doubtful = tuple(
        replace(option, low_ms=option.step_ms / 1.5, high_ms=option.step_ms * 1.5)
        for option in options(steps)
    )
    need, due_ms = estimate(options=doubtful), 200_000
    cell = Cell(choose="protect")
    assert len(cell.submitted("a", need, deadline_ms=due_ms)["a"]) == 8
    cell = Cell(choose="protect")
    assert len(cell.submitted("late", need, deadline_ms=50_000)["late"]) == 1
    other = Cell(choose="protect")
    other.submitted("full", estimate(options=options({(1, 1): 100.0, (2, 4): 1.0})))
    other.start("full")
    for name in ("a", "b"):
        assert other.submitted(name, need, deadline_ms=due_ms) == {}
    option = other.genie.choice(other.state, other.job("a")).option
    assert option is not None
    assert option.workers == 4


def test_a_job_waits_for_its_choice_and_others_pass() -> None:
    """Its best ratio is a whole node; both have a GPU in use, so it waits, and a job of one GPU goes on."""
    cell = Cell()
    whole = estimate(options=options({(1, 1): 100.0, (1, 4): 1.0}))
    single = estimate(options=options({(1, 1): 100.0}))
    first = cell.submitted("a", single) | cell.submitted("b", single)
    assert first == {"a": ["n1"], "b": ["n1"]}
    assert cell.submitted("whole", whole) == {"whole": ["n2"] * 4}
    assert cell.submitted("next", whole) == {}
    assert cell.submitted("small", single) == {"small": ["n1"]}


def test_it_gets_exactly_its_nodes_and_gpus() -> None:
    """⟨2, 2⟩: two workers on each of two nodes, the fullest that have room first."""
    cell = Cell()
    cell.join(node_spec("n3"))
    cell.submitted("a", estimate(options=options({(1, 1): 1.0})))
    assert cell.submitted("b", estimate(options=options({(1, 1): 100.0, (2, 2): 1.0}))) == {
        "b": ["n1", "n1", "n2", "n2"]
    }


@pytest.mark.parametrize(
    ("choose", "shape"),
    [
        ("most", (2, 4)),
        ("least", (1, 1)),
        ("performance", (2, 4)),
        ("ratio", (1, 4)),
        ("qos", (1, 4)),
        ("protect", (1, 4)),
    ],
)
def test_the_baselines(choose: str, shape: tuple[int, int]) -> None:
    """MaxOcc, MinOcc, PerfPre, CERPre. Source: GENIE §IV-A."""
    cell = Cell(choose=choose)
    assert len(cell.submitted("a")["a"]) == shape[0] * shape[1]


def test_what_is_not_known_comes_last_and_runs_all_the_same() -> None:
    """No run time, no options, one shape only, options outside of its range: defined, and nobody is stuck."""
    cell = Cell()
    assert cell.submitted("unknown", estimate(options=(), run_ms=None)) == {
        "unknown": ["n1"] * 4 + ["n2"] * 4
    }
    waiting = {
        "no-options": (estimate(options=()), {}),
        "one-shape": (estimate(options=()), {"workers": 2, "min_workers": None, "global_batch_size": None}),
        "outside": (estimate(), {"min_workers": 5, "workers": 7, "global_batch_size": 64}),
        "past": (estimate(), {"deadline_ms": 1}),
    }
    for name, (need, more) in waiting.items():
        assert cell.submitted(name, need, **more) == {}
    assert next(cell.genie.order(cell.state)) == "past"
    for name in waiting:
        assert cell.genie.claim(cell.state, cell.job(name))
        cell.genie.place(cell.state, cell.job(name), LazyRng(0))


@pytest.mark.parametrize(
    ("more", "claim"),
    [
        ({}, "last in the queue: its run time is unknown, so its deadline cannot be planned"),
        ({"deadline_ms": 90_000}, "last in the queue: it is due in 1 min 30 s, but its run time is unknown"),
        ({"qos": "urgent"}, "last in the queue: it was due 0 s ago, but its run time is unknown"),
    ],
)
def test_without_a_run_time_the_reason_names_what_is_expected(more: dict[str, Any], claim: str) -> None:
    cell = Cell()
    cell.submitted("first")
    cell.submitted("unknown", estimate(options=(), run_ms=None), **more)
    assert cell.genie.claim(cell.state, cell.job("unknown")) == claim


def test_odds_follow_the_interval() -> None:
    """A step of 100 ms, nine in ten between 80 and 125: at its middle the odds are even, at its ends one in
    twenty and nineteen in twenty."""
    wide = ShapeOption(workers=1, nodes=1, gpus_per_node=1, step_ms=100, low_ms=80, high_ms=125)
    found = job(estimate(options=(wide,)))
    work_ms = ALONE_MS - LAUNCH_MS
    for times, expected in ((1.0, 0.5), (0.8, 0.05), (1.25, 0.95), (0.0, 0.0), (10.0, 1.0)):
        assert odds(found, wide, LAUNCH_MS + times * work_ms, 0) == pytest.approx(expected, abs=1e-3)
    sure = options()[0]
    assert [odds(job(), sure, ALONE_MS + late, 0) for late in (-1, 0)] == [0, 1]
    assert odds(job(estimate(run_ms=None)), sure, 1e12, 0) == 0
    assert odds(job(), sure, -1e12, 5) == 0


@pytest.mark.parametrize(
    ("need", "nodes"),
    [
        (options({(1, 1): 100.0, (4, 2): 0.001}), 1),  # more nodes than there are
        (options({(1, 1): 100.0, (1, 8): 0.001}), 1),  # more GPUs than any has
        (
            (*options({(1, 1): 100.0}), UNEVEN),
            1,
        ),
        ((UNEVEN,), 8),
    ],
)
def test_what_the_cell_can_never_hold_is_no_choice(need: tuple[ShapeOption, ...], nodes: int) -> None:
    """The best ratio is of a placement that no node of the cell could ever hold, or that is uneven, as the
    estimator packs five workers: the job does not wait for it for ever. Where that leaves nothing, it is
    placed as one of which no iterations are known."""
    cell = Cell(theta=0.0)
    assert len(cell.submitted("a", estimate(options=need))["a"]) == nodes


def test_workers_of_several_gpus_are_placed_elsewhere() -> None:
    """⟨n, g⟩ counts workers with a GPU each; one with two of them is placed as one of which no iterations are
    known."""
    cell = Cell()
    two = estimate(worker=ResourceVector(gpus=2))
    assert len(cell.submitted("a", two)["a"]) == 4


class AsPrinted:
    """Alg. 1, line by line, over plain numbers."""

    def __init__(self, steps: dict[tuple[int, int], float], theta: float) -> None:
        self.steps, self.theta = steps, theta

    def latency(self, shape: tuple[int, int]) -> float:
        return LAUNCH_MS + (ALONE_MS - LAUNCH_MS) * self.steps[shape] / self.steps[(1, 1)]

    def ratio(self, shape: tuple[int, int]) -> float:
        n, g = shape
        return (1 / self.steps[shape]) / (n * g / (2 * 4) + self.theta * n / 2)

    def chosen(self, due_ms: float, now_ms: int) -> tuple[float, float]:
        """(best ratio, allowance)."""
        in_time = [shape for shape in self.steps if self.latency(shape) + now_ms <= due_ms]
        best = max(self.ratio(shape) for shape in in_time or self.steps)
        return best, max(
            due_ms - (self.latency(shape) + now_ms)
            for shape in in_time or self.steps
            if self.ratio(shape) == best
        )


@given(
    st.dictionaries(st.sampled_from(sorted(STEPS)), st.integers(1, 400).map(float), min_size=1),
    st.integers(0, 2_000_000),
    st.sampled_from([0.0, 0.5, 3.0]),
    st.sampled_from(["prior", "normal", "urgent"]),
)
def test_it_is_the_printed_algorithm(
    steps: dict[tuple[int, int], float], now_ms: int, theta: float, qos: str
) -> None:
    """Whatever the step times: the ratio of its choice is that of the text, at any time."""
    steps = dict(sorted(({(1, 1): 100.0} | steps).items()))
    cell, printed = Cell(theta=theta), AsPrinted(steps, theta)
    cell.state.now_ms = now_ms
    waits = job(estimate(options=options(steps)), qos=qos)
    found = cell.genie.choice(cell.state, waits)
    assert found.option is not None
    due_ms = expected_ms(waits.spec, printed.latency((1, 1)))
    best, _ = printed.chosen(due_ms, now_ms)
    shape = (found.option.nodes, found.option.gpus_per_node)
    assert printed.ratio(shape) == pytest.approx(best)
    assert found.allowance_ms == pytest.approx(due_ms - (printed.latency(shape) + now_ms))


def test_why_names_the_allowance() -> None:
    """A user asks why a job waits: how long it may, on what it would run, and for how long."""
    cell = Cell()
    cell.state.now_ms = 0
    assert cell.genie.claim(cell.state, job()) == (
        "it may wait 16 min 50 s; it runs 3 min 10 s on 1 × 4 GPUs, and a start now is in time with a "
        "probability of 100 %"
    )


def test_when_gpus_come_free_those_that_fit_pass_the_one_that_waits_for_more() -> None:
    """All have one worker at least and so the same smallest demand. One GPU of four is freed: the first in
    order waits for a whole node, the next one starts."""
    cell = CellDriver(PlacerSettings(profile="genie"))
    cell.join(node_spec("n1"))
    single = estimate(options=options({(1, 1): 100.0}))
    whole = estimate(options=options({(1, 1): 100.0, (1, 4): 1.0}))
    for name in ("a", "b", "c", "d"):
        cell.submit(name, spec(), single)
        cell.start(name)
    cell.submit("wide", spec(deadline_ms=1_200_000), whole)
    cell.submit("small", spec(deadline_ms=9_000_000), single)
    order = profile_for(cell.state.settings).order
    assert order is not None
    assert list(order.order(cell.state)) == ["wide", "small"]
    assert placed(cell.exit("a.1.w0")) == {"small": ["n1"]}


def test_no_bound_on_overtaking_holds_up_the_profiles_own_order() -> None:
    """The job that came first waits for a whole node and may wait longest. Others are first in the order of
    their allowances, however often they have passed it: a bound on that would let no job start, since it is
    not its turn either."""
    cell = CellDriver(PlacerSettings(profile="genie", max_overtakes=1))
    cell.join(node_spec("n1"))
    single = estimate(options=options({(1, 1): 100.0}))
    cell.submit("a", spec(), single)
    cell.submit(
        "wide", spec(deadline_ms=900_000_000), estimate(options=options({(1, 1): 100.0, (1, 4): 1.0}))
    )
    for name in ("b", "c", "d"):
        assert placed(cell.submit(name, spec(deadline_ms=9_000_000), single)) == {name: ["n1"]}


def test_the_reason_is_about_the_workers_that_it_waits_for() -> None:
    """Two of four GPUs are free, and it waits for all of them; a job of one worker would have started."""
    cell = CellDriver(PlacerSettings(profile="genie"))
    cell.join(node_spec("n1"))
    for name in ("a", "b"):
        cell.submit(name, spec(), estimate(options=options({(1, 1): 100.0})))
    cell.submit("wide", spec(), estimate(options=options({(1, 1): 100.0, (1, 4): 1.0})))
    found = explain(cell.state, "wide")
    assert (found.reason, found.detail) == (
        Reason.GANG_INCOMPLETE,
        "2 of 4 tasks fit now, and all must start together",
    )
