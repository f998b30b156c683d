"""The same inputs give the same ledger, byte for byte, in any process and under any hash seed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
from tests.bench.core import CoreBench
bench = CoreBench(24, seed=5, profile={profile!r})
bench.fill()
bench.churn(1500)
print(len(bench.ledger), hashlib.sha256(b"".join(bench.ledger)).hexdigest())
"""


def ledger_of(profile: str, hash_seed: str) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(profile=profile)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.parametrize("profile", ["liquid", "random", "k8s-default", "even", "fifo"])
def test_the_ledger_does_not_depend_on_the_process(profile: str) -> None:
    """A set or dict whose order leaks into a choice would make replay differ on the next machine."""
    ledgers = {ledger_of(profile, seed) for seed in ("0", "1", "4242")}
    assert len(ledgers) == 1, ledgers
