"""What the examples of `penstock.sdk` use of their frameworks, played: weights that a loop adds to, saved as
JSON. Runs as the head of a script."""

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCHES = 100
HELD_AT = 30
"""The batch in which it stays, where HELD says so, until there is a file `go`; then there is a file
`held`."""


class Model:
    """Its history tells each batch once, in order, if none was lost and none came twice."""

    def __init__(self) -> None:
        self.history: list[int] = []

    def train(self, batch: int) -> None:
        if batch == HELD_AT and "HELD" in os.environ:
            Path("held").touch()
            while not Path("go").exists():
                time.sleep(0.01)  # clock: the script's, which is not judged by it
        self.history.append(batch)

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.history = found["history"]

    # Keras
    def save_weights(self, path: str) -> None:
        Path(path).write_text(json.dumps(self.history))

    def load_weights(self, path: str) -> None:
        self.history = json.loads(Path(path).read_text())

    def fit(self, epochs: int, initial_epoch: int, callbacks: list[Callable[[int], object]]) -> None:
        for epoch in range(initial_epoch, epochs):
            self.train(epoch)
            for each in callbacks:
                each(epoch)

    # scikit-learn
    def partial_fit(self, batch: int) -> None:
        self.train(batch)


class torch:  # noqa: N801 - as the framework's name
    """`save` and `load`."""

    @staticmethod
    def save(found: object, path: str) -> None:
        Path(path).write_text(json.dumps(found))

    @staticmethod
    def load(path: str) -> Any:
        return json.loads(Path(path).read_text())


class joblib:  # noqa: N801 - as the library's name
    """`dump` and `load`."""

    @staticmethod
    def dump(found: Model, path: str) -> None:
        found.save_weights(path)

    @staticmethod
    def load(path: str) -> Model:
        model = Model()
        model.load_weights(path)
        return model


def on_epoch_end(act: Callable[[int], object]) -> Callable[[int], object]:
    """As `LambdaCallback(on_epoch_end=…)`."""
    return act


model = Model()
