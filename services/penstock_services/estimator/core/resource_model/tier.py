"""The tier of the learned resource model: GPU memory and utilisation of networks that the cell has run."""

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.model.types import JobSpec
from penstock_services.estimator.core.model_lifecycle import InUse
from penstock_services.estimator.core.node_capacity import NodeCapacity
from penstock_services.estimator.core.resource_model.measurements import MEMORY, UTILISATION, Task
from penstock_services.estimator.core.resource_model.model import Model
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, Guess
from penstock_services.estimator.core.runs import Card

MIN_KNOWN = 0.2  # of 1: below, the model does not answer, for nothing like it was measured
MAX_CONFIDENCE = 0.9  # the interval holds nine runs in ten
MAX_CACHED = 4_096  # answers


class _Asked(NamedTuple):
    """What the model's answer depends on."""

    model: str
    batch_size: int | None
    gpus: int
    workers: int
    parameter_servers: int
    cards: tuple[Card, ...]


class ModelTier:
    """Answers GPU memory and utilisation; None for networks that it never saw.

    The GPU is not chosen yet when a job is estimated. Of the cards in the cell that the job may use, those count
    on which it fits; among them the smallest promise is taken, so that no card that would do is ruled out.
    """

    def __init__(self, nodes: NodeCapacity) -> None:
        self._nodes = nodes
        self._model: InUse[Model] | None = None
        self._answers: OrderedDict[_Asked, Guess | None] = OrderedDict()

    def use(self, model: InUse[Model]) -> None:
        """From the next estimate on."""
        self._model = model
        self._answers.clear()

    def prepare(self, specs: Iterable[JobSpec]) -> None:
        """Predicts for jobs that arrive together, all at once: `guess` of each then finds its answer in the cache.

        Beyond MAX_CACHED kinds of jobs, `guess` predicts for itself.
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
        return _Asked(spec.model, spec.batch_size, gpus, spec.workers, spec.parameter_servers, cards)

    def _ask(self, wanted: Sequence[_Asked]) -> None:
        assert self._model is not None
        self._answers.update(zip(wanted, _answers(self._model, wanted), strict=True))
        while len(self._answers) > MAX_CACHED:
            self._answers.popitem(last=False)


def _answers(learned: InUse[Model], wanted: Sequence[_Asked]) -> list[Guess | None]:
    """One for each, in their order; by two questions to the model, however many there are."""
    tasks = [_task(asked, card) for asked in wanted for card in asked.cards]
    inputs = learned.model.features.of(tasks)
    label = learned.model.labels.get(MEMORY)
    if label is None:
        return [None] * len(wanted)
    memory = label.predict(MEMORY, inputs, cached=True)
    ends = list(accumulate(len(asked.cards) for asked in wanted))
    high = memory.high.tolist()
    best = [
        end - len(asked.cards) + _best_card(high[end - len(asked.cards) : end], asked.cards)
        for asked, end in zip(wanted, ends, strict=True)
    ]
    busy = learned.model.labels.get(UTILISATION)
    percent = (
        [None] * len(best) if busy is None else busy.expect(UTILISATION, inputs.pick(np.array(best))).tolist()
    )
    values, lows, known = (column[best].tolist() for column in (memory.value, memory.low, memory.known))
    name = f"{learned.version}, learned from {learned.model.runs} runs: GPU memory"
    return [
        None
        if sure < MIN_KNOWN
        else Guess(
            tier="model",
            confidence=round(MAX_CONFIDENCE * sure, 3),
            source=f"{name} {value:.0f} MiB on {tasks[at].gpu}, "
            f"9 of 10 such runs between {low:.0f} and {high[at]:.0f}",
            gpu_memory_mib=math.ceil(high[at]),
            gpu_utilisation_percent=None if share is None else round(share, 1),
            model_version=learned.version,
        )
        for at, value, low, sure, share in zip(best, values, lows, known, percent, strict=True)
    ]


def _task(asked: _Asked, card: Card) -> Task:
    return Task(
        model=asked.model,
        gpu=card.model,
        gpus=asked.gpus * asked.workers,
        batch_size=math.nan if asked.batch_size is None else asked.batch_size,
        card_mib=card.memory_mib,
        parameter_servers=asked.parameter_servers,
        workers=asked.workers,
    )


def _best_card(high: Sequence[float], cards: Sequence[Card]) -> int:
    """Index of the card with the smallest promise among those that hold it; else of the largest card."""
    holds = [index for index, card in enumerate(cards) if high[index] < card.memory_mib]
    if holds:
        return min(holds, key=lambda index: (high[index], cards[index]))
    return max(range(len(cards)), key=lambda index: (cards[index].memory_mib, cards[index]))
