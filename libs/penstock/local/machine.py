"""Checks of one machine: Python, disk, GPUs, and what the services need whose settings are given. Nothing is changed or created."""

import asyncio
import importlib.util
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from penstock.cli.doctor import Finding
from penstock.errors import ConfigurationError, PenstockError
from penstock.local.reach import database_findings, dated, gateway_findings, log_findings, names_of
from penstock.private_files import read_private_text
from penstock.redaction import without_passwords

MIN_PYTHON = (3, 11)
NVIDIA_SMI_TIMEOUT_S = 10.0
MIN_FREE_BYTES = 1 << 30  # of a state folder: journals are small, tasks' logs have 64 MiB each
MIN_FREE_SHARE = 0.05
NODE_SETTINGS = ("PENSTOCK_NODE_", "PENSTOCK_TASK_USER", "PENSTOCK_MACHINE_ID", "PENSTOCK_SECRETS_DIR")
"""Beginnings of variables that belong to a node-reporter's settings."""
OF_GATEWAY_TOO = ("PENSTOCK_NODE_LOG_CA", "PENSTOCK_NODE_LOG_KEY", "PENSTOCK_NODE_LOG_ARCHIVE")
NEEDED_BY_NODE = ("httpx", "psutil", "pynvml")


def machine_findings(env: Mapping[str, str]) -> Iterator[Finding]:
    """Of this machine, with the settings of `env`."""
    node = any(name.startswith(NODE_SETTINGS) and name not in OF_GATEWAY_TOO for name in env)
    new = sys.version_info[:2] >= MIN_PYTHON
    yield Finding("Python", platform.python_version(), "" if new else "use Python 3.11 or newer")
    yield _gpus_here()
    yield from _disk(env)
    yield from _private(env)
    yield from checked("operator key", lambda: _operator_key(env))
    yield from checked("tokens", lambda: _tokens(env))
    yield from checked("certificate", lambda: _certificate(env))
    log_url = _url(env, "PENSTOCK_LOG") or _url(env, "PENSTOCK_DSN")
    dsn = _url(env, "PENSTOCK_DSN")
    if log_url:
        yield from checked("log", lambda: log_findings(log_url, node=node))
    if dsn:
        yield from checked("Postgres", lambda: database_findings(dsn))
    if node:
        yield from _node(env, log_url)


