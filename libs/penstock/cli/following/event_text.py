"""Ledger events as text, one line each, for `submit`, `events` and `watch`."""

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from penstock.cli.output import duration, memory, with_short_ids
from penstock.text.counting import count

Data = Mapping[str, Any]

MAX_NAMED = 3  # jobs in a line about a plan

ENDINGS = MappingProxyType(
    {
        "succeeded": "succeeded",
        "failed": "failed",
        "cancelled": "cancelled",
        "timed_out_queued": "waited too long",
        "timed_out_running": "ran too long",
        "unschedulable": "can never run here",
    }
)


TIERS = MappingProxyType(
    {
        "user": "as asked",
        "history": "from earlier runs",
        "model": "by the learned model",
        "nearest": "from similar runs",
        "default": "a guess: no similar job has run yet",
    }
)
"""Tier of an estimate → its source, as text."""


def needs(vector: Data) -> str:
    """A resource vector: `1 GPU, 2 cores, 1 GiB`."""
    parts = []
    if vector.get("gpus"):
        parts.append(count(vector["gpus"], "GPU"))
        if vector.get("gpu_memory_mib"):
            parts.append(f"{memory(vector['gpu_memory_mib'])} each")
    parts.append(count(vector.get("cores", 1), "core"))
    if vector.get("host_memory_mib"):
        parts.append(memory(vector["host_memory_mib"]))
    return ", ".join(parts)


JOIN_REFUSALS = {
    "other_machine": "another machine has this node id and is not proven gone; fence that machine, or "
    "rename this node",
    "gpu_of_another_node": "one of its GPUs belongs to another node that is not proven gone; fence that node",
    "stale_join": "its incarnation is not above the last one; the node joins again",
}


def gpu_list(indexes: list[int]) -> str:
    """`GPU 0`, `GPUs 0–3`, `GPUs 0, 2`, `no GPU`."""
    return f"GPU{'s' if len(indexes) > 1 else ''} {numbers(indexes, ', ')}" if indexes else "no GPU"


def numbers(values: list[int], separator: str = ",") -> str:
    """`0–3`, `0,2`, `–`."""
    if len(values) > 2 and values == list(range(values[0], values[-1] + 1)):
        return f"{values[0]}–{values[-1]}"
    return separator.join(map(str, values)) or "–"


def places(tasks: list[Data]) -> str:
    """Placement of a gang's tasks: `node-1 (GPU 0), node-2 (GPU 3)`."""
    by_node: dict[str, list[int]] = {}
    for task in tasks:
        by_node.setdefault(task["node_id"], []).extend(task["gpus"])
    return ", ".join(f"{node} ({gpu_list(sorted(gpus))})" for node, gpus in by_node.items())


def _estimated(data: Data) -> str:
    estimate = data["estimate"]
    tier = TIERS.get(estimate["tier"], estimate["tier"])
    sure = f"{needs(estimate['worker'])} per worker; {tier}, {estimate['confidence']:.0%} sure"
    new = "" if estimate["tier"] == "default" else first_of_kind(estimate)  # else the line states it already
    return "; ".join(filter(None, (sure, new)))


def first_of_kind(estimate: Data) -> str:
    """`first of its kind: network` if no similar job was in the estimate's training set; empty otherwise."""
    names = [name.replace("gpu_model", "GPU model") for name in estimate.get("first_of_kind") or ()]
    return f"first of its kind: {', '.join(names)}" if names else ""


def _exited(data: Data) -> str:
    ran = duration(data["exited_ms"] - data["started_ms"])
    if data["cause"] == "start_failed":
        return f"could not be started: {data.get('detail', '')}"
    how = (
        f"exit code {data['exit_code']}"
        if data.get("exit_code") is not None
        else f"signal {data.get('signal')}"
    )
    if data["cause"] == "out_of_memory":
        how = "out of memory"
    if data.get("exhausted"):
        how = f"out of {data['exhausted'].replace('_', ' ').replace('gpu', 'GPU')} ({data.get('detail', '')})"
    if data["cause"] == "lost":
        how = f"lost ({data.get('detail', '')})"
    if data["cause"] in ("exited", "stopped") and not data.get("exhausted") and data.get("detail"):
        return f"{how} after {ran}; {data['detail']}"
    return f"{how} after {ran}"


def reason_of(job: Data) -> str:
    """Why the job ended or failed; tasks are named without the job's id."""
    return with_short_ids(without_prefix(str(job.get("reason") or "").replace(f"{job['job_id']}.", "")))


