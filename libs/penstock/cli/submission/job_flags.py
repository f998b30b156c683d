"""Flags of `penstock submit` as fields of a job file."""

from collections.abc import Mapping
from typing import Any

import typer

from penstock.cli.submission import jobspec
from penstock.cli.terminals import attach

_LIKEWISE = (
    "name owner parameter_servers model batch_size global_batch_size category iterations target_loss "
    "workdir sync queue_timeout run_timeout qos deadline grace checkpoint preemptible prelaunch priority "
    "companions tied_grace interactive may_submit"
)
FIELDS = {name: name for name in _LIKEWISE.split()} | {"traits": "trait", "gpu_models": "gpu_model"}
"""Field of a job file → the parameter of `submit` that sets the same."""
NEEDS = {name: name for name in ("gpus", "cores", "host_memory", "gpu_memory", "bandwidth")}
NODES = {"only": "only_node", "exclude": "exclude_node", "prefer": "prefer_node"}
"""The same within `resources` and `nodes`."""


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given; those that may be repeated as lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flags.items()
        if value not in (None, (), [])
    }


def _set(params: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return given({field: params[flag] for field, flag in names.items()})


def fields(ctx: typer.Context, known: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of the job file's top level from flags; `known`: the file's own. Raises `Stop`."""
    params = ctx.params
    places = (params["venv"], params["conda"], params["container"])
    more = {
        "workers": jobspec.workers(known, params["min_workers"], params["workers"]),
        "environment": jobspec.environment(*places, path=params["path"]),
    }
    return _set(params, FIELDS) | given(more)


def sections(ctx: typer.Context) -> dict[str, dict[str, Any]]:
    """Sections of the job file from flags. Raises `Stop`."""
    params = ctx.params
    env, secret, label = (list(params[flag] or ()) for flag in ("env", "secret", "label"))
    env = attach.with_term(params["interactive"], env)
    return {
        "resources": _set(params, NEEDS),
        "nodes": _set(params, NODES),
        "retry": {"max_attempts": params["max_attempts"]},
        "env": jobspec.variables(env, secret),
        "labels": jobspec.pairs(label, "--label"),
    }
