"""What a node makes of a script's lines: strict, bounded, and one bad line never costs the next."""

import itertools
import re
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.codegen.schemas import ROOT
from penstock.model.inputs.external_events import (
    StageSample,
    StagesMeasured,
    StepsMeasured,
    TaskCheckpointed,
    TaskPhaseChanged,
    TelemetrySampled,
)
from penstock.model.schema.validation import checked
from penstock.sdk.reporter.lines import LINE_BYTES
from penstock_services.node_reporter.core.reports.progress import (
    MAX_CHANGES,
    MAX_CHECKPOINTS,
    MAX_STAGES,
    MAX_STEPS,
    ProgressParser,
    Report,
)
from tests.unit.node_reporter.measure.progress_lines import KEY, NOW_MS, done_of, parser, steps

ABOUT = {"node_id": "n1", "task_id": KEY[0], "token": KEY[1], "at_ms": NOW_MS}
STAGES = b'{"stages":{"iterations":2,"samples":[[6.5,1,0,0,0],[54.5,0,0.25,1.0,0]]}}\n'


def test_lines_become_events_with_names_of_their_own() -> None:
    """A repeat after a crash has the same name, so that a duplicate is recognised."""
    reports = parser().parse(b"train\n" + steps(4, total=9, steps=3, step_ms=2.5, loss=1) + STAGES, NOW_MS)
    assert reports == [
        Report(f"train/{NOW_MS}", checked(TaskPhaseChanged, {**ABOUT, "phase": "train"})),
        Report(
            "steps/4",
            checked(StepsMeasured, {**ABOUT, "done": 4, "total": 9, "steps": 3, "step_ms": 2.5, "loss": 1.0}),
        ),
        Report(f"loss/{NOW_MS}", TelemetrySampled(node_id="n1", task_id=KEY[0], at_ms=NOW_MS, loss=1.0)),
        Report(
            f"stages/{NOW_MS}/1",
            checked(
                StagesMeasured,
                {
                    **ABOUT,
                    "iterations": 2,
                    "samples": (
                        StageSample(lasted_ms=6.5, storage=1.0),
                        StageSample(lasted_ms=54.5, cpu=0.25, gpu=1.0),
                    ),
                },
            ),
        ),
    ]


def test_the_lines_in_the_readme_are_understood() -> None:
    """Trainings in C++ or Julia write them by hand, as they stand there."""
    text = (ROOT / "libs/penstock/sdk/README.md").read_text()
    (lines,) = re.findall(r"```\n(train\n.*?)```", text, re.DOTALL)
    one_task = parser()
    reports = one_task.parse(lines.encode(), NOW_MS)
    assert [type(one.event) for one in reports] == [
        TaskPhaseChanged,
        StepsMeasured,
        TelemetrySampled,  # the loss; the next one is too close to it
        TelemetrySampled,  # the window's step time
        StagesMeasured,
        TaskCheckpointed,
    ]
    assert one_task.garbage == 0


def test_checkpoints_are_reported_up_to_a_bound_and_then_the_last() -> None:
    """A script saves after every step. The latest counts, so the last one is reported all the same; another
    rank's are not."""
    lines = b"".join(
        b'{"checkpoint":{"path":"attempt-1-iteration-%d","iteration":%d,"bytes":9,"seconds":0.25}}\n' % (n, n)
        for n in range(MAX_CHECKPOINTS + 5)
    )
    one_task = parser()
    reports = [*one_task.parse(lines, NOW_MS), *one_task.end(NOW_MS)]
    assert len(reports) == len({one.name for one in reports}) == MAX_CHECKPOINTS + 1
    last = MAX_CHECKPOINTS + 4
    path = f"/state/checkpoints/job-1/attempt-1-iteration-{last}"
    fields = {**ABOUT, "path": path, "iteration": last, "size_bytes": 9, "save_ms": 250}
    assert reports[-1].event == checked(TaskCheckpointed, fields)
    assert parser(leads=False).parse(lines, NOW_MS) == []


