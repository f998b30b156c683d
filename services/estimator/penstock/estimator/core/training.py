"""From finished runs to the model that answers: which runs teach, whether a new model is better, and its tier.

Everything here is pure, so that training runs in a worker process; chance comes from one seed alone.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from penstock.cluster.nouns import WHOLE_GPU, JobSpec
from penstock.estimator.core.estimate import DEFAULT_GPUS, Guess
from penstock.estimator.core.learn.model import Model, Told, within
from penstock.estimator.core.learn.model import train as fit
from penstock.estimator.core.learn.runs import (
    MEMORY,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    runs_of,
    set_aside,
)
from penstock.estimator.core.learn.saved import BadModel, from_bytes, to_bytes
from penstock.estimator.core.learn.saved import version_of as digest_of
from penstock.estimator.core.runs import Card, FinishedRun

__all__ = ["BadModel", "Learned", "ModelTier", "Trained", "read_model", "train"]

FEWEST_RUNS = 30  # that tell their network and their GPU; below, nothing can be held out
HELD_OUT = 0.2  # the newest runs judge, the older ones teach
WORSE_BY = 1.02  # a new model may be so much worse on recent runs: less is chance
LEAST_KNOWN = 0.2  # of 1: below, the model says nothing, for nothing like it was measured
MOST_CONFIDENCE = 0.9  # the interval holds nine runs in ten
MAX_REMEMBERED = 4_096  # answers
SEED = 0


class Trained(NamedTuple):
    """A model as bytes, and how it did on the newest runs, which it was not shown."""

    version: str
    sha256: str
    body: bytes
    runs: int
    first_run_ms: int
    last_run_ms: int
    metrics: dict[str, float]
    promoted: bool


class Learned(NamedTuple):
    """A model that may answer."""

    version: str
    model: Model


def read_model(body: bytes, digest: str) -> Learned:
    """Raises `BadModel`, also for a whole model that is not the one of this digest."""
    if digest_of(body) != digest:
        raise BadModel("another model than the one that was written here")
    return Learned(version_of(digest), from_bytes(body))


def version_of(digest: str) -> str:
    """The model's name in estimates and events."""
    return f"resources-{digest[:12]}"


def table(runs: Sequence[FinishedRun]) -> tuple[Runs, list[FinishedRun]]:
    """The runs that can teach, as columns, and they themselves: of a named network, on whole GPUs."""
    tasks: list[Task] = []
    measured: list[Mapping[str, float]] = []
    kept: list[FinishedRun] = []
    for run in runs:
        about, given = run.about, run.given
        if run.set_aside or about.model is None or given.gpus < 1 or given.gpu_share_milli < WHOLE_GPU:
            continue
        task = Task(
            model=about.model,
            gpu=given.card.model,
            gpus=given.gpus * about.workers,
            batch_size=math.nan if about.batch_size is None else about.batch_size,
            card_mib=given.card.memory_mib or math.nan,
            parameter_servers=about.parameter_servers,
            workers=about.workers,
            owner=about.owner,
        )
        labels = {
            MEMORY: run.measured.gpu_memory_mib,
            UTILISATION: run.measured.gpu_utilisation_percent,
            UTILISATION_STD: run.measured.gpu_utilisation_std,
        }
        if set_aside(task, labels) is None:
            tasks.append(task)
            measured.append(labels)
            kept.append(run)
    return runs_of(tasks, measured), kept


def train(runs: Sequence[FinishedRun], current: bytes | None) -> Trained | None:
    """Learns from all runs; promoted if, learned from the older ones, it is no worse than `current` on the newest.

    The weights of likeness are searched for on the older runs alone, so that the judgement has not seen the newest in
    any way; the model that answers then learns from all runs, with those weights where cells are many (see `fit`).
    None if too few of the runs can teach. `current` has seen some of those newest runs, which is in its favour.
    """
    columns, kept = table(runs)
    if len(kept) < FEWEST_RUNS:
        return None
    split = len(kept) - max(1, int(HELD_OUT * len(kept)))
    newest = columns.pick(np.arange(split, len(kept)))
    try:
        candidate = fit(columns.pick(np.arange(split)), SEED)
        final = fit(columns, SEED, candidate)
    except ValueError:
        return None  # none of them measured anything
    metrics = judged(candidate, newest)
    promoted = True
    if current is not None:
        before = judged(from_bytes(current), newest)
        metrics |= {f"before_{name}": value for name, value in before.items()}
        promoted = metrics["error"] <= WORSE_BY * before["error"]
    body = to_bytes(final)
    digest = digest_of(body)
    return Trained(
        version_of(digest),
        digest,
        body,
        len(kept),
        int(kept[0].measured.ended_ms),
        int(kept[-1].measured.ended_ms),
        metrics,
        promoted,
    )


