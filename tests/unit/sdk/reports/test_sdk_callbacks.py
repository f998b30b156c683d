"""Callbacks of the SDK: in loops as frameworks drive them, on a real FIFO, and outside of Penstock."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sklearn.ensemble import GradientBoostingRegressor

from penstock.sdk.reporter.lines import FIFO
from tests.support.trainings.training_script import Pipe

ROOT = Path(__file__).resolve().parents[4]
PLAYED_KERAS = '''
import types, sys

class Callback:
    """As Keras has it: the list of callbacks calls every hook of each."""
    def set_params(self, params): self.params = params
    def set_model(self, model): self.model = model
    def on_train_begin(self, logs=None): pass
    def on_epoch_begin(self, epoch, logs=None): pass
    def on_train_batch_begin(self, batch, logs=None): pass
    def on_train_batch_end(self, batch, logs=None): pass
    def on_epoch_end(self, epoch, logs=None): pass
    def on_train_end(self, logs=None): pass

class Model:
    weights = 0
    def save_weights(self, path): open(path, "w").write(str(self.weights))
    def load_weights(self, path): self.weights = int(open(path).read())
    def fit(self, callbacks, epochs=2, steps=5, initial_epoch=0):
        for each in callbacks:
            each.set_params({"epochs": epochs, "steps": steps})
            each.set_model(self)
            each.on_train_begin()
        for epoch in range(initial_epoch, epochs):
            for each in callbacks: each.on_epoch_begin(epoch)
            for batch in range(steps):
                for each in callbacks: each.on_train_batch_begin(batch)
                self.weights += 1
                for each in callbacks: each.on_train_batch_end(batch, {"loss": 1.0 / self.weights})
            for each in callbacks: each.on_epoch_end(epoch, {})
        for each in callbacks: each.on_train_end()

if IMPORTED:
    keras = types.ModuleType("keras")
    keras.callbacks = types.SimpleNamespace(Callback=Callback)
    sys.modules["keras"] = keras
'''
PLAYED_LIGHTNING = '''
import types, sys

class Callback:
    """As Lightning has it; the trainer asks whether `state_dict` is overridden, of real callbacks only."""
    state_key = "x"
    def on_train_start(self, trainer, module): pass
    def on_train_batch_start(self, trainer, module, batch, number): pass
    def on_train_batch_end(self, trainer, module, outputs, batch, number): pass
    def on_train_end(self, trainer, module): pass

class Trainer:
    global_step, estimated_stepping_batches = 0, 8
    def __init__(self, callbacks):
        assert all(isinstance(each, Callback) for each in callbacks)
        self.callbacks = callbacks
    def fit(self):
        for each in self.callbacks: each.on_train_start(self, None)
        for number in range(8):
            for each in self.callbacks: each.on_train_batch_start(self, None, [number], number)
            outputs = {"loss": 8.0 - number}
            for each in self.callbacks: each.on_train_batch_end(self, None, outputs, [number], number)
        for each in self.callbacks: each.on_train_end(self, None)

lightning = types.ModuleType("lightning.pytorch")
lightning.callbacks = types.SimpleNamespace(Callback=Callback)
sys.modules["lightning.pytorch"] = lightning
'''
KERAS_SCRIPT = """
from penstock.sdk.callbacks import keras_callback
model = Model()
callback = keras_callback(model)
model.fit([callback], initial_epoch=callback.epoch)
print(model.weights)
"""


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "phases")
    yield pipe
    os.close(pipe.descriptor)


def run(script: str, env: dict[str, str]) -> "subprocess.CompletedProcess[str]":
    found = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("PENSTOCK_") and name != "RANK"
    }
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**found, "PYTHONPATH": str(ROOT / "libs"), **env},
        capture_output=True,
        text=True,
        check=False,
    )


def reported(fifo: Pipe) -> list[dict[str, Any]]:
    """What `progress` wrote."""
    lines = [json.loads(line) for line in fifo.text().splitlines() if line.startswith(b"{")]
    return [line["steps"] for line in lines if "steps" in line]


def test_a_loop_of_pytorchs_kind(fifo: Pipe) -> None:
    """Three lines: two epochs over a loader of four batches. The first and the last iteration are reported,
    with their losses."""
    script = """
from penstock.sdk.callbacks import Steps
steps = Steps(total=8)
for epoch in range(2):
    for batch in steps([1, 2, 3, 4]):
        steps.loss = 10 - epoch * 4 - batch
"""
    assert run(script, {FIFO: str(fifo.path)}).stderr == ""
    first, *_, last = reported(fifo)
    assert (first["done"], first["total"], first["loss"]) == (1, 8, 9)
    assert (last["done"], last["loss"]) == (8, 2)


def test_a_loop_that_is_left_reports_what_was_done(fifo: Pipe) -> None:
    """`break` in its body: that iteration is not over. A generator that raises does so in the script."""
    script = """
