"""Completion of jobs' names and ids in the shell: one short question to the gateway, and silence where it fails."""

from typing import Any

import typer

LIMIT_MS = 700  # the shell waits for it
MAX_OFFERED = 50
MAX_LOOKED_AT = 200  # of the latest jobs


def complete_job(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of jobs, the latest first, then ids; those that start so."""
    try:
        return _jobs(ctx.find_root().params, incomplete)
    except Exception:  # noqa: BLE001 - a message in the middle of a line that is being typed helps no one
        return []


def _jobs(options: dict[str, Any], incomplete: str) -> list[str]:
    from penstock.cli.signals import time_limit
    from penstock.client import Client  # an HTTP client, which other completions do not need

    with (
        time_limit(LIMIT_MS),
        Client(
            options.get("server"), token_file=options.get("token_file"), ca=options.get("ca"), tries=1
        ) as client,
    ):
        names = [job["name"] for job in client.get("/v1/jobs", limit=MAX_LOOKED_AT)["jobs"]]
        found = [name for name in names if name and name.startswith(incomplete)]
        if incomplete and len(incomplete) <= 128:
            same = client.get("/v1/jobs", prefix=incomplete, limit=MAX_OFFERED)["jobs"]
            found += [job["job_id"] for job in same]
    return list(dict.fromkeys(found))[:MAX_OFFERED]
