"""What the service learns of step times: Pollux' measurements as finished runs of three owners, asked about
cells not shown.

`test_genie_model.py` judges the model alone; here it is what the service makes of runs: tables with bounds,
shared and owners' own, one training. `-s` shows every figure.
"""

import math
from functools import cache

import numpy as np
import pytest

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.model_lifecycle import Trained
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.placements import Cell
from penstock_services.estimator.core.records.runs import Allocation, Card, FinishedRun, Steps, job_info
from penstock_services.estimator.core.step_time.training import STEPS, StepQuestion, answer
from tests.papers.prediction.prediction_tables import NETWORKS, step_times
from tests.support.data import DATA_ROOT

DATA = DATA_ROOT / "pollux/traces"
OWNERS = ("ada", "bob", "eve")
ASKED = 3_000  # of the cells that were not shown
LIGHT = 15

pytestmark = pytest.mark.skipif(
    not (DATA / "bert/placements.csv").is_file(),
    reason=f"Pollux' step times are not in {DATA}; set PENSTOCK_DATA to the folder that holds pollux/",
)


Told = list[tuple[str, Cell, float]]
"""(network, cell, ln of the step in seconds)."""


@cache
def split(light: bool) -> tuple[Told, Told]:
    """What is shown, in a random order, and what is asked."""
    rng = np.random.default_rng(0)
    shown: Told = []
    hidden: Told = []
    for network in NETWORKS:
        cells = [
            (network, *one) for one in zip(step_times(network).cells, step_times(network).log_s, strict=True)
        ]
        order = [cells[place] for place in rng.permutation(len(cells))]
        count = LIGHT if light else len(order) // 2
        shown += order[:count]
        hidden += order[count:]
    asked = [hidden[place] for place in rng.permutation(len(hidden))[:ASKED]]
    return [shown[place] for place in rng.permutation(len(shown))], asked


def run(seq: int, network: str, cell: Cell, log_s: float) -> FinishedRun:
    gpus, step_ms = sum(cell.placement), 1_000 * math.exp(log_s)
    spec = JobSpec(
        owner=OWNERS[seq % 3], command=("train",), model=network, batch_size=round(cell.local_batch * gpus)
    )
    measured_run = Run(
        ended_ms=1_000 * seq,
        seq=seq,
        run_ms=1_000 * step_ms,
        gpus=cell.placement[0],
        total_gpus=gpus,
        iterations=1_000,
        step_ms=step_ms,
    )
    given = Allocation(cell.placement[0], 1_000, 4, Card("T4", 15_360))
    return FinishedRun(
        seq,
        f"job-{seq}",
        job_info(spec),
        given,
        None,
        measured_run,
        "",
        Steps(cell.placement, (step_ms,) * 4),
    )


@cache
def trained(light: bool) -> Trained:
    found = STEPS.train([run(seq, *one) for seq, one in enumerate(split(light)[0], 1)], None)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("light", "median", "p95"),
    [(False, 0.05, 0.18), (True, 0.08, 1.5)],
    ids=["half of the cells", "15 each"],
)
def test_cells_that_nobody_ran(light: bool, median: float, p95: float) -> None:
    """A fourth owner asks how long a step takes on placements and batches that the other three never had.

    Of half of the cells the median is 0.0350 ± 0.0008 and p95 0.152 ± 0.004 (8 draws); after 15 each
    0.052 ± 0.0035 and 0.19 to 0.74, in ln -1.4 ± 0.35 (16 draws).
    """
    model = trained(light)
    durations = STEPS.read(model.body, model.sha256).model
    asked = [(StepQuestion("new", network, "T4", cell), log_s) for network, cell, log_s in split(light)[1]]
    answers = answer(durations, [one for one, _ in asked])
    off, held = [], 0
    for one, log_s in asked:
        predicted = answers[one]
        assert predicted is not None
        off.append(abs(math.expm1(predicted.log_s - log_s)))
        held += abs(predicted.log_s - log_s) <= predicted.width
    print(
        f"\n{model.runs} runs: error of {len(off)} other cells median {np.median(off):.1%}, p95 "
        f"{np.quantile(off, 0.95):.1%}; {held / len(off):.1%} within the interval"
    )
    assert np.median(off) <= median
    assert np.quantile(off, 0.95) <= p95
    assert held / len(off) >= 0.9
