"""From finished runs to the model that answers: which runs teach, whether a new model is better, and its tier.

Everything here is pure, so that training runs in a worker process; chance comes from one seed alone.
"""

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np

from penstock.model.types import WHOLE_GPU, JobSpec
from penstock_services.estimator.core.resource_model.features import Inputs
from penstock_services.estimator.core.resource_model.gaussian_process import Remembering
from penstock_services.estimator.core.resource_model.measurements import (
    MEMORY,
    UTILISATION,
    UTILISATION_STD,
    Runs,
    Task,
    runs_of,
    set_aside,
)
from penstock_services.estimator.core.resource_model.model import Model, Told, told, within
from penstock_services.estimator.core.resource_model.model import train as fit
from penstock_services.estimator.core.resource_model.saved import BadModel, from_bytes, to_bytes
from penstock_services.estimator.core.resource_model.saved import version_of as digest_of
from penstock_services.estimator.core.resources.estimate import DEFAULT_GPUS, Guess
from penstock_services.estimator.core.runs import Card, Cards, FinishedRun

__all__ = ["BadModel", "Learned", "ModelTier", "Trained", "read_model", "rehearse", "train"]

FEWEST_RUNS = 30  # that tell their network and their GPU; below, nothing can be held out
HELD_OUT = 0.2  # the newest runs judge, the older ones teach
WORSE_BY = 1.02  # a new model may be so much worse on recent runs: less is chance
LEAST_KNOWN = 0.2  # of 1: below, the model says nothing, for nothing like it was measured
MOST_CONFIDENCE = 0.9  # the interval holds nine runs in ten
MAX_REMEMBERED = 4_096  # answers
USUAL_GPUS = (1, 2, 4, 8)  # of a worker
MOST_REHEARSED = 8_192  # questions; 0.1 s
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
    memory: Remembering | None
    """Its process of GPU memory; None where no run measured that."""

    def tell_memory(self, inputs: Inputs) -> Told | None:
        """As the model's `predict` tells it."""
        if self.memory is None:
            return None
        return told(MEMORY, self.model.labels[MEMORY], inputs, self.memory)


def read_model(body: bytes, digest: str) -> Learned:
    """Raises `BadModel`, also for a whole model that is not the one of this digest."""
    if digest_of(body) != digest:
        raise BadModel("another model than the one that was written here")
    model = from_bytes(body)
    memory = model.labels.get(MEMORY)
    return Learned(version_of(digest), model, None if memory is None else Remembering(memory.process))


def rehearse(learned: Learned, cards: Sequence[Card]) -> Learned:
    """Asks about the memory of each network on usual numbers of these GPUs, which is then remembered: it depends on the
    batch by its line alone, so that hardly any job waits for it. Returns the same model."""
    networks = sorted(learned.model.design.workloads)
    asked = [
        _task(_Asked(network, None, gpus, 1, 0, (card,)), card)
        for network in networks
        for gpus in USUAL_GPUS
        for card in cards
    ]
    if asked:
        learned.tell_memory(learned.model.design.of(asked[:MOST_REHEARSED]))
    return learned


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
    """Per label the mean error and the share of runs inside their 90 % interval; `error`, by which models are promoted, is that of
    memory: utilisation is reported, and no decision reads it.

    Errors: of memory as a logarithm (0.1 is 10 %), of percentages as a share of 100.
    """
    told = model.predict(runs.tasks)
    found: dict[str, float] = {"error": math.inf}
    for name in (MEMORY, UTILISATION, UTILISATION_STD):
        truth = runs.labels.get(name)
        if truth is None or name not in told or not np.isfinite(truth).any():
            continue
        rows = np.flatnonzero(np.isfinite(truth))
        value, right = told[name].value[rows], truth[rows]
        off = np.log(value / right) if name == MEMORY else (value - right) / 100
        found[f"{name}_error"] = float(np.abs(off).mean())
        found[f"{name}_within"] = float(within(told[name].low, told[name].high, truth)[rows].mean())
        if name == MEMORY:
            found["error"] = found[f"{name}_error"]
    return found


