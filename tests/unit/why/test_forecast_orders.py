"""Expected starts and positions under each kind of profile, computed by hand: they follow the profile's own
order, not that of arrival."""

from random import Random

import pytest

from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.settings import PlacerSettings
from penstock.scheduling.profiles import profile_for
from penstock.why.explain import explain
from penstock.why.forecast import Start, expected_start
from penstock.why.queue_position import line_of
from tests.support.cluster.driver import CellDriver, job_spec, node_spec
from tests.unit.scheduling.make_room.test_preemption import needing, settle


def cell(profile: str, gpus: int, **settings: object) -> CellDriver:
    driver = CellDriver(PlacerSettings(profile=profile, **settings))
    driver.join(node_spec("n0", gpus))
    return driver


def start(driver: CellDriver, job_id: str, gpus: int, run_s: int, spec: JobSpec | None = None) -> None:
    driver.submit(job_id, spec, needing(gpus, run_s))
    settle(driver)


def forecast(driver: CellDriver, job_id: str, **ends_s: int) -> Start:
    """`ends_s`: job → seconds from now."""
    now_ms = driver.now_ms
    ends_ms = {name: now_ms + left_s * 1_000 for name, left_s in ends_s.items()}
    found = expected_start(driver.state, driver.job(job_id), ends_ms, now_ms)
    assert found is not None
    return found


def starts_s(driver: CellDriver, job_id: str, **ends_s: int) -> float | None:
    """Seconds from now."""
    starts_ms = forecast(driver, job_id, **ends_s).starts_ms
    return None if starts_ms is None else (starts_ms - driver.now_ms) / 1_000


@pytest.mark.parametrize(
    ("profile", "long", "short"),
    [("fifo", 1_000, 4_600), ("penstock", 1_060, 1_000), ("kubeflow", 1_000, 4_600)],
)
def test_a_short_job_is_expected_before_the_long_one_that_came_first(
    profile: str, long: int, short: int
) -> None:
    """One GPU is busy for 1,000 s. A job of an hour waits, and one of a minute that came later; `penstock`
    lets it pass, as by then 1 + 1,000 / √(3,600 × 64) is more than 1 + 1,000 / √(3,600 × 4,096)."""
    driver = cell(profile, 1)
    start(driver, "running", 1, 1_000)
    driver.submit("long", None, needing(1, 3_600))
    driver.submit("short", None, needing(1, 60))
    assert starts_s(driver, "long", running=1_000) == long
    assert starts_s(driver, "short", running=1_000) == short
    later = {name: explain(driver.state, name, driver.now_ms + 1_000_000) for name in ("long", "short")}
    assert (later["short"].position == 1) == (short < long)
    assert later["long"].position == 3 - (later["short"].position or 0)
    assert later["long"].ahead == (later["long"].position or 0) - 1


@pytest.mark.parametrize(
    ("profile", "fourth", "other"), [("fifo", 10, 30), ("penstock", 30, 10), ("drf", 30, 10)]
)
def test_a_tenant_below_its_share_is_expected_first(profile: str, fourth: int, other: int) -> None:
    """Both GPUs are a big team's, and a job of theirs waits before one of a small team. When one ends the big
    team has its half."""
    driver = cell(profile, 2)
    for name in ("a", "b"):
        start(driver, name, 1, 600, job_spec(owner="big"))
    driver.submit("fourth", job_spec(owner="big"), needing(1, 600))
    driver.submit("other", job_spec(owner="small"), needing(1, 600))
    assert starts_s(driver, "fourth", a=10, b=30) == fourth
    assert starts_s(driver, "other", a=10, b=30) == other
    assert explain(driver.state, "other").position == (2 if profile == "fifo" else 1)


def test_priority_counts_in_the_forecast() -> None:
    """The paper's run has priority 5; the sweep before it starts after it has ended."""
    driver = cell("penstock", 1)
    start(driver, "running", 1, 100)
    driver.submit("sweep", None, needing(1, 600))
    driver.submit("paper", job_spec(priority=5), needing(1, 500))
    assert starts_s(driver, "paper", running=100) == 100
    assert starts_s(driver, "sweep", running=100) == 600
    assert explain(driver.state, "sweep").position == 2


def test_kept_nodes_are_nobody_elses_in_the_forecast() -> None:
    """Half of the node is free and kept for a job of the whole node that has waited for hours: it starts in
    600 s and takes as long."""
    driver = cell("penstock", 8)
    start(driver, "first", 4, 40_600)
    driver.submit("eight", None, needing(8, 600))
    driver.at(40_000_000)
    driver.submit("hour", None, needing(2, 3_600))
    assert [*driver.state.planned] == ["eight"]
    assert starts_s(driver, "eight", first=600) == 600
    assert starts_s(driver, "hour", first=600) == 1_200


