"""Liquid's pre-scheduling and event-driven communication through the real engine: a few sequences; all of
them in `make papers`."""

import pytest

from tests.papers.liquid import idle_tables
from tests.papers.liquid.idle_tables import Mode
from tests.support.data import DATA_ROOT as DATA

pytestmark = pytest.mark.skipif(
    not (DATA / "muri/stage_profiles.csv").is_file(),
    reason=f"Muri's stage profiles are not in {DATA}; set PENSTOCK_DATA to the folder that holds muri/",
)


@pytest.fixture(autouse=True)
def data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_DATA", str(DATA))


def test_a_launch_overlaps_the_end_of_the_job_before() -> None:
    """Eight jobs of BERT on one GPU. With ends known all that is left between two is the save; with ends
    learned a little more; where only the report of the save is known, the launch less the save; and without,
    both."""
    [bert] = [kind for kind in idle_tables.kinds() if kind.model == "bert"]
    truth, job = idle_tables.job_model("measured"), idle_tables.sequence(bert, 0)[0]
    launch_s, save_s = truth.start_up_s(job), truth.save_s(job)

    def gaps(mode: Mode) -> list[float]:
        return list(idle_tables.gaps("measured", bert, 0, mode._replace(checked=True)))

    assert gaps(Mode(durations="known")) == pytest.approx([launch_s + save_s] * 7, abs=0.05)
    assert gaps(Mode(prelaunch=True, durations="known")) == pytest.approx([save_s] * 7, abs=0.05)
    assert gaps(Mode(prelaunch=True, durations="unknown")) == pytest.approx(
        [max(launch_s, save_s)] * 7, abs=0.05
    )
    learned = gaps(Mode(prelaunch=True))
    assert sum(learned) < 0.56 * 7 * (launch_s + save_s)


def test_a_heartbeat_adds_half_of_its_interval_and_more() -> None:
    """What is published for 5 s, by the gap that the authors show; the curve rises with the interval."""
    [kind] = [kind for kind in idle_tables.kinds() if kind.model == "vgg16"]
    idle = [
        sum(idle_tables.gaps("measured", kind, 0, Mode(durations="known", tick_s=tick_s)))
        for tick_s in (0.0, 1.0, 5.0, 20.0)
    ]
    assert idle == sorted(idle)
    assert idle[0] < 0.88 * idle[2]
