"""What is answered to "how long does it still take": by the latest report, by the estimate, or not at all."""

from typing import Any

import msgspec
import orjson
import pytest

from penstock.cli.output import duration
from penstock.cli.queries import eta
from penstock.ledger.state.job.remaining import Remaining, remaining_of
from penstock.model.inputs.estimates import Bounds, EtaEstimated
from penstock.model.nouns.types import Estimate, ResourceVector
from penstock_services.gateway.core.forecasts.eta import FIELDS, MAX_LEFT_MS, ended, remaining

REPORTED_MS = 1_000_000


EVENT = EtaEstimated(
    job_id="j",
    attempt=1,
    at_ms=REPORTED_MS,
    done=3_000,
    left_ms=Bounds(middle=600_000, low=480_000, high=900_000),
    steps=Bounds(middle=7_000, low=7_000, high=7_000),
    step_ms=Bounds(middle=85.7, low=68.6, high=128.6),
    level=0.9,
    source="iterations asked for",
    model_version="steps-1",
)
"""Ten minutes left when reported, eight to fifteen; 3,000 of 10,000 iterations done."""


def report(now_ms: int = REPORTED_MS, **changes: Any) -> Remaining:
    """As the ledger's record of `now_ms` holds it."""
    return remaining_of(msgspec.structs.replace(EVENT, **changes), now_ms)


def standing(
    status: str = "running", run_ms: int | None = None, running_ms: int | None = 500_000, attempt: int = 1
) -> tuple[dict[str, Any], Estimate | None]:
    """The job's row, and its estimate if there is one."""
    row = {"job_id": "j", "status": status, "attempt": attempt, "running_ms": running_ms}
    if run_ms is None:
        return row, None
    return row, Estimate(
        worker=ResourceVector(),
        tier="history",
        confidence=0.5,
        source="5 runs of the same job",
        run_ms=run_ms,
    )


def shown(answer: dict[str, Any], now: int | None = None) -> str:
    """As people read it."""
    from rich.console import Console

    screen = Console(width=200)
    with screen.capture() as captured:
        screen.print(eta.shown(answer, {"name": "digits"}, now))
    return captured.get()


@pytest.mark.parametrize(
    ("since_ms", "left", "due", "words"),
    [
        (0, (600_000, 480_000, 900_000), "later", "10m 00s left (8m 00s to 15m 00s)"),
        (-5_000, (600_000, 480_000, 900_000), "later", "10m 00s left"),
        (540_000, (60_000, 0, 360_000), "later", "1m 00s left (0.00 s to 6m 00s)"),
        (600_000, (0, 0, 300_000), "any_moment", "due any moment, within 5m 00s"),
        (900_000, (0, 0, 0), "overdue", "overdue: it takes longer than estimated"),
        (9_999_999, (0, 0, 0), "overdue", "overdue"),
    ],
)
def test_what_has_passed_since_the_word_is_taken_off(
    since_ms: int, left: tuple[int, int, int], due: str, words: str
) -> None:
    """The training reports at growing distances; between two reports people ask again and again. A node's
    clock may be ahead."""
    found = remaining(*standing(), report(), REPORTED_MS + since_ms)
    assert (found["answer"], found["due"], found["level"]) == ("reported", due, 0.9)
    assert tuple(found["left_ms"][name] for name in ("middle", "low", "high")) == left
    assert found["ends_ms"]["middle"] == found["now_ms"] + left[0]
    assert (found["done"], found["age_ms"]) == (3_000, max(0, since_ms))
    assert found["share"] == pytest.approx(min(1.0, 0.3 + 0.7 * max(0, since_ms) / 599_900), abs=1e-6)
    text = shown(found)
    assert words in text
    assert (
        f"{found['share']:.0%} done; reported {duration(max(0, since_ms))} ago: 3,000 of 10,000 iterations"
        in text
    )
    assert "steps-1" in text
    passed = shown(remaining(*standing(), report(), REPORTED_MS), REPORTED_MS + max(0, since_ms))
    assert words in passed, "--watch counts on without asking again"
    assert f"{found['share']:.0%} done" in passed


def test_a_node_whose_clock_is_ahead_does_not_stop_the_countdown() -> None:
    """Its report is dated ten minutes ahead; the ledger took it in two minutes ago."""
    ahead = report(at_ms=REPORTED_MS + 600_000)
    found = remaining(*standing(), ahead, REPORTED_MS + 120_000)
    assert (found["left_ms"]["middle"], found["age_ms"]) == (480_000, 120_000)
    late = report(REPORTED_MS + 50_000)
    assert remaining(*standing(), late, REPORTED_MS + 60_000)["left_ms"]["middle"] == 540_000, (
        "reported late, counted from its moment"
    )


def test_a_word_about_a_failed_attempt_says_nothing_of_the_next() -> None:
    """The first attempt was nearly through when its node died; the second begins at its checkpoint, which is
    not known yet."""
    found = remaining(*standing(attempt=2), report(attempt=1), REPORTED_MS)
    assert (found["answer"], found["left_ms"]) == ("unknown", None)
    assert remaining(*standing(attempt=2), report(attempt=2), REPORTED_MS)["answer"] == "reported"


