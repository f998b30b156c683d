"""Features of the default model: job sizes as logarithms, the GPU by its capabilities.

Ideal: a job's memory follows from its graph. Departure: only its workload's name is known, so a line is
fitted per workload: memory = a + b·batch + c·batch/GPUs with a, b, c ≥ 0 (some launchers report the batch of
one GPU, some that of all; the fit determines which). The line predicts how full the card will be.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from scipy.optimize import nnls

from penstock_services.estimator.core.learning.gaussian_process import Floats, Indexes
from penstock_services.estimator.core.resource_model.gpus import facts_of, generation_of
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    MIB_PER_GIB,
    Runs,
    Task,
    card_mib,
    half_precision,
)

GPUS, CARD, RATE, BANDWIDTH, YEAR, BATCH, FILL = range(7)
"""Columns: log₂ of the GPUs; logarithms of card memory, arithmetic rate at the job's precision and memory
bandwidth; year of the GPU's generation; batch size against the workload's median; line / card memory, as a
logarithm."""
WIDTH = FILL + 1  # number of these columns
MIN_RUNS = 4  # for a line of its own, or a median
ROUNDS = 8  # of reweighting: least squares becomes least absolute error
TIGHTEST = 0.02  # relative error below which a run is not weighted up any more
MIN_FILL = math.exp(-8.0)  # 0.03 % of the card
LINE_SHARES = (0.5, 1.0)  # lower and upper bound
NO_LINE = (math.nan, math.nan, math.nan)
NEW_GPU, NEW_GENERATION = -1, -2  # in place of the index of a GPU model

Key = tuple[str, bool]
"""Workload, whether 16 bits wide."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """Jobs as input of the kernels. All of length n;
    `columns` shape (n, WIDTH), standardised but for GPUS."""

    columns: Floats
    workload: Indexes
    """Index of the workload's name; −1: unseen."""
    half: Indexes
    """1: most arithmetic is 16 bits wide, else 0."""
    gpu: Indexes
    """Index of the GPU model's name; NEW_GPU: unseen; NEW_GENERATION: unseen, as all of its generation."""
    log_card: Floats
    """Natural logarithm of the card's MiB."""
    log_line: Floats
    """Of memory: its part that follows the line below a full card, at most 0; in logarithms."""
    log_gpus: Floats

    def pick(self, rows: Indexes) -> "Inputs":
        """Those jobs, in the order given."""
        return Inputs(*(getattr(self, name)[rows] for name in self.__slots__))


@dataclass(frozen=True, slots=True)
class Features:
    """Parameters of the columns, learned in training. All of it can be stored as numbers and names."""

    workloads: Mapping[str, int]
    gpus: Mapping[str, int]
    lines: Mapping[Key, tuple[float, float, float]]
    batches: Mapping[Key, float]
    """Median logarithm of the batch size."""
    usual_fill: float
    mean: Floats
    scale: Floats
    line_share: float
    """How far memory follows its line when the batch or the card changes. At 1 it is the line alone, whatever
    the card; at 0 the card's share that such jobs take. Libraries that grow into free memory put it between;
    never below 0, or memory would fall as the batch grows."""

    def of(self, tasks: Sequence[Task]) -> Inputs:
        """Any jobs, also of unseen workloads and GPUs: their unknown values are the training set's mean."""
        raw, half = self.raw(tasks)
        fill, unknown = raw[:, FILL], np.isnan(raw)
        if unknown.any():
            fill = np.where(unknown[:, FILL], self.usual_fill, fill)
            raw = np.where(unknown, self.mean, raw)
        known = {generation_of(name) for name in self.gpus}
        new = [NEW_GPU if generation_of(task.gpu) in known else NEW_GENERATION for task in tasks]
        return Inputs(
            columns=(raw - self.mean) / self.scale,
            workload=np.array([self.workloads.get(task.model, -1) for task in tasks], dtype=np.intp),
            half=half,
            gpu=np.array(
                [self.gpus.get(task.gpu, own) for task, own in zip(tasks, new, strict=True)], np.intp
            ),
            log_card=raw[:, CARD],
            log_line=self.line_share * np.minimum(fill, 0.0),
            log_gpus=raw[:, GPUS] * math.log(2),
        )

    def raw(self, tasks: Sequence[Task]) -> tuple[Floats, Indexes]:
        """The columns as they are measured, NaN where unknown, and whether each task is 16 bits wide."""
        half = [half_precision(task.precision) for task in tasks]
        rows = [
            (
                task.gpus,
                card_mib(task),
                task.batch_size,
                *_columns_of(task.gpu, wide),
                *self._known(task.model, wide),
            )
            for task, wide in zip(tasks, half, strict=True)
        ]
        values = np.array(rows, dtype=np.float64).reshape(len(tasks), 10).T
        gpus, card, batch, _, _, _, usual, a, b, c = values
        batch = np.where(np.isnan(batch), np.exp(usual), batch)
        fill = np.log(np.maximum((a + b * batch + c * batch / gpus) / card, MIN_FILL))
        columns = np.empty((len(tasks), WIDTH))
        columns[:, GPUS], columns[:, CARD] = np.log2(gpus), np.log(card)
        columns[:, [RATE, BANDWIDTH, YEAR]] = values[3:6].T
        columns[:, BATCH] = np.log(batch) - usual
        columns[:, FILL] = np.where(np.isnan(a + batch), self.usual_fill, fill)
        return columns, np.array(half, dtype=np.intp)

    def _known(self, model: str, half: bool) -> tuple[float, float, float, float]:
        """The usual batch, as a logarithm, and the line,
        of a workload at this width or else the other; NaN: unknown."""
        key, other = (model, half), (model, not half)
        usual = self.batches.get(key)
        line = self.lines.get(key) or self.lines.get(other) or NO_LINE
        return (self.batches.get(other, math.nan) if usual is None else usual, *line)


