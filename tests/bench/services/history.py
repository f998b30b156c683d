"""A cell's finished runs as the estimator keeps them, made up: for measuring speed, where what is learned
does not matter.

Networks as unequally popular as names of published traces, any batch size, one to eight GPUs of six kinds.
Memory and utilisation have a way of their own per network and kind, so that no simple law explains them away.
"""

import numpy as np

from penstock.model.jobs.job_parts import ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock_services.estimator.core.records.history import Run
from penstock_services.estimator.core.records.runs import Allocation, Card, FinishedRun, job_info
from penstock_services.estimator.core.resource_model.gpus import facts_of

CARDS = (
    Card("T4", 15_360),
    Card("2080TI", 11_264),
    Card("V100", 32_510),
    Card("A10", 23_028),
    Card("A6000", 49_140),
    Card("A100", 40_536),
)
NETWORKS = 60
OWNERS = 50
POPULARITY = 1.3  # exponent of Zipf's law
FULLEST = 0.97  # of a card


class Month:
    """Draws jobs and what they use; the same seed gives the same month."""

    def __init__(self, seed: int = 1) -> None:
        self._rng = rng = np.random.default_rng(seed)
        self._fixed_mib = rng.uniform(400, 4_000, NETWORKS)
        self._sample_mib = rng.lognormal(3.5, 1.0, NETWORKS)
        self._busy = rng.uniform(20, 95, NETWORKS)
        self._usual = 2 ** rng.integers(3, 7, NETWORKS)
        self._way = rng.normal(0, 0.12, (2, NETWORKS, len(CARDS)))

    def job(self, number: int) -> JobSpec:
        """A network at any batch size: two jobs are hardly ever the same."""
        network = min(int(self._rng.zipf(POPULARITY)), NETWORKS) - 1
        batch = max(1, int(self._usual[network] * 2 ** self._rng.uniform(-2, 2)))
        return JobSpec(
            owner=f"user-{self._rng.integers(OWNERS)}",
            command=("python", f"train-{number}.py"),
            model=f"network-{network}",
            batch_size=batch,
            resources=ResourceRequest(gpus=int(2 ** self._rng.integers(0, 4))),
        )

    def run(self, seq: int) -> FinishedRun:
        """One that fits its card."""
        while True:
            job, kind = self.job(seq), int(self._rng.integers(len(CARDS)))
            used_mib, busy = self.used(job, kind)
            if used_mib < FULLEST * CARDS[kind].memory_mib:
                break
        gpus = job.resources.gpus or 1
        measured = Run(
            ended_ms=float(seq * 1_000),
            seq=float(seq),
            run_ms=float(self._rng.uniform(1, 50) * 60_000),
            gpus=gpus,
            busy_cores=float(self._rng.uniform(1, 8)),
            host_memory_mib=float(self._rng.uniform(2_000, 30_000)),
            gpu_memory_mib=used_mib,
            gpu_utilisation_percent=busy,
            gpu_utilisation_std=float(np.clip(3 + (100 - busy) / 5 * self._rng.uniform(0.5, 1.5), 0, 50)),
        )
        return FinishedRun(
            seq, f"run-{seq}", job_info(job), Allocation(gpus, 1_000, 8, CARDS[kind]), None, measured, ""
        )

    def used(self, job: JobSpec, kind: int) -> tuple[float, float]:
        """GPU memory (MiB) and utilisation (%) on this kind of card."""
        network, card = int((job.model or "-0").split("-")[1]), CARDS[kind]
        facts = facts_of(card.model)
        assert facts is not None
        batch = (job.batch_size or 1) / (job.resources.gpus or 1)
        more, busier = self._way[:, network, kind]
        own_mib = self._fixed_mib[network] + self._sample_mib[network] * batch
        grown_mib = own_mib + 0.2 * max(0.0, card.memory_mib - own_mib) * self._busy[network] / 100
        busy = self._busy[network] * (facts.full_tflops / 16) ** -0.2 * (batch / self._usual[network]) ** 0.15
        noise = self._rng.normal(0, 0.02, 2)
        used_mib = grown_mib * np.exp(more + noise[0])
        return float(used_mib), float(np.clip(busy * np.exp(busier + noise[1]), 1, 100))
