"""Rows of the gateway's JSON as tables."""

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.markup import escape
from rich.table import Table

from penstock.cli.following.event_text import numbers, reason_of
from penstock.cli.following.follow import phases_ms
from penstock.cli.output import duration, memory, short_id, state
from penstock.model.nouns.types import WHOLE_GPU
from penstock.screen import plain_table

Row = Mapping[str, Any]
MAX_REASON_CHARS = 60
NO_JOBS = "No jobs yet. Submit one: penstock submit -- python3 train.py"


def now_ms() -> int:
    """This machine's clock."""
    return time.time_ns() // 1_000_000


def counting_on(answered_ms: int) -> Callable[[], int]:
    """The cell's time from now on: `now_ms` of an answer and the time since it came, whatever this machine's
    clock shows."""
    came_s = time.monotonic()
    return lambda: answered_ms + int((time.monotonic() - came_s) * 1_000)


def clock(ms: int | None) -> str:
    """A moment as local time of day, with the date unless that is today; `–` for None."""
    if ms is None:
        return "–"
    moment, today = time.localtime(ms / 1_000), time.localtime()
    return time.strftime("%H:%M:%S" if moment[:3] == today[:3] else "%Y-%m-%d %H:%M", moment)


def as_of(answer: Row) -> str:
    """`as of record 812, 10:42:03; now 11:07:10`: the record as of which an answer holds, and up to when its
    times count."""
    record = f"as of record {answer['seq']}, {clock(answer['record_ms'])}"
    return f"{record}; now {clock(answer['now_ms'])}" if answer["now_ms"] > answer["record_ms"] else record


def status_of(job: Row) -> str:
    """Its state in colour, with the exit code when it failed with one."""
    shown = state(job["status"])
    if job["status"] == "failed" and job.get("exit_code"):
        shown += f" [dim]({job['exit_code']})[/]"
    if job.get("held"):
        shown += " [yellow](held)[/]"
    silent = list(dict.fromkeys(row["node_id"] for row in job.get("unproven") or []))
    if silent:
        shown += (
            f" [yellow]({escape(silent[0])}{f' +{len(silent) - 1}' if len(silent) > 1 else ''} silent)[/]"
        )
    return shown


def nodes_of(job: Row) -> str:
    """`node-1`, `node-0 +2`."""
    nodes = list(dict.fromkeys(job.get("nodes") or []))
    if not nodes:
        return "–"
    return nodes[0] if len(nodes) == 1 else f"{nodes[0]} +{len(nodes) - 1}"


def shortened(text: str, chars: int = MAX_REASON_CHARS) -> str:
    return text if len(text) <= chars else text[: chars - 1] + "…"


def jobs_table(jobs: Iterable[Row], now: int, left: Mapping[str, str] | None = None) -> Table:
    """One line per job, with times up to `now`, in ms. `left`: job → time left, for the wide table; None: the
    short one."""
    columns = ["JOB", "NAME", "STATE", "NODES", "GPUS", "CORES", "WAITED", "RAN"]
    wide = left is not None
    if wide:
        columns += ["LEFT", "OWNER", "PRIORITY", "TRY", "SUBMITTED", "ENDED", "REASON"]
    table = plain_table(*columns, right=("GPUS", "CORES", "WAITED", "RAN", "LEFT", "PRIORITY", "TRY"))
    for job in jobs:
        queue, _, run = phases_ms(dict(job), now)
        cells = [
            job["job_id"] if wide else short_id(job["job_id"]),
            escape(job["name"] or "–"),
            status_of(job),
            escape(nodes_of(job)),
            str(job.get("gpus") or 0),
            str(job.get("cores") or 0),
            duration(queue),
            duration(run),
        ]
        if left is not None:
            cells += [
                left.get(job["job_id"], "–"),
                escape(job["owner"]),
                _priority(job),
                str(job["attempt"]),
                clock(job["submitted_ms"]),
                clock(job.get("ended_ms")),
                escape(shortened(reason_of(job) or job.get("unschedulable") or "")),
            ]
        table.add_row(*cells)
    return table


def _priority(job: Row) -> str:
    """`–` where the job's specification is hidden."""
    spec = job.get("spec")
    return str(spec.get("priority", 0)) if spec else "–"


def bar(used: int, whole: int, width: int = 12) -> str:
    """`████░░░░`: a share, never rounded to empty or full while it is neither."""
    if whole <= 0:
        return ""
    filled = round(width * used / whole)
    if 0 < used < whole:
        filled = min(max(filled, 1), width - 1)
    return f"[cyan]{'█' * filled}[/][dim]{'░' * (width - filled)}[/]"