def without_prefix(text: str) -> str:
    """`never_fits_gpus: one worker needs …` without the reason's name."""
    return re.sub(r"^never_fits\w*: ", "", text)


def _progress(data: Data) -> str:
    total = f" of {data['total']:,}" if data.get("total") else ""
    step = f", {data['step_ms']:.4g} ms each" if data.get("steps") else ""
    if data.get("waited_ms"):
        step += f", {data['waited_ms']:.4g} of them waiting for turns"
    if data.get("missed_turns"):
        step += f", {count(data['missed_turns'], 'stage')} without a turn"
    loss = "" if data.get("loss") is None else f", loss {data['loss']:.4g}"
    return f"{data['done']:,}{total} iterations{step}{loss}"


def _remaining(data: Data) -> str:
    left = data["left_ms"]
    middle, low, high = (duration(round(left[name])) for name in ("middle", "low", "high"))
    return f"{middle} left ({low} to {high}); {data['source']}"


def _cap(percent: int | None, mechanism: str = "") -> str:
    """`mechanism`: `TaskAdjusted.enforced`; empty: not known."""
    if percent is None:
        return "no cap"
    of = {"cpu_quota": "its cores' time", "": "the memory bandwidth, or of its cores' time"}
    return f"at most {percent} % of {of.get(mechanism, 'the memory bandwidth')}"


def _adjusted(data: Data) -> str:
    what = data["what"].replace("_", " ")
    return f"{what} by {data['enforced']}" if data["enforced"] else f"{what} as before: {data['detail']}"


def asked(row: Data) -> str:
    """Who asked for something, and why: `asked for by ops/ana: it starves`; empty if no user did."""
    why = f": {row['reason']}" if row["reason"] else ""
    return f"asked for by {row['by']}{why}" if row["by"] else ""


def adjustment(row: Data) -> str:
    """An adjustment of a running task:
    `w0 has 4 cores (0–3), asked for by ops/ana: it starves, by cpuset`."""
    has = (
        f"{count(len(row['value']), 'core')} ({numbers(row['value'])})"
        if row["what"] == "cores"
        else _cap(row["value"], row["enforced"])
    )
    done = (
        f", by {row['enforced']}" if row["enforced"] else f"; {row['problem'] or 'its node has not answered'}"
    )
    return f"{', '.join(filter(None, (f'{_short(row)} has {has}', asked(row))))}{done}"


def _checkpointed(data: Data) -> str:
    """`w0 at iteration 9,000 in 1.3 s: /var/lib/…`"""
    at = "" if data.get("iteration") is None else f" at iteration {data['iteration']:,}"
    took = f" in {duration(data['save_ms'])}" if data.get("save_ms") else ""
    return f"{_short(data)}{at}{took}: {data.get('path') or 'no path reported'}"


def _fetched(data: Data) -> str:
    """`w0 has iteration 9,000 from node-a1 in 1.3 s, 2 GiB`, or why it starts without a checkpoint."""
    if data.get("problem"):
        return f"{_short(data)} starts without its checkpoint from {data['from_node']}: {data['problem']}"
    size = memory(-(-data.get("size_bytes", 0) >> 20))
    took = duration(data.get("fetch_ms", 0))
    return (
        f"{_short(data)} has iteration {data.get('iteration') or 0:,} from {data['from_node']} in {took}, "
        f"{size}"
    )


def checkpoint(row: Data) -> str:
    """A job's latest checkpoint: `iteration 9,000 of attempt 1, saved in 1.3 s on node-a1: /var/lib/…`."""
    at = "" if row["iteration"] is None else f"iteration {row['iteration']:,} of "
    where = f"{row['node_id']}{', shared' if row['shared'] else ''}"
    fetched = f", fetched from {row['fetched_from']}" if row["fetched_from"] else ""
    lacks = (
        f"; attempt {row['attempt'] + 1} or a later one did not get it: {row['problem']}"
        if row["problem"]
        else ""
    )
    return (
        f"{at}attempt {row['attempt']}, saved in {duration(row['save_ms'])} on {where}{fetched}: "
        f"{row['path'] or 'no path reported'}{lacks}"
    )


def move(row: Data) -> str:
    """A job's latest move, with its cost where that is given: `to node-b1, asked for by ops/ana: fans; given
    up: node-b1 is cordoned`."""
    why = f": {row['reason']}" if row["reason"] else ""
    ends = {"under_way": "it is being stopped", "arrived": f"attempt {row['attempt'] + 1} is there"}
    end = ends.get(row["outcome"]) or f"given up: {row['problem']}"
    cost = f"; {found}" if (found := moved(row.get("moved"))) else ""
    return f"to {', '.join(dict.fromkeys(row['nodes']))}, asked for by {row['by']}{why}; {end}{cost}"


