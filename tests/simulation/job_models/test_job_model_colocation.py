"""Job model `colocation`: by hand on a small table of our own, and on the whole of Gavel's."""

from pathlib import Path
from statistics import fmean

import pytest

from penstock.model.nouns.settings import PlacerSettings
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.engine import Options, Simulation
from penstock.simulator.job_models.measurements.colocation import Colocation, Config
from penstock.simulator.job_models.measurements.tables import COLOCATED, ISOLATED, read_throughputs
from penstock.simulator.job_models.model import Allocation, NotMeasured
from penstock.simulator.job_models.sharing import Links
from penstock.simulator.job_models.steady import SteadyWork
from penstock.simulator.traces.cluster import nodes_of
from penstock.simulator.traces.jobs import TraceJob
from tests.simulation.scenarios import ends
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "gavel"
needs_gavel = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"Gavel's tables are not in {DATA}; set PENSTOCK_DATA to the folder that holds gavel/",
)

TABLES = {
    ISOLATED: """gpu,consolidated,model,batch_size,num_gpus,steps_per_s
fast,1,net,8,1,10
fast,1,net,8,2,18
fast,0,net,8,2,9
fast,1,tree,,1,4
fast,1,net,8,4,0
slow,1,net,8,1,2
slow,1,net,8,2,4
slow,0,net,8,2,5
""",
    COLOCATED: """gpu,model_a,batch_a,ngpu_a,model_b,batch_b,ngpu_b,tput_a,tput_b,iso_a,iso_b
fast,net,8,1,net,8,1,6,6,10,10
fast,net,8,1,tree,,1,7,3,10,4
fast,tree,,1,net,8,1,3,7,4,10
fast,tree,,1,tree,,1,0,0,4,4
fast,net,8,2,net,8,2,12,12,18,18
""",
}
FIRST, SECOND = Allocation((0,)), Allocation((1,))
HALF = Allocation((0,), share_milli=500)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in TABLES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def job_model_of(folder: Path, *, split: bool = False) -> Colocation:
    """Nodes of two GPUs: those named f… are fast, s… slow, all others fast too."""
    return Colocation(
        read_throughputs(folder), "fast", {"f": "fast", "s": "slow", "s2": "slow"}, 2, split=split
    )


def net(job_id: str = "a", gpus: int = 1) -> TraceJob:
    return TraceJob(job_id, 0, 0, gpus, "net", 8, iterations=180)


TREE = TraceJob("t", 0, 30.0, 1, "tree")


def test_a_job_is_as_long_as_its_steps_take_packed(folder: Path) -> None:
    """180 steps: 18 s on one fast GPU, 10 s on two; who asks for slow ones is measured by them."""
    job_model = job_model_of(folder)
    assert job_model.work_s(net()) == 18
    assert job_model.work_s(net(gpus=2)) == 10
    assert job_model.work_s(net()._replace(gpu_models=("SLOW",))) == 90
    assert job_model.work_s(TREE) == 30, "without steps its run time counts"
    with pytest.raises(
        NotMeasured, match=r"colocation: net with batch 8 on 4 fast, consolidated, was never measured"
    ):
        job_model.work_s(net(gpus=4))  # the table holds 0


def test_the_place_decides(folder: Path) -> None:
    """Two GPUs on one node, on two nodes, on slow nodes, on one of each: the slow one sets the pace."""
    job_model, job = job_model_of(folder), net(gpus=2)
    assert job_model.speed(job, {"f": Allocation((0, 1))}, ()) == 1
    assert job_model.speed(job, {"f": FIRST, "f2": FIRST}, ()) == 0.5
    assert job_model.speed(job, {"s": Allocation((0, 1))}, ()) == pytest.approx(4 / 18)
    assert job_model.speed(job, {"f": FIRST, "s": FIRST}, ()) == pytest.approx(5 / 18)
    assert job_model.speed(net(), {"f": Allocation((0, 1))}, ()) == 1.8, "given more than it asked for"
    assert job_model.network_share(job, {"f": Allocation((0, 1))}) == 0
    single = Colocation(read_throughputs(folder), "fast", {}, 1)
    assert single.speed(job, {"x": FIRST, "y": FIRST}, ()) == 1, (
        "nodes of one GPU: two of them are as near as can be"
    )
    assert job_model.network_share(job, {"f": FIRST, "f2": FIRST}) == 0.5
    assert job_model.network_share(job, {"s": FIRST, "s2": FIRST}) == 0, "spread was the faster one there"


def test_pairs_are_measured_and_each_side_has_its_own_speed(folder: Path) -> None:
    """A net and a tree on halves of one GPU keep 70 and 75 % of their speeds; on another GPU nobody
    disturbs."""
    job_model = job_model_of(folder)
    assert job_model.speed(net(), {"f": HALF}, [job_model.neighbour(TREE, {"f": HALF})]) == pytest.approx(0.7)
    assert job_model.speed(TREE, {"f": HALF}, [job_model.neighbour(net(), {"f": HALF})]) == pytest.approx(
        0.75
    )
    assert job_model.speed(net(), {"f": HALF}, [job_model.neighbour(net("b"), {"f": HALF})]) == pytest.approx(
        0.6
    )
    assert job_model.speed(net(), {"f": FIRST}, [job_model.neighbour(TREE, {"f": SECOND})]) == 1
    both = {"f": Allocation((0, 1))}
    assert job_model.speed(net(gpus=2), both, [job_model.neighbour(net("b", 2), both)]) == pytest.approx(
        12 / 18
    )
    apart = {"f": FIRST, "f2": FIRST}
    assert job_model.speed(net(gpus=2), apart, [job_model.neighbour(net("b", 2), apart)]) == pytest.approx(
        0.5 * 12 / 18
    )


