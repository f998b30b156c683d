"""Checks of one machine: Python, disk, GPUs, and the needs of the services whose settings are given. Nothing
is changed or created."""

import os
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from penstock.cli.operations.doctor import Finding, checked
from penstock.errors import ConfigurationError
from penstock.local.doctor.node_machine import gpus_here, node_findings
from penstock.local.doctor.reach import database_findings, dated, log_findings
from penstock.private_files import read_private_text
from penstock.runtime.settings import Settings
from penstock.text.redaction import postgres_problem

MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 1 << 30  # of a state folder: journals are small, tasks' logs have 64 MiB each
MIN_FREE_SHARE = 0.05
NODE_SETTINGS = ("PENSTOCK_NODE_", "PENSTOCK_TASK_USER", "PENSTOCK_MACHINE_ID", "PENSTOCK_SECRETS_DIR")
"""Prefixes of a node-reporter's variables."""
ARCHIVE = "PENSTOCK_NODE_LOG_ARCHIVE"
OF_GATEWAY_TOO = ("PENSTOCK_NODE_LOG_CA", "PENSTOCK_NODE_LOG_KEY", ARCHIVE)
SERVICE_SETTINGS = ("PENSTOCK_GATEWAY_", "PENSTOCK_OPERATOR_KEY", "PENSTOCK_TOKENS")
LOG_SETTINGS = ("PENSTOCK_LOG", "PENSTOCK_LOG_FILE", "PENSTOCK_DSN", "PENSTOCK_DSN_FILE")
OF_SERVICES = ("PENSTOCK_CELL", "PENSTOCK_CELL_INDEX", "PENSTOCK_OTLP", "PENSTOCK_TRACE_RATIO")


def machine_findings(env: Mapping[str, str], *, whole: bool = False) -> Iterator[Finding]:
    """Checks of this machine with the settings of `env`. `whole`: these are all settings of a service, so a
    missing one is a finding."""
    node = any(name.startswith(NODE_SETTINGS) and name not in OF_GATEWAY_TOO for name in env)
    new = sys.version_info[:2] >= MIN_PYTHON
    yield Finding("Python", platform.python_version(), "" if new else "use Python 3.11 or newer")
    if not node:
        yield gpus_here()
    yield from checked("disk", lambda: _disk(env))
    yield from _private(env)
    yield from checked("settings", lambda: _settings(env, node=node, whole=whole))
    yield from checked("operator key", lambda: _operator_key(env))
    yield from checked("tokens", lambda: _tokens(env))
    yield from checked("output's archive", lambda: _log_archive(env))
    yield from checked("certificate", lambda: _certificate(env))
    log_url = _url(env, "PENSTOCK_LOG") or _url(env, "PENSTOCK_DSN")
    dsn = _url(env, "PENSTOCK_DSN")
    index = env.get("PENSTOCK_CELL_INDEX") or "0"
    if log_url:
        cell_index = int(index) if index.isdecimal() else 0
        yield from checked("log", lambda: log_findings(log_url, node=node, cell_index=cell_index))
    if dsn and postgres_problem(dsn) is None:
        yield from checked("Postgres", lambda: database_findings(dsn, env.get("PENSTOCK_CELL") or "default"))
    if node:
        yield from node_findings(env, log_url)


def _url(env: Mapping[str, str], variable: str) -> str:
    """The value of PENSTOCK_LOG or PENSTOCK_DSN, or the content of its file;
    empty where the file cannot be used."""
    if env.get(variable):
        return env[variable]
    path = env.get(f"{variable}_FILE")
    try:
        return read_private_text(f"{variable}_FILE", Path(path))[0].strip() if path else ""
    except ConfigurationError:
        return ""  # `_private` reports it


def _settings(env: Mapping[str, str], *, node: bool, whole: bool) -> Iterator[Finding]:
    """The settings that all services share, parsed as services parse them. Settings in files have findings of
    their own."""
    named = {name for name, text in env.items() if text}
    service = whole and any(name.startswith(SERVICE_SETTINGS) for name in named)
    if not node and not service and not named & {*OF_SERVICES, *LOG_SETTINGS}:
        return
    if not named & {*LOG_SETTINGS}:
        remedy = "give its URL in a file, PENSTOCK_LOG_FILE (mode 0600)"
        yield Finding("log", "neither PENSTOCK_LOG nor PENSTOCK_LOG_FILE is set", remedy)
    elif service and not named & {"PENSTOCK_DSN", "PENSTOCK_DSN_FILE"}:
        remedy = (
            "give its URL in a file, PENSTOCK_DSN_FILE (mode 0600): projector and gateway need it, the "
            "others start sooner"
        )
        yield Finding("Postgres", "neither PENSTOCK_DSN nor PENSTOCK_DSN_FILE is set", remedy)
    plain = {name: text for name, text in env.items() if not name.endswith("_FILE")}
    Settings.from_env(
        {**plain, "PENSTOCK_LOG": _url(env, "PENSTOCK_LOG") or "-", "PENSTOCK_DSN": _url(env, "PENSTOCK_DSN")}
    )


