"""Options of one laboratory run."""

from typing import NamedTuple

from tests.faults.laboratory.injection.nemesis import FAULTS

LOGS = ("kafka", "embedded", "kafka")
"""What the log behaves as, by seed: see `laboratory.log`. Their number is prime to `run.REPLAY_EVERY`."""


class Options(NamedTuple):
    """A run. None: from the seed."""

    seed: int
    faults: tuple[str, ...] = tuple(FAULTS)
    profile: str | None = None
    jobs: int | None = None
    nodes: int | None = None
    storm_s: float | None = None
    log: str | None = None
    """One of `LOGS`."""
    lost: str | None = None
    """Services that die for good (`laboratory.ending`)."""

    def arguments(self) -> str:
        """As the command line takes them."""
        parts = [f"--seed {self.seed}"]
        if self.faults != tuple(FAULTS):
            parts.append(f"--faults {','.join(self.faults) or 'none'}")
        given = {
            "profile": self.profile,
            "jobs": self.jobs,
            "nodes": self.nodes,
            "storm": self.storm_s,
            "log": self.log,
            "lost": self.lost,
        }
        parts += [f"--{name} {value}" for name, value in given.items() if value is not None]
        return " ".join(parts)