def node_state(node: Row) -> str:
    """`ready`; `ready, cordoned`; `suspect, dead at 12:40:10`;
    `ready, drained` once nothing is left on it."""
    cordon, doubt, failing = node.get("cordon"), node.get("suspicion"), node.get("distrust")
    if failing and not cordon and not doubt:
        return (
            f"{state(node['status'])}, GPU {numbers(failing['gpus'])} suspect"
            if failing["gpus"]
            else state("suspect")
        )
    if doubt and doubt["proven_ms"]:
        return f"{state(node['status'])}, [yellow]dead at {clock(doubt['proven_ms'])}[/]"
    if not cordon:
        return state(node["status"])
    how = "cordoned" if not cordon["drain"] else "draining" if node["tasks"] else "drained"
    return f"{state(node['status'])}, [yellow]{how}[/]"


def suspected_for(node: Row) -> str:
    """`its connection broke (12:27:40); probed 12:27:41; proven dead at 12:40:11 unless it answers`."""
    doubt = node.get("suspicion")
    if not doubt:
        return distrusted_for(node) or "–"
    parts = [f"{doubt['reason']} ({clock(doubt['at_ms'])})"]
    if doubt["probed_ms"]:
        parts.append(f"probed {clock(doubt['probed_ms'])}")
    if doubt["proven_ms"]:
        parts.append(f"proven dead at {clock(doubt['proven_ms'])} unless it answers")
    return "; ".join(parts)


def distrusted_for(node: Row) -> str:
    """`3 jobs of 3 owners failed there …; a probe may start there from 12:41:10`;
    empty: the node is trusted."""
    found = node.get("distrust")
    if not found:
        return ""
    gpus = f"GPU {numbers(found['gpus'])}: " if found["gpus"] else ""
    probe = f"a probe may start there from {clock(found['until_ms'])}"
    if found["probe"]:
        probe = f"its probe is {found['probe']}"
    return f"{gpus}{found['reason']}; {probe}"


def nodes_remarks(nodes: Iterable[Row]) -> list[str]:
    """A sentence for each node on which jobs fail, by id:
    `node-0 is suspect: 3 jobs of 3 owners failed there …`."""
    failing = {str(node["node_id"]): text for node in nodes if (text := distrusted_for(node))}
    return [f"{node_id} is suspect: {text}" for node_id, text in sorted(failing.items())]


def labels_of(node: Row) -> str:
    """`disk=ssd zone=b`; `–` for a node without labels."""
    return " ".join(f"{name}={value}" for name, value in sorted((node.get("labels") or {}).items())) or "–"


def cordoned_by(node: Row) -> str:
    """`ada@workstation-7: fans are to be replaced`."""
    cordon = node.get("cordon")
    if not cordon:
        return "–"
    return f"{cordon['by']}: {shortened(cordon['reason'])}" if cordon["reason"] else str(cordon["by"])


def nodes_table(nodes: Iterable[Row], *, wide: bool = False) -> Table:
    """One line per node, by id, with used and total capacity."""
    columns = ["NODE", "STATE", "GPU MODEL", "GPUS", "", "CORES", "MEMORY", "TASKS"]
    if wide:
        columns += ["RACK", "DOMAIN", "ADDRESS", "NETWORK", "FAULTED", "LABELS", "CORDONED BY", "ISOLATION"]
    table = plain_table(*columns, right=("GPUS", "CORES", "MEMORY", "TASKS", "FAULTED"))
    for node in sorted(nodes, key=lambda node: str(node["node_id"])):
        gpus = node["gpus"] - node["gpus_free"]
        cells = [
            escape(node["node_id"]),
            node_state(node),
            escape(node.get("gpu_model") or "–"),
            f"{gpus}/{node['gpus']}",
            bar(gpus, node["gpus"]),
            f"{node['cores'] - node['cores_free']}/{node['cores']}",
            f"{memory(node['host_memory_mib'] - node['host_memory_free_mib'])} of "
            f"{memory(node['host_memory_mib'])}",
            str(node["tasks"]),
        ]
        if wide:
            cells += [
                escape(node["rack"]),
                escape(node["domain"]),
                escape(node["address"]),
                f"{node['bandwidth_mbps'] / 1_000:g} Gbit/s",
                str(node["gpus_faulted"]),
                escape(labels_of(node)),
                escape(cordoned_by(node)),
                escape(isolation(node)),
            ]
        table.add_row(*cells)
    return table


EXITS = {
    "pid_namespace": "exits by PID namespace",
    "cgroup": "exits by cgroup",
    "none": "exits not proven: whole GPUs only",
}
BANDWIDTH = {
    "resctrl": "memory bandwidth by resctrl",
    "cpu_quota": "memory bandwidth by quotas of processor time",
}
CONTENTION = {
    "pressure": "waiting for cores by the kernel's triggers",
    "schedstat": "waiting for cores by reading what threads have waited",
    "none": "waiting for cores not at all",
}


def isolation(node: Row) -> str:
    """The isolation of tasks that the node enforces: `exits by PID namespace, files hidden`."""
    found = node.get("isolation")
    if not found:
        return "not reported"
    parts = [
        EXITS[found["exits"]],
        "files hidden" if found["files"] else "files open",
        "memory per task" if found.get("memory") == "task" else "memory per process",
        f"cores by {found.get('cores', 'affinity')}",
        "devices by cgroup" if found.get("devices") == "cgroup" else "GPUs by CUDA_VISIBLE_DEVICES alone",
        BANDWIDTH.get(found.get("bandwidth", "none"), ""),
        "own /tmp" if found.get("tmp") == "task" else "/tmp shared",
        "" if found.get("processes") == "limited" else "processes unlimited",
        f"jobs as {found['user']}" if found.get("user") else "",
    ]
    return ", ".join(part for part in parts if part)


