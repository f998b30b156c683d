"""Asynchronous training with parameter servers: each holds a slice of the weights, workers push and pull.

A worker computes the gradient on its own share of the digits, sends each server its slice of it and gets the
current slice back; no worker waits for the others (asynchronous SGD). The roles come from Penstock:
PENSTOCK_ROLE (worker or ps), RANK, WORLD_SIZE (workers) and PENSTOCK_PEERS (every member with rank and
address).

    job file: workers: 2, parameter_servers: 1, command: [python, tilt/jobs/parameter_server.py]
"""

import argparse
import itertools
import json
import os
import socket
import threading
import time
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

SHAPE = (65, 10)  # 64 pixels and a bias, 10 classes
SEED = 3
MEET_TIMEOUT_S = 60.0
STEP_TIMEOUT_S = 60.0


def receive(connection: socket.socket, count: int) -> bytes:
    """Exactly `count` bytes. Raises `ConnectionError` when the other side is done."""
    parts = bytearray()
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the other side is gone")
        parts += part
    return bytes(parts)


def slices(servers: int) -> list[slice]:
    """The part of the flat weights on each server."""
    edges = np.linspace(0, SHAPE[0] * SHAPE[1], servers + 1).astype(int)
    return [slice(low, high) for low, high in itertools.pairwise(edges)]


def serve(address: tuple[str, int], values: np.ndarray, workers: int, learning_rate: float) -> None:
    """Answers pushes until every worker has closed its connection."""
    lock = threading.Lock()
    pushes = 0

    def attend(connection: socket.socket) -> None:
        nonlocal pushes
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while True:
                try:
                    gradient = np.frombuffer(receive(connection, values.nbytes))
                except ConnectionError:
                    return
                with lock:
                    values[:] -= learning_rate * gradient
                    pushes += 1
                    answer = values.tobytes()
                connection.sendall(answer)

    attendants = []
    with socket.create_server(address) as server:
        server.settimeout(MEET_TIMEOUT_S)
        print(f"serving {len(values)} weights to {workers} workers at {address[0]}:{address[1]}", flush=True)
        for _ in range(workers):
            connection, _ = server.accept()
            connection.settimeout(STEP_TIMEOUT_S)
            attendants.append(threading.Thread(target=attend, args=(connection,)))
            attendants[-1].start()
    for attendant in attendants:
        attendant.join()
    print(f"{pushes} pushes applied", flush=True)


def connect(address: tuple[str, int]) -> socket.socket:
    """Connects as soon as the server listens."""
    deadline = time.monotonic() + MEET_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection(address, timeout=STEP_TIMEOUT_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
            continue
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return connection


def exchange(servers: list[socket.socket], parts: list[slice], gradient: np.ndarray) -> np.ndarray:
    """Pushes every server its slice; returns the present weights."""
    for server, part in zip(servers, parts, strict=True):
        server.sendall(gradient[part].tobytes())
    return np.concatenate(
        [
            np.frombuffer(receive(server, 8 * (part.stop - part.start)))
            for server, part in zip(servers, parts, strict=True)
        ]
    )


def train(servers: list[socket.socket], rank: int, workers: int, steps: int, batch_size: int) -> None:
    """Softmax regression on every `workers`-th sample."""
    x, y = load_digits(return_X_y=True)
    x = np.hstack([x / 16.0, np.ones((len(x), 1))])
    test, x_mine, y_mine = slice(0, 400), x[400:][rank::workers], y[400:][rank::workers]
    parts = slices(len(servers))
    generator = np.random.default_rng((SEED, rank))
    flat = exchange(servers, parts, np.zeros(SHAPE[0] * SHAPE[1]))
    start = time.perf_counter()
    for step in range(1, steps + 1):
        chosen = generator.integers(len(x_mine), size=batch_size)
        logits = x_mine[chosen] @ flat.reshape(SHAPE)
        exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
        errors = exponentials / exponentials.sum(axis=1, keepdims=True)
        errors[np.arange(batch_size), y_mine[chosen]] -= 1.0
        flat = exchange(servers, parts, (x_mine[chosen].T @ errors / batch_size).ravel())
        if step % max(1, steps // 10) == 0:
            accuracy = np.mean(np.argmax(x[test] @ flat.reshape(SHAPE), axis=1) == y[test])
            seconds = time.perf_counter() - start
            print(
                f"worker {rank}  step {step:6d}/{steps}  accuracy {accuracy:.4f}  {seconds:6.2f} s",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--learning-rate", type=float, default=0.1)
    options = parser.parse_args()
    rank, workers = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    port = int(os.environ["MASTER_PORT"])
    large = os.environ.get("PENSTOCK_PEERS_FILE")  # of a gang too large for a variable
    peers = json.loads(Path(large).read_text() if large else os.environ["PENSTOCK_PEERS"])
    servers = [peer for peer in peers if peer["role"] == "ps"]
    # One port was given to the gang: server number i takes the i-th from there.
    addresses = [(peer["address"], port + number) for number, peer in enumerate(servers)]
    if os.environ["PENSTOCK_ROLE"] == "ps":
        number = [peer["rank"] for peer in servers].index(rank)
        part = slices(len(servers))[number]
        serve(addresses[number], np.zeros(part.stop - part.start), workers, options.learning_rate)
        return
    train([connect(address) for address in addresses], rank, workers, options.steps, options.batch_size)


if __name__ == "__main__":
    main()
