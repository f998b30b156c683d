"""Stage profiles of simulated jobs, as the estimator would have measured them: the trace's stage times, with
an optional error.

A trace in Muri's format has storage and CPU in one figure, the time of two of the four slots: half of it
counts as each. The error is the same for all jobs of a kind, which share one profile; it does not affect the
jobs' speeds.
"""

from zlib import crc32

import numpy as np

from penstock.model.nouns.types import StageTimes
from penstock.simulator.traces.jobs import Stages, TraceJob

Kind = tuple[str, int | None, int, Stages]
LEAST_MS = 1e-6


class StageProfiles:
    """Profiles of one run. `noise`: largest relative error of each stage, 0 – 1, uniform and seeded."""

    def __init__(self, seed: int, noise: float) -> None:
        self._seed, self._noise = seed, noise
        self._found: dict[Kind, StageTimes] = {}

    def of(self, job: TraceJob) -> StageTimes:
        """The profile of a job with stage times in its trace."""
        assert job.stages is not None, job
        kind = job.model, job.batch_size, job.gpus, job.stages
        found = self._found.get(kind)
        if found is None:
            found = self._found[kind] = self._measured(kind)
        return found

    def _measured(self, kind: Kind) -> StageTimes:
        model, batch_size, gpus, stages = kind
        storage_cpu, gpu, network = (
            part * error
            for part, error in zip(stages[1:], self._errors(f"{model}/{batch_size}/{gpus}"), strict=True)
        )
        return StageTimes(
            storage_ms=storage_cpu / 2,
            cpu_ms=storage_cpu / 2,
            gpu_ms=gpu,
            network_ms=network,
            iteration_ms=max(LEAST_MS, stages.iteration_ms),
        )

    def _errors(self, name: str) -> list[float]:
        if not self._noise:
            return [1.0, 1.0, 1.0]
        rng = np.random.Generator(np.random.PCG64(np.random.SeedSequence((self._seed, crc32(name.encode())))))
        return [float(1.0 + error) for error in rng.uniform(-self._noise, self._noise, 3)]
