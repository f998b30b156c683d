"""Checks of a machine that runs jobs: its node-reporter's options, address, users, containers and GPUs.
Nothing is changed."""

import asyncio
import importlib.util
import os
import re
import shlex
import shutil
import socket
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from typer.exceptions import TyperException
from typer.main import get_command

from penstock import commandline
from penstock.cli.operations.doctor import Finding, checked
from penstock.errors import ConfigurationError
from penstock.local.doctor.reach import dated, gateway_findings, names_of
from penstock.text.installing import installing

if TYPE_CHECKING:
    from penstock_services.node_reporter.options import Options
    from penstock_services.node_reporter.shell.isolation.users import TaskUser

NVIDIA_SMI_TIMEOUT_S = 10.0
NEEDED_BY_NODE = ("httpx", "psutil", "pynvml")
INSTALL = installing("node-reporter")
OPTIONS = "PENSTOCK_NODE_OPTIONS"
GPUS_HERE = "GPUs here"
TRUE = ("1", "true", "t", "yes", "y", "on")


def node_findings(env: Mapping[str, str], log_url: str) -> Iterator[Finding]:
    """Checks of the needs of a node-reporter with these settings. `log_url`: empty where it is not known."""
    missing = [name for name in NEEDED_BY_NODE if importlib.util.find_spec(name) is None]
    if missing:
        yield gpus_here()
        yield Finding("packages", f"missing: {', '.join(missing)}", INSTALL)
        return
    try:
        options = options_of(env)
    except ConfigurationError as error:
        yield gpus_here()
        problem, _, remedy = str(error).partition("; ")
        yield Finding("options", problem, remedy)
        return
    yield _gpus(options)
    if log_url:
        yield from checked("address", lambda: _address(options, log_url))
    yield from checked("log server", lambda: _log_server(options))
    yield from checked("task user", lambda: _task_user(options, env))
    yield _machine_id(options)
    yield from checked("standing connection", lambda: gateway_findings(env))


def options_of(env: Mapping[str, str]) -> "Options":
    """The node-reporter's options as its systemd unit passes them: variables, and PENSTOCK_NODE_OPTIONS.
    Raises `ConfigurationError`."""
    from penstock_services.node_reporter.__main__ import app
    from penstock_services.node_reporter.options import Options

    command = get_command(app)
    words = ["--node-id", socket.gethostname()]
    for option in command.params:
        text = env.get(option.envvar) if isinstance(option.envvar, str) else None
        if text and getattr(option, "is_flag", False):
            words += [option.opts[0]] if text.lower() in TRUE else []
        elif text:
            words += [option.opts[0], text]
    try:
        words += shlex.split(env.get(OPTIONS, ""))
        return commandline.parsed(Options, words, "penstock-node-reporter")
    except ValueError as error:
        raise ConfigurationError(f"{OPTIONS}: {error}; mend its quotation marks") from error
    except TyperException as error:
        problem = error.format_message().rstrip(".")
        raise ConfigurationError(
            f"{OPTIONS}, or a variable of the same file: {problem}; `penstock-node-reporter --help` lists "
            "all options"
        ) from error


def _address(options: "Options", log_url: str) -> Iterator[Finding]:
    from penstock_services.node_reporter.shell.link.address import REMEDY, own_address

    address = asyncio.run(own_address(options.address, log_url))
    problem = _not_here(address)
    if problem:
        yield Finding("address", f"{address}: no program here can listen there ({problem})", REMEDY)
        return
    yield Finding("address", f"{address} is announced to the other nodes")


def _not_here(host: str) -> str:
    """Why no program can listen at this address; empty: one can."""
    try:
        family, kind, _, _, place = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.bind(place)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _log_server(options: "Options") -> Iterator[Finding]:
    """The log server, from which the gateway fetches tasks' output."""
    from penstock_services.node_reporter.shell.link.log_server import listens_at

    what, certificate, key = "log server", options.log_cert, options.log_cert_key
    if options.log_key is None and options.gateway_token_file is None:
        remedy = "give the reporter PENSTOCK_NODE_TOKEN_FILE, or PENSTOCK_NODE_LOG_KEY as the gateway has it"
        yield Finding(what, "none: `penstock logs` cannot show the output of this node's tasks", remedy)
    else:
        host, port = listens_at(options)
        problem = _not_here(host.strip("[]"))
        at = f"at {host}:{port}" if port else f"at a free port of {host}, which a firewall may close"
        if problem:
            remedy = "name an address of this machine in PENSTOCK_NODE_LOG_BIND, such as 0.0.0.0:8743"
            yield Finding(what, f"{host}: no program here can listen there ({problem})", remedy)
        else:
            yield Finding(what, at if certificate else f"{at}, in clear")
    if certificate and key:
        yield from checked("certificate", lambda: _certificate(certificate, key))
    elif certificate or key:
        remedy = "give both or none: PENSTOCK_NODE_LOG_TLS_CERT and PENSTOCK_NODE_LOG_TLS_KEY"
        yield Finding(
            "certificate", "a certificate without its key, or a key without its certificate", remedy
        )


