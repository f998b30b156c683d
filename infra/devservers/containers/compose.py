"""Docker Compose as a checker of `docker-compose.yml`: reads and validates it without a container engine."""

from pathlib import Path

from infra.devservers.go_parts import obtain_program, pinned

MODULE = "github.com/docker/compose/v2"


def obtain_compose() -> Path:
    """The `docker-compose` program, built once. Raises `LaunchError` with the remedy."""
    return obtain_program(
        "compose",
        pinned("compose", MODULE).lstrip("v"),
        f"{MODULE}/cmd",
        expected="about 90 seconds on two cores",
        override="PENSTOCK_COMPOSE",
    )
