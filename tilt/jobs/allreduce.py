"""Trains a two-layer network on the digits with several workers that average their gradients at every step.

Each worker sees its own share of every batch. The gradients travel over TCP: worker 0 listens on
MASTER_ADDR:MASTER_PORT, adds up what the others send and returns the mean, so that after each step all
workers hold the same weights (checked at the end). Penstock sets RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT for every worker of a gang; alone it runs as a gang of one:

    python tilt/jobs/allreduce.py --batch-size 256 --epochs 40

It reports to Penstock how far it is and what its steps spend their time in (`libs/penstock/sdk/README.md`).
"""

import argparse
import hashlib
import os
import socket
import struct
import sys
import time

import numpy as np
from sklearn.datasets import load_digits

from penstock.sdk.progress import progress
from penstock.sdk.stages import iteration, stage

HIDDEN = 128
SEED = 5
MEET_TIMEOUT_S = 60.0  # the last worker may start later than the first
STEP_TIMEOUT_S = 60.0  # a peer that is silent for so long is gone


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises `ConnectionError` when the peer is gone."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(min(1 << 20, count - len(parts)))
        if not part:
            raise ConnectionError("a worker of the gang is gone")
        parts += part
    return bytes(parts)


class Gang:
    """All workers; `mean` is a barrier that returns the same array to every worker."""

    def __init__(self, rank: int, size: int, address: tuple[str, int]) -> None:
        self.rank, self.size = rank, size
        self._peers: list[socket.socket] = []
        if size == 1:
            return
        self._peers = self._welcome(address) if rank == 0 else [self._join(address)]
        for peer in self._peers:
            peer.settimeout(STEP_TIMEOUT_S)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _welcome(self, address: tuple[str, int]) -> list[socket.socket]:
        by_rank: dict[int, socket.socket] = {}
        with socket.create_server(address, backlog=self.size) as server:
            server.settimeout(MEET_TIMEOUT_S)
            while len(by_rank) < self.size - 1:
                peer, _ = server.accept()
                by_rank[struct.unpack("!I", receive(peer, 4))[0]] = peer
        return [by_rank[rank] for rank in sorted(by_rank)]

    def _join(self, address: tuple[str, int]) -> socket.socket:
        deadline = time.monotonic() + MEET_TIMEOUT_S
        while True:
            try:
                peer = socket.create_connection(address, timeout=MEET_TIMEOUT_S)
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.05)  # worker 0 does not listen yet
                continue
            peer.sendall(struct.pack("!I", self.rank))
            return peer

    def mean(self, values: np.ndarray) -> np.ndarray:
        """The element-wise mean over all workers; `values` float64, the same shape everywhere."""
        if self.size == 1:
            return values
        if self.rank > 0:
            self._peers[0].sendall(values.tobytes())
            return np.frombuffer(receive(self._peers[0], values.nbytes)).reshape(values.shape)
        total = values.copy()
        for peer in self._peers:
            total += np.frombuffer(receive(peer, values.nbytes)).reshape(values.shape)
        total /= self.size
        for peer in self._peers:
            peer.sendall(total.tobytes())
        return total


def unpack(flat: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The two weight matrices inside the flat vector: (65, HIDDEN) and (HIDDEN + 1, 10), biases last."""
    first = 65 * HIDDEN
    return flat[:first].reshape(65, HIDDEN), flat[first:].reshape(HIDDEN + 1, 10)


def with_bias(x: np.ndarray) -> np.ndarray:
    return np.hstack([x, np.ones((len(x), 1))])


def forward(flat: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Hidden activations (n, HIDDEN) and class probabilities (n, 10)."""
    first, second = unpack(flat)
    hidden = np.maximum(with_bias(x) @ first, 0.0)
    logits = with_bias(hidden) @ second
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    return hidden, exponentials / exponentials.sum(axis=1, keepdims=True)


def loss_and_gradient(flat: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross entropy and its gradient by back-propagation, as one flat vector."""
    _, second = unpack(flat)
    hidden, probabilities = forward(flat, x)
    rows = np.arange(len(y))
    loss = float(-np.log(probabilities[rows, y] + 1e-12).mean())
    errors = probabilities
    errors[rows, y] -= 1.0
    errors /= len(y)
    back = (errors @ second[:-1].T) * (hidden > 0)
    return loss, np.concatenate([(with_bias(x).T @ back).ravel(), (with_bias(hidden).T @ errors).ravel()])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=256, help="over all workers")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--target-loss", type=float, default=0.0, help="ends after an epoch below it")
    options = parser.parse_args()
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    address = (os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "0")))
    print(f"worker {rank} of {size}: meeting at {address[0]}:{address[1]}", flush=True)
    gang = Gang(rank, size, address)
    x, y = load_digits(return_X_y=True)
    x = x / 16.0
    generator = np.random.default_rng(SEED)  # the same in every worker: same weights, same shuffles
    order = generator.permutation(len(x))
    train, test = order[400:], order[:400]
    flat = generator.standard_normal(65 * HIDDEN + (HIDDEN + 1) * 10) * 0.1
    start = time.perf_counter()
    starts = range(0, len(train) - options.batch_size + 1, options.batch_size)
    steps = 0
    for number in range(1, options.epochs + 1):
        shuffled = generator.permutation(train)
        losses = []
        for first in starts:
            iteration()
            mine = shuffled[first : first + options.batch_size][rank::size]
            with stage("cpu"):
                loss, gradient = loss_and_gradient(flat, x[mine], y[mine])
            with stage("network"):
                mean = gang.mean(np.append(gradient, loss))
            flat = flat - options.learning_rate * mean[:-1]
            losses.append(mean[-1])
            steps += 1
            progress(steps, options.epochs * len(starts), mean[-1])
        if rank == 0:
            accuracy = np.mean(np.argmax(forward(flat, x[test])[1], axis=1) == y[test])
            print(
                f"epoch {number:3d}/{options.epochs}  loss {np.mean(losses):.4f}  accuracy {accuracy:.4f}  "
                f"{time.perf_counter() - start:6.2f} s",
                flush=True,
            )
        if np.mean(losses) < options.target_loss:
            break  # the same losses in every worker: all end here
    if np.max(np.abs(gang.mean(flat) - flat)) > 1e-9:
        sys.exit("the workers' weights differ: gradients were lost on the way")
    print(f"worker {rank}: weights {hashlib.sha256(flat.round(9).tobytes()).hexdigest()[:16]}", flush=True)


if __name__ == "__main__":
    main()