def _certificate(certificate: Path, key: Path) -> Iterator[Finding]:
    from penstock_services.gateway.shell.access.tls import certificate_shown

    try:
        shown = certificate_shown(certificate, key)
    except ConfigurationError as error:
        raise ConfigurationError(
            str(error).replace("PENSTOCK_GATEWAY_TLS", "PENSTOCK_NODE_LOG_TLS")
        ) from error
    yield dated("certificate", shown["notAfter"], f"for {names_of(shown)}", certificate)


def _task_user(options: "Options", env: Mapping[str, str]) -> Iterator[Finding]:
    """The user that jobs run as, and the isolation of jobs that works here: tried with a real process."""
    from penstock_services.node_reporter.shell.isolation.users import check_reach, find_task_user, own_name
    from penstock_services.node_reporter.shell.process.spawner import find_confinement

    user = find_task_user(options.task_user, allow_root=options.allow_root)
    if user is not None and env.get("PENSTOCK_STATE_DIR"):
        check_reach(user, Path(env["PENSTOCK_STATE_DIR"]) / "nodes" / "ID")
    yield Finding("task user", own_name() if user is None else user.name)
    yield _containers(user, options)
    plan, errors = find_confinement(user)
    if plan.exits == "none":
        remedy = (
            "let the node-reporter make PID namespaces (as root, or user namespaces allowed); else GPUs are "
            "not shared here"
        )
        yield Finding("PID namespace", "; ".join(errors), remedy)
        return
    yield Finding(
        "PID namespace",
        "to be had" + ("" if plan.mounts else "; no mounts, so tasks see this machine's files"),
    )


def _containers(user: "TaskUser | None", options: "Options") -> Finding:
    """The container runtime for jobs that name an image. A node may be without."""
    from penstock_services.node_reporter.shell.isolation.containers import check_devices, find_runtime
    from penstock_services.node_reporter.shell.ports import NotStartable

    what = "containers"
    try:
        runtime = find_runtime(os.environ.get("PATH", ""), "", root=user is None and os.geteuid() == 0)
    except NotStartable as refusal:
        return Finding(what, f"jobs with a container are refused here: {refusal}")
    try:
        check_devices(runtime, [] if options.virtual_gpus is not None else _uuids())
    except NotStartable as refusal:
        problem, _, remedy = str(refusal).partition("; ")
        return Finding(what, problem, remedy)
    return Finding(what, f"by {runtime.name} ({runtime.path})")


def _machine_id(options: "Options") -> Finding:
    from penstock.runtime.this_machine import machine_id

    found = options.machine_id or machine_id()
    remedy = (
        ""
        if found
        else "run `systemd-machine-id-setup`, or set PENSTOCK_MACHINE_ID: by it a cloned machine is noticed"
    )
    return Finding("machine id", found or "/etc/machine-id has none", remedy)


def _gpus(options: "Options") -> Finding:
    """GPUs of a node; a node without GPUs has --virtual-gpus 0."""
    if options.virtual_gpus is not None:
        return Finding(GPUS_HERE, f"{options.virtual_gpus} virtual ones, by --virtual-gpus")
    found = gpus_here()
    if shutil.which("nvidia-smi") is None:
        remedy = f"install NVIDIA's driver, or write --virtual-gpus 0 into {OPTIONS} for a node without GPUs"
        return Finding(GPUS_HERE, "no NVIDIA driver: this node offers no GPUs", remedy)
    return found


def gpus_here() -> Finding:
    """Real GPUs of this machine. They are optional: their absence is not an error."""
    here = GPUS_HERE
    program = shutil.which("nvidia-smi")
    if program is None:
        return Finding(here, "no NVIDIA driver on this machine; `penstock up` uses virtual GPUs")
    try:
        listed = _listed(program)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(here, f"nvidia-smi: {error}", "repair the NVIDIA driver, or use virtual GPUs")
    if listed.returncode != 0:
        return Finding(here, (listed.stdout or listed.stderr).strip()[:200], "repair the NVIDIA driver")
    if importlib.util.find_spec("pynvml") is None:
        return Finding(here, "the driver is there, nvidia-ml-py is not", INSTALL)
    return Finding(here, f"{len(listed.stdout.splitlines())} by NVML; `penstock up --real` uses them")


def _listed(program: str) -> "subprocess.CompletedProcess[str]":
    """The program's list with a line per GPU: `GPU 0: NVIDIA H200 (UUID: GPU-…)`.
    Raises `OSError`, `TimeoutExpired`."""
    argv = [program, "-L"]
    return subprocess.run(argv, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S, check=False)


def _uuids() -> list[str]:
    """UUIDs of the real GPUs here; none where they cannot be listed, which is a finding of its own."""
    program = shutil.which("nvidia-smi")
    try:
        return re.findall(r"UUID: (GPU-[0-9a-f-]+)", _listed(program).stdout) if program else []
    except (OSError, subprocess.TimeoutExpired):
        return []