@pytest.mark.parametrize(
    ("profile", "settings", "small"),
    [("fifo", {}, 10), ("fifo-strict", {}, 50), ("fifo", {"max_overtakes": 0}, 50)],
)
def test_bounds_of_the_queue_count_in_the_forecast(
    profile: str, settings: dict[str, int], small: int
) -> None:
    """A job of the whole node is first; whether a small one may pass it decides when that starts: at 10 s, or
    after 20 + 30 s."""
    driver = cell(profile, 2, **settings)
    for name in ("a", "b"):
        start(driver, name, 1, 600)
    driver.submit("wide", None, needing(2, 30))
    driver.submit("small", None, needing(1, 600))
    assert starts_s(driver, "small", a=10, b=20) == small


@pytest.mark.parametrize(("profile", "waits"), [("srtf", 100), ("srsf", 100), ("sjf", 1_000)])
def test_who_comes_later_gives_way_in_the_forecast(profile: str, waits: int) -> None:
    """A job of both GPUs and 500 s waits for one that has 100 s left, and for one that has 1,000 s left only
    where nobody is stopped."""
    driver = cell(profile, 2)
    start(driver, "mid", 1, 100)
    start(driver, "long", 1, 10_000)
    driver.submit("both", None, needing(2, 500))
    settle(driver)
    found = forecast(driver, "both", mid=100, long=1_000)
    assert found.starts_ms == driver.now_ms + waits * 1_000
    assert "the profile's order stays as it is now" in found.assumes


def test_positions_under_tiresias_are_those_of_its_queues() -> None:
    """Two new jobs of one queue wait behind one that runs: first come, first served within the queue."""
    driver = cell("tiresias", 1, profile_settings='{"queue_limits_gpu_s": [1000000]}')
    start(driver, "running", 1, 5_000)
    for name in ("second", "third"):
        driver.submit(name, None, needing(1, 50))
    settle(driver)
    assert [explain(driver.state, name).position for name in ("second", "third")] == [1, 2]
    assert starts_s(driver, "third", running=100) == 150


def test_each_kind_of_profile_says_what_its_forecast_assumes() -> None:
    """A user who compares two cells sees why one of the answers holds less."""
    texts = set()
    for profile in ("fifo", "penstock", "srtf"):
        driver = cell(profile, 1)
        start(driver, "running", 1, 100)
        driver.submit("next", None, needing(1, 500))
        settle(driver)
        texts.add(forecast(driver, "next", running=100).assumes)
    assert len(texts) == 3
    assert all("running jobs end as estimated" in text for text in texts)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("profile", ["penstock", "drf", "kubeflow"])
def test_the_order_that_is_shown_is_the_one_in_which_jobs_are_tried(profile: str, seed: int) -> None:
    """Three tenants with some thirty jobs of all sizes, lengths and priorities wait for a full cell: what
    `queue` lists and what the placer does agree."""
    random = Random(seed)
    driver = cell(profile, 8)
    for number in range(4):
        owner = random.choice("abc")
        start(driver, f"r{number}", 2, 5_000, job_spec(owner=owner))
    for number in range(30):
        driver.at(number * (100_000, 2_000_000)[seed % 2])
        spec = job_spec(owner=random.choice("abc"), priority=random.choice((-2, 0, 0, 0, 3)))
        driver.submit(
            f"j{number}", spec, needing(random.choice((1, 1, 2, 8)), random.choice((60, 900, 9_000)))
        )
    state = driver.state
    stage = profile_for(state.settings).order
    assert stage is not None
    tried = list(stage.order(state))
    waiting = [state.jobs[job_id] for job_id in state.queue.values()]
    shown, turns, started = [], stage.ranking(state, waiting).turns(state.now_ms), None
    try:
        while True:
            shown.append(turns.send(started).job_id)  # type: ignore[arg-type]
            started = False
    except StopIteration:
        pass
    assert shown == tried
    assert len(line_of(state, state.now_ms).places or ()) == len(waiting), "all have a position"


def test_a_job_far_back_in_a_large_cell_has_an_expected_start() -> None:
    """Eighty full nodes, of which one is free each second, and as many jobs of four kinds that wait for a
    whole one each."""
    driver = CellDriver(PlacerSettings(profile="fifo"))
    driver.join(*(node_spec(f"n{number:02}", 8) for number in range(80)))
    for number in range(80):
        driver.submit(f"r{number}", None, needing(8, 5_000))
    for number in range(80):
        driver.submit(f"j{number}", None, needing(8, 5_000, cores=1 + number % 4))
    ends_s = {f"r{number}": 1 + number for number in range(80)}
    assert starts_s(driver, "j0", **ends_s) == 1
    assert starts_s(driver, "j75", **ends_s) == 76