def test_without_a_word_the_estimate_answers_and_says_so() -> None:
    """A script that reports nothing, of a job that ran five times before."""
    found = remaining(*standing(run_ms=120_000), None, 560_000)
    assert (found["answer"], found["due"], found["left_ms"]["middle"], found["left_ms"]["high"]) == (
        "estimated",
        "later",
        60_000,
        None,
    )
    assert "about 1m 00s left" in shown(found)
    assert "so this is the estimate: 5 runs of the same job" in shown(found)
    late = remaining(*standing(run_ms=120_000), None, 700_000)
    assert (late["due"], late["left_ms"]["middle"]) == ("overdue", 0)
    launching = remaining(*standing("launching", 120_000, None), None, 700_000)
    assert (launching["due"], launching["left_ms"]["middle"]) == ("later", 120_000)


def test_where_nothing_is_known_it_says_what_a_script_can_tell() -> None:
    found = remaining(*standing(), None, 560_000)
    assert (found["answer"], found["due"], found["ran_ms"]) == ("unknown", None, 60_000)
    assert "penstock.sdk" in shown(found)
    assert eta.nothing_known(found)


@pytest.mark.parametrize("status", ["submitted", "queued", "backoff"])
def test_a_job_that_waits_says_so(status: str) -> None:
    """The answer does not hold when it starts: `why` gives what it waits for. The report is of an attempt
    that is over."""
    found = remaining(*standing(status, 120_000, None), report(), REPORTED_MS)
    assert (found["answer"], found["run_ms"], found["left_ms"]) == ("waiting", 120_000, None)
    assert "once it starts it takes about 2m 00s" in shown(found)
    assert not eta.nothing_known(found)
    assert eta.nothing_known(remaining(*standing(status, None, None), None, REPORTED_MS))


def test_a_job_that_waits_shows_its_expected_start_and_what_that_assumes() -> None:
    """Between meetings: will it have started by noon? The screen counts on, and a start that passes is due
    any moment."""
    start = {
        "starts_ms": REPORTED_MS + 300_000,
        "unknown": "",
        "assumes": "no new job comes in",
        "holders": [{"job_id": "other", "owner": "ben", "gpus": 2, "ends_ms": REPORTED_MS + 300_000}],
    }
    found = remaining(*standing("queued", 120_000, None), None, REPORTED_MS) | {"start": start}
    for text in (shown(found), eta.in_a_line(found)):
        assert ", in 5m 00s" in text
        assert "once it starts it takes about 2m 00s, to about" in text
    assert "the start holds if no new job comes in" in shown(found)
    assert "other of ben holds 2 GPUs, ends about" in shown(found)
    assert ", in 1m 00s" in shown(found, REPORTED_MS + 240_000)
    assert "expected start: any moment" in shown(found, REPORTED_MS + 301_000)
    without_run = remaining(*standing("queued", None, None), None, REPORTED_MS)
    assert not eta.nothing_known(without_run | {"start": start})
    unknown = {"starts_ms": None, "unknown": "1 of 1 has no estimate", "assumes": "", "holders": []}
    assert eta.nothing_known(without_run | {"start": unknown})
    assert "expected start: not known: 1 of 1 has no estimate" in shown(without_run | {"start": unknown})


def test_an_ended_job_says_when() -> None:
    found = ended("j", "timed_out_running", 940_000, 1_000_000)
    assert "ended 1m 00s ago: timed out running" in shown(found)
    assert (found["answer"], eta.in_short(found), eta.nothing_known(found)) == ("ended", "–", False)


def test_every_answer_has_the_same_keys() -> None:
    """Scripts read `.left_ms` without looking first whether it is there."""
    answers = [
        remaining(*standing(), report(), REPORTED_MS),
        remaining(*standing(run_ms=5), None, REPORTED_MS),
        remaining(*standing(), None, REPORTED_MS),
        remaining(*standing("queued"), None, REPORTED_MS),
        ended("j", "failed", None, REPORTED_MS),
    ]
    for found in answers:
        assert list(found) == ["job_id", "status", "answer", "now_ms", *FIELDS]
        assert eta.in_a_line(found)


def test_no_iterations_at_all_is_no_share() -> None:
    """Reported before the first iteration of a job whose target is reached already."""
    nothing = Bounds(middle=0, low=0, high=0)
    found = remaining(*standing(), report(done=0, steps=nothing, left_ms=nothing), REPORTED_MS)
    assert (found["share"], found["due"]) == (None, "overdue")
    assert "0 of 0 iterations" in shown(found)


@pytest.mark.parametrize("ms", [1e308, 1e15, 1e-308, 0.4])
def test_absurd_words_are_answered(ms: float) -> None:
    """Whoever may hand in estimates may hand in nonsense: the answer can be written down and shown all the
    same."""
    all_of_it = Bounds(middle=ms, low=0, high=1.7e308)
    found = remaining(
        *standing(), report(left_ms=all_of_it, steps=all_of_it, step_ms=all_of_it), REPORTED_MS + 60_000
    )
    assert 0 <= found["left_ms"]["middle"] <= found["left_ms"]["high"] <= MAX_LEFT_MS
    assert 0 <= found["share"] <= 1
    orjson.dumps(found)
    assert shown(found)
    assert eta.in_a_line(found)
    assert eta.in_short(found)