def checked(what: str, look: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """What `look` finds; its error as a finding, whose remedy follows the first `; `."""
    try:
        yield from look()
    except (PenstockError, OSError) as error:
        problem, _, remedy = without_passwords(str(error)).partition("; ")
        yield Finding(what, problem, remedy or f"mend the settings of: {what}")
    except ModuleNotFoundError as error:
        yield Finding(
            what, f"not checked: {error.name} is not installed", "pip install 'penstock[local]' here"
        )


def _url(env: Mapping[str, str], variable: str) -> str:
    """The value of PENSTOCK_LOG or PENSTOCK_DSN, or of the file that stands for it; empty where that one cannot be used."""
    if env.get(variable):
        return env[variable]
    path = env.get(f"{variable}_FILE")
    try:
        return read_private_text(f"{variable}_FILE", Path(path))[0].strip() if path else ""
    except ConfigurationError:
        return ""  # `_private` has its finding


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
        from penstock.runtime.node_keys import operator_key

        key = operator_key(env)
        yield Finding(
            "operator key",
            "trusted: every writer of the log" if key is None else env["PENSTOCK_OPERATOR_KEY"],
        )


def _tokens(env: Mapping[str, str]) -> Iterator[Finding]:
    if env.get("PENSTOCK_TOKENS"):
        from penstock_services.gateway.shell.tokens import TokenFile

        count = TokenFile(Path(env["PENSTOCK_TOKENS"])).count
        remedy = "" if count else "no request is let in: `penstock token` makes one"
        yield Finding("tokens", f"{count} in {env['PENSTOCK_TOKENS']}", remedy)


def _certificate(env: Mapping[str, str]) -> Iterator[Finding]:
    """The gateway's own, as its clients are shown it."""
    if not any(name.startswith("PENSTOCK_GATEWAY_") and text for name, text in env.items()):
        return
    from penstock_services.gateway.shell.options import Options
    from penstock_services.gateway.shell.tls import certificate_shown

    options = Options.from_env(env)
    if options.certificate is None or options.key is None:
        yield Finding("certificate", "none: http, for this machine alone or behind a proxy that encrypts")
        return
    shown = certificate_shown(options.certificate, options.key)
    names = [name for _, name in shown.get("subjectAltName", ())]
    yield dated("certificate", shown["notAfter"], f"for {', '.join(names) or 'no name'}", options.certificate)


def _disk(env: Mapping[str, str]) -> Iterator[Finding]:
    """Of the folders for state and output."""
    home = Path.home() / ".local/state/penstock"
    for variable in ("PENSTOCK_STATE_DIR", "PENSTOCK_LOG_DIR", "PENSTOCK_ARCHIVE"):
        folder = Path(env.get(variable) or home)
        if not env.get(variable) and variable != "PENSTOCK_STATE_DIR":
            continue
        there = next(path for path in (folder, *folder.parents) if path.exists())
        usage = shutil.disk_usage(there)
        low = usage.free < max(MIN_FREE_BYTES, MIN_FREE_SHARE * usage.total)
        remedy = "free some: the journal, and so every order, waits for the disk" if low else ""
        if not os.access(there, os.W_OK):
            remedy = f"let {os.environ.get('USER') or os.geteuid()} write to {there}, or set {variable}"
        yield Finding("disk", f"{usage.free / (1 << 30):.1f} GiB free for {folder}", remedy)


def _node(env: Mapping[str, str], log_url: str) -> Iterator[Finding]:
    """What a node-reporter with these settings needs."""
    missing = [name for name in NEEDED_BY_NODE if importlib.util.find_spec(name) is None]
    if missing:
        yield Finding(
            "packages", f"missing: {', '.join(missing)}", "pip install 'penstock[node-reporter]' here"
        )
        return
    if not log_url:
        yield Finding(
            "log", "PENSTOCK_LOG is not set", "give its URL in a file, PENSTOCK_LOG_FILE (mode 0600)"
        )
    else:
        yield from checked("address", lambda: _address(env, log_url))
    yield from checked("certificate", lambda: _log_certificate(env))
    yield from checked("task user", lambda: _task_user(env))
    yield _machine_id(env)
    yield from checked("gateway here", lambda: gateway_findings(env))


def _address(env: Mapping[str, str], log_url: str) -> Iterator[Finding]:
    from penstock_services.node_reporter.shell.address import REMEDY, own_address

    address = asyncio.run(own_address(env.get("PENSTOCK_NODE_ADDRESS") or None, log_url))
    try:
        family, kind, _, _, place = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        yield Finding("address", f"{address}: no program here can listen there ({error.strerror})", REMEDY)
        return
    yield Finding("address", f"{address} is announced to the other nodes")


def _log_certificate(env: Mapping[str, str]) -> Iterator[Finding]:
    """That of the server of tasks' output."""
    certificate, key = (env.get(f"PENSTOCK_NODE_LOG_TLS_{part}") for part in ("CERT", "KEY"))
    if not certificate or not key:
        return
    from penstock_services.gateway.shell.tls import certificate_shown

    try:
        shown = certificate_shown(Path(certificate), Path(key))
    except ConfigurationError as error:
        raise ConfigurationError(
            str(error).replace("PENSTOCK_GATEWAY_TLS", "PENSTOCK_NODE_LOG_TLS")
        ) from error
    yield dated("certificate", shown["notAfter"], f"for {names_of(shown)}", certificate)


def _task_user(env: Mapping[str, str]) -> Iterator[Finding]:
    """Who jobs run as, and what of them can be confined: tried with a real process."""
    from penstock_services.node_reporter.shell.spawner import find_confinement
    from penstock_services.node_reporter.shell.users import find_task_user, own_name

    user = find_task_user(
        env.get("PENSTOCK_TASK_USER") or None, allow_root=bool(env.get("PENSTOCK_ALLOW_ROOT"))
    )
    yield Finding("task user", own_name() if user is None else user.name)
    plan, errors = find_confinement(user)
    if plan.exits == "none":
        remedy = "let the node-reporter make PID namespaces (as root, or user namespaces allowed); else GPUs are not shared here"
        yield Finding("PID namespace", "; ".join(errors), remedy)
        return
    yield Finding(
        "PID namespace",
        "to be had" + ("" if plan.mounts else "; no mounts, so tasks see this machine's files"),
    )


def _machine_id(env: Mapping[str, str]) -> Finding:
    from penstock.runtime.this_machine import machine_id

    found = env.get("PENSTOCK_MACHINE_ID") or machine_id()
    remedy = (
        ""
        if found
        else "run `systemd-machine-id-setup`, or set PENSTOCK_MACHINE_ID: by it a cloned machine is noticed"
    )
    return Finding("machine id", found or "/etc/machine-id has none", remedy)


def _gpus_here() -> Finding:
    """Real GPUs are a possibility, not a duty: their absence is no fault."""
    here = "GPUs here"
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding(here, "no NVIDIA driver on this machine; `penstock up` uses virtual GPUs")
    try:
        listed = subprocess.run(
            [program, "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(here, f"nvidia-smi: {error}", "repair the NVIDIA driver, or use virtual GPUs")
    if listed.returncode != 0:
        return Finding(here, (listed.stdout or listed.stderr).strip()[:200], "repair the NVIDIA driver")
    if importlib.util.find_spec("pynvml") is None:
        remedy = "pip install 'penstock[node-reporter]'"
        return Finding(here, "the driver is there, nvidia-ml-py is not", remedy)
    return Finding(here, f"{len(listed.stdout.splitlines())} by NVML; `penstock up --real` uses them")
