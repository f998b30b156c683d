"""Helm, which renders, checks and installs the chart `infra/helm/penstock`."""

from pathlib import Path

from infra.devservers.build_cache import INFRA
from infra.devservers.go_parts import obtain_program, pinned

MODULE = "helm.sh/helm/v3"
CHART = INFRA / "helm" / "penstock"
_FOLDER = "helm/tool"


def obtain_helm() -> Path:
    """The `helm` program, built once. Raises `LaunchError` with the remedy."""
    return obtain_program(
        "helm",
        pinned(_FOLDER, MODULE).lstrip("v"),
        f"{MODULE}/cmd/helm",
        expected="2 to 7 minutes on two cores",
        override="PENSTOCK_HELM",
        folder=_FOLDER,
    )
