"""Traces as their publishers' archives have them: Philly's attempts in JSON, and Alibaba's table of PAI
tasks."""

import json
from pathlib import Path

import pytest

from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.traces.files.importing import Trace, read_trace
from penstock.simulator.traces.jobs import TraceJob

PHILLY = [
    {
        "status": "Pass",
        "vc": "v1",
        "jobid": "application_1_1",
        "user": "ana",
        "submitted_time": "2017-10-07 01:00:00",
        "attempts": [
            {
                "start_time": "2017-10-07 01:01:00",
                "end_time": "2017-10-07 01:02:40",
                "detail": [{"ip": "m1", "gpus": ["gpu0", "gpu1"]}, {"ip": "m2", "gpus": ["gpu4", "gpu5"]}],
            },
            {
                "start_time": "2017-10-07 01:05:00",
                "end_time": "2017-10-07 01:05:20",
                "detail": [{"ip": "m1", "gpus": ["gpu0"]}],
            },
        ],
    },
    {
        "status": "Killed",
        "vc": "v1",
        "jobid": "application_1_2",
        "user": "ben",
        "submitted_time": "2017-10-07 01:00:30",
        "attempts": [],
    },
    {
        "status": "Running",
        "vc": "v2",
        "jobid": "application_1_3",
        "user": None,
        "submitted_time": "None",
        "attempts": [
            {
                "start_time": "2017-10-07 02:00:00",
                "end_time": "None",
                "detail": [{"ip": "m3", "gpus": ["gpu0"]}],
            }
        ],
    },
    {
        "status": "Pass",
        "vc": "v2",
        "jobid": "application_1_4",
        "user": None,
        "submitted_time": "None",
        "attempts": [{"start_time": "2017-10-07 01:00:40", "end_time": "2017-10-07 01:00:50", "detail": []}],
    },
]
PAI = """aa1,tensorflow,1,Terminated,1000.0,1600.0,600.0,29.0,50.0,MISC
bb2,ps,2,Failed,2000.0,2500.0,400.0,10.0,,CPU
bb2,worker,4,Failed,2010.0,2600.0,800.0,20.0,100.0,V100
cc3,worker,3,Terminated,2100.0,2200.0,100.0,4.0,50.0,T4
dd4,worker,1,Running,3000.0,,600.0,29.0,100.0,P100
ee5,worker,1,Waiting,,,600.0,29.0,100.0,P100
"""


def read(tmp_path: Path, text: str) -> Trace:
    path = tmp_path / "trace"
    path.write_text(text)
    return read_trace(path)


@pytest.mark.parametrize("text", [json.dumps(PHILLY), "\n".join(map(json.dumps, PHILLY))])
def test_phillys_attempts_are_one_job(tmp_path: Path, text: str) -> None:
    """A job that was tried twice; one that was killed in the queue; one that still ran; one whose
    submission was not recorded."""
    trace = read(tmp_path, text)
    assert list(trace.jobs) == [
        TraceJob("application_1_1", 0, 120, 4, owner="ana", workers=2),
        TraceJob("application_1_4", 40, 10, 0, owner="v2", cores=1),
    ]
    assert dict(trace.passed) == {"jobs that never ran": 1, "jobs that have not ended": 1}
    assert set(trace.left_out) == {"status", "vc"}, "what is lost is named"


def test_a_broken_attempt_is_a_problem_of_its_job(tmp_path: Path) -> None:
    """A cut file, or one edited by hand."""
    broken = {
        "jobid": "x",
        "submitted_time": "soon",
        "attempts": [{"start_time": "yesterday", "end_time": "2017-10-07 01:00:40"}],
    }
    with pytest.raises(BadFile, match=r"'yesterday' or .* is not a date and time"):
        read(tmp_path, json.dumps([PHILLY[0], broken]))
    with pytest.raises(BadFile, match="no job with attempts, jobid, submitted_time"):
        read(tmp_path, json.dumps([PHILLY[0], {"jobid": "x"}]))


@pytest.mark.parametrize(
    "header",
    ["", "job_name,task_name,inst_num,status,start_time,end_time,plan_cpu,plan_mem,plan_gpu,gpu_type\n"],
)
def test_pais_tasks_are_one_job(tmp_path: Path, header: str) -> None:
    """Per cent of cores and GPUs, GiB, instances; the tasks of a job run at the same time."""
    trace = read(tmp_path, header + PAI)
    assert list(trace.jobs) == [
        TraceJob("aa1", 1_000, 600, 1, cores=6, host_memory_mib=29 * 1_024, gpu_share_milli=500),
        TraceJob("bb2", 2_000, 600, 4, cores=40, host_memory_mib=100 * 1_024, gpu_models=("V100",)),
        TraceJob("cc3", 2_100, 100, 2, cores=3, host_memory_mib=12 * 1_024, gpu_models=("T4",)),
    ]
    assert dict(trace.passed) == {"jobs that never ran": 1, "jobs that have not ended": 1}


def test_pais_table_of_jobs_says_which_table_has_the_resources(tmp_path: Path) -> None:
    """The archive has seven tables; their names differ by a word."""
    with pytest.raises(BadFile, match=r"pai_task_table\.csv"):
        read(tmp_path, "aa1,f0e1,u9,Terminated,1000.0,1600.0\n")


@pytest.mark.parametrize("line", ["aa1,w,x,Terminated,1,2,3,4,5,V100", "aa1,w,1,Terminated,1,2,3,4,5"])
def test_a_line_of_another_table_names_its_column(tmp_path: Path, line: str) -> None:
    """One line of the file was cut."""
    with pytest.raises(BadFile, match="line 2"):
        read(tmp_path, PAI.split("\n")[0] + "\n" + line + "\n")