def test_what_nobody_measured_is_refused(folder: Path) -> None:
    """Two trees did not fit together, three jobs were never tried: no speed is made up."""
    job_model = job_model_of(folder)
    tree = job_model.neighbour(TREE._replace(job_id="u"), {"f": HALF})
    with pytest.raises(NotMeasured, match=r"tree on 1 fast together with tree on 1 fast was never measured"):
        job_model.speed(TREE, {"f": HALF}, [tree])
    with pytest.raises(NotMeasured, match=r"3 jobs on one GPU was never measured; .*unmeasured=split"):
        job_model.speed(net(), {"f": HALF}, [tree, job_model.neighbour(net("b"), {"f": HALF})])
    with pytest.raises(NotMeasured, match=r"forest with batch 8 on 1 fast"):
        job_model.speed(net()._replace(model="forest"), {"f": FIRST}, ())
    with pytest.raises(NotMeasured, match="2 fast together with net with batch 8 on 1 fast"):
        job_model.speed(net(gpus=2), {"f": Allocation((0, 1))}, [job_model.neighbour(net("b"), {"f": FIRST})])


def test_slices_of_time_stand_in_where_asked_for(folder: Path) -> None:
    """With `unmeasured=split`: the share that it was given, or an equal one; what was measured stays as
    measured."""
    job_model = job_model_of(folder, split=True)
    third = {"f": Allocation((0,), share_milli=300)}
    others = [job_model.neighbour(net("b"), third), job_model.neighbour(net("c"), third)]
    assert job_model.speed(net(), third, others) == pytest.approx(0.3)
    whole = {"f": FIRST}
    assert job_model.speed(
        net(), whole, [job_model.neighbour(net("b"), whole), job_model.neighbour(net("c"), whole)]
    ) == pytest.approx(1 / 3)
    assert job_model.speed(net(), third, [job_model.neighbour(TREE, third)]) == pytest.approx(0.7)


def test_links_of_spread_jobs_are_shared(folder: Path) -> None:
    """Half of a spread step is network: two spread jobs on the same two nodes have 1.5 flows of load instead
    of 1."""
    job_model = Links(job_model_of(folder))
    apart, beside = {"f": FIRST, "f2": FIRST}, {"f": SECOND, "f2": SECOND}
    assert job_model.speed(net(gpus=2), apart, ()) == 0.5
    assert job_model.speed(net(gpus=2), apart, [job_model.neighbour(net("b", 2), beside)]) == pytest.approx(
        0.5 / 1.25
    )


def test_a_table_with_holes_is_told_line_by_line(folder: Path) -> None:
    (folder / ISOLATED).write_text("gpu,consolidated,model,batch_size,num_gpus\nfast,1,net,8,1\n")
    with pytest.raises(BadFile, match=r"line 1, column steps_per_s: missing"):
        read_throughputs(folder)
    (folder / ISOLATED).write_text(TABLES[ISOLATED] + "fast,2,net,eight,1,-1\n")
    with pytest.raises(BadFile) as caught:
        read_throughputs(folder)
    message = str(caught.value)
    assert "line 10, column consolidated: 2 is more than 1" in message
    assert "line 10, column batch_size: 'eight' is not a whole number" in message
    assert "line 10, column steps_per_s: '-1' is not a number" in message


@needs_gavel
def test_what_spreading_costs_in_gavels_table() -> None:
    """0.73 × on average over all that was measured both ways on several GPUs, 0.10 × at worst."""
    table = read_throughputs(DATA)
    costs = {
        config: rate / table.consolidated[config]
        for config, rate in table.spread.items()
        if config.gpus > 1 and config in table.consolidated
    }
    assert len(costs) == 165
    assert fmean(costs.values()) == pytest.approx(0.734, abs=0.001)
    assert min(costs.values()) == pytest.approx(0.105, abs=0.001)
    assert len(table.pairs) == 1_881, "of 5,277 lines; the others hold 0: the two did not run together"


@needs_gavel
def test_gavels_pairs_are_the_same_from_both_sides() -> None:
    """Each measured pair stands there twice, once for each job, and nobody runs faster beside another."""
    table = read_throughputs(DATA)
    for one, other in table.pairs:
        assert (other, one) in table.pairs, (one, other)
    gains = [rate / table.consolidated[one] for (one, _), rate in table.pairs.items()]
    assert max(gains) <= 1.0
    two = Config("k80", "ResNet-18", 16, 1)
    assert table.pairs[two, two] / table.consolidated[two] == pytest.approx(0.502, abs=0.001)


def test_two_jobs_on_one_gpu_run_at_the_speed_of_their_pair(folder: Path) -> None:
    """Three jobs ask for half a GPU each, on a node with two: two share the first GPU at 60 % each, the third
    has the second one to itself. When the pair has ended, nobody was slowed down for longer than that."""
    jobs = [net(name)._replace(gpu_share_milli=500, duration_s=0.0) for name in ("a", "b", "c")]
    simulation = Simulation(
        nodes_of("1x2"),
        PlacerSettings(profile="fifo"),
        SteadyWork(job_model_of(folder)),
        jobs,
        Options(check_every_step=True),
    )
    assert ends(simulation) == pytest.approx({"a": 30.0, "b": 30.0, "c": 18.0})
    assert simulation.figures(1, 1).gpu_allocation == pytest.approx((0.5 * 18 + 1.0 * 30) / (2 * 30))
