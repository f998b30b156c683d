"""Parametric shape of a step time from physics: computing, and synchronisation that partly overlaps with it.

    ln t = level + ln(C^γ + S^γ) / γ
    C = ((1 − φ) + φ·batch) · (1 + host·(widest − 1)/3)         computing, in units of e^level
    S = 0                                                        one GPU
      = exp(sync + one_node + one_node_slope·ln((gpus − 1)/3))   one node
      = exp(sync + two_nodes + two_nodes_slope·ln(gpus/4))       two nodes
      = exp(sync + density_slope·ln(gpus/(2·nodes)) + nodes_slope·ln(nodes/3))   more

φ = 1/(1 + e^fixed) is the part of a step at the reference batch that grows with the batch; γ = 1 + e^overlap:
1 = no overlap, large = only the longer of both counts. Every coefficient of time is positive by its form. Two
nodes have parameters of their own since all-reduce libraries use another algorithm from three nodes on: a
step on three nodes can be shorter than on two. One local batch is measured against `reference`, so that the
parameters of one model inform the prior of the next.
"""

from typing import NamedTuple

import numpy as np

from penstock_services.estimator.core.learning.gaussian_process import Floats
from penstock_services.estimator.core.records.placements import Points

PARAMETERS = (
    "level",
    "fixed",
    "host",
    "sync",
    "one_node",
    "two_nodes",
    "one_node_slope",
    "two_nodes_slope",
    "density_slope",
    "nodes_slope",
    "overlap",
)
LEVEL = 0  # the place of the first of them
_NO_SYNC = -40.0  # e^-40 of a step
_OVERLAP_RANGE = (-5.0, 3.0)  # γ from 1.007 to 21
_HOST_RANGE = (-20.0, 5.0)  # e^-20 of a step are none; e^5 are 150
_STEP = 1e-4  # of the numeric derivative; the parameters are of order 1


class Shape(NamedTuple):
    """`log_s`: ln of the step in seconds. `sync_share`: ∂ ln t / ∂ ln S, 0 (hidden) to 1.
    Both of shape (cells,)."""

    log_s: Floats
    sync_share: Floats


def shape_of(parameters: Floats, at: Points) -> Shape:
    """`parameters`: shape (PARAMETERS,), or (sets, 1, PARAMETERS)-like for many; see `slopes`."""
    level, fixed, host, sync, one, two, one_slope, two_slope, density, more, overlap = np.moveaxis(
        parameters, -1, 0
    )[..., None]
    growing = 1.0 / (1.0 + np.exp(fixed))
    compute = np.log((1.0 - growing) + growing * at.batch)
    compute = compute + np.log1p(np.exp(np.clip(host, *_HOST_RANGE)) * (at.widest - 1.0) / 3.0)
    nodes, gpus = at.nodes, at.gpus
    on_one = one + one_slope * np.log(np.maximum(gpus - 1.0, 1.0) / 3.0)
    on_two = two + two_slope * np.log(gpus / 4.0)
    on_more = density * np.log(gpus / (2.0 * nodes)) + more * np.log(nodes / 3.0)
    between = sync + np.where(nodes == 1, on_one, np.where(nodes == 2, on_two, on_more))
    between = np.where(gpus == 1, _NO_SYNC, between)
    sharpness = 1.0 + np.exp(np.clip(overlap, *_OVERLAP_RANGE))
    both = np.logaddexp(sharpness * compute, sharpness * between) / sharpness
    return Shape(level + both, np.exp(sharpness * (between - both)))


def slopes(parameters: Floats, at: Points) -> Floats:
    """∂ ln t / ∂ parameters, shape (cells, PARAMETERS)."""
    steps = np.eye(len(PARAMETERS)) * _STEP
    both = shape_of(np.concatenate((parameters + steps, parameters - steps)), at).log_s
    half = len(PARAMETERS)
    return np.asarray((both[:half] - both[half:]).T / (2.0 * _STEP))
