"""Softmax regression on the handwritten digits, written out in NumPy: forward pass, gradient, momentum.

    python tilt/jobs/softmax.py --batch-size 32 --learning-rate 0.1 --epochs 2000

Ends with exit code 3 when the loss explodes, as it does with a learning rate far too large. Each epoch is
reported to Penstock, and with `--checkpoint` (in a job with `checkpoint: sdk`) it saves a checkpoint when
Penstock requests one, and resumes from it (`libs/penstock/sdk/README.md`).
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress

EXIT_DIVERGED = 3
HOPELESS_LOSS = 1e6  # guessing blindly costs ln 10 = 2.3
LINES = 20  # of progress per run
MOMENTUM = 0.9
SEED = 11


def loss_and_gradient(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross entropy with a little weight decay, and its gradient; weights (features + 1, classes)."""
    inputs = np.hstack([x, np.ones((len(x), 1))])
    with np.errstate(over="ignore", invalid="ignore"):
        logits = inputs @ weights
        logits -= logits.max(axis=1, keepdims=True)
        exponentials = np.exp(logits)
        probabilities = exponentials / exponentials.sum(axis=1, keepdims=True)
        chosen = logits[np.arange(len(y)), y] - np.log(exponentials.sum(axis=1))
        loss = float(-chosen.mean() + 1e-4 * np.sum(weights * weights))
        errors = probabilities
        errors[np.arange(len(y)), y] -= 1.0
        return loss, inputs.T @ errors / len(y) + 2e-4 * weights


class Diverged(Exception):
    """The loss explodes."""


class Training:
    """What was learned in `done` epochs, and what the next one needs. `x`: shape (samples, features); `y`:
    their classes."""

    def __init__(self, x: np.ndarray, y: np.ndarray, generator: np.random.Generator) -> None:
        self._x, self._y = x, y
        self.done = 0
        self.weights = 0.01 * generator.standard_normal((x.shape[1] + 1, 10))
        self._velocity = np.zeros_like(self.weights)

    def epoch(self, batch_size: int, learning_rate: float) -> float:
        """One pass over all samples; the mean of its losses. Raises `Diverged`."""
        shuffled = np.random.default_rng((SEED, self.done)).permutation(len(self._x))
        losses = []
        for first in range(0, len(shuffled), batch_size):
            chosen = shuffled[first : first + batch_size]
            loss, gradient = loss_and_gradient(self.weights, self._x[chosen], self._y[chosen])
            if not loss < HOPELESS_LOSS:
                raise Diverged(
                    f"epoch {self.done + 1}: the loss is {loss:.3g}: the learning rate is too large"
                )
            losses.append(loss)
            self._velocity = MOMENTUM * self._velocity - learning_rate * gradient
            self.weights = self.weights + self._velocity
        self.done += 1
        return float(np.mean(losses))

    def save(self, folder: str) -> None:
        np.savez(f"{folder}/state.npz", weights=self.weights, velocity=self._velocity, done=self.done)

    def restore(self, folder: str) -> None:
        state = np.load(f"{folder}/state.npz")
        self.weights, self._velocity, self.done = state["weights"], state["velocity"], int(state["done"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--epochs", type=int, default=2000)
    parser.add_argument(
        "--gpu-ms",
        type=float,
        default=0.0,
        help="wait so long in each epoch, as for a GPU that needs no core meanwhile",
    )
    parser.add_argument(
        "--until", type=Path, help="end when this file is there, after --epochs at the latest"
    )
    parser.add_argument(
        "--checkpoint",
        action="store_true",
        help="save when Penstock requests it, and resume from the last checkpoint",
    )
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = x / 16.0
    generator = np.random.default_rng(SEED)
    order = generator.permutation(len(x))
    train, test = order[400:], order[:400]
    training = Training(x[train], y[train], generator)
    if options.checkpoint:
        checkpoint(training.save, training.restore)
    start = time.perf_counter()
    enough = False
    while training.done < options.epochs and not enough:
        try:
            loss = training.epoch(options.batch_size, options.learning_rate)
        except Diverged as error:
            print(error, file=sys.stderr)
            sys.exit(EXIT_DIVERGED)
        time.sleep(options.gpu_ms / 1_000)
        number = training.done
        enough = options.until is not None and options.until.exists()
        progress(number, None if options.until else options.epochs, loss)
        if number % max(1, options.epochs // LINES) and number != options.epochs and not enough:
            continue
        guesses = np.argmax(np.hstack([x[test], np.ones((len(test), 1))]) @ training.weights, axis=1)
        print(
            f"epoch {number:4d}/{options.epochs}  loss {loss:.4f}  "
            f"accuracy {np.mean(guesses == y[test]):.4f}  {time.perf_counter() - start:6.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
