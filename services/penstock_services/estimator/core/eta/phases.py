"""How long a job launches and saves: by runs of the same job, else by the nearest runs of its network.

Liquid's second model (§6.1, `learn.liquid.PhaseModel`) tells both from a forest. Medians answer here: launching depends
on the machine's images and the data's place, saving on the size of the network, and the same job, or the same network,
has both in common; the forest cannot be kept without pickle, and has nothing to say about a network it never saw.
"""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.history import Runs
from penstock_services.estimator.core.resources.nearest import Nearest, believed
from penstock_services.estimator.core.runs import About

Around = Literal["launch_ms", "save_ms"]
AROUND: tuple[Around, ...] = ("launch_ms", "save_ms")
"""What is around the training itself."""


def phase_ms(name: Around, job: JobSpec | About, runs: Runs | None, nearest: Nearest) -> float:
    """The median of `runs`, which are the job's own, else of its nearest; 0 where nobody told.

    Of the nearest each owner counts with two runs at most and with no more than twice what the next one had, so that one
    among three does not move it beyond the others'.
    """
    values: Sequence[float] = runs.column(name) if runs else ()
    if not values:
        near = nearest.to(job)
        most = believed(near, name)
        if most is not None:
            values = [min(value, most) for _, run in near if (value := getattr(run, name)) == value]
    return median(values) if values else 0.0
