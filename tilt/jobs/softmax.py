"""Softmax regression on the handwritten digits, written out in NumPy: forward pass, gradient, momentum.

    python tilt/jobs/softmax.py --batch-size 32 --learning-rate 0.1 --epochs 2000

Ends with exit code 3 when the loss explodes, as it does with a learning rate far too large. Each epoch is reported to Penstock
(`libs/penstock/sdk/README.md`).
"""

import argparse
import sys
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

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
    options = parser.parse_args()
    x, y = load_digits(return_X_y=True)
    x = x / 16.0
    generator = np.random.default_rng(SEED)
    order = generator.permutation(len(x))
    train, test = order[400:], order[:400]
    weights = 0.01 * generator.standard_normal((x.shape[1] + 1, 10))
    velocity = np.zeros_like(weights)
    start = time.perf_counter()
    for number in range(1, options.epochs + 1):
        shuffled = generator.permutation(train)
        losses = []
        for first in range(0, len(shuffled), options.batch_size):
            chosen = shuffled[first : first + options.batch_size]
            loss, gradient = loss_and_gradient(weights, x[chosen], y[chosen])
            if not loss < HOPELESS_LOSS:
                print(
                    f"epoch {number}: the loss is {loss:.3g}: the learning rate is too large", file=sys.stderr
                )
                sys.exit(EXIT_DIVERGED)
            losses.append(loss)
            velocity = MOMENTUM * velocity - options.learning_rate * gradient
            weights = weights + velocity
        time.sleep(options.gpu_ms / 1_000)
        enough = options.until is not None and options.until.exists()
        progress(number, None if options.until else options.epochs, np.mean(losses))
        if number % max(1, options.epochs // LINES) and number != options.epochs and not enough:
            continue
        guesses = np.argmax(np.hstack([x[test], np.ones((len(test), 1))]) @ weights, axis=1)
        print(
            f"epoch {number:4d}/{options.epochs}  loss {np.mean(losses):.4f}  "
            f"accuracy {np.mean(guesses == y[test]):.4f}  {time.perf_counter() - start:6.2f} s",
            flush=True,
        )
        if enough:
            break


if __name__ == "__main__":
    main()
