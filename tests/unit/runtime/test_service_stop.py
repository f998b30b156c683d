"""A service that is not ready yet obeys SIGTERM: it waits for a log or a database that may stay away for
long."""

import os
import signal
import socket
import subprocess
import sys

SERVICE = """
import runpy
from penstock.log.kafka import retries
retries.START_LIMIT_S = 1e6
runpy.run_module("penstock_services.projector", run_name="__main__")
"""
"""A projector that waits for its log until it is told to end."""


def test_a_stop_ends_a_service_that_waits_for_its_log() -> None:
    """An operator starts a projector before its broker, and changes their mind. All services share what
    obeys."""
    nobody = socket.socket()
    nobody.bind(("127.0.0.1", 0))  # and does not listen
    env = os.environ | {
        "PENSTOCK_LOG": f"kafka://127.0.0.1:{nobody.getsockname()[1]}",
        "PENSTOCK_DSN": "postgresql://127.0.0.1:1/none",
        "PENSTOCK_LOG_LEVEL": "WARNING",
    }
    process = subprocess.Popen([sys.executable, "-c", SERVICE], env=env, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        assert "Kafka" in process.stderr.readline()
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
    finally:
        process.kill()
        process.wait()
        nobody.close()
