"""Every real part that tests of the CI run use, obtained before they run: `python -m infra.devservers.parts`.

A build takes minutes and a test may not. `prepare_for` is pytest's hook for the same: it obtains only what
the collected tests are marked with.
"""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.devservers.containers.compose import obtain_compose
from infra.devservers.containers.podman import obtain_containers
from infra.devservers.helm import obtain_helm
from infra.devservers.jaeger import obtain_binary
from infra.devservers.kafka import obtain_parts
from infra.devservers.kubernetes_parts import obtain_kwok
from infra.devservers.kubernetes_parts import obtain_parts as obtain_kubernetes_parts
from infra.devservers.launchers import obtain_launchers
from infra.devservers.processes import LaunchError

PARTS: dict[str, Callable[[], Path]] = {
    "kafka": obtain_parts,
    "jaeger": obtain_binary,
    "launchers": obtain_launchers,
    "kubernetes": obtain_kubernetes_parts,
    "helm": obtain_helm,
}
"""Pytest marker → how to get its part."""
SLOW_PARTS: dict[str, Callable[[], Path]] = {
    "compose": obtain_compose,
    "containers": obtain_containers,
    "kwok": obtain_kwok,
}
"""The same, of tests that the CI run leaves out."""


def prepare_for(session: pytest.Session) -> None:
    """For a conftest: `pytest_collection_finish = prepare_for`. A part that cannot be had is reported here
    once; each test that needs it then fails with the same remedy."""
    if session.config.option.collectonly:
        return
    marks = {mark.name for item in session.items for mark in item.iter_markers()}
    wanted = [obtain for name, obtain in (PARTS | SLOW_PARTS).items() if name in marks]
    capture = session.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        for obtain in wanted:
            try:
                obtain()
            except LaunchError as error:
                print(f"\npenstock: {error}", file=sys.stderr)


def main() -> int:
    """Obtains the parts of the CI run; prints where each lies."""
    try:
        for name, obtain in PARTS.items():
            print(f"{name}: {obtain()}")
    except LaunchError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
