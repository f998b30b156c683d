"""Training with four stages per iteration, one of which takes most of the time: reads a batch from disk,
prepares it on one core, learns from it, averages the gradient with a peer over TCP.

    python tilt/jobs/four_stages.py --bound storage --folder /tmp/stages --iterations 200

Four of them, each bound by another resource, retain most of their speed on one GPU if they take turns (Muri,
SIGCOMM '22, Table 2).

Storage is the disk itself (O_DIRECT where the file system has it), the CPU one core. The learning and the
link are stand-ins, since no GPU and no network is needed here: the computing is real, and so are the bytes,
but a piece of it takes a fixed time, in which one process alone has the device. So two processes that use it
at once get half of it each, as of a GPU that runs the kernels of several processes one after the other. The
work of a stage is measured once per folder and the same afterwards, however busy the machine is.
"""

import argparse
import fcntl
import json
import mmap
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np

from penstock.sdk.checkpoint import checkpoint
from penstock.sdk.progress import progress
from penstock.sdk.stages import STAGES, iteration, stage

LONG_S, SHORT_S = 0.06, 0.012  # the stage by which it is bound, and each other one
PIECE_S = 0.002  # of a stand-in's time
BLOCK = 1 << 20  # bytes of one read
FILE_BLOCKS = 64
FEATURES, ROWS = 64, 2_048  # FEATURES * ROWS float64 are one block
PIECE_BYTES = 1 << 16  # of one piece on the link
MEASURED = 12  # pieces, the fastest of which counts: others may have had to wait for a core
SEED = 5


class Device:
    """A stand-in that serves one process at a time: each piece of work takes `PIECE_S`, for any process."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w")  # noqa: SIM115 - as long as the process

    def run(self, work: Callable[[], object]) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)
        ends = time.perf_counter() + PIECE_S
        work()
        time.sleep(max(0.0, ends - time.perf_counter()))
        fcntl.flock(self._file, fcntl.LOCK_UN)


class Disk:
    """Blocks of a file of samples, read past the page cache."""

    def __init__(self, path: Path) -> None:
        generator = np.random.default_rng(SEED)
        block = generator.standard_normal((ROWS, FEATURES)).tobytes()
        with open(path, "wb") as file:
            for _ in range(FILE_BLOCKS):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except OSError:  # a file system in memory
            self._file = os.open(path, os.O_RDONLY)
        self._buffer = mmap.mmap(-1, BLOCK)  # begins at a page, as O_DIRECT wants it
        self._next = 0

    def read(self) -> None:
        os.preadv(self._file, [self._buffer], BLOCK * self._next)
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)
        self._next = (self._next + 1) % FILE_BLOCKS

    def samples(self) -> np.ndarray:
        """Of the block that was read last; shape (ROWS, FEATURES)."""
        return np.frombuffer(self._buffer, "f8").reshape(ROWS, FEATURES)


class Peer:
    """The other side of the link: sends back the bytes that it receives."""

    def __init__(self) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self._here = socket.create_connection(listener.getsockname())
        there, _ = listener.accept()
        listener.close()
        for end in (self._here, there):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=self._echo, args=(there,), daemon=True).start()

    def exchange(self, payload: bytes) -> bytes:
        self._here.sendall(payload)
        return _received(self._here, len(payload))

    def _echo(self, there: socket.socket) -> None:
        while payload := _received(there, PIECE_BYTES):
            there.sendall(payload)


def _received(end: socket.socket, size: int) -> bytes:
    """Empty: the other side has closed."""
    parts, left = [], size
    while left:
        part = end.recv(left)
        if not part:
            return b""
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


class Training:
    """Linear regression by gradient descent. `folder`: of the stand-ins, which all jobs on the GPU share, and
    of the files."""

    def __init__(self, folder: Path, name: str) -> None:
        self.done = 0
        self.loss = 0.0
        self.weights = np.zeros(FEATURES)
        self._target = np.random.default_rng(SEED).standard_normal(FEATURES)
        self._disk = Disk(folder / f"{name}.samples")
        self._peer = Peer()
        self._gpu, self._link = Device(folder / "gpu"), Device(folder / "link")
        self._disk.read()
        self._x = self._disk.samples()
        self._gradient = np.zeros(PIECE_BYTES // 8)

    def piece(self, name: str) -> None:
        """Of the work of a stage."""
        match name:
            case "storage":
                self._disk.read()
            case "cpu":
                raw = self._disk.samples()
                order = np.argsort(raw[:, 0])
                self._x = (raw[order] - raw.mean(axis=0)) / raw.std(axis=0)
            case "gpu":
                self._gpu.run(self._learn)
            case _:
                self._link.run(self._average)

    def _learn(self) -> None:
        errors = self._x @ (self.weights - self._target)
        self._gradient[:FEATURES] = self._x.T @ errors / ROWS
        self.weights -= 0.05 * self._gradient[:FEATURES]
        self.loss = float(np.mean(errors**2))

    def _average(self) -> None:
        theirs = np.frombuffer(self._peer.exchange(self._gradient.tobytes()))
        self._gradient = (self._gradient + theirs) / 2

    def save(self, folder: str) -> None:
        np.savez(f"{folder}/state.npz", weights=self.weights, done=self.done)

    def restore(self, folder: str) -> None:
        state = np.load(f"{folder}/state.npz")
        self.weights, self.done = state["weights"], int(state["done"])


def pieces_of(training: Training, name: str, seconds: float, known: Path) -> int:
    """Number of pieces of this stage that take so long on this machine when it is idle: as in the file
    `known`, else measured."""
    if not known.exists():
        times = []
        for _ in range(MEASURED):
            began = time.perf_counter()
            training.piece(name)
            times.append(time.perf_counter() - began)
        new = known.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(min(times)))
        new.replace(known)
    return max(1, round(seconds / json.loads(known.read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bound", choices=STAGES, required=True, help="by which resource")
    parser.add_argument("--folder", type=Path, required=True, help="that all jobs on the GPU share; is made")
    parser.add_argument("--iterations", type=int, default=1_000)
    parser.add_argument(
        "--until", type=Path, help="end when this file is there, at the latest after --iterations"
    )
    parser.add_argument(
        "--times", type=Path, help="a file for the second, since boot, at which each iteration ended"
    )
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    training = Training(options.folder, options.bound)
    pieces = {
        name: pieces_of(
            training, name, LONG_S if name == options.bound else SHORT_S, options.folder / f"{name}.measured"
        )
        for name in STAGES
    }
    checkpoint(training.save, training.restore)
    times = open(options.times or os.devnull, "a", buffering=1)  # noqa: SIM115 - as long as the process
    while training.done < options.iterations and not (options.until and options.until.exists()):
        iteration()
        for name in STAGES:
            with stage(name):
                for _ in range(pieces[name]):
                    training.piece(name)
        training.done += 1
        times.write(f"{time.monotonic()}\n")
        progress(training.done, None if options.until else options.iterations, training.loss)
    print(f"{training.done} iterations, {pieces} pieces of each stage, loss {training.loss:.3g}")


if __name__ == "__main__":
    main()