def test_a_job_without_a_folder_reports_no_checkpoint() -> None:
    """It never said that it saves: the line names nothing that a node could find."""
    one_task = ProgressParser("n1", *KEY, leads=True)
    assert one_task.parse(b'{"checkpoint":{"path":"x","iteration":1}}\n', NOW_MS) == []
    assert one_task.garbage == 1


GARBAGE = [
    b'{"checkpoint":{}}',
    b'{"checkpoint":{"path":"../other-job/attempt-1-iteration-1","iteration":1}}',
    b'{"checkpoint":{"path":"/etc","iteration":1}}',
    b'{"checkpoint":{"path":"..","iteration":1}}',
    b'{"checkpoint":{"path":"x","iteration":-1}}',
    b'{"checkpoint":{"path":"x","iteration":1,"seconds":1e9}}',
    b'{"checkpoint":{"path":"x","iteration":1,"bytes":-1}}',
    b'{"checkpoint":{"path":"x","iteration":1,"shared":true}}',
    b"progress: 5%",
    b"trainsave",
    b"TRAIN",
    b"5",
    b"null",
    b"[]",
    b"{}",
    b'"train"',
    b"\xff\xfe\x00",
    b'{"steps":',
    b'{"steps":null,"stages":null}',
    b'{"steps":{}}',
    b'{"steps":{"done":0}}',
    b'{"steps":{"done":-1}}',
    b'{"steps":{"done":1.5}}',
    b'{"steps":{"done":true}}',
    b'{"steps":{"done":"1"}}',
    b'{"steps":{"done":9007199254740993}}',
    b'{"steps":{"done":' + b"9" * 3_000 + b"}}",
    b'{"steps":{"done":1,"total":0}}',
    b'{"steps":{"done":1,"loss":NaN}}',
    b'{"steps":{"done":1,"loss":1e999}}',
    b'{"steps":{"done":1,"loss":-1e101}}',
    b'{"steps":{"done":1,"step_ms":-1}}',
    b'{"steps":{"done":1,"step_ms":1e10}}',
    b'{"steps":{"done":1,"token":99}}',
    b'{"steps":{"done":1},"node_id":"n2"}',
    b'{"steps":{"done":1},"stages":{"iterations":1,"samples":[[1,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[]}}',
    b'{"stages":{"iterations":0,"samples":[[1,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[0,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1,0,0,-1,0]]}}',
    b'{"stages":{"iterations":1,"samples":[[1e9,0,0,0,0]]}}',
    b'{"stages":{"iterations":1,"samples":[' + b",".join([b"[1,0,0,0,0]"] * 257) + b"]}}",
    b"[" * 4_000,
    b'{"stages":' * 400,
    b'{"steps":{"done":' + b"[" * 3_000,
]


@pytest.mark.parametrize("garbage", GARBAGE, ids=lambda line: line[:40].decode(errors="replace"))
def test_garbage_is_counted_and_costs_nothing_else(garbage: bytes) -> None:
    """A script prints into the wrong descriptor, or tries what it can get away with."""
    one_task = parser()
    reports = one_task.parse(steps(1) + garbage + b"\n" + steps(2), NOW_MS)
    assert (done_of(reports), len(reports), one_task.garbage) == ([1, 2], 2, 1)


