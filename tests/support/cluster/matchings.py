"""Weights of matchings, and those of full ones by rustworkx to compare them with."""

from collections.abc import Sequence

import numpy as np
import rustworkx
from numpy.typing import NDArray

from penstock_papers.muri.matching_chains import Pairs

ENOUGH = 0.999
ENOUGH_OF_FEW = 0.998  # of some hundreds that all differ; one pair of them weighs that much


def full_weight(weights: NDArray[np.float64]) -> float:
    """Of Edmonds' matching of all nodes."""
    graph = rustworkx.PyGraph()
    graph.add_nodes_from(range(len(weights)))
    graph.add_edges_from(
        [
            (one, other, round(float(weights[one, other]) * 1e9))
            for one in range(len(weights))
            for other in range(one)
            if weights[one, other] > 0
        ]
    )
    pairs = rustworkx.max_weight_matching(graph, weight_fn=int)
    return float(sum(weights[pair] for pair in pairs))


def weight_of(pairs: Pairs, weights: Sequence[Sequence[float]]) -> float:
    return sum(weights[one][other] * count for (one, other), count in pairs.items())


def expanded(counts: Sequence[int], weights: Sequence[Sequence[float]]) -> NDArray[np.float64]:
    kinds = [kind for kind, count in enumerate(counts) for _ in range(count)]
    return np.array([[weights[one][other] for other in kinds] for one in kinds]).reshape(
        len(kinds), len(kinds)
    )