def moved(found: Data | None) -> str:
    """`moved from node-a1; its stop took 2.10 s and cost 40.0 s of work; it goes on at iteration 9,000`."""
    if not found:
        return ""
    text = f"moved from {', '.join(dict.fromkeys(found['nodes']))}"
    if found.get("stop_ms") is None:
        return text
    lost_ms = found.get("lost_ms")
    if lost_ms is None:
        cost = "an unknown amount of work"
    else:
        cost = f"{duration(lost_ms)} of work" if lost_ms else "no work"
    at = found.get("resumes_at")
    goes_on = "" if at is None else f"; it goes on at iteration {at:,}"
    return f"{text}; its stop took {duration(found['stop_ms'])} and cost {cost}{goes_on}"


TEXTS: Mapping[str, tuple[str, Callable[[Data], str]]] = MappingProxyType(
    {
        "penstock.job.submitted": ("submitted", lambda d: " ".join(d["spec"]["command"])),
        "penstock.job.estimated": ("estimated", _estimated),
        "penstock.placement.decided": ("placed", lambda d: places(d["tasks"]) + _sharing(d) + _after(d)),
        "penstock.group.decided": (
            "grouped",
            lambda d: f"{' and '.join(d['job_ids'])} share GPUs, asked for by {d['by']}: {d['reason']}",
        ),
        "penstock.group.dissolved": (
            "dissolved",
            lambda d: f"{' and '.join(d['leaves'])} leaves {d['group_id']}: {d['reason']}",
        ),
        "penstock.task.started": (
            "started",
            lambda d: f"{_short(d)} on {d['node_id']}, process {d['pid']}{_early(d)}",
        ),
        "penstock.task.phase_changed": ("phase", lambda d: f"{_short(d)}: {d['phase']}"),
        "penstock.task.checkpointed": ("checkpoint", _checkpointed),
        "penstock.save.refused": ("not saved", lambda d: f"{_short(d)} on {d['node_id']}: {d['reason']}"),
        "penstock.task.checkpoint_fetched": ("fetched", _fetched),
        "penstock.move.decided": (
            "moving",
            lambda d: f"to {places(d['tasks'])}, asked for by {d['by']}: {d['reason']}",
        ),
        "penstock.job.converged": (
            "converged",
            lambda d: f"{'moves' if d['moves'] else 'stays'}: {d['reason']}",
        ),
        "penstock.cores.reclaimed": ("reclaimed", lambda d: f"for {d['by_job_id']}: {d['reason']}"),
        "penstock.move.given_up": ("not moved", lambda d: str(d["reason"])),
        "penstock.cores.decided": (
            "cores",
            lambda d: f"{_short(d)}: {count(len(d['cores']), 'core')}, {asked(d)}",
        ),
        "penstock.bandwidth.decided": (
            "bandwidth",
            lambda d: f"{_short(d)}: {_cap(d['memory_bandwidth_percent'])}, {asked(d)}",
        ),
        "penstock.task.adjusted": ("adjusted", lambda d: f"{_short(d)}: {_adjusted(d)}"),
        "penstock.steps.measured": ("progress", lambda d: _progress(d)),
        "penstock.stages.measured": ("stages", lambda d: f"{_short(d)}: of {d['iterations']} iterations"),
        "penstock.job.eta_estimated": ("remaining", lambda d: _remaining(d)),
        "penstock.task.exited": ("exited", lambda d: f"{_short(d)}: {_exited(d)}"),
        "penstock.task.lost": ("lost", lambda d: f"{_short(d)} on {d['node_id']}: {d['reason']}"),
        "penstock.order.refused": (
            "refused",
            lambda d: f"{_short(d)} by {d['node_id']}: {d['reason']} {d.get('detail', '')}",
        ),
        "penstock.stop.decided": (
            "stopping",
            lambda d: f"{d['reason'].replace('_', ' ')}; grace {duration(d['grace_ms'])}",
        ),
        "penstock.job.preempted": ("preempted", lambda d: str(d["reason"])),
        "penstock.job.requeued": ("requeued", lambda d: _requeued(d)),
        "penstock.job.queued": ("queued", lambda d: "back-off is over"),
        "penstock.job.cancel_requested": (
            "cancel",
            lambda d: str(d.get("reason", "")) + (f", by {d['by']}" if d.get("by") else ""),
        ),
        "penstock.job.follower_changed": ("follower", lambda d: "connected" if d["connected"] else "gone"),
        "penstock.job.hold_requested": ("held", lambda d: _operator(d).removeprefix(", ")),
        "penstock.job.release_requested": ("released", lambda d: _operator(d).removeprefix(", ")),
        "penstock.job.checkpoint_requested": ("save", lambda d: _operator(d).removeprefix(", ")),
        "penstock.job.command_run": ("command", lambda d: _command_run(d)),
        "penstock.checkpoint.decided": (
            "saving",
            lambda d: f"{_short(d)} on {d['node_id']} is asked to save",
        ),
        "penstock.job.found_unschedulable": ("never fits", lambda d: without_prefix(d["reason"])),
        "penstock.job.found_schedulable": ("fits", lambda d: "the cell has changed and can hold it"),
        "penstock.job.ended": ("ended", reason_of),
        "penstock.node.joined": (
            "joined",
            lambda d: (
                f"{d['node']['node_id']}: {count(len(d['node']['gpus']), 'GPU')}, "
                f"{count(d['node']['cores'], 'core')}"
            ),
        ),
        "penstock.node.changed": ("changed", lambda d: str(d["node"]["node_id"])),
        "penstock.node.left": ("left", lambda d: f"{d['node_id']}: {d['proof']}{_operator(d)}"),
        "penstock.node.cordoned": (
            "cordoned",
            lambda d: f"{d['node_id']}{', its jobs leave it' if d.get('drain') else ''}{_operator(d)}",
        ),
        "penstock.node.uncordoned": ("uncordoned", lambda d: f"{d['node_id']}{_operator(d)}"),
        "penstock.node.suspected": ("suspected", lambda d: f"{d['node_id']}: {d['reason']}"),
        "penstock.node.probed": ("probed", lambda d: f"{d['node_id']} is asked to join again"),
        "penstock.node.probe_sent": ("probe sent", lambda d: str(d["node_id"])),
        "penstock.node.probe_expired": (
            "probe expired",
            lambda d: f"{d['node_id']} did not answer, and its lease is over",
        ),
        "penstock.node.lost": ("node lost", lambda d: str(d["node_id"])),
        "penstock.node.restored": ("restored", lambda d: str(d["node_id"])),
        "penstock.node.distrusted": (
            "suspect",
            lambda d: (
                f"{d['node_id']}{_slots(d)}: {d['reason']}; a probe starts there in {duration(d['pause_ms'])}"
            ),
        ),
        "penstock.node.put_on_probation": (
            "probation",
            lambda d: f"{d['node_id']}: the next job that is placed there is its probe",
        ),
        "penstock.node.trusted": ("trusted", lambda d: f"{d['node_id']}: {d['reason']}"),
        "penstock.node.join_refused": (
            "join refused",
            lambda d: f"{d['node_id']}: {JOIN_REFUSALS[d['reason']]}",
        ),
        "penstock.gpu.faulted": (
            "GPU fault",
            lambda d: f"{d['node_id']} GPU {d['gpu']}: {d['fault']} {d.get('detail', '')}",
        ),
        "penstock.cell.frozen": ("frozen", lambda d: str(d["reason"])),
        "penstock.cell.thawed": ("thawed", lambda d: str(d["reason"])),
        "penstock.choice.failed": ("undecided", lambda d: f"policy {d['profile']} raised {d['error']}"),
        "penstock.term.started": (
            "term",
            lambda d: f"{d['term']} begins; profile {d['settings'].get('profile', '')}",
        ),
        "penstock.input.accepted": (
            "accepted",
            lambda d: (
                f"{d['topic']}/{d['partition']} is read on from {d['offset']}, after {d['position']}; "
                f"{d.get('reason', '')}"
            ),
        ),
        "penstock.ledger.accepted": (
            "accepted",
            lambda d: f"the ledger has lost records and goes on in epoch {d['epoch']}; {d.get('reason', '')}",
        ),
        "penstock.record.amended": (
            "amended",
            lambda d: f"the record at offset {d['offset']} could not be decoded{_operator(d)}",
        ),
        "penstock.plan.proposed": ("proposal", lambda d: _proposed(d)),
        "penstock.migration.proposed": (
            "proposal",
            lambda d: f"{d['proposer']}: to {', '.join(dict.fromkeys(d['nodes']))}: {d['reason']}",
        ),
        "penstock.cores.proposed": (
            "proposal",
            lambda d: f"{d['proposer']}: {_short(d)} with {count(d['cores'], 'core')}: {d['reason']}",
        ),
        "penstock.throttle.proposed": (
            "proposal",
            lambda d: (
                f"{d['proposer']}: {_short(d)} with {_cap(d['memory_bandwidth_percent'])}: {d['reason']}"
            ),
        ),
        "penstock.plan.adopted": ("plan", lambda d: _adopted(d)),
        "penstock.batch_window.opened": (
            "window",
            lambda d: "jobs arrive fast: waiting jobs are left to a batch plan",
        ),
        "penstock.batch_window.closed": (
            "window",
            lambda d: (
                f"over: {'a plan was answered' if d['reason'] == 'answered' else 'no plan came in time'}"
            ),
        ),
        "penstock.proposal.answered": ("proposal", lambda d: _answered(d)),
    }
)
"""Event type → (word, the sentence after it)."""