@pytest.mark.parametrize("size", [LINE_BYTES, LINE_BYTES + 1, 3 * LINE_BYTES, 200_000])
def test_a_line_that_does_not_end_is_skipped_up_to_its_end(size: int) -> None:
    """Binary data by mistake; the FIFO was full in the middle of it. Nothing grows with it."""
    one_task = parser()
    reports = []
    for chunk in (steps(1), *[b"x" * 1_000] * (size // 1_000), b"x" * (size % 1_000), b"\n" + steps(2)):
        reports += one_task.parse(chunk, NOW_MS)
    assert (done_of(reports), one_task.end(NOW_MS), one_task.garbage) == ([1, 2], [], 1)
    assert done_of(one_task.parse(b"x" * size + b"\n" + steps(3), NOW_MS)) == [3]


def test_the_longest_line_is_parsed() -> None:
    """256 samples of a profiler that measures them itself fit, if they are written short."""
    samples = ",".join(["[1,0,0,1,0]"] * 256)
    line = f'{{"stages":{{"iterations":20,"samples":[{samples}]}}}}'.encode()
    (report,) = parser().parse(line.ljust(LINE_BYTES - 1) + b"\n", NOW_MS)
    assert isinstance(report.event, StagesMeasured)
    assert len(report.event.samples) == 256


def test_a_torn_line_costs_itself_alone() -> None:
    """Its writer was killed within the write."""
    one_task = parser()
    reports = one_task.parse(steps(1) + steps(2)[:-9] + b"\n" + STAGES + steps(3), NOW_MS)
    assert (done_of(reports), len(reports), one_task.garbage) == ([1, 3], 3, 1)


def test_a_phase_needs_no_line_end() -> None:
    """`printf train > $PENSTOCK_PHASE_FILE`, as it always worked."""
    one_task = parser()
    reports = [
        *one_task.parse(b"launch", NOW_MS),
        *one_task.parse(b"train", NOW_MS),
        *one_task.parse(b"\n save \n", NOW_MS),
    ]
    assert [getattr(one.event, "phase", "") for one in reports] == ["launch", "train", "save"]
    assert one_task.garbage == 0


SOURCE = b"".join(
    [
        b"launch\n",
        steps(1),
        b"nonsense\n",
        b"train\n",
        steps(2, loss=0.5),
        STAGES,
        b"x" * 5_000 + b"\n",
        steps(3),
    ]
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(0, len(SOURCE)), max_size=12))
def test_it_does_not_matter_where_reads_cut_the_lines(cuts: list[int]) -> None:
    """A pipe knows no lines; a read ends anywhere."""
    one_task, reports = parser(), []
    edges = [0, *sorted(cuts), len(SOURCE)]
    for start, end in itertools.pairwise(edges):
        reports += one_task.parse(SOURCE[start:end], NOW_MS)
    reports += one_task.end(NOW_MS)
    whole = parser()
    assert reports == whole.parse(SOURCE, NOW_MS)
    assert (len(reports), one_task.garbage) == (7, 2)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.binary(max_size=60) | st.sampled_from([line + b"\n" for line in GARBAGE[:30]]), max_size=20)
)
def test_whatever_comes_is_survived(chunks: list[bytes]) -> None:
    """And the next honest line is parsed."""
    one_task = parser()
    for chunk in chunks:
        one_task.parse(chunk, NOW_MS)
    assert done_of(one_task.parse(b"\n" + steps(1 << 53), NOW_MS)) == [1 << 53]


# ------------------------------------------------------------------------------------------------- bounds


def test_progress_in_every_iteration_is_thinned_and_its_last_word_kept() -> None:
    """A script without the SDK reports each of 100,000 iterations: some hundred events, and the exact end."""
    one_task, reports = parser(), []
    for start in range(1, 100_001, 500):
        reports += one_task.parse(b"".join(steps(done) for done in range(start, start + 500)), NOW_MS)
    assert 90 < len(reports) < 120
    assert done_of(reports)[:4] == [1, 2, 3, 4]
    assert done_of(one_task.end(NOW_MS)) == [100_000]
    assert one_task.garbage == 0


def test_the_iteration_that_was_announced_as_the_last_is_reported_at_once() -> None:
    """It may save for an hour afterwards."""
    one_task = parser()
    reports = one_task.parse(b"".join(steps(done, total=104) for done in (50, 100, 104)), NOW_MS)
    assert done_of(reports) == [50, 100, 104]
    assert one_task.end(NOW_MS) == []


