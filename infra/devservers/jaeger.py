"""A real Jaeger server on loopback: takes OTLP over HTTP, stores traces in memory, answers queries.

with jaeger_server() as jaeger:
    ... export spans to jaeger.otlp_endpoint ...
    spans = jaeger.trace(trace_id)
"""

import contextlib
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infra.devservers.build_cache import INFRA, build_environment
from infra.devservers.go_parts import obtain_program, pinned
from infra.devservers.processes import (
    POLL_S,
    Child,
    LaunchError,
    as_command,
    free_port,
    on_free_ports,
    until_signalled,
)

CONFIG = INFRA / "jaeger" / "config.yaml"
PACKAGE = "github.com/jaegertracing/jaeger"
PROBE_TIMEOUT_S = 5.0  # of one look at its health; then it is asked again
JAEGER_NOTES = "@jaeger@"  # begins the names of attributes that Jaeger adds itself
PORTS = ("OTLP", "QUERY", "GRPC", "HEALTH")


def pinned_version() -> str:
    """Jaeger 2's version. Its Go module is numbered v1.N for release 2.(N - 63): v1.76.0 is 2.13.0."""
    _, minor, patch = pinned("jaeger", PACKAGE).split(".")
    return f"2.{int(minor) - 63}.{patch}"


def obtain_binary() -> Path:
    """The Jaeger program, built once. Raises `LaunchError` with the remedy."""
    return obtain_program(
        "jaeger",
        pinned_version(),
        f"{PACKAGE}/cmd/jaeger",
        expected="3 to 7 minutes on two cores",
        override="PENSTOCK_JAEGER",
    )


class JaegerServer:
    """One Jaeger process; its traces are lost when it ends."""

    def __init__(self, folder: Path) -> None:
        """`folder` receives its log. Starts nothing yet."""
        self._binary = obtain_binary()
        self._log_path = folder / "jaeger.log"
        self._child: Child | None = None
        self._ports: dict[str, int] = {}

    @property
    def otlp_endpoint(self) -> str:
        """Base URL for OTLP over HTTP (`PENSTOCK_OTLP`); exporters append `/v1/traces`."""
        return f"http://127.0.0.1:{self._ports['OTLP']}"

    @property
    def query_url(self) -> str:
        """Base URL of the query API."""
        return f"http://127.0.0.1:{self._ports['QUERY']}"

    @property
    def pid(self) -> int:
        """Raises `LaunchError` when it was never started."""
        if self._child is None:
            raise LaunchError("Jaeger was not started")
        return self._child.pid

    def start(self) -> None:
        """Starts it and waits until it accepts spans and answers. Raises `LaunchError` with the log's
        tail."""
        on_free_ports(self._start_anew)

    def _start_anew(self) -> None:
        self._ports = {name: free_port() for name in PORTS}
        env = build_environment(
            **{f"PENSTOCK_JAEGER_{name}_PORT": str(port) for name, port in self._ports.items()}
        )
        argv = [str(self._binary), "--config", str(CONFIG)]
        self._child = Child("jaeger", argv, log_path=self._log_path, env=env)
        try:
            self._child.wait_ready(self._ready)
        except LaunchError:
            self._child.kill9()
            raise

    def stop(self) -> None:
        """Ends it (SIGTERM, then SIGKILL). Idempotent."""
        if self._child is not None:
            self._child.stop()

    def trace(
        self, trace_id: str, timeout_s: float | None = None, *, spans_at_least: int = 1
    ) -> list[dict[str, Any]]:
        """The trace's spans in OTLP's JSON form, each with its resource's attributes under `"resource"`.

        `trace_id`: 32 hex digits. Attributes become plain mappings. Polls, since a span is stored about 50 ms
        after it was sent; the order is Jaeger's. Raises `LaunchError` when Jaeger has ended, and
        `TimeoutError` when `timeout_s` passes (None: never) with fewer than `spans_at_least` spans.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            spans = self._stored_spans(trace_id)
            if len(spans) >= spans_at_least:
                return spans
            if self._child is None or not self._child.running:
                raise LaunchError("Jaeger does not run")
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(
                    f"Jaeger has {len(spans)} of ≥ {spans_at_least} spans of {trace_id} after {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def _stored_spans(self, trace_id: str) -> list[dict[str, Any]]:
        try:
            answer = _get_json(f"{self.query_url}/api/v3/traces/{trace_id}")
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:  # not stored yet
                return []
            raise
        return [
            {
                **span,
                "attributes": _plain(span.get("attributes", [])),
                "resource": _plain(group.get("resource", {}).get("attributes", [])),
            }
            for group in answer["result"].get("resourceSpans", [])
            for scope in group.get("scopeSpans", [])
            for span in scope.get("spans", [])
        ]

    def _ready(self) -> bool:
        health = f"http://127.0.0.1:{self._ports['HEALTH']}/status"
        try:
            return bool(_get_json(health, PROBE_TIMEOUT_S)["status"] == "StatusOK")
        except (OSError, ValueError, KeyError):
            return False


def _get_json(url: str, timeout_s: float | None = None) -> Any:
    """`timeout_s` None: as long as the server holds the connection."""
    with urllib.request.urlopen(url, timeout=timeout_s) as answer:
        return json.loads(answer.read())


def _plain(attributes: list[dict[str, Any]]) -> dict[str, Any]:
    """Without Jaeger's own attributes: it adds them to a span that is read before its parent arrived, and
    they stay."""
    return {
        attribute["key"]: _plain_value(attribute["value"])
        for attribute in attributes
        if not attribute["key"].startswith(JAEGER_NOTES)
    }


def _plain_value(value: dict[str, Any]) -> Any:
    """OTLP JSON encodes 64-bit numbers as strings: {"intValue": "7"}."""
    ((kind, content),) = value.items()
    if kind == "intValue":
        return int(content)
    if kind == "arrayValue":
        return [_plain_value(item) for item in content.get("values", [])]
    if kind == "kvlistValue":
        return _plain(content.get("values", []))
    return content


@contextlib.contextmanager
def jaeger_server() -> Iterator[JaegerServer]:
    """A started Jaeger; afterwards neither process nor file is left. Raises `LaunchError`."""
    with tempfile.TemporaryDirectory(prefix="penstock-jaeger-") as folder:
        server = JaegerServer(Path(folder))
        try:
            server.start()
            yield server
        finally:
            server.stop()


def main() -> int:
    """`make jaeger`."""
    ArgumentParser(description="A real Jaeger on loopback, until Ctrl-C.").parse_args()

    def serve() -> None:
        with jaeger_server() as server:
            until_signalled(
                f"Jaeger {pinned_version()} is ready (process {server.pid}); Ctrl-C ends it and forgets its "
                "traces.\n"
                f"In another shell, before Penstock starts:\n\n"
                f"  export PENSTOCK_OTLP={server.otlp_endpoint}\n\n"
                f"This build has no web pages. Read a trace by its id (32 hex digits):\n\n"
                f"  curl -s {server.query_url}/api/v3/traces/TRACE_ID | python3 -m json.tool\n"
            )

    return as_command(serve)


if __name__ == "__main__":
    sys.exit(main())
