"""Random generator of a decision, seeded by the event that it decides about."""

import numpy as np


class LazyRng:
    """Random generator, seeded anew for each input event from (run seed, event id): equal in every replay."""

    def __init__(self, run_seed: int, event_id: str = "") -> None:
        self.used = False
        """Whether any random number was used: if not, no decision depends on the seed."""
        self._run_seed = run_seed
        self.seed(event_id)

    def seed(self, event_id: str) -> None:
        """Begins the next event."""
        self._event_id = event_id
        self._generator: np.random.Generator | None = None

    @property
    def generator(self) -> np.random.Generator:
        """The generator, created at first use: most policies use no random numbers."""
        if self._generator is None:
            self.used = True
            entropy = (self._run_seed, *self._event_id.encode())
            self._generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy)))
        return self._generator
