"""A service that begins before its secrets are there, as containers do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.waiting import wait_until

SERVICES = (
    *("batcher", "contention_guard", "estimator", "gateway", "migrator", "node_reporter"),
    *("placer", "projector"),
)


def started(service: str, **settings: str) -> "subprocess.Popen[str]":
    options = ["--node-id", "n1", "--allow-root", "--state-dir", settings["HOME"]]
    argv = [sys.executable, "-m", f"penstock_services.{service}"]
    env = {name: text for name, text in os.environ.items() if not name.startswith("PENSTOCK_")} | settings
    return subprocess.Popen(
        argv + (options if service == "node_reporter" else []),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
    )


@pytest.mark.parametrize("service", SERVICES)
def test_a_missing_url_is_a_sentence_with_the_remedy(service: str, tmp_path: Path) -> None:
    """The volume of secrets is mounted late: a supervisor must start the service again, and its log must not
    fill with tracebacks."""
    child = started(service, HOME=str(tmp_path), PENSTOCK_LOG_FILE=f"{tmp_path}/log.url")
    output, errors = child.communicate()
    assert (child.returncode, output) == (1, ""), errors
    assert errors.strip().endswith(
        f"PENSTOCK_LOG_FILE: {tmp_path}/log.url is missing; `python -m penstock.local.postgres_setup --node "
        "NODE` writes one for each node"
    )
    assert errors.count("\n") == 1


@pytest.mark.parametrize("service", ["gateway", "placer"])
def test_a_missing_operators_key_is_one_too(service: str, tmp_path: Path) -> None:
    """The keys are made by another container, which has not run."""
    key = tmp_path / "operator.key"
    nowhere = "postgresql://127.0.0.1:1/none"
    child = started(service, HOME=str(tmp_path), PENSTOCK_DSN=nowhere, PENSTOCK_OPERATOR_KEY=str(key))
    _, errors = child.communicate()
    assert child.returncode == 1, errors
    assert errors.endswith(
        f"{key} is missing; make one for placer and gateway with `head -c 32 /dev/urandom`\n"
    )
    assert errors.count("\n") == 1


def test_a_ready_service_says_so_at_its_socket(dsn: str, tmp_path: Path) -> None:
    """A container's health check asks the process itself: a file that it once wrote proves nothing."""
    health = tmp_path / "health"
    program = Path(__file__).parents[3] / "infra/images/inside/health.py"
    ask = [sys.executable, "-S", "-E", str(program), str(health)]
    assert subprocess.run(ask, check=False, capture_output=True).returncode == 1
    child = started("projector", HOME=str(tmp_path), PENSTOCK_DSN=dsn, PENSTOCK_HEALTH=str(health))
    try:
        wait_until(
            lambda: subprocess.run(ask, check=False, capture_output=True).returncode == 0, "the answer"
        )
        os.kill(child.pid, 19)  # SIGSTOP: it lives, and does not work
        assert subprocess.run(ask, check=False, capture_output=True).returncode == 1
        os.kill(child.pid, 18)
    finally:
        child.terminate()
        child.communicate()
    assert child.returncode == 0
