"""Prepares images on many cores: shifts, mirrors and blurs the handwritten digits again and again, a process
per core, until it is stopped.

    python tilt/jobs/augment.py --processes 4

A job without GPUs, typical of those that run beside trainings on most clusters: it takes all the processor
time that it can have.
"""

import argparse
import multiprocessing
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits

SEED = 3
BATCH = 256  # images, 8 × 8 pixels


def augmented(images: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A batch of them, each moved by up to two pixels, half of them mirrored, all blurred; shape (BATCH, 8,
    8)."""
    chosen = images[generator.integers(len(images), size=BATCH)]
    down, right = generator.integers(-2, 3, size=2)
    moved = np.roll(chosen, (down, right), axis=(1, 2))
    mirrored = generator.random(BATCH) < 0.5
    moved[mirrored] = moved[mirrored, :, ::-1]
    return (moved + np.roll(moved, 1, axis=1) + np.roll(moved, 1, axis=2)) / 3


def work(number: int, images: np.ndarray) -> None:
    """Runs until the program that started it has ended."""
    os.setsid()  # the kernel shares busy cores among sessions: each process has its part of one
    parent, generator = os.getppid(), np.random.default_rng((SEED, number))
    while os.getppid() == parent:
        augmented(images, generator)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    images = load_digits().images
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=work, args=(number, images)) for number in range(options.processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()


if __name__ == "__main__":
    main()
