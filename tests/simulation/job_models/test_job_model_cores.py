"""Job model `cpu`: by hand on a small table of our own, and on Synergy's."""

from pathlib import Path

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.job_models.measurements.cores import MIB_PER_GB, Cpu
from penstock.simulator.job_models.measurements.tables import SENSITIVITY, read_sensitivity
from penstock.simulator.job_models.model import Allocation, NotMeasured
from penstock.simulator.traces.jobs import TraceJob
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "synergy"
needs_synergy = pytest.mark.skipif(
    not DATA.is_dir(),
    reason=f"Synergy's table is not in {DATA}; set PENSTOCK_DATA to the folder that holds synergy/",
)

HEADER = "cpu_gpu_ratio_dir,model,num_gpu,batch,cpus,mem_gb,relative_tput\n"
TABLE = (
    HEADER
    + """models,net,1,8,1,50,0.2
models,net,1,8,1,100,0.4
models,net,1,8,3,50,0.6
models,net,1,8,3,100,1.0
models,net,1,8,6,50,0.6
models,net,1,8,6,100,1.6
models,flat,1,8,1,50,1.0
models,__init_,1,8,1,50,9
models,net,2,8,6,50,0
models,net,4,8,1,100,0.5
models,net,4,8,3,100,1
models-4,net,1,8,6,50,7
"""
)


@pytest.fixture
def job_model(tmp_path: Path) -> Cpu:
    (tmp_path / "t.csv").write_text(TABLE)
    return Cpu(read_sensitivity(tmp_path / "t.csv"))


def net(gpus: int = 1, cores: float | None = None, memory_gb: float | None = None) -> TraceJob:
    memory_mib = None if memory_gb is None else round(memory_gb * MIB_PER_GB)
    return TraceJob("a", 0, 100.0, gpus, "net", cores=cores, host_memory_mib=memory_mib)


def test_cores_between_measured_points_are_linear(job_model: Cpu) -> None:
    """Asked for three cores, given one to twelve: 0.4, 0.7, 1, 1.2, 1.6, and nothing more beyond what was
    measured."""
    for cores, speed in ((1, 0.4), (2, 0.7), (3, 1.0), (4, 1.2), (6, 1.6), (12, 1.6)):
        assert job_model.speed(net(), {"n": Allocation((0,), cores)}, ()) == pytest.approx(speed), cores
    assert job_model.speed(net(cores=6), {"n": Allocation((0,), 3)}, ()) == pytest.approx(1 / 1.6), (
        "against what it asked for"
    )
    assert job_model.speed(
        net(gpus=2), {"n": Allocation((0,), 2), "m": Allocation((0,), 2)}, ()
    ) == pytest.approx(0.7), "per GPU"
    assert job_model.speed(net(gpus=4), {"n": Allocation((0, 1, 2, 3), 8)}, ()) == pytest.approx(0.75), (
        "rows of its own"
    )
    assert job_model.work_s(net()) == 100


def test_memory_counts_where_the_trace_tells_it(job_model: Cpu) -> None:
    """75 GB lie halfway between 50 and 100; who asked for 100 and is given 50 has 60 % of its speed."""
    memory = {gb: round(gb * MIB_PER_GB) for gb in (50, 75, 100)}
    asked = net(cores=3, memory_gb=100)
    for gb, speed in ((50, 0.6), (75, 0.8), (100, 1.0)):
        allocation = Allocation((0,), 3, host_memory_mib=memory[gb])
        assert job_model.speed(asked, {"n": allocation}, ()) == pytest.approx(speed, abs=1e-4), gb


def test_eighths_of_cores_are_counted_as_such(tmp_path: Path) -> None:
    """On openb's nodes a core counts as eight: 24 slices are three cores."""
    (tmp_path / "t.csv").write_text(TABLE)
    job_model = Cpu(read_sensitivity(tmp_path / "t.csv"), slices_per_core=8)
    assert job_model.speed(net(), {"n": Allocation((0,), 24)}, ()) == 1


def test_what_nobody_measured_is_refused(job_model: Cpu) -> None:
    """An unknown model, a third of a core, 20 GB: the message names what there is. CPU jobs have no GPU to
    feed."""
    with pytest.raises(NotMeasured, match=r"cpu: tree was never measured; there are flat, net"):
        job_model.work_s(net()._replace(model="tree"))
    with pytest.raises(NotMeasured, match=r"net with 0\.5 cores per GPU; the fewest measured are 1"):
        job_model.speed(net(gpus=2), {"n": Allocation((0, 1), 1)}, ())
    with pytest.raises(NotMeasured, match=r"net with 20\.0 GB per GPU; the least measured is 50"):
        job_model.work_s(net(memory_gb=20))
    assert job_model.speed(TraceJob("c", 0, 100, 0), {"n": Allocation((), 1)}, ()) == 1


def test_a_table_without_one_gpu_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(HEADER + "models-4,net,1,8,6,50,7\n")
    with pytest.raises(BadFile, match="no row with cpu_gpu_ratio_dir models and one GPU"):
        read_sensitivity(tmp_path / "t.csv")


@needs_synergy
def test_who_gains_by_cores_in_synergys_table() -> None:
    """Against three cores: AlexNet and ShuffleNet 2.9 ×, ResNet-18 2.4 ×, ResNet-50 1.15 ×, language models
    nothing."""
    job_model = Cpu(read_sensitivity(DATA / SENSITIVITY))
    gains = {
        "alexnet": 2.94,
        "shufflenet": 2.89,
        "res18": 2.4,
        "res50": 1.15,
        "bert": 1.0,
        "gnmt": 1.0,
        "lstm": 1.0,
    }
    for model, gain in gains.items():
        assert job_model.relative(model, 24) == pytest.approx(gain), model
        assert job_model.relative(model, 3) == 1
    assert job_model.relative("alexnet", 24) / job_model.relative("alexnet", 1) == pytest.approx(9.8)
    assert job_model.relative("alexnet", 24, 20.83) == pytest.approx(0.1), (
        "starved of memory, cores do not help"
    )


@needs_synergy
def test_jobs_of_two_and_four_gpus_have_rows_of_their_own() -> None:
    """ResNet-50 gains by a fourth core on one GPU, but not on several; nobody measured BERT on two: as on
    one."""
    job_model = Cpu(read_sensitivity(DATA / SENSITIVITY))
    assert [job_model.relative("res50", 6, gpus=gpus) for gpus in (1, 2, 4)] == pytest.approx(
        [1.15, 1.0, 1.0]
    )
    assert [job_model.relative("alexnet", 9, gpus=gpus) for gpus in (1, 2)] == pytest.approx([2.0, 2.33])
    assert job_model.relative("bert", 1, gpus=2) == 1
