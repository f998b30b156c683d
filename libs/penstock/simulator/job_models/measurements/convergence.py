"""Job model `convergence`: measured loss curves of jobs.

It wraps another job model, which determines how fast the job runs: `convergence(shared-node)`. A job's model
is the name of a curve, which is stretched to the job's work. Losses are reported as measured.

| curves | source | falling quantity |
|---|---|---|
| `charrnn/<setting>` | 21 runs of a character model, 2,000 points each | the training loss |
| `pollux/<model>-<batch>` | 34 runs to the end, a point per epoch | the error: 1 – accuracy, word error rate,
… |
| `zeus/<data set>-<network>-<batch>` | epochs until targets were met, mean of the seeds that met them | 1 –
the metric |

Not measured: the loss between two points (linear), and that of runs with another batch size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.simulator.job_models.measurements.interpolation import interpolate
from penstock.simulator.job_models.model import Around, JobModel, NotMeasured
from penstock.simulator.traces.jobs import TraceJob


@dataclass(frozen=True, slots=True)
class LossCurve:
    """(progress 0 – 1, loss as measured), progress rising from 0; at least two points."""

    points: Sequence[tuple[float, float]]

    def at(self, progress: float) -> float:
        """The loss as measured, linear between points."""
        return interpolate(self.points, progress)[0]


class Convergence(Around):
    """`curves` by name. Neighbours matter where they matter for the inner job model."""

    name = "convergence"

    def __init__(self, inner: JobModel, curves: Mapping[str, LossCurve]) -> None:
        super().__init__(inner)
        self.neighbours_matter = inner.neighbours_matter
        self._curves = curves

    def loss(self, job: TraceJob, progress: float) -> float:
        return self._curve(job).at(progress)

    def _curve(self, job: TraceJob) -> LossCurve:
        found = self._curves.get(job.model)
        if found is None:
            raise NotMeasured(f"convergence: there is no curve {job.model!r}")
        return found
