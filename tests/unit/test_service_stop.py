"""A service that is not ready yet obeys SIGTERM: it waits for a log or a database that may stay away for long."""

import os
import signal
import subprocess
import sys

from infra.devservers.processes import free_port

ENDS_S = 10.0  # much less than the 30 s that a client waits for Kafka


def test_a_stop_ends_a_service_that_waits_for_its_log() -> None:
    """An operator starts a projector before its broker, and changes their mind. All services share what obeys."""
    env = os.environ | {
        "PENSTOCK_LOG": f"kafka://127.0.0.1:{free_port()}",
        "PENSTOCK_DSN": "postgresql://127.0.0.1:1/none",
        "PENSTOCK_LOG_LEVEL": "WARNING",
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock_services.projector"], env=env, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stderr is not None
        assert "Kafka" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait(ENDS_S) == 0
    finally:
        process.kill()
        process.wait()