from penstock.sdk.callbacks import Steps
steps = Steps(done=40)
for batch in steps(range(9)):
    if batch == 3:
        break
def fails():
    yield 1
    raise ValueError("no more")
try:
    for batch in steps(fails()): pass
except ValueError as error:
    print(error, steps.done)
"""
    done = run(script, {FIFO: str(fifo.path)})
    assert (done.stdout, done.stderr) == ("no more 44\n", "")
    assert reported(fifo)[-1]["done"] == 44


@pytest.mark.parametrize("imported", [True, False])
def test_keras(fifo: Pipe, imported: bool) -> None:
    """A callback of Keras' own class where the script has imported Keras, and one that has every hook
    otherwise."""
    script = PLAYED_KERAS.replace("IMPORTED", str(imported)) + KERAS_SCRIPT
    done = run(script, {FIFO: str(fifo.path)})
    assert (done.stdout, done.stderr) == ("10\n", "")
    first, *_, last = reported(fifo)
    assert (first["done"], first["total"], first["loss"]) == (1, 10, 1.0)
    assert (last["done"], last["loss"]) == (10, 0.1)


def test_keras_goes_on_at_its_checkpoint(fifo: Pipe, tmp_path: Path) -> None:
    """Stopped in the second epoch, started again: weights, batches and the epoch are those of the
    checkpoint."""
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    stop = """
import os, signal
class Stops:
    def __getattr__(self, name): return lambda *a, **k: None
    def on_train_batch_begin(self, batch, logs=None):
        if model.weights == 7: os.kill(os.getpid(), signal.SIGTERM)
from penstock.sdk.callbacks import keras_callback
model = Model()
callback = keras_callback(model)
model.fit([Stops(), callback], initial_epoch=callback.epoch)
"""
    env = {FIFO: str(fifo.path), "PENSTOCK_CHECKPOINT_DIR": str(folder), "PENSTOCK_ATTEMPT": "1"}
    played = PLAYED_KERAS.replace("IMPORTED", "True")
    stopped = run(played + stop, env)
    assert stopped.returncode == 75, stopped.stderr
    [saved] = folder.iterdir()
    fifo.text()
    again = """
from penstock.sdk.callbacks import keras_callback
model = Model()
callback = keras_callback(model)
print(callback.epoch, model.weights)
model.fit([callback], epochs=3, initial_epoch=callback.epoch)
"""
    done = run(played + again, {**env, "PENSTOCK_RESUME": str(saved), "PENSTOCK_ATTEMPT": "2"})
    assert (done.stdout, done.stderr) == ("1 8\n", "")
    assert [line["done"] for line in reported(fifo)][-1] == 18, "it goes on counting"


def test_lightning(fifo: Pipe) -> None:
    """Its trainer takes nothing but callbacks of its own class: ours is one, though it is not imported."""
    script = (
        PLAYED_LIGHTNING
        + "from penstock.sdk.callbacks import lightning_callback\nTrainer([lightning_callback()]).fit()\n"
    )
    done = run(script, {FIFO: str(fifo.path)})
    assert done.stderr == ""
    first, *_, last = reported(fifo)
    assert (first["done"], first["total"], first["loss"]) == (1, 8, 8.0)
    assert (last["done"], last["loss"]) == (8, 1.0)


def test_scikit_learns_boosting(fifo: Pipe) -> None:
    """The real one: forty stages, and the training score of each as its loss."""
    script = """
import numpy as np
from sklearn.ensemble import GradientBoostingRegressor
from penstock.sdk.callbacks import monitor
x = np.random.default_rng(0).standard_normal((100, 3))
model = GradientBoostingRegressor(n_estimators=40).fit(x, x[:, 0], monitor=monitor(40))
print(len(model.estimators_), model.train_score_[-1])
"""
    done = run(script, {FIFO: str(fifo.path)})
    stages, score = done.stdout.split()
    assert (stages, done.stderr) == ("40", "")
    last = reported(fifo)[-1]
    assert (last["done"], last["total"]) == (40, 40)
    assert last["loss"] == pytest.approx(float(score))


def test_outside_of_penstock_nothing_happens() -> None:
    """The same scripts on a laptop; and importing the callbacks imports no framework."""
    from penstock.sdk.callbacks import Steps, keras_callback, lightning_callback, monitor

    assert list(Steps(total=3)(range(3))) == [0, 1, 2]
    x = np.zeros((10, 1))
    GradientBoostingRegressor(n_estimators=2).fit(x, x[:, 0], monitor=monitor(2))
    for callback in (keras_callback(), lightning_callback()):
        assert callback is not None
    with pytest.raises(AttributeError):
        keras_callback().no_hook  # noqa: B018
    code = (
        "import sys, penstock.sdk.callbacks; print(sorted({'keras', 'torch', 'lightning', 'numpy', "
        "'sklearn'} & set(sys.modules)))"
    )
    assert run(code, {}).stdout == "[]\n"