QUIET = frozenset({"penstock.timer.set", "penstock.timer.fired", "penstock.timer.cancelled"})
"""The placer's timers: shown by `events -o wide` only."""


def _sharing(data: Data) -> str:
    return f", beside the members of {data['group']}" if data.get("group") else ""


def _slots(data: Data) -> str:
    """` GPU 0, 1`; empty: the whole node."""
    return f" GPU {numbers(data['gpus'])}" if data.get("gpus") else ""


def _after(data: Data) -> str:
    """`, prelaunched after j1`; empty where it starts at once."""
    how = "prelaunched after" if data.get("prelaunch") else "after"
    return f", {how} {', '.join(data['after'])}" if data.get("after") else ""


def _early(data: Data) -> str:
    """`, launched 12.3 s before its GPUs were free`; empty for most."""
    opened_ms = data.get("opened_ms")
    if opened_ms is None:
        return ""
    return f", launched {max(0, opened_ms - data['started_ms']) / 1_000:.1f} s before its GPUs were free"


def _requeued(data: Data) -> str:
    over = f"attempt {data['attempt']} is over: "
    if data.get("estimate_again"):
        return over + "it ran out of guessed memory; the next attempt is estimated anew and gets more"
    return over + str(data["reason"])


def _operator(data: Data) -> str:
    """`, by ada@workstation-7: fans`; empty if no person acted."""
    by, reason = data.get("by"), data.get("reason")
    return (f", by {by}" if by else "") + (f": {reason}" if reason else "")


