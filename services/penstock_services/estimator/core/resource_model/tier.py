"""The tier of the learned resource model: GPU memory and utilisation of networks that the cell has run."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.records.runs import Card
from penstock_services.estimator.core.resource_model.measurements import MEMORY, UTILISATION, Task
from penstock_services.estimator.core.resource_model.model import Model
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, Guess

MIN_KNOWN = 0.2  # of 1: below, the model does not answer, since no similar job was measured
MAX_CONFIDENCE = 0.9  # the interval holds nine runs in ten
MAX_CACHED = 4_096  # answers


class _Asked(NamedTuple):
    """Cache key: the inputs of the model's answer."""

    model: str
    batch_size: int | None
    gpus: int
    """Of all workers together."""
    cards: tuple[Card, ...]

    def tasks(self) -> list[Task]:
        """One per card."""
        batch = math.nan if self.batch_size is None else self.batch_size
        return [
            Task(self.model, card.model, self.gpus, batch_size=batch, card_mib=card.memory_mib)
            for card in self.cards
        ]


class ModelTier:
    """Answers GPU memory and utilisation; None for unseen networks.

    The GPU is not chosen yet when a job is estimated. Of the cards in the cell that the job may use, those
    count on which it fits; among them the smallest promise is taken, so that no suitable card is ruled out.
    """

    def __init__(self, nodes: NodeCapacity) -> None:
        self._nodes = nodes
        self._model: InUse[Model] | None = None
        self._answers: OrderedDict[_Asked, Guess | None] = OrderedDict()

    def use(self, model: InUse[Model]) -> None:
        """Uses this model from the next estimate on."""
        self._model = model
        self._answers.clear()

    def prepare(self, specs: Iterable[JobSpec]) -> None:
        """Predicts for jobs that arrive together in one batch: `guess` of each then finds its answer in the
        cache.

        Beyond MAX_CACHED kinds of jobs, `guess` predicts by itself.
        """
        found = (self._asked(spec) for spec in specs)
        wanted = dict.fromkeys(asked for asked in found if asked is not None and asked not in self._answers)
        if len(wanted) > 1:
            self._ask(list(wanted)[:MAX_CACHED])

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        asked = self._asked(spec)
        if asked is None:
            return None
        if asked not in self._answers:
            self._ask([asked])
        return self._answers[asked]

    def _asked(self, spec: JobSpec) -> _Asked | None:
        """None where the model does not answer."""
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if self._model is None or spec.model is None or gpus == 0:
            return None
        if spec.model not in self._model.model.features.workloads:
            return None
        cards, allowed = self._nodes.cards(), spec.gpu_models
        if allowed:
            cards = tuple(card for card in cards if card.model in allowed)
        if not cards:
            return None
        return _Asked(spec.model, spec.batch_size, gpus * spec.workers, cards)

    def _ask(self, wanted: Sequence[_Asked]) -> None:
        assert self._model is not None
        self._answers.update(zip(wanted, _answers(self._model, wanted), strict=True))
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)


def _answers(learned: InUse[Model], wanted: Sequence[_Asked]) -> list[Guess | None]:
    """One for each, in their order; in two batched predictions, however many there are."""
    version, model = learned
    if MEMORY not in model.labels:
        return [None] * len(wanted)
    tasks = [task for asked in wanted for task in asked.tasks()]
    inputs = model.features.of(tasks)
    memory = model.labels[MEMORY].predict(MEMORY, inputs, cached=True)
    high, starts = memory.high.tolist(), [0, *accumulate(len(asked.cards) for asked in wanted)]
    best = [
        start + _best_card(high[start : start + len(asked.cards)], asked.cards)
        for start, asked in zip(starts, wanted, strict=False)
    ]
    rows = np.array(best)
    percents: list[float | None] = [None] * len(best)
    if UTILISATION in model.labels:
        percents = model.labels[UTILISATION].expect(UTILISATION, inputs.pick(rows)).tolist()
    values, lows, known = (column[rows].tolist() for column in (memory.value, memory.low, memory.known))
    unseen = (inputs.gpu[rows] < 0).tolist()
    name = f"{version}, learned from {model.runs} runs: GPU memory"
    return [
        None
        if sure < MIN_KNOWN
        else Guess(
            tier="model",
            confidence=round(MAX_CONFIDENCE * sure, 3),
            source=f"{name} {value:.0f} MiB on {tasks[row].gpu}, "
            f"9 of 10 such runs between {low:.0f} and {high[row]:.0f}",
            gpu_memory_mib=math.ceil(high[row]),
            gpu_utilisation_percent=None if percent is None else round(percent, 1),
            model_version=version,
            first_of_kind=("gpu_model",) if new else (),
        )
        for row, value, low, sure, percent, new in zip(
            best, values, lows, known, percents, unseen, strict=True
        )
    ]


def _best_card(high: Sequence[float], cards: Sequence[Card]) -> int:
    """Index of the card with the smallest promise among those on which it fits; else of the largest card."""
    holds = [index for index, card in enumerate(cards) if high[index] < card.memory_mib]
    if holds:
        return min(holds, key=lambda index: (high[index], cards[index]))
    return max(range(len(cards)), key=lambda index: (cards[index].memory_mib, cards[index]))
