"""Charts of jobs that take turns: text of a group for the bars of the Gantt chart,
and one period of some groups."""

from collections.abc import Mapping, Sequence

import altair as alt

from penstock.charts.plots import CATEGORICAL, WIDTH, legend, table
from penstock.charts.report import Chart, Drawing, Panel, Section
from penstock.scheduling.groups.interleaving import RESOURCES, slots, times_of
from penstock.simulator.results.metrics import duration
from penstock.simulator.results.series import Gantt, JobNote, RunSeries
from penstock.simulator.results.sharings import ALONE, Sharing

ROWS = ("storage", "CPU", "GPU", "network")
MEMBERS = ("A", "B", "C", "D")
COLOURS = CATEGORICAL[: len(MEMBERS)]
ROW_PX = 26


def shares(gantt: Gantt, jobs: Mapping[int, JobNote]) -> list[str]:
    """For each bar the jobs with which it takes turns and the prediction; empty: it is alone."""
    names = {note.job_id: note.label for note in jobs.values()}
    return [
        "" if number == ALONE else _predicted(gantt.sharings[int(number)], jobs[int(job)].job_id, names)
        for number, job in zip(gantt.sharing, gantt.job, strict=True)
    ]


def _predicted(sharing: Sharing, job_id: str, names: Mapping[str, str]) -> str:
    order = " → ".join(names.get(member, member) for member in sharing.members)
    turns = sharing.turns
    if turns is None or job_id not in turns.job_ids:
        return f"{order}, nothing predicted"
    speed = turns.speeds[turns.job_ids.index(job_id)]
    instead = f"; instead: {turns.alternative}" if turns.alternative else ""
    return f"{order}; efficiency {turns.efficiency:.2f}; it runs at {speed:.0%} of its speed alone{instead}"


def turns_section(runs: Sequence[RunSeries]) -> Section | None:
    """The section about turns; None: no jobs with known stages took turns."""
    drawings = [
        Drawing(
            [Panel(_period(sharing), *_heading(run, sharing, names)) for sharing, names in run.turns],
            part=run.name if len(runs) > 1 else "",
        )
        for run in runs
        if run.turns
    ]
    caption = (
        "One period of groups that took turns for long: which member uses which resource when, if all wait "
        "for each other after each stage "
        "(Muri, equation 3); each member does one iteration. What is expected counts what taking turns "
        "costs, and that who is done "
        "early goes on early."
    )
    return Section("turns", "How groups take turns", caption, drawings) if drawings else None


def _heading(run: RunSeries, sharing: Sharing, names: Sequence[str]) -> tuple[str, str]:
    """The members, and the prediction."""
    assert sharing.turns is not None, sharing
    turns = sharing.turns
    members = ", ".join(
        f"{member} {name} ({speed:.0%})"
        for member, name, speed in zip(MEMBERS, names, turns.speeds, strict=False)
    )
    lasted = duration(sharing.lasted_ms(round(1_000 * run.end_s)) / 1_000)
    expected = f"expected {turns.period_ms:,.0f} ms, efficiency {turns.efficiency:.2f}"
    return members, f"shared for {lasted}; {expected}"


def _period(sharing: Sharing) -> Chart:
    """Chart of one period. Rows: resources; bars: members."""
    times = [times_of(stages) for stages in sharing.stages if stages is not None]
    rows: list[tuple[float, float, str, str]] = []
    at_ms = 0.0
    for shift, length_ms in enumerate(slots(times)):
        for number, of_member in enumerate(times):
            resource = (number + shift) % RESOURCES
            if of_member[resource] > 0:
                rows.append((at_ms, at_ms + of_member[resource], ROWS[resource], MEMBERS[number]))
        at_ms += length_ms
    data = table(
        x=[row[0] for row in rows],
        x2=[row[1] for row in rows],
        resource=[row[2] for row in rows],
        member=[row[3] for row in rows],
    )
    bars = (
        alt.Chart(data)
        .transform_calculate(time="format(datum.x2 - datum.x, ',.1f') + ' ms'")
        .mark_bar(height=ROW_PX - 8)
        .encode(
            x=alt.X("x:Q", title="ms of the period", scale=alt.Scale(domain=[0, at_ms], nice=False)),
            x2="x2:Q",
            y=alt.Y("resource:N", title=None, sort=list(ROWS), scale=alt.Scale(domain=list(ROWS))),
            color=alt.Color(
                "member:N", scale=alt.Scale(domain=list(MEMBERS), range=list(COLOURS)), legend=legend(MEMBERS)
            ),
            tooltip=["member:N", "resource:N", "time:N"],
        )
    )
    return alt.layer(bars).properties(width=WIDTH, height=ROW_PX * len(ROWS))