def _command_run(data: Data) -> str:
    """`w0: nvidia-smi, by ada: begins`, `… ended with 0`."""
    end = "begins" if data.get("exit_code") is None else f"ended with {data['exit_code']}"
    return f"{_short(data)}: {data['command']}{_operator(data)}: {data.get('problem') or end}"


def _proposed(data: Data) -> str:
    units = data["units"]
    jobs = sum(len(unit["jobs"]) for unit in units)
    return f"{data['proposer']} plans {count(jobs, 'job')} in {count(len(units), 'unit')}"


def _adopted(data: Data) -> str:
    waiting = [f"{unit['job_id']} on {', '.join(dict.fromkeys(unit['nodes']))}" for unit in data["units"]]
    more = f" and {len(waiting) - MAX_NAMED} others" if len(waiting) > MAX_NAMED else ""
    named = "; ".join(waiting[:MAX_NAMED])
    return f"nodes are reserved for {named}{more}" if waiting else "no nodes are reserved"


def _answered(data: Data) -> str:
    """The numbers of units in a plan; the first refused unit, with the reason."""
    text = f"{data['proposer']}: {data['verdict']}"
    refused = data.get("refused", [])
    parts = [f"{data[key]} {key}" for key in ("started", "waiting") if data.get(key)]
    if refused:
        first = refused[0]
        parts.append(f"{len(refused)} refused, the first ({first['reason']}): {first['detail']}")
    elif data.get("reason"):
        parts.append(f"{data['reason']}: {data.get('detail', '')}")
    return f"{text}, {'; '.join(parts)}" if parts else text


def _short(data: Data) -> str:
    """A task's id without its job: `w0`."""
    return str(data["task_id"]).rpartition(".")[2]


def describe(kind: str, data: Data) -> tuple[str, str]:
    """(word, sentence) for an event; one of a newer kind is named by its type."""
    kind = kind.rpartition(".v")[0] if kind.rpartition(".v")[2].isdigit() else kind
    found = TEXTS.get(kind)
    if found is None:
        return kind.removeprefix("penstock."), ""
    word, sentence = found
    if kind == "penstock.job.ended":
        word = ENDINGS.get(str(data.get("outcome")), word)
    try:
        return word, with_short_ids(sentence(data).strip())
    except (KeyError, TypeError, ValueError):  # an event of a newer version may lack a field
        return word, ""
