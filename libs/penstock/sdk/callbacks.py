"""Callbacks for training loops of PyTorch, Keras, Lightning and scikit-learn: progress, loss, stages and
checkpoints in three lines.

    steps = Steps(total=epochs * len(loader))           # PyTorch, and every loop of your own
    for batch in steps(loader):
        steps.loss = train(batch)

    model.fit(x, y, callbacks=[keras_callback(model)])   # Keras
    Trainer(callbacks=[lightning_callback()])            # Lightning
    model.fit(x, y, monitor=monitor(model.n_estimators)) # scikit-learn's boosting

None of these frameworks is imported here: a base class that a framework requires is taken from the modules
that the script has imported. Outside of Penstock these callbacks do nothing, like `penstock.sdk.progress` and
`stages`; they never fail a training.
"""

import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
from penstock.sdk.stages import iteration, stage

Item = TypeVar("Item")
WEIGHTS, STEP = "model.weights.h5", "step"
KERAS, LIGHTNING = ("keras", "tensorflow.keras", "tf_keras"), ("lightning.pytorch", "pytorch_lightning")


class Steps:
    """Counts the iterations of a loop. `total`: of the whole training; `done`: completed before the loop
    begins.

    `loss`: set it within an iteration; it is read only now and then, so a loss on a GPU is not waited for.
    Fetching the next item is the stage `storage`, the body of the loop `gpu`.
    """

    def __init__(self, total: int | None = None, done: int = 0) -> None:
        self.total = total
        self.done = done
        self.loss: Any = None

    def __call__(self, items: Iterable[Item]) -> Iterator[Item]:
        """The items, each as one iteration, which ends when the next item is requested."""
        following = iter(items)
        while True:
            iteration()
            with stage("storage"):
                try:
                    item = next(following)
                except StopIteration:
                    return
            with stage("gpu"):
                yield item
            self.step()

    def step(self) -> None:
        """Counts one more completed iteration, for loops other than a `for` over items."""
        self.done += 1
        progress(self.done, self.total, self.loss)


def monitor(total: int | None = None) -> Callable[[int, Any, Any], bool]:
    """Callback for `fit(monitor=…)` of scikit-learn's gradient boosting: a boosting stage is an iteration,
    its training score the loss. It never stops the training."""

    def each(number: int, model: Any, variables: Any) -> bool:
        scores = getattr(model, "train_score_", None)
        loss = scores[number] if scores is not None and number < len(scores) else None
        progress(number + 1, total, loss)
        return False

    return each


def keras_callback(model: Any = None) -> Any:
    """Callback for `fit(callbacks=[…])` of Keras: batches are iterations, with `logs["loss"]`.

    If a model is given, its weights and the number of epochs are the job's checkpoint: they are restored
    here, so pass `initial_epoch=callback.epoch`. After a save in the middle of an epoch the training goes on
    at the epoch's beginning with the weights of the middle, as with Keras' own backups.
    """
    return _keras_class(_base("Callback", KERAS, "callbacks"))(model)


def lightning_callback() -> Any:
    """Callback for `Trainer(callbacks=[…])` of Lightning: batches are iterations, with the step's loss;
    fetching a batch is the stage `storage`. Checkpoints are Lightning's own: if such a script saves on
    SIGTERM, write `checkpoint: signal` in its job file."""
    return _lightning_class(_base("Callback", LIGHTNING, "callbacks"))()


def _base(name: str, modules: Iterable[str], below: str) -> type:
    """The class of this name in the framework that the script has imported;
    `object` where it has imported none."""
    for module in modules:
        framework = sys.modules.get(module)
        found = getattr(getattr(framework, below, None), name, None)
        if isinstance(found, type):
            return found
    return object


def _keras_class(base: type) -> type:
    class PenstockCallback(base):  # type: ignore[misc]
        """See `keras_callback`."""

        def __init__(self, trained: Any) -> None:
            super().__init__()
            self._steps = Steps()
            self._trained = trained
            self.epoch = 0
            """The epoch at which the training goes on."""
            if trained is not None:
                checkpoint(self._save, self._restore)

        def set_model(self, model: Any) -> None:
            if base is not object:
                super().set_model(model)

        def set_params(self, params: Any) -> None:
            found = params or {}
            batches, epochs = found.get("steps"), found.get("epochs")
            self._steps.total = batches * epochs if batches and epochs else None
            if base is not object:
                super().set_params(params)

        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            self.epoch = epoch + 1

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._steps.loss = (logs or {}).get("loss")
            self._steps.step()

        def _save(self, path: str) -> None:
            self._trained.save_weights(f"{path}/{WEIGHTS}")
            Path(path, STEP).write_text(f"{self._steps.done} {self.epoch}")

        def _restore(self, path: str) -> None:
            self._trained.load_weights(f"{path}/{WEIGHTS}")
            done, epoch = Path(path, STEP).read_text().split()
            self._steps.done, self.epoch = int(done), int(epoch)

        def __getattr__(self, name: str) -> Any:
            """Stubs of unused hooks, where there is no base class that has them."""
            if base is object and name.startswith("on_"):
                return _nothing
            raise AttributeError(name)

    return PenstockCallback


def _lightning_class(base: type) -> type:
    class PenstockCallback(base):  # type: ignore[misc]
        """See `lightning_callback`."""

        def __init__(self) -> None:
            super().__init__()
            self._steps = Steps()
            self._fetching: Any = None

        def on_train_start(self, trainer: Any, module: Any) -> None:
            total = getattr(trainer, "estimated_stepping_batches", None)
            self._steps.total = int(total) if isinstance(total, int | float) and 0 < total < 1 << 53 else None
            self._steps.done = int(getattr(trainer, "global_step", 0) or 0)
            self._fetch()

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, number: int) -> None:
            self._fetched()

        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, number: int
        ) -> None:
            self._steps.loss = outputs.get("loss") if isinstance(outputs, dict) else outputs
            self._steps.step()
            self._fetch()

        def on_train_end(self, trainer: Any, module: Any) -> None:
            self._fetched()

        def _fetch(self) -> None:
            """Enters the stage of reading the next batch."""
            iteration()
            self._fetching = stage("storage")
            self._fetching.__enter__()

        def _fetched(self) -> None:
            if self._fetching is not None:
                self._fetching.__exit__(None, None, None)
                self._fetching = None

    return PenstockCallback


def _nothing(*_: Any, **__: Any) -> None:
    """An unused hook."""
