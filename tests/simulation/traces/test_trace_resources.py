"""What a job of a trace asks for, and what is typical of a trace."""

from pathlib import Path

import pytest

from penstock.scheduling.definition import text_of
from penstock.simulator.commands.options import validate
from penstock.simulator.traces.jobs import Shape, TraceJob
from penstock.simulator.traces.resources import cores_of, request_of, workers_of
from penstock_papers.baselines.fgd import typical_tasks
from penstock_papers.settings import FgdSettings, TypicalTask
from tests.support.cli.command_line import simulate_options


def pod(name: str, gpus: int, cores: float | None, share: int = 1_000) -> TraceJob:
    return TraceJob(name, 0, 10, gpus, cores=cores, gpu_share_milli=share)


@pytest.mark.parametrize(
    ("cores", "workers", "slices", "found"),
    [
        (3.152, 1, 8, 25),  # 25.2 eighths
        (11.908, 1, 8, 95),  # 95.3
        (4.19, 1, 8, 34),  # 33.5: up
        (0.01, 1, 8, 1),  # something must be given
        (3.152, 1, 1, 4),  # a whole core or none
        (12.0, 4, 1, 3),
        (0.3, 3, 1, 1),  # 0.1 each, in spite of 0.09999999999999999
    ],
)
def test_cores_are_whole_and_slices_nearest(cores: float, workers: int, slices: int, found: int) -> None:
    """A pod of 3.152 cores: an ordinary node gives four, one that counts in eighths gives 25 of them."""
    assert cores_of(pod("p", 1, cores), workers, slices) == found


def test_what_is_not_told_is_small() -> None:
    """A trace that only knows GPUs: a core and a GiB for each, so that GPUs alone bind."""
    asked = request_of(pod("p", 4, None), Shape(2, 2), 1)
    assert (asked.gpus, asked.cores, asked.host_memory_mib, asked.gpu_share_milli) == (2, 2, 2_048, None)
    assert request_of(pod("p", 1, None, 250), Shape(1, 1), 1).gpu_memory_mib == 256


def test_the_kinds_of_workers_that_hold_most() -> None:
    """Twenty workers: a gang counts once per worker, and the last twentieth does not count."""
    jobs = [pod(f"half-{i}", 1, 2.0, 500) for i in range(11)]
    jobs += [pod("gang", 16, 32.0), *(pod(f"cpu-{i}", 0, 3.0) for i in range(6)), pod("odd", 3, 3.0)]
    assert typical_tasks(workers_of(jobs, 8, 1, single_gpu_workers=False)) == (
        TypicalTask(cores=2, gpus=1, gpu_share_milli=500, count=11),
        TypicalTask(cores=3, gpus=0, count=6),
        TypicalTask(cores=16, gpus=8, count=2),
    )


def typical(*tasks: TypicalTask) -> str:
    return text_of(FgdSettings(typical_tasks=tasks))


def test_a_trace_tells_what_is_typical_unless_somebody_does(tmp_path: Path) -> None:
    """`penstock simulate --profile fgd` needs no setting; where one is given it holds; others need none."""
    trace = tmp_path / "two.csv"
    trace.write_text("job_id,submit_s,duration_s,gpus,cores\na,0,10,2,4\nb,1,10,2,4\n")

    def own(profile: str, *more: str) -> str:
        given = validate(simulate_options(str(trace), "--profile", profile, *more))
        return given.simulation(profile, 0, given.trace(0)).cell.state.settings.profile_settings

    assert own("fgd") == typical(TypicalTask(cores=4, gpus=2, count=2))
    assert own("best-fit") == ""
    given = 'typical_tasks=[{"cores": 1, "gpus": 8, "count": 3}]'
    assert own("fgd", "--set", given) == typical(TypicalTask(cores=1, gpus=8, count=3))