@lru_cache(maxsize=1_024)
def _columns_of(gpu: str, half: bool) -> tuple[float, float, float]:
    """RATE, BANDWIDTH and YEAR of a GPU's name; NaN where it is unknown."""
    facts = facts_of(gpu)
    if facts is None:
        return math.nan, math.nan, math.nan
    rate = math.log(facts.half_tflops if half else facts.full_tflops)
    return rate, math.log(facts.bandwidth_gbps), float(facts.year)


def features_of(runs: Runs) -> Features:
    """Learns names, lines and scales. At least one run; GPU memory need not be measured."""
    lines, batches = memory_lines(runs)
    names = {task.model for task in runs.tasks}, {task.gpu for task in runs.tasks}
    workloads, gpu_names = ({name: index for index, name in enumerate(sorted(found))} for found in names)
    plain = Features(workloads, gpu_names, lines, batches, math.nan, np.zeros(WIDTH), np.ones(WIDTH), 1.0)
    raw, _ = plain.raw(runs.tasks)
    fills = raw[:, FILL][np.isfinite(raw[:, FILL])]
    usual = float(np.median(fills)) if fills.size else 0.0
    raw[np.isnan(raw[:, FILL]), FILL] = usual
    known = np.isfinite(raw)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, raw, 0.0).sum(0) / count
    spread = np.sqrt(np.where(known, (raw - mean) ** 2, 0.0).sum(0) / count)
    mean[GPUS], spread[GPUS] = 0.0, 1.0
    if not known[:, CARD].any():
        mean[CARD] = math.log(16 * MIB_PER_GIB)
    scale = np.where(spread > 1e-9, spread, 1.0)
    share = line_share_of(runs, raw)
    return Features(workloads, gpu_names, lines, batches, usual, mean, scale, share)


def line_share_of(runs: Runs, raw: Floats) -> float:
    """Slope of the logarithm of the card's share in use over that of the line, around each workload's mean;
    `raw`: columns."""
    memory = runs.labels.get(MEMORY, np.full(len(runs), math.nan))
    rows = np.flatnonzero(np.isfinite(memory) & np.isfinite(raw[:, CARD]))
    _, workload = np.unique([runs.tasks[row].model for row in rows], return_inverse=True)
    x, y = np.minimum(raw[rows, FILL], 0.0), np.log(memory[rows]) - raw[rows, CARD]
    count = np.maximum(np.bincount(workload), 1)
    x, y = (values - (np.bincount(workload, values) / count)[workload] for values in (x, y))
    against = float(x @ x)
    return float(np.clip(x @ y / against, *LINE_SHARES)) if against > 0 else LINE_SHARES[1]


def memory_lines(runs: Runs) -> tuple[dict[Key, tuple[float, float, float]], dict[Key, float]]:
    """Per workload and width its line, where enough runs measured their memory, and the median logarithm of
    its batches."""
    batch = np.array([task.batch_size for task in runs.tasks])
    gpus = np.array([task.gpus for task in runs.tasks])
    memory = runs.labels.get(MEMORY, np.full(len(runs), math.nan))
    rows_of: dict[Key, list[int]] = {}
    for row, task in enumerate(runs.tasks):
        if not math.isnan(task.batch_size):
            rows_of.setdefault((task.model, half_precision(task.precision)), []).append(row)
    lines, batches = {}, {}
    for key, rows in sorted(rows_of.items()):
        batches[key] = float(np.median(np.log(batch[rows])))
        mine = [row for row in rows if math.isfinite(memory[row])]
        if len(mine) >= MIN_RUNS:
            lines[key] = memory_line(batch[mine], gpus[mine], memory[mine])
    return lines, batches


def memory_line(batch: Floats, gpus: Floats, memory_mib: Floats) -> tuple[float, float, float]:
    """a, b, c ≥ 0 of memory = a + b·batch + c·batch/GPUs with the least sum of relative errors; MiB.

    Relative, since otherwise the largest cards alone would dominate; absolute errors rather than squares,
    since many runs lie above the line because their library takes the free memory. Shape of each argument:
    (runs,), > 0.
    """
    unit = np.array([1.0, 1.0 / batch.mean(), 1.0 / (batch / gpus).mean()]) * memory_mib.mean()
    x = np.stack([np.ones_like(batch), batch, batch / gpus], axis=1) * unit / memory_mib[:, None]
    weight = np.ones(len(batch))
    found = np.zeros(3)
    for _ in range(ROUNDS):
        found, _rest = nnls(x * weight[:, None], weight)
        weight = 1 / np.sqrt(np.maximum(np.abs(x @ found - 1), TIGHTEST))
    a, b, c = (float(value) for value in found * unit)
    return a, b, c
