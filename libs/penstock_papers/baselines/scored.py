"""Score-based placement: the driver of policies that score every open node with a whole number and take the
node with the largest score.

Ties go to the lowest ordinal. One task after the other, parameter servers first, all or nothing
(`penstock.cluster.gang`); earlier tasks of the gang count as placed. Unlike the other policies these examine
every open node, as their sources do: O(nodes) for a decision, in array operations. The score of a node for
a kind of task is cached until the node changes: it depends on nothing else.
"""

from collections.abc import Hashable
from typing import NamedTuple, Protocol

import numpy as np

from penstock.cluster.assignment import Plan
from penstock.cluster.chance import LazyRng
from penstock.cluster.gang import Gang, place_greedily
from penstock.ledger.state.job.demand import vector_key
from penstock.ledger.state.job.job_state import JobState
from penstock.ledger.state.state import CellState
from penstock.model.nouns.types import ResourceVector
from penstock_papers.baselines.rows import Flags, GangGpus, Ints, NodeRow, NodeTable, Rows, rows_of

MAX_KINDS = 1_024
"""Kinds of tasks whose scores are cached; openb's largest pod file has 151."""


class Scored(NamedTuple):
    """Scores of some nodes for one task."""

    scores: Ints
    """Shape (nodes), the larger the better; meaningless where the task does not fit."""
    gpus: Ints | None = None
    """Shape (nodes): the GPU that the task shall share; None: `base.assign` chooses."""


class Scorer(Protocol):
    """Score function of a policy. Depends only on the row, the demand and the basis."""

    def basis(self, state: CellState) -> Hashable:
        """All other inputs of a score: when it changes, all scores are recomputed."""
        ...

    def score(self, rows: Rows, need: ResourceVector, table: NodeTable) -> Scored:
        """Scores these nodes under the latest basis."""
        ...


class _Scores(NamedTuple):
    """The scores of one kind of task."""

    scores: Ints
    gpus: Ints
    versions: Ints
    """Versions of the nodes when they were scored; −1: never."""


class ScoredFit:
    """A policy that chooses a `Scorer`'s best node. Score in the explanation: minus the scorer's."""

    def __init__(self, name: str, scorer: Scorer) -> None:
        self.name = name
        self._scorer = scorer
        self._table = NodeTable()
        self._basis: Hashable = None
        self._cache: dict[tuple[float, ...], _Scores] = {}

    def place(self, state: CellState, job: JobState, rng: LazyRng) -> Plan | None:
        """No random choice."""
        demand = job.demand
        if not state.index.candidates(demand.worker, demand.where):
            return None  # the usual case while jobs wait; found without scoring nodes
        basis = self._scorer.basis(state)
        if self._table.refresh(state) or basis != self._basis or len(self._cache) > MAX_KINDS:
            self._cache.clear()
            self._basis = basis
        search = _Search(self, state)
        plan = place_greedily(self.name, state, job, search.rank)
        return search.gpus.named(plan, job) if plan is not None and search.chose_gpus else plan

    def scored(self, need: ResourceVector) -> Scored:
        """Scores of all nodes of the table."""
        table, key = self._table, vector_key(need)
        cached = self._cache.get(key)
        if cached is None:
            cached = self._cache[key] = _Scores(
                np.zeros_like(table.versions),
                np.full_like(table.versions, -1),
                np.full_like(table.versions, -1),
            )
        stale = np.flatnonzero(cached.versions != table.versions)
        if stale.size:
            found = self._scorer.score(table.rows.at(stale), need, table)
            cached.scores[stale] = found.scores
            if found.gpus is not None:
                cached.gpus[stale] = found.gpus
            cached.versions[stale] = table.versions[stale]
        return Scored(cached.scores, cached.gpus)

    def scored_row(self, row: NodeRow, need: ResourceVector) -> tuple[int, int]:
        """(score, GPU or −1) of one node with the gang's own tasks."""
        found = self._scorer.score(rows_of([row], self._table.models), need, self._table)
        return int(found.scores[0]), -1 if found.gpus is None else int(found.gpus[0])


class _Search:
    """The scores for one gang, including its own tasks placed before."""

    def __init__(self, policy: ScoredFit, state: CellState) -> None:
        self._policy = policy
        self.gpus = GangGpus(state)
        self.chose_gpus = False

    def rank(self, gang: Gang, is_worker: bool, limit: int) -> list[tuple[float, int]]:
        need = gang.need(is_worker)
        nodes = self.gpus.still_open(gang.open(is_worker), need)
        if not nodes:
            return []
        scores, gpus = self._policy.scored(need)
        assert gpus is not None
        if self.gpus.rows:
            scores, gpus = scores.copy(), gpus.copy()
            for ordinal, row in self.gpus.rows.items():
                scores[ordinal], gpus[ordinal] = self._policy.scored_row(row, need)
        best = _largest(scores, flags_of(nodes, scores.size), limit)
        gpu = int(gpus[best[0]])  # the driver takes the first of the ranked nodes
        self.chose_gpus |= gpu >= 0
        self.gpus.take(best[0], need, (gpu,) if gpu >= 0 else None)
        return [(float(-scores[ordinal]), ordinal) for ordinal in best]


def flags_of(nodes: int, count: int) -> Flags:
    """The bit set of ordinals as an array of `count` flags."""
    raw = np.frombuffer(nodes.to_bytes((count + 7) // 8, "little"), np.uint8)
    return np.unpackbits(raw, count=count, bitorder="little").view(np.bool_)


def _largest(scores: Ints, allowed: Flags, limit: int) -> list[int]:
    """At most `limit` allowed ordinals, largest score first, then lowest ordinal."""
    ordinals = np.flatnonzero(allowed)
    if limit == 1:
        return [int(ordinals[np.argmax(scores[ordinals])])]
    keys = ordinals - scores[ordinals] * scores.size
    if keys.size > limit:
        first = np.argpartition(keys, limit - 1)[:limit]
        ordinals, keys = ordinals[first], keys[first]
    return [int(ordinal) for ordinal in ordinals[np.argsort(keys)]]
