"""Kubeflow's gangs beside Kubernetes' pods, and the two ways of keeping a queue."""

import pytest

from penstock.cluster.chance import LazyRng
from penstock.cluster.reasons import Reason
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.scheduling.profiles import in_force, profile_for
from penstock.why.explain import explain
from tests.support.cluster import builders as b
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def test_kubeflow_does_not_see_gpus() -> None:
    """n0 has three of four GPUs busy, n1 half of its cores: by cores and memory n0 is emptier, with GPUs it
    is not.

    A task of 1 GPU, 2 of 16 cores, 8 of 64 GiB. n0: shares 5/16 and 1/8: mean 7/32, deviation 3/32: 168.75.
    n1: shares 5/8 and 1/8: mean 3/8, deviation 1/4: 137.5.
    """
    state = b.cell(nodes=2, gpus=4, cores=16, host_memory_mib=65_536)
    b.placed_on(state, b.queued(state, "gpus", worker=b.need(gpus=3, cores=3, host_memory_mib=0)), "n0")
    b.placed_on(state, b.queued(state, "cores", worker=b.need(gpus=0, cores=8, host_memory_mib=0)), "n1")
    job = b.queued(state, worker=b.need(gpus=1, cores=2, host_memory_mib=8_192))
    blind = profile_for(PlacerSettings(profile="kubeflow")).place.place(state, job, LazyRng(0, "x"))
    seeing = profile_for(PlacerSettings(profile="k8s-default")).place.place(state, job, LazyRng(0, "x"))
    assert blind is not None
    assert seeing is not None
    assert (blind.nodes, seeing.nodes) == (("n0",), ("n1",))
    assert [c.score for c in blind.explanation.candidates] == pytest.approx([-168.75, -137.5])


def test_kubeflow_scores_every_node() -> None:
    """Of 150 nodes the emptiest is the last one: no random choice."""
    state = b.cell(nodes=150, gpus=2)
    for i in range(149):
        b.placed_on(state, b.queued(state, f"busy-{i}", worker=b.need(gpus=0)), f"n{i}")
    job = b.queued(state, worker=b.need())
    for event in ("one", "two"):
        plan = profile_for(PlacerSettings(profile="kubeflow")).place.place(state, job, LazyRng(0, event))
        assert plan is not None
        assert plan.nodes == ("n149",)


def queue(profile: str, **settings: int) -> CellDriver:
    """One node of four GPUs, one taken; a gang of four waits, and then four jobs of one GPU come."""
    driver = CellDriver(PlacerSettings(profile=profile, **settings))
    driver.join(node_spec("n0", 4))
    driver.submit("first")
    driver.submit("gang", job_spec(workers=2), estimate(2))
    for name in "abcd":
        driver.submit(name)
    return driver


def running(driver: CellDriver) -> str:
    return "".join(job.job_id for job in driver.state.jobs.values() if job.status is JobStatus.LAUNCHING)


def test_who_may_overtake_a_waiting_gang() -> None:
    """fifo: as often as the bound allows; fifo-strict: nobody; kubeflow: everybody, whatever bound is set."""
    assert running(queue("fifo", max_overtakes=2)) == "firstab"
    assert running(queue("fifo-strict")) == "first"
    assert running(queue("kubeflow", max_overtakes=0, backfill_window=1)) == "firstabc"


def test_what_a_profile_fixes_is_not_what_was_given() -> None:
    """The ledger keeps the settings as given; the placer, and `why` with it, go by what the profile makes of
    them."""
    given = PlacerSettings(profile="fifo-strict", backfill_window=64)
    assert in_force(given).backfill_window == 1
    assert in_force(PlacerSettings(profile="fifo", backfill_window=7)).backfill_window == 7
    driver = queue("fifo-strict")
    found = explain(driver.state, "a")
    assert found.reason is Reason.BEHIND_IN_QUEUE
    assert found.detail == "1 jobs are ahead; only the first 1 in the queue may start"