def _private(env: Mapping[str, str]) -> Iterator[Finding]:
    """Files with passwords: readable here, and by their owner alone."""
    for variable in ("PENSTOCK_LOG_FILE", "PENSTOCK_DSN_FILE", "PENSTOCK_NODE_TOKEN_FILE"):
        path = env.get(variable)
        if path:

            def look(variable: str = variable, path: str = path) -> Iterator[Finding]:
                text, _ = read_private_text(variable, Path(path))
                empty = "" if text.strip() else "it is empty: write the URL or token into it"
                yield Finding("private file", f"{variable}: {path}", empty)

            yield from checked("private file", look)


def _operator_key(env: Mapping[str, str]) -> Iterator[Finding]:
    if env.get("PENSTOCK_OPERATOR_KEY"):
        from penstock.runtime.keys.node_keys import operator_key

        key = operator_key(env)
        yield Finding(
            "operator key",
            "trusted: every writer of the log" if key is None else env["PENSTOCK_OPERATOR_KEY"],
        )


def _log_archive(env: Mapping[str, str]) -> Iterator[Finding]:
    """The archive of tasks' output; the packages for its store must be installed."""
    if env.get(ARCHIVE):
        from penstock.runtime.files.log_archive import LogArchive

        yield Finding("output's archive", LogArchive(env[ARCHIVE]).name)


def _tokens(env: Mapping[str, str]) -> Iterator[Finding]:
    if env.get("PENSTOCK_TOKENS"):
        from penstock_services.gateway.shell.access.tokens import TokenFile

        count = TokenFile(Path(env["PENSTOCK_TOKENS"])).count
        remedy = "" if count else "no request is let in: `penstock token` makes one"
        yield Finding("tokens", f"{count} in {env['PENSTOCK_TOKENS']}", remedy)


def _certificate(env: Mapping[str, str]) -> Iterator[Finding]:
    """The gateway's own certificate, as its clients receive it."""
    if not any(name.startswith("PENSTOCK_GATEWAY_") and text for name, text in env.items()):
        return
    from penstock_services.gateway.shell.access.tls import certificate_shown
    from penstock_services.gateway.shell.options import Options

    options = Options.from_env(env)
    if options.certificate is None or options.key is None:
        yield Finding("certificate", "none: http, for this machine alone or behind a proxy that encrypts")
        return
    shown = certificate_shown(options.certificate, options.key)
    names = [name for _, name in shown.get("subjectAltName", ())]
    yield dated("certificate", shown["notAfter"], f"for {', '.join(names) or 'no name'}", options.certificate)


def _disk(env: Mapping[str, str]) -> Iterator[Finding]:
    """Free space of the folders for state and output."""
    from penstock_services.node_reporter.shell.isolation.users import own_name

    home = Path.home() / ".local/state/penstock"
    for variable in ("PENSTOCK_STATE_DIR", "PENSTOCK_LOG_DIR", "PENSTOCK_ARCHIVE"):
        folder = Path(env.get(variable) or home)
        if not env.get(variable) and variable != "PENSTOCK_STATE_DIR":
            continue
        there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
        usage, files = shutil.disk_usage(there), os.statvfs(there)
        low = usage.free < max(MIN_FREE_BYTES, MIN_FREE_SHARE * usage.total)
        found = f"{usage.free / (1 << 30):.1f} GiB free for {folder}"
        if files.f_files and files.f_favail < MIN_FREE_SHARE * files.f_files:
            low, found = True, f"{found}, {files.f_favail} of {files.f_files} inodes"
        remedy = "free some: the journal, and so every order, waits for the disk" if low else ""
        if not os.access(there, os.W_OK | os.X_OK):
            remedy = (
                f"let {own_name()} write to {there}, or set {variable}; run the doctor as the service's user"
            )
        yield Finding("disk", found, remedy)
