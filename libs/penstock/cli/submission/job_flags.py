"""Flags for the fields of a job, made from their definitions, and what was given by them as fields of a job
file."""

import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import typer

from penstock.cli.submission import jobspec
from penstock.cli.terminals import attach
from penstock.model.jobs.job_fields import JobField, job_fields
from penstock.model.jobs.job_spec import JobSpec

FLAGS = {field.parameter: field for field in job_fields(JobSpec) if field.about.flag is not None}
"""Parameter of a command → the field that it sets."""
OTHERS = "*"
JOINED = ("workers", "min_workers", "env", "secrets", "labels")
"""Fields whose flags are not their keys in a job file, one for one."""


def taken(*order: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator: the command has these options in this order. Those that are no parameters of its own are
    flags for fields of a job, which it gets as further keyword arguments. `*`: all flags not named here."""
    names = " ".join(order).split()
    rest = [name for name in FLAGS if name not in names]
    names = [each for name in names for each in (rest if name == OTHERS else [name])]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = inspect.signature(command).parameters
        options = [own[name] if name in own else _option(name, FLAGS[name]) for name in names]
        keywords = (option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options)
        command.__signature__ = inspect.Signature([own["ctx"], *keywords])  # type: ignore[attr-defined]
        command.__annotations__ = {}
        return command

    return decorate


def _option(name: str, field: JobField) -> inspect.Parameter:
    kind, metavar = _value(field)
    about = field.about
    option = typer.Option(*about.options, metavar=about.metavar or metavar, help=about.flag or about.help)
    hint: Any = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=hint)


def _value(field: JobField) -> tuple[Any, str | None]:
    """Type of a flag's value, and what stands for one in the help; None: its type."""
    kind = get_args(field.kind)[0] if get_origin(field.kind) is Annotated else field.kind
    if field.unit:
        return str, field.about.example
    if get_origin(kind) is Literal:
        return (kind, None) if field.about.choice else (str, "|".join(get_args(kind)))
    if get_origin(kind) is tuple:
        each = get_args(kind)[0]
        return list[str], "|".join(get_args(each)) if get_origin(each) is Literal else None
    return (list[str] if get_origin(kind) is dict else kind), None


def given(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given; those that may be repeated as lists."""
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in flags.items()
        if value not in (None, (), [])
    }


def _of(flags: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The fields of a section that are given by flags of their own."""
    fields = ((name, field) for name, field in FLAGS.items() if field.section == section)
    return given({field.key: flags[name] for name, field in fields if field.key not in JOINED})


def fields(flags: Mapping[str, Any], known: Mapping[str, Any], *, path: bool) -> dict[str, Any]:
    """Fields of the job file's top level from flags; `known`: the file's own. Raises `Stop`."""
    more = {
        "workers": jobspec.workers(known, flags["min_workers"], flags["workers"]),
        "environment": jobspec.environment(_of(flags, "environment"), path=path),
    }
    return _of(flags, "") | given(more)


def sections(flags: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Sections of the job file from flags. Raises `Stop`."""
    env, secret, label = (list(flags[name] or ()) for name in ("env", "secret", "label"))
    env = attach.with_term(flags["interactive"], env)
    names = dict.fromkeys(field.section for field in FLAGS.values())
    return {name: _of(flags, name) for name in names if name not in ("", "environment")} | {
        "env": jobspec.variables(env, secret),
        "labels": jobspec.pairs(label, "--label"),
    }
