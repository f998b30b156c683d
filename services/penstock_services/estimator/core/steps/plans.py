"""Which placements to measure next, after a step model was promoted: a few per network and GPU where it is in doubt.

Source: GENIE §III (light profiling) for how few; `throughput/plan.py` for which.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from math import isclose, log2
from typing import NamedTuple

from penstock.model.external_events import Probe, ProfilePlanned
from penstock_services.estimator.core.steps.durations import Durations
from penstock_services.estimator.core.steps.samples import SHARED, Sample, name_of
from penstock_services.estimator.core.throughput.model import StepModel
from penstock_services.estimator.core.throughput.placements import Cell, ring, wrong_placement
from penstock_services.estimator.core.throughput.plan import profile_plan

MOST_POINTS = (
    15  # measured cells per network and GPU, beyond which no more are asked for. Source: GENIE §IV-B
)
MOST_PROBES = 4  # in one plan: after these the next training knows more
MOST_PLANS = 8  # after one training, for the networks used last
DOUBTED = 0.15  # standard deviation of ln step, weighted by use: above, estimates err by more than their run times scatter
MAX_BATCHES = 4  # whole-job batch sizes, the most used
NEXT_TO = 0.25  # by hand
MAX_NODES = 64
LEAST_LOCAL_BATCH = 1.0


class _Use(NamedTuple):
    """What jobs of one network on one GPU model asked for so far."""

    owner: str
    """Of the newest run."""
    cells: Counter[Cell]
    batches: Counter[float]


def plans(
    durations: Durations, version: str, samples: Sequence[Sample], nodes: Mapping[str, Sequence[int]]
) -> tuple[ProfilePlanned, ...]:
    """`nodes`: GPU model → GPUs on each node. For the networks used last first."""
    used: dict[tuple[str, str], _Use] = {}
    for sample in reversed(samples):
        use = used.setdefault((sample.network, sample.gpu), _Use(sample.owner, Counter(), Counter()))
        use.cells[sample.cell] += 1
        use.batches[sample.batch] += 1
    found: list[ProfilePlanned] = []
    for (network, gpu), use in used.items():
        model = durations.models.get(name_of(SHARED, network, gpu))
        left = 0 if model is None else MOST_POINTS - len(model.table.cells)
        if model is None or left <= 0 or not nodes.get(gpu):
            continue
        probes = _probes(model, use, nodes[gpu], min(left, MOST_PROBES))
        if probes:
            found.append(
                ProfilePlanned(
                    model=network, gpu_model=gpu, owner=use.owner, model_version=version, probes=probes
                )
            )
        if len(found) == MOST_PLANS:
            break
    return tuple(found)


def _probes(model: StepModel, use: _Use, nodes: Sequence[int], most: int) -> tuple[Probe, ...]:
    batches = [batch for batch, _ in sorted(use.batches.items(), key=lambda one: (-one[1], one[0]))]
    cells = dict.fromkeys(use.cells)
    cells |= {
        Cell(shape, batch / sum(shape)): None
        for shape in placements(nodes)
        for batch in batches[:MAX_BATCHES]
        if batch / sum(shape) >= LEAST_LOCAL_BATCH
    }
    candidates = list(cells)
    measured = {(ring(cell.placement), cell.local_batch) for cell in model.table.cells}
    weights = [_asked_for(cell, use) for cell in candidates]
    planned = profile_plan(model, candidates, weights, most + len(measured), DOUBTED)
    new = [probe for probe in planned if (ring(probe.cell.placement), probe.cell.local_batch) not in measured]
    return tuple(
        Probe(
            gpus_per_node=probe.cell.placement,
            local_batch=probe.cell.local_batch,
            spread_before=probe.spread_before,
            spread_after=probe.spread_after,
        )
        for probe in new[:most]
    )


def _asked_for(cell: Cell, use: _Use) -> float:
    """How often a cell is expected to be asked for: as often as its batch was, by `NEXT_TO` less per doubling of the
    GPUs. Every cell that ran was measured, so that by what ran alone nothing would ever be in doubt."""
    gpus = sum(cell.placement)
    return sum(
        runs * float(NEXT_TO ** abs(log2(gpus / sum(ran.placement))))
        for ran, runs in use.cells.items()
        if isclose(ran.local_batch * sum(ran.placement), cell.local_batch * gpus)
    )


def placements(nodes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """⟨n, g⟩ in powers of two that these nodes can hold, the fewest GPUs first."""
    sizes = sorted((gpus for gpus in nodes if gpus), reverse=True)[:MAX_NODES]
    count = 1
    found: list[tuple[int, ...]] = []
    while count <= len(sizes):
        each = 1
        while each <= sizes[count - 1]:
            shape = (each,) * count
            if not wrong_placement(shape):
                found.append(shape)
            each *= 2
        count *= 2
    yield from sorted(found, key=lambda shape: (sum(shape), len(shape)))