def test_after_a_resume_distances_grow_from_there() -> None:
    reports = parser().parse(b"".join(steps(90_000 + done) for done in range(1, 30)), NOW_MS)
    assert [done - 90_000 for done in done_of(reports)] == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        9,
        10,
        11,
        13,
        15,
        17,
        19,
        21,
        24,
        27,
    ]


def test_what_goes_backwards_is_not_reported() -> None:
    """A second process of the same task reports its own, slower progress."""
    one_task = parser()
    reports = one_task.parse(b"".join(steps(done) for done in (1, 100, 3, 104, 102, 100)), NOW_MS)
    assert (done_of(reports), done_of(one_task.end(NOW_MS))) == ([1, 100], [104])


def test_a_hostile_script_is_bounded() -> None:
    """It announces each iteration as its last, changes its phase and its stages without end."""
    one_task, reports = parser(), []
    for done in range(1, 3_000):
        reports += one_task.parse(
            steps(done, total=done) + STAGES + (b"train\n", b"save\n")[done % 2], NOW_MS
        )
    reports += one_task.end(NOW_MS)
    assert len(done_of(reports)) == MAX_STEPS + 1
    assert sum(isinstance(one.event, StagesMeasured) for one in reports) == MAX_STAGES
    assert sum(isinstance(one.event, TaskPhaseChanged) for one in reports) == MAX_CHANGES
    names = [one.name for one in reports if not isinstance(one.event, TaskPhaseChanged)]
    assert len(set(names)) == len(names)
    assert one_task.dropped > 5_000


def test_of_a_gang_rank_0_alone_is_believed_for_all() -> None:
    """256 workers that all report would be 256 times the events; phases are each worker's own."""
    one_task = parser(leads=False)
    reports = one_task.parse(b"train\n" + steps(1) + STAGES + b"save\n", NOW_MS) + one_task.end(NOW_MS)
    assert [type(one.event) for one in reports] == [TaskPhaseChanged, TaskPhaseChanged]
    assert one_task.dropped == 2


def losses_of(reports: Iterable[Report]) -> list[float]:
    return [one.event.loss for one in reports if isinstance(one.event, TelemetrySampled)]


def test_losses_go_out_when_they_may_matter() -> None:
    """The first one; later ones five seconds apart at least, if they are not the same again."""
    one_task = parser()
    reported = [(0, 4.0), (1, 3.0), (5, 2.0), (10, 2.0), (15, 1.99), (20, 2.5), (30, 1.0)]
    reports = [
        report
        for at_s, loss in reported
        for report in one_task.parse(b'{"loss":{"done":7,"loss":%f}}\n' % loss, NOW_MS + 1_000 * at_s)
    ]
    assert losses_of(reports) == [4.0, 2.0, 1.99, 2.5, 1.0]
    assert one_task.garbage == 0


def test_losses_of_a_storm_of_lines_are_bounded() -> None:
    """10,000 lines a second for an hour: the node reads what it must and passes on a hundred; its clock is
    set back an hour meanwhile."""
    one_task, reports = parser(), []
    for second in range(3_600):
        now_ms = NOW_MS + 1_000 * second - (3_600_000 if second > 1_800 else 0)
        lines = b"".join(b'{"loss":{"done":1,"loss":%d}}\n' % (second * 7 % 100 + i) for i in range(10))
        reports += one_task.parse(lines, now_ms)
    assert 100 < len(losses_of(reports)) < 600
    assert len(losses_of(parser(leads=False).parse(b'{"loss":{"done":1,"loss":1}}\n', NOW_MS))) == 0


@pytest.mark.parametrize(
    "line", ['{"done":1,"loss":NaN}', '{"done":0,"loss":1}', '{"loss":1}', '{"done":1,"loss":1e200}']
)
def test_a_loss_that_is_none_is_garbage(line: str) -> None:
    """A script has diverged, or writes nonsense: counted, and nothing else."""
    one_task = parser()
    assert one_task.parse(b'{"loss":' + line.encode() + b"}\n", NOW_MS) == []
    assert one_task.garbage == 1