def judged(model: Model, runs: Runs) -> dict[str, float]:
    """Per label the mean error and the share of runs inside their 90 % interval; `error` is the mean over labels.

    Errors: of memory as a logarithm (0.1 is 10 %), of percentages as a share of 100.
    """
    told = model.predict(runs.tasks)
    found: dict[str, float] = {}
    errors: list[float] = []
    for name in (MEMORY, UTILISATION, UTILISATION_STD):
        truth = runs.labels.get(name)
        if truth is None or name not in told or not np.isfinite(truth).any():
            continue
        rows = np.flatnonzero(np.isfinite(truth))
        value, right = told[name].value[rows], truth[rows]
        off = np.log(value / right) if name == MEMORY else (value - right) / 100
        found[f"{name}_error"] = float(np.abs(off).mean())
        found[f"{name}_within"] = float(within(told[name].low, told[name].high, truth)[rows].mean())
        errors.append(found[f"{name}_error"])
    found["error"] = float(np.mean(errors)) if errors else math.inf
    return found


class ModelTier:
    """What the learned model says about GPU memory and utilisation; nothing for networks it never saw.

    The GPU is not chosen yet when a job is estimated. Of the cards in the cell that the job may use, those count
    on which it fits; among them the smallest promise is taken, so that no card that would do is ruled out.
    `cards`: node → its GPUs, kept up to date by the caller.
    """

    def __init__(self, cards: Mapping[str, Card]) -> None:
        self._cards = cards
        self._model: Learned | None = None
        self._known: OrderedDict[tuple[object, ...], Guess | None] = OrderedDict()

    def use(self, model: Learned) -> None:
        """From the next estimate on."""
        self._model = model
        self._known.clear()

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if self._model is None or spec.model not in self._model.model.design.workloads or gpus == 0:
            return None
        allowed = spec.gpu_models
        cards = sorted(
            {card for card in self._cards.values() if card.model and (not allowed or card.model in allowed)}
        )
        asked = (spec.model, spec.batch_size, gpus, spec.workers, spec.parameter_servers, *cards)
        if asked not in self._known:
            self._known[asked] = _ask(self._model, spec, gpus, cards) if cards else None
            if len(self._known) > MAX_REMEMBERED:
                self._known.popitem(last=False)
        return self._known[asked]


def _ask(learned: Learned, spec: JobSpec, gpus: int, cards: Sequence[Card]) -> Guess | None:
    tasks = [
        Task(
            model=spec.model or "",
            gpu=card.model,
            gpus=gpus * spec.workers,
            batch_size=math.nan if spec.batch_size is None else spec.batch_size,
            card_mib=card.memory_mib,
            parameter_servers=spec.parameter_servers,
            workers=spec.workers,
        )
        for card in cards
    ]
    told = learned.model.predict(tasks)
    memory = told.get(MEMORY)
    if memory is None:
        return None
    card = _best_card(memory, cards)
    if memory.known[card] < LEAST_KNOWN:
        return None
    used = told.get(UTILISATION)
    return Guess(
        tier="model",
        confidence=round(MOST_CONFIDENCE * float(memory.known[card]), 3),
        source=f"{learned.version}, learned from {learned.model.runs} runs: GPU memory {memory.value[card]:.0f} MiB on "
        f"{cards[card].model}, 9 of 10 such runs between {memory.low[card]:.0f} and {memory.high[card]:.0f}",
        gpu_memory_mib=math.ceil(memory.high[card]),
        gpu_utilisation_percent=None if used is None else round(float(used.value[card]), 1),
        model_version=learned.version,
    )


def _best_card(memory: Told, cards: Sequence[Card]) -> int:
    """Index of the card with the smallest promise among those that hold it; else of the largest card."""
    holds = [index for index, card in enumerate(cards) if memory.high[index] < card.memory_mib]
    if holds:
        return min(holds, key=lambda index: (memory.high[index], cards[index]))
    return max(range(len(cards)), key=lambda index: (cards[index].memory_mib, cards[index]))
