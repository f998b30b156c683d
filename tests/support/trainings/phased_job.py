"""A training of real processes with a launch, iterations and a save, and the times of its phases as the
ledger has them."""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from tests.support.installation.system import Gateway
from tests.support.waiting import wait_until

SCRIPT = """
import os, sys, time
import numpy as np
from penstock.sdk.phases import phase
from penstock.sdk.progress import progress
launch_s, train_s, save_s = map(float, sys.argv[1:4])
begun = time.monotonic()
samples = np.random.default_rng(0).random(1 << 20)
time.sleep(max(0.0, launch_s - (time.monotonic() - begun)))
phase("train")
iterations = 50
for done in range(1, iterations + 1):
    samples += 1.0
    time.sleep(train_s / iterations)
    progress(done, iterations)
phase("save")
begun = time.monotonic()
with open("model.npy", "wb") as file:
    np.save(file, samples)
    file.flush()
    os.fsync(file.fileno())
time.sleep(max(0.0, save_s - (time.monotonic() - begun)))
"""
"""Arguments: seconds of launch (NumPy's import comes on top), training and save."""


class Times(NamedTuple):
    """Of the last attempt, ms by its node's clock."""

    started_ms: int
    opened_ms: int | None
    """When it got its GPU, where it launched before."""
    train_ms: int
    save_ms: int
    exited_ms: int


def phased(launch_s: float, train_s: float, save_s: float) -> Sequence[str]:
    return [sys.executable, "-c", SCRIPT, str(launch_s), str(train_s), str(save_s)]


def times(gateway: Gateway, job_id: str) -> Times:
    """Of a job that has succeeded, once all of it can be read."""
    at: dict[str, Any] = {}

    def complete() -> bool:
        for event in gateway.get(f"/v1/jobs/{job_id}/events?limit=1000")["events"]:
            data = event["data"]
            match event["type"]:
                case "penstock.task.started":
                    at.update(started_ms=data["started_ms"], opened_ms=data.get("opened_ms"))
                case "penstock.task.phase_changed" if data["phase"] in ("train", "save"):
                    at[f"{data['phase']}_ms"] = data["at_ms"]
                case "penstock.task.exited":
                    at["exited_ms"] = data["exited_ms"]
        return len(at) == len(Times._fields)

    wait_until(complete, lambda: f"the times of {job_id}, of which these are known: {at}")
    return Times(**at)