class _Asked(NamedTuple):
    """What the model's answer depends on."""

    model: str
    batch_size: int | None
    gpus: int
    workers: int
    parameter_servers: int
    cards: tuple[Card, ...]


class ModelTier:
    """What the learned model says about GPU memory and utilisation; nothing for networks it never saw.

    The GPU is not chosen yet when a job is estimated. Of the cards in the cell that the job may use, those count
    on which it fits; among them the smallest promise is taken, so that no card that would do is ruled out.
    `cards`: node → its GPUs, kept up to date by the caller.
    """

    def __init__(self, cards: Cards) -> None:
        self._cards = cards
        self._model: Learned | None = None
        self._known: OrderedDict[_Asked, Guess | None] = OrderedDict()

    def use(self, model: Learned) -> None:
        """From the next estimate on."""
        self._model = model
        self._known.clear()

    def rehearse(self) -> None:
        """As `rehearse`, on the cards that are there now; for a service that begins."""
        if self._model is not None:
            rehearse(self._model, self._cards.kinds)

    def prepare(self, specs: Iterable[JobSpec]) -> None:
        """Asks the model about jobs that arrive together, all at once: `guess` of each then has its answer at hand.

        Beyond MAX_REMEMBERED kinds of jobs, `guess` asks for itself.
        """
        found = (self._asked(spec) for spec in specs)
        wanted = dict.fromkeys(asked for asked in found if asked is not None and asked not in self._known)
        if len(wanted) > 1:
            self._ask(list(wanted)[:MAX_REMEMBERED])

    def guess(self, spec: JobSpec, key: bytes) -> Guess | None:
        asked = self._asked(spec)
        if asked is None:
            return None
        if asked not in self._known:
            self._ask([asked])
        return self._known[asked]

    def _asked(self, spec: JobSpec) -> _Asked | None:
        """None where the model says nothing."""
        gpus = DEFAULT_GPUS if spec.resources.gpus is None else spec.resources.gpus
        if self._model is None or spec.model is None or gpus == 0:
            return None
        if spec.model not in self._model.model.design.workloads:
            return None
        cards, allowed = self._cards.kinds, spec.gpu_models
        if allowed:
            cards = tuple(card for card in cards if card.model in allowed)
        if not cards:
            return None
        return _Asked(spec.model, spec.batch_size, gpus, spec.workers, spec.parameter_servers, cards)

    def _ask(self, wanted: Sequence[_Asked]) -> None:
        assert self._model is not None
        self._known.update(zip(wanted, _answers(self._model, wanted), strict=True))
        while len(self._known) > MAX_REMEMBERED:
            self._known.popitem(last=False)


def _answers(learned: Learned, wanted: Sequence[_Asked]) -> list[Guess | None]:
    """One for each, in their order; by two questions to the model, however many there are."""
    tasks = [_task(asked, card) for asked in wanted for card in asked.cards]
    inputs = learned.model.design.of(tasks)
    memory = learned.tell_memory(inputs)
    if memory is None:
        return [None] * len(wanted)
    ends = list(accumulate(len(asked.cards) for asked in wanted))
    high = memory.high.tolist()
    best = [
        end - len(asked.cards) + _best_card(high[end - len(asked.cards) : end], asked.cards)
        for asked, end in zip(wanted, ends, strict=True)
    ]
    used = learned.model.expect(inputs.pick(np.array(best)), UTILISATION)
    percent = [None] * len(best) if used is None else used.tolist()
    values, lows, known = (column[best].tolist() for column in (memory.value, memory.low, memory.known))
    name = f"{learned.version}, learned from {learned.model.runs} runs: GPU memory"
    return [
        None
        if sure < LEAST_KNOWN
        else Guess(
            tier="model",
            confidence=round(MOST_CONFIDENCE * sure, 3),
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
