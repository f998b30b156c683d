"""How long a job launches and saves: medians of runs of the same job, else of the nearest runs of its network.

Liquid's second model (§6.1) predicts both with a forest. Medians answer here: launching depends on the machine's images and
the data's place, saving on the size of the network, and the same job, or the same network, has both in common; the forest
has no answer for a network that it never saw.
"""

from collections.abc import Sequence
from statistics import median
from typing import Literal

from penstock.model.types import JobSpec
from penstock_services.estimator.core.resources.history import Runs
from penstock_services.estimator.core.resources.nearest import Nearest, believed
from penstock_services.estimator.core.runs import JobInfo

Around = Literal["launch_ms", "save_ms"]
AROUND: tuple[Around, ...] = ("launch_ms", "save_ms")
"""What is around the training itself."""


def phase_ms(name: Around, job: JobSpec | JobInfo, runs: Runs | None, nearest: Nearest) -> float:
    """The median of `runs`, which are the job's own, else of its nearest; 0 where nobody reported it.

    Of the nearest each owner counts with two runs at most and with no more than twice what the next one had, so that one
    among three does not move it beyond the others'.
    """
    values: Sequence[float] = runs.column(name) if runs else ()
    if not values:
        near = nearest.to(job)
        limit = believed(near, name)
        if limit is not None:
            values = [min(value, limit) for _, run in near if (value := getattr(run, name)) == value]
    return median(values) if values else 0.0
