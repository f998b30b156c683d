"""Whatever running jobs tell, in whatever order: the fold stays within bounds, and what is said fits into an
event."""

import math
from functools import cache

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.inputs.estimates import EtaEstimated
from penstock_services.estimator.core.fold.progress import MAX_PUBLISHED, MAX_SPANS, MAX_WINDOWS
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.records.history import key_of
from penstock_services.estimator.core.step_time.training import STEPS, Durations
from tests.unit.estimator.reports import JOB, Reports, month, ran, updates_of

MOST = 1 << 53
WHOLE = st.one_of(st.integers(1, 50), st.integers(1, MOST), st.just(MOST))
REAL = st.one_of(st.floats(-10, 10), st.floats(-1e100, 1e100), st.just(0.0))
STEP_MS = st.one_of(st.floats(0, 1_000), st.floats(0, 1e9))
SPECS = st.builds(
    lambda iterations, target, batch: msgspec.structs.replace(
        JOB, iterations=iterations, target_loss=target, batch_size=batch
    ),
    st.none() | WHOLE,
    st.none() | REAL,
    st.none() | st.integers(1, 1 << 30),
)
REPORTS = st.tuples(
    st.just("tell"), WHOLE, st.integers(0, 1_000) | WHOLE, STEP_MS, st.none() | WHOLE, st.none() | REAL
)
PHASES = st.tuples(
    st.just("phase"), st.sampled_from(("launch", "train", "save")), st.integers(-10_000, 10**9)
)
OTHERS = st.sampled_from((("placed", (2,)), ("placed", (4,)), ("committed",), ("other-task",)))
HISTORY = st.lists(st.tuples(st.floats(1, MOST), st.floats(1e-3, 8e7)), max_size=4)


@cache
def learned() -> InUse[Durations]:
    """Half of its runs are of somebody who lies about everything that he can."""
    wild = [
        ran(
            100 + seq,
            "mallory",
            ring=(1 + seq % 8,),
            step_ms=10.0 ** (seq % 11 - 3),
            iterations=2.0 ** (seq % 54),
            curve=tuple((float(step), 10.0 ** ((seq * step) % 200 - 100)) for step in range(1, 40)),
        )
        for seq in range(60)
    ]
    trained = STEPS.train([*month(60), *wild], None)
    assert trained is not None
    return STEPS.read(trained.body, trained.sha256)


@settings(max_examples=150, deadline=None)
@given(st.booleans(), SPECS, HISTORY, st.lists(st.one_of(REPORTS, REPORTS, PHASES, OTHERS), max_size=30))
def test_any_order_of_predictings(with_model, spec, past, happenings) -> None:  # type: ignore[no-untyped-def]
    """Preempted in between, phases that go back, a total that shrinks, a loss beyond all bounds, a past as
    wild."""
    cell = Reports()
    etas, attempt = updates_of(cell.ledger), 1
    if with_model:
        etas._steps.use(learned())
    for seq, (iterations, step_ms) in enumerate(past):
        run = ran(seq, ring=(2,), iterations=iterations, step_ms=step_ms)
        cell.ledger.history.add(key_of(spec), run.measured, "ada")
    cell.begin("job", spec=spec)
    answered: EtaEstimated | None = None
    for kind, *more in happenings:
        if kind == "tell":
            done, steps, step_ms, total, loss = more
            window = {"steps": steps, "step_ms": step_ms, "lasted_ms": 60_000}
            cell.report("job", done, attempt=attempt, total=total, loss=loss, **window)
        elif kind == "phase":
            cell.phase("job", more[0], after_ms=more[1], attempt=attempt)
        elif kind == "placed":
            attempt += 1
            cell.begin("job", more[0], attempt=attempt)
        elif kind == "committed" and answered is not None:
            cell.record(answered)
        else:
            cell.report("stranger", 5)
        found = etas.next("job")
        if found is not None:
            answered = found
            for bounds in (found.left_ms, found.steps, found.step_ms):
                assert 0 <= bounds.low <= bounds.middle <= bounds.high < math.inf
        progress = cell.progress("job")
        assert len(progress.windows.parts) <= MAX_WINDOWS
        assert len(progress.curve.spans) <= MAX_SPANS
        assert len(progress.published) <= MAX_PUBLISHED
        assert all(window > 0 for window in progress.windows.equal())
    cell.end("job", attempt=attempt)
    assert len(cell.stored) == 1
