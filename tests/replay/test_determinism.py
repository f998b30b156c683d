"""The same inputs give the same ledger, byte for byte, in any process and under any hash seed."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import hashlib
import sys
from tests.bench.core import CoreBench
for profile in sys.argv[1:]:
    bench = CoreBench(24, seed=5, profile=profile)
    bench.fill()
    bench.churn(1500)
    print(profile, len(bench.ledger), hashlib.sha256(b"".join(bench.ledger)).hexdigest())
"""
PROFILES = ("liquid", "random", "k8s-default", "even", "fifo")


def ledgers(hash_seed: str) -> dict[str, str]:
    """By profile, of one process: length and hash."""
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *PROFILES],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(line.split(maxsplit=1) for line in done.stdout.splitlines())


@pytest.fixture(scope="module")
def by_process() -> list[dict[str, str]]:
    return [ledgers(hash_seed) for hash_seed in ("0", "1", "4242")]


@pytest.mark.parametrize("profile", PROFILES)
def test_the_ledger_does_not_depend_on_the_process(profile: str, by_process: list[dict[str, str]]) -> None:
    """A set or dict whose order leaks into a choice would make replay differ on the next machine."""
    found = {ledgers[profile] for ledgers in by_process}
    assert len(found) == 1, found
