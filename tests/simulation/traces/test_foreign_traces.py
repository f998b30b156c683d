"""Malformed and foreign traces through the whole simulator: each is refused with a reason, or runs; none
brings it down."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from penstock.exits import BadCommand
from penstock.runtime.files.csv_import import BadFile
from penstock.simulator.commands.options import validate
from tests.support.cli.command_line import simulate_options

STEPS = 200  # enough for all that a few jobs do
COLUMNS = {
    "job_id": ["a", "b", "c", "x" * 113, "x" * 114, "A/b:c.d-e_f"],
    "submit_s": ["0", "1", "0.5", "1e11", "1e12"],
    "duration_s": ["1", "60", "1e-3", "1e12", "", "0"],
    "gpus": ["0", "1", "2", "4", "8", "9", "256", "4096", "4095"],
    "model": ["", "m", "m" * 128, "m" * 129],
    "batch_size": ["", "1", str(1 << 30), str((1 << 30) + 1)],
    "owner": ["", "ana", "o" * 128],
    "iterations": ["", "1", str(10**17)],
    "cores": ["", "1", "0.001", "96", "1e5", "262144"],
    "host_memory_mib": ["", "1", str(1 << 30), "500000"],
    "gpu_memory_mib": ["", "1", "32768", "32769", str(1 << 30)],
    "gpu_share_milli": ["", "1", "500", "1000", "1001"],
    "gpu_models": ["", "GPU", "GPU|T4", "T4", "|".join(f"m{n}" for n in range(17))],
    "workers": ["", "1", "2", "3", "256", "257"],
    "parameter_servers": ["", "0", "1", "256"],
    "server_gpus": ["", "0", "1", "16"],
    "patience_s": ["", "0.0001", "10", "1e9", "1e10"],
    "inference": ["", "yes", "no", "maybe"],
    "memory_bandwidth": ["", "0.5", "1", "2"],
    "labels": ["", "class=gold", "a=b|a=c", "x", "k=%F0%9F%98%80", "|".join(f"k{n}=v" for n in range(65))],
}
"""Of each column what is common, and what lies at or just beyond its bounds."""
USUAL = {"job_id": "j{}", "submit_s": "0", "duration_s": "5", "gpus": "1"}


@st.composite
def traces(draw: st.DrawFn) -> str:
    """A few jobs, usual but for a few fields."""
    odd = draw(st.lists(st.sampled_from(list(COLUMNS)), max_size=4, unique=True))
    columns = list(dict.fromkeys([*USUAL, *odd]))
    lines = [",".join(columns)]
    for number in range(draw(st.integers(1, 4))):
        usual = {**USUAL, "job_id": f"j{number}"}
        lines.append(
            ",".join(draw(st.sampled_from(COLUMNS[name])) if name in odd else usual[name] for name in columns)
        )
    return "\n".join(lines)


@settings(deadline=None, max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=traces(),
    profile=st.sampled_from(["fifo", "srtf", "fgd"]),
    more=st.sampled_from([(), ("--single-gpu-workers",), ("--arrivals", "fill"), ("--ticks", "30s")]),
)
def test_every_trace_is_refused_or_runs(
    tmp_path: Path, text: str, profile: str, more: tuple[str, ...]
) -> None:
    """A month of somebody's jobs with one absurd number in it: a line with the reason, never a traceback at
    night."""
    path = tmp_path / "trace.csv"
    path.write_text(text)
    given_ = validate(
        simulate_options(
            str(path),
            "--cluster",
            "2x8+1x4",
            "--profile",
            profile,
            "--skip-bad",
            "--check",
            *more,
        )
    )
    try:
        trace = given_.trace(1)
    except BadFile as refused:
        event("refused")
        refusals = refused.problems
    except BadCommand as refused:
        problem = "--arrivals fill: no job asks for a GPU: a cluster cannot be filled with them"
        assert str(refused) == problem  # noqa: PT017
        return
    else:
        refusals = ()
    if refusals:
        assert all(problem.line or problem.text == "no job in it" for problem in refusals)
        return
    simulation = given_.simulation(profile, 1, trace)
    steps = 0
    while simulation.step() and steps < STEPS:
        steps += 1
    event(f"ran, {trace.skipped_lines} lines left out")
    if not more and steps < STEPS:
        hasty = sum(1 for job in trace.jobs if job.patience_s is not None)
        assert simulation.figures(1, 1).finished_jobs >= len(trace.jobs) - hasty, (
            "what may run here also ends"
        )


@pytest.mark.parametrize("name", COLUMNS)
def test_the_bounds_are_where_the_test_thinks(name: str, tmp_path: Path) -> None:
    """Each column has values that are taken: the property above is not a walk past refusals."""
    path = tmp_path / "trace.csv"
    columns = list(dict.fromkeys([*USUAL, name]))
    taken = 0
    for value in COLUMNS[name]:
        usual = {**USUAL, "job_id": "j", name: value}
        path.write_text(",".join(columns) + "\n" + ",".join(usual[column] for column in columns))
        given_ = validate(simulate_options(str(path), "--cluster", "2x8+1x4"))
        try:
            given_.trace(1)
        except BadFile:
            continue
        taken += 1
    assert taken >= 1
