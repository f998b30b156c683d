"""Shell completion of jobs' names and ids, and of nodes: one short request to the gateway, and no output
where it fails."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from penstock.client import Client

LIMIT_MS = 700  # the shell waits for it
MAX_OFFERED = 50
MAX_LOOKED_AT = 200  # of the latest jobs


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs with this prefix, the latest first, then ids."""
    try:
        return _jobs(ctx.find_root().params, incomplete)
    except Exception:  # noqa: BLE001 - a message in the middle of a line that is being typed helps no one
        return []


def complete_node(ctx: typer.Context, incomplete: str) -> list[str]:
    """Ids of nodes with this prefix."""
    try:
        with _asking(ctx.find_root().params) as client:
            return [node.node_id for node in client.nodes() if node.node_id.startswith(incomplete)][
                :MAX_OFFERED
            ]
    except Exception:  # noqa: BLE001 - as for jobs
        return []


@contextmanager
def _asking(options: dict[str, Any]) -> "Iterator[Client]":
    from penstock.cli.signals import time_limit
    from penstock.client import Client  # an HTTP client, which other completions do not need

    with (
        time_limit(LIMIT_MS),
        Client(
            options.get("server"), token_file=options.get("token_file"), ca=options.get("ca"), tries=1
        ) as client,
    ):
        yield client


def _jobs(options: dict[str, Any], incomplete: str) -> list[str]:
    with _asking(options) as client:
        names = [job["name"] for job in client.get("/v1/jobs", limit=MAX_LOOKED_AT)["jobs"]]
        found = [name for name in names if name and name.startswith(incomplete)]
        if incomplete and len(incomplete) <= 128:
            same = client.get("/v1/jobs", prefix=incomplete, limit=MAX_OFFERED)["jobs"]
            found += [job["job_id"] for job in same]
    return list(dict.fromkeys(found))[:MAX_OFFERED]