def measures(node: Row) -> str:
    """The contention that the node can measure: `waiting for cores by the kernel's triggers, memory traffic
    not at all`."""
    found = node.get("measures")
    if not found:
        return "not reported"
    traffic = "memory traffic not at all"
    if found["memory_bandwidth"] != "none":
        limit = found.get("memory_mb_s")
        of = f"of {limit / 1_000:g} GB/s" if limit else "in percent of the largest seen"
        traffic = f"memory traffic by {found['memory_bandwidth']}, {of}"
    return f"{CONTENTION[found['contention']]}, {traffic}"


def gpus_table(gpus: Iterable[Row], *, wide: bool = False) -> Table:
    """A line per GPU and job on it, by node and slot; SHARE: the job's share of the GPU."""
    columns = ["NODE", "GPU", "UUID", "MODEL", "MEMORY", "STATE", "SHARE", "JOB"]
    if wide:
        columns += ["TASK", "GPU MEMORY OF IT"]
    table = plain_table(*columns, right=("GPU", "MEMORY", "SHARE", "GPU MEMORY OF IT"))
    for gpu in sorted(gpus, key=lambda gpu: (gpu["node_id"], gpu["gpu"])):
        cells = [
            escape(gpu["node_id"]),
            str(gpu["gpu"]),
            escape(gpu["uuid"] if wide else short_uuid(gpu["uuid"])),
            escape(gpu["model"]),
            memory(gpu["memory_mib"]),
            gpu_state(gpu),
        ]
        for holder in gpu["holders"]:
            more = [holder["task_id"], memory(holder["gpu_memory_mib"] or None)] if wide else []
            table.add_row(*cells, f"{holder['share_milli'] / 10:g}%", short_id(holder["job_id"]), *more)
        if not gpu["holders"]:
            table.add_row(*cells, *["–"] * (len(columns) - len(cells)))
    return table


def gpu_state(gpu: Row) -> str:
    """`free`, `used`, `shared, 25% free`, `shared, in turns` by a group, `faulted`, `suspect`."""
    if gpu["faulted"] or not gpu["holders"]:
        return state("faulted" if gpu["faulted"] else "suspect" if gpu.get("suspect") else "free")
    if all(holder["share_milli"] == WHOLE_GPU for holder in gpu["holders"]):
        return state("used") if len(gpu["holders"]) == 1 else f"{state('shared')}, in turns"
    return state("shared") + (f", {gpu['free_milli'] / 10:g}% free" if gpu["free_milli"] else "")


def short_uuid(uuid: str) -> str:
    """`GPU-5d0f2b1e-…` as `GPU-5d0f2b1e`: enough to tell the GPUs of one cell apart;
    others stay as they are."""
    kind, _, rest = uuid.partition("-")
    first, _, more = rest.partition("-")
    return f"{kind}-{first}" if kind in ("GPU", "MIG") and more else uuid


def gpu_names(task: Row, *, wide: bool = False) -> str:
    """`GPU-5d0f2b1e (0), GPU-77aa4f3c (1)`: each GPU with its slot;
    without the name where it is not known; `–`."""
    slots, uuids = task["gpus"], task["gpu_uuids"]
    if len(uuids) != len(slots):
        return numbers(slots)
    named = zip(slots, uuids, strict=True)
    return ", ".join(f"{uuid if wide else short_uuid(uuid)} ({slot})" for slot, uuid in named) or "–"


def tasks_table(tasks: Iterable[Row], now: int, *, wide: bool = False) -> Table:
    """One line per task of a job's attempts, with times up to `now`, in ms."""
    table = plain_table(
        "TRY",
        "TASK",
        "STATE",
        "NODE",
        "GPUS",
        "CORES",
        "PID",
        "RAN",
        "EXIT",
        right=("TRY", "PID", "RAN"),
        wrap=("GPUS",),
    )
    for task in tasks:
        started_ms, end_ms = task.get("started_ms"), task.get("exited_ms") or now
        ran = None if started_ms is None else max(0, end_ms - started_ms)
        exit_ = "–"
        if task.get("exited_ms"):
            exit_ = (
                f"code {task['exit_code']}"
                if task.get("exit_code") is not None
                else f"signal {task.get('signal')}"
            )
            if task.get("cause") not in (None, "exited"):
                exit_ += f" ({task['cause']})"
        table.add_row(
            str(task["attempt"]),
            task["task_id"].rpartition(".")[2],
            state(task["status"]),
            escape(task["node_id"]),
            escape(gpu_names(task, wide=wide)),
            numbers(task["cores"]),
            str(task.get("pid") or "–"),
            duration(ran),
            exit_,
        )
    return table
