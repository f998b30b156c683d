"""Everything on one machine, used through the command line as people and pipelines use it."""

import asyncio
import itertools
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
import yaml

from penstock.errors import NotAllowed
from penstock.exits import Exit
from penstock.log.port import Message, Partition
from penstock.log.postgres.embedded import EmbeddedLog
from penstock.model.schema.topics import NODE_PARTITIONS, Topic
from tests.e2e.conftest import ENDLESS, Installation, listed, processes_of, until_line, until_there
from tests.support.cli.command_process import PENSTOCK, ROOT
from tests.support.cli.terminal import Terminal
from tests.support.waiting import wait_until

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("no_job_stays")]


def test_a_job_runs_and_its_phases_are_printed_as_they_happen(up: Installation) -> None:
    """The first job of a new user."""
    answer = up.run(
        "submit", "--name", "hello", "--gpus", "1", "--", "python3", "-c", "print('hello from the task')"
    )
    assert answer.returncode == 0, answer.stderr + answer.stdout
    *lines, _ = [line for line in answer.stdout.splitlines()[1:] if line != "hello from the task"]
    assert [line.split()[2] for line in lines] == [
        "submitted",
        "estimated",
        "placed",
        "started",
        "exited",
        "succeeded",
    ]
    assert "hello from the task\n" in answer.stdout, "what the job prints"
    assert "queued" in answer.stdout.splitlines()[-1]
    assert "\x1b" not in answer.stdout, "no colour in a pipe"
    assert up.run("logs", "hello").stdout == "hello from the task\n"


@pytest.mark.parametrize(
    ("flags", "command", "code"),
    [
        ((), ("true",), 0),
        ((), ("sh", "-c", "echo the reason >&2; exit 3"), 10),
        (("--propagate",), ("sh", "-c", "exit 3"), 3),
        (("--propagate",), ("true",), 0),
        (("--gpus", "16"), ("true",), 13),
        (("--gpus", "16", "--queue-timeout", "100ms"), ("true",), 14),
        (("--run-timeout", "300ms"), ENDLESS, 15),
        ((), ("/no/such/program",), 10),
    ],
)
def test_submit_ends_with_the_jobs_own_ending(
    up: Installation, flags: tuple[str, ...], command: tuple[str, ...], code: int
) -> None:
    """A pipeline's step is green, red, or red for a reason that needs another remedy."""
    answer = up.run("submit", *flags, "--", *command)
    assert answer.returncode == code, answer.stdout + answer.stderr
    assert "Traceback" not in answer.stderr
    if "the reason" in " ".join(command):
        assert "\nthe reason\n" in answer.stdout
        quiet = up.run("submit", "--quiet", *flags, "--", *command)
        assert quiet.returncode == code
        assert ["\nthe reason\n" in quiet.stdout, "exited" in quiet.stdout] == [False, True]


def test_the_output_of_all_members_and_attempts(up: Installation, tmp_path: Path) -> None:
    """A gang on two nodes fails when both members have printed, and is tried again: its output is printed
    with names as it comes, and can be read again in parts."""
    mark = f"{tmp_path}/$PENSTOCK_ATTEMPT"
    program = (
        "echo attempt $PENSTOCK_ATTEMPT on $PENSTOCK_NODE_ID; echo rank $RANK >&2; "
        f"touch {mark}.$RANK; until test -e {mark}.0 -a -e {mark}.1; do sleep 0.05; done; test "
        "$PENSTOCK_ATTEMPT = 2"
    )
    flags = ("--name", "gang-out", "--workers", "2", "--gpus", "2", "--max-attempts", "2")
    answer = up.run("submit", *flags, "--", "sh", "-c", program)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for attempt in (1, 2):
        on = [f"worker-{rank} | attempt {attempt} on" for rank in (0, 1)]
        assert all(answer.stdout.count(line) == 1 for line in on), answer.stdout
    logs = up.run("logs", "gang-out")
    assert (logs.returncode, logs.stderr) == (0, "")
    printed = [line.partition(" | ") for line in logs.stdout.splitlines()]
    assert [(name, text.split(" on ")[0]) for name, _, text in printed] == [
        ("worker-0", "attempt 2"),
        ("worker-0", "rank 0"),
        ("worker-1", "attempt 2"),
        ("worker-1", "rank 1"),
    ]
    assert {text.split(" on ")[1] for _, _, text in printed[::2]} == {"node-0", "node-1"}
    assert "worker-1 | attempt 1 on" in up.run("logs", "gang-out", "--attempt", "1", "-f").stdout
    assert up.run("logs", "gang-out", "--task", "w1", "--tail", "1", "--since", "1h").stdout == "rank 1\n"
    job_id = listed(up, "describe", "job", "gang-out")["job_id"]
    next((up.folder / "task-logs" / str(job_id)).glob("*.2.w0.log")).unlink()
    lost = up.run("logs", "gang-out")
    assert lost.returncode == 1
    assert lost.stdout.splitlines() == logs.stdout.splitlines()[2:], "the other is shown"
    assert "penstock: worker-0: node" in lost.stderr, lost.stderr


def test_a_cancelled_job_ends_with_its_own_code_for_whoever_follows_it(up: Installation) -> None:
    """A colleague looks into the job that a pipeline waits for, and cancels it."""
    following = up.started("submit", "--name", "cancel-me", "--", *ENDLESS)
    until_line(following, "started")
    own = "echo $PENSTOCK_ATTEMPT of $PENSTOCK_JOB_ID; exit 3"
    looked = up.run("exec", "cancel-me", "--", "sh", "-c", own)
    job_id = listed(up, "describe", "job", "cancel-me")["job_id"]
    assert (looked.returncode, looked.stdout) == (3, f"1 of {job_id}\n"), looked.stderr
    answer = up.run("cancel", "cancel-me", "--reason", "wrong data")
    assert answer.returncode == 0, answer.stderr
    rest, _ = following.communicate()
    assert following.returncode == 11
    assert "wrong data" in rest
    again = up.run("cancel", "cancel-me")
    assert again.returncode == 1
    assert "already ended" in again.stderr


def test_ctrl_c_stops_following_and_the_job_goes_on(up: Installation, tmp_path: Path) -> None:
    """Somebody closes the laptop; the training must not notice."""
    gate = tmp_path / "gate"
    following = up.started("submit", "--name", "goes-on", "--", *until_there(gate))
    job_id = until_line(following, "").strip()
    until_line(following, "started")
    following.send_signal(signal.SIGINT)
    _, output = following.communicate()
    assert following.returncode == 130
    assert f"penstock watch {job_id}" in output
    assert f"penstock cancel {job_id}" in output
    assert "Traceback" not in output
    gate.touch()
    assert up.run("watch", job_id).returncode == 0, "it succeeded, and watch ends with its code"


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_cancelled_pipeline_cancels_its_job_where_it_is_asked_to(
    up: Installation, stop: signal.Signals
) -> None:
    """The CI system cancels a step with SIGTERM: the training went on, and held its GPUs for a day."""
    for flags, outcome in ((("--cancel-on-interrupt",), "cancelled"), ((), None)):
        following = up.started("submit", *flags, "--", *ENDLESS)
        job_id = until_line(following, "").strip()
        following.send_signal(stop)
        _, output = following.communicate()
        assert following.returncode == 128 + stop, output
        assert "Traceback" not in output
        assert (f"Cancelled {job_id}" in output) == bool(flags), output
        assert (f"{job_id} goes on" in output) != bool(flags), output
        if outcome is None:
            assert listed(up, "describe", "job", job_id)["outcome"] is None
            assert up.run("cancel", job_id).returncode == 0
        assert up.run("wait", job_id).returncode == 11


def test_wait_ends_with_the_jobs(up: Installation, tmp_path: Path) -> None:
    """A pipeline submits three trainings and waits for all of them."""
    gate = tmp_path / "gate"
    made = [
        up.run(
            "submit", "-d", "--label", "sweep=lr,1", "--label", f"leg={number}", "--", *command
        ).stdout.strip()
        for number, command in enumerate([("true",), ("false",), until_there(gate)])
    ]
    assert up.run("wait", made[0]).returncode == 0
    assert up.run("wait", *made[:2]).returncode == 10, "the second one failed"

    def gave_up() -> list[str]:
        """Who had ended by then, as far as it had time to look."""
        late = up.run("wait", *made, "--timeout", "300ms", "-o", "json")
        ended = [job["job_id"] for job in json.loads(late.stdout)["jobs"]]
        assert late.returncode == 124
        assert f"{3 - len(ended)} of 3 jobs have not ended within 0.3 s" in late.stderr
        return ended

    wait_until(lambda: gave_up() == made[:2], "the two that had ended")
    waiting = up.started("wait", *made)
    lines = [until_line(waiting, "") for _ in range(2)]
    assert ["succeeded" in lines[0], "failed" in lines[1]] == [True, True]
    gate.touch()
    rest, _ = waiting.communicate()
    assert "succeeded" in rest
    assert waiting.returncode == 10
    assert up.run("wait", "no-such-job").returncode == 1

    shown = up.run("get", "jobs", "-l", "sweep=lr,1", "--limit", "2")
    assert len(shown.stdout.splitlines()) == 3, shown.stdout
    assert "2 of 3; --limit 3 lists more" in shown.stderr
    assert up.run("get", "jobs", "-l", "sweep=lr,1", "-l", "leg=1").stdout.count("failed") == 1
    assert up.run("get", "jobs", "-l", "sweep=none").stdout.strip() == "No job fits."
    assert up.run("get", "job", made[1][:12]).stdout.count("failed") == 1
    assert up.run("get", "job", made[1], "-w").returncode == 10, "to its end, which was a failure"


def test_filters_watch_and_several_ids(up: Installation, tmp_path: Path) -> None:
    """A user ends a sweep: looks at it by name, watches it, and cancels its jobs with one command."""
    run = until_there(tmp_path / "never")
    made = [up.run("submit", "-d", "--name", f"leg-{n}", "--", *run).stdout.strip() for n in range(2)]
    assert up.run("get", "jobs", "--name", "leg-1", "-o", "json").stdout.count('"job_id"') == 1
    watching = up.started("get", "jobs", "--name", "leg-1", "-w")
    assert watching.stdout is not None
    assert watching.stdout.readline().startswith("JOB")
    answer = up.run("cancel", "leg-0", "no-such-job", "leg-1")
    assert answer.returncode == 1
    assert "job no-such-job: not found" in answer.stderr
    assert [line.split(":")[0] for line in answer.stdout.splitlines()] == made
    lines = iter(watching.stdout.readline, "")
    seen = "".join(itertools.takewhile(lambda line: "cancelled" not in line, lines))
    assert watching.poll() is None, "the stream goes on"
    watching.kill()
    watching.communicate()
    assert made[0][:12] not in seen, "the other's events are not shown"
    assert [
        json.loads(up.run("wait", *made, "-o", "json").stdout)["jobs"][n]["outcome"] for n in range(2)
    ] == [
        "cancelled",
        "cancelled",
    ]
    assert up.run("watch", "leg-0", "--owner", "ana").returncode == 2


def test_a_job_is_held_and_released(up: Installation, tmp_path: Path) -> None:
    """An operator holds a job that hurts its node: the attempt may end, and the reason is shown to all who
    look."""
    up.run("submit", "-d", "--name", "late", "--", *until_there(tmp_path / "never"))
    held = up.run("hold", "late", "--reason", "the data are being copied")
    assert "penstock release" in held.stdout, held.stderr
    shown = ("get", "job", "late")
    wait_until(lambda: "(held)" in up.run(*shown).stdout, "the hold, which a busy placer takes in later")
    why = up.run("why", "late").stdout
    assert "It is held (by " in why
    assert "the data are being copied" in why
    assert "It is held" in up.run("why", "late", "--at", "0s").stdout
    assert "was submitted at" in up.run("why", "late", "--at", "2026-05-04T10:42").stderr
    again = up.run("hold", "late")
    assert (again.returncode, "held already" in again.stderr) == (1, True)
    assert up.run("release", "late").returncode == 0
    wait_until(lambda: "(held)" not in up.run(*shown).stdout, "the release")
    wait_until(lambda: "released" in up.run("events", "late").stdout, "the release among its events")
    words = up.run("events", "late").stdout
    assert words.index("held") < words.index("released")
    assert up.run("cancel", "late").returncode == 0


def test_a_key_belongs_to_one_job(up: Installation) -> None:
    """A restarted pipeline step submits again; a copied key with another job is a mistake worth stopping
    for."""
    first = up.run("submit", "--detach", "--idempotency-key", "step-7", "--", "true")
    again = up.run("submit", "--detach", "--idempotency-key", "step-7", "--", "true")
    assert (first.returncode, again.returncode) == (0, 0)
    assert first.stdout == again.stdout
    other = up.run("submit", "--detach", "--idempotency-key", "step-7", "--", "false")
    assert other.returncode == 22
    assert len(other.stderr.splitlines()) == 1
    assert "step-7" in other.stderr


def test_without_the_token_nobody_comes_in(up: Installation, place: Path) -> None:
    """Another user of the same machine."""
    nobody = up.run("get", "jobs", PENSTOCK_TOKEN_FILE="")
    assert nobody.returncode == 21
    assert "--token-file" in nobody.stderr
    wrong = place / "token"
    wrong.write_text("x" * 32)
    assert up.run("get", "jobs", "--token-file", str(wrong)).returncode == 21


def test_a_narrow_terminal_cuts_no_column_of_a_wide_table(up: Installation) -> None:
    shown = up.run("get", "nodes", "-o", "wide", COLUMNS="60").stdout.splitlines()
    assert all("node-" in line and "exits" in line for line in shown[1:]), shown


def test_what_a_job_could_steal_from_its_node_is_that_nodes_own(up: Installation) -> None:
    """A job breaks out and reads the log's URL that its node-reporter has: no ledger, no orders of other
    nodes."""
    assert up.run("submit", "--workers", "2", "--gpus", "2", "--", "true").returncode == 0, "both have orders"
    urls = list((up.folder / "nodes").glob("*/log-url"))
    assert len(urls) > 1
    orders = {Partition(Topic.ORDERS, index): 0 for index in range(NODE_PARTITIONS)}

    async def steal(url: str) -> set[bytes | None]:
        log = await EmbeddedLog(url, "thief").start()
        try:
            stolen = await log.reader(orders).read()
            for topic in set(Topic) - {Topic.NODES, Topic.TELEMETRY, Topic.DEAD_LETTERS}:
                with pytest.raises(NotAllowed, match=topic):
                    await log.append([Message(Partition(topic, 0), b"{}")])
        finally:
            await log.close()
        return {record.key for record in stolen if record.value or record.headers}

    for path in urls:
        assert path.stat().st_mode & 0o777 == 0o600
        assert asyncio.run(steal(path.read_text())) == {path.parent.name.encode()}


def test_a_stopped_gateway_is_unreachable_not_a_crash(up: Installation) -> None:
    """The wrong port in somebody's settings."""
    answer = up.run("top", PENSTOCK_SERVER="http://127.0.0.1:9")
    assert answer.returncode == 20
    assert len(answer.stderr.splitlines()) == 1


def test_json_holds_the_documented_keys(up: Installation, succeeded: str) -> None:
    """Scripts rest on these; libs/cli/README.md documents them."""
    readme = (ROOT / "libs/penstock/cli/README.md").read_text()
    rows = {
        "jobs": listed(up, "get", "jobs")["jobs"],
        "nodes": listed(up, "get", "nodes")["nodes"],
        "gpus": listed(up, "get", "gpus")["gpus"],
        "events": listed(up, "events", succeeded)["events"],
        "tasks": listed(up, "describe", "job", succeeded)["tasks"],
    }
    for name, found in rows.items():
        assert isinstance(found, list)
        assert found, name
        documented = readme.partition(f"| `{name}` |")[2].partition("|")[0]
        assert set(found[0]) == {key.strip(" `") for key in documented.split(",")}, name
    assert yaml.safe_load(up.run("get", "nodes", "-o", "yaml").stdout) == listed(up, "get", "nodes")


def test_why_answers_for_the_placed_the_waiting_and_the_past(up: Installation, succeeded: str) -> None:
    """Why is it there; why does it not run; and why did it not run an hour ago."""
    placed = listed(up, "why", succeeded)
    placement = placed["placement"]
    assert isinstance(placement, dict)
    assert placement["candidates"]
    blockers = [up.run("submit", "-d", "--gpus", "2", "--", *ENDLESS).stdout.strip() for _ in range(2)]
    waiting = up.run("submit", "-d", "--name", "waits", "--gpus", "2", "--", "true").stdout.strip()
    wait_until(lambda: listed(up, "why", waiting)["reason"] == "gpus_busy", "both nodes to be taken")
    found = listed(up, "why", waiting)
    assert found["now_or_never"] == "later"
    table = up.run("queue").stdout
    assert "waits" in table
    assert "Too few GPUs are free" in table
    seq = found["seq"]
    for job_id in blockers:
        assert up.run("cancel", job_id).returncode == 0
    assert up.run("watch", waiting).returncode == 0
    assert listed(up, "why", waiting)["status"] == "succeeded"
    past = listed(up, "why", waiting, "--at", str(seq))
    assert (past["reason"], past["seq"]) == ("gpus_busy", seq)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("get", "jobs"), ("JOB", "STATE")),
        (("get", "jobs", "-o", "wide"), ("OWNER", "SUBMITTED")),
        (("get", "nodes", "-o", "wide"), ("node-0", "rack-1", "ready")),
        (("get", "gpus"), ("V100", "16 GiB")),
        (("describe", "node", "node-1"), ("rack-1", "V100")),
        (("describe", "job", "done"), (r"VIRTUAL-node-\d-\d \(\d\)",)),
        (("why", "done"), (r"VIRTUAL-node-\d-\d \(\d\)",)),
        (("doctor",), ("placer", "2 of 2 ready")),
        (("projections", "verify"), ("ok: true",)),
        (("projections", "rebuild"), ("ok: true",)),
        (("queue",), ("No job waits",)),
        (("version",), ("penstock 0",)),
    ],
    ids=lambda value: " ".join(value),
)
@pytest.mark.usefixtures("succeeded")
def test_looking_around(up: Installation, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    """Every command that only looks, after some jobs have run."""
    up.gateway.until_nodes(2)
    answer = up.run(*arguments)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    for word in words:
        assert re.search(word, answer.stdout), answer.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ("why", "nope"),
        ("logs", "nope"),
        ("describe", "job", "nope"),
        ("describe", "node", "nope"),
        ("cancel", "nope"),
    ],
)
def test_an_unknown_name_is_reported_with_where_to_look(up: Installation, arguments: tuple[str, ...]) -> None:
    """A typing error."""
    answer = up.run(*arguments)
    assert answer.returncode == 1
    assert len(answer.stderr.splitlines()) == 1
    assert all(words in answer.stderr for words in ("nope", "lists them")), answer.stderr


def test_top_and_watch_in_a_pipe_show_a_snapshot_and_then_lines(up: Installation) -> None:
    """`penstock watch | tee log` in a CI job."""
    watching = up.started("watch")
    until_line(watching, "")
    made = up.run("submit", "-d", "--name", "seen", "--", "true").stdout.strip()
    line = until_line(watching, f"{made[:12]}  succeeded")
    assert re.match(r"\d\d:\d\d:\d\d ", line), line
    watching.send_signal(signal.SIGINT)
    watching.communicate()
    assert watching.returncode == 130


def test_a_pipeline_that_may_only_submit_cancels_its_job(up: Installation, place: Path) -> None:
    """It has the id that its submission printed; names and starts of ids are for those who may read."""
    made = up.run("token", "--roles", "submit", "--tenant", "ci")
    token = place / "submit-only"
    token.write_text(made.stdout)
    job_id = up.run("submit", "--detach", "--token-file", str(token), "--", *ENDLESS).stdout.strip()
    assert up.run("cancel", job_id, "--token-file", str(token)).returncode == 0
    assert up.run("watch", job_id).returncode == 11
    followed = up.run("submit", "--token-file", str(token), "--", "true")
    assert followed.returncode == 0, followed.stderr
    assert "role read" in followed.stderr
    assert up.run("watch", followed.stdout.strip()).returncode == 0
    unknown = up.run("cancel", "nightly", "--token-file", str(token))
    assert (unknown.returncode, "nightly" in unknown.stderr) == (1, True), unknown.stderr


def test_a_second_up_on_the_same_folder_says_who_holds_it(up: Installation) -> None:
    """Two terminals, one forgotten."""

    def started(*arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [*PENSTOCK, "up", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=up.env, cwd=ROOT)

    second = started("--folder", str(up.folder), "--port", "0")
    assert second.returncode == 2
    assert str(up.process.pid) in second.stderr
    assert up.url in second.stderr
    taken = started("--folder", str(up.folder) + "2", "--port", up.url.rpartition(":")[2])
    assert taken.returncode == 2
    assert "--port" in taken.stderr


def test_a_killed_node_reporter_comes_back_and_its_task_goes_on(up: Installation) -> None:
    """The out-of-memory killer picks the node-reporter; the training beside it must not suffer, nor the
    debugger in it: its user has detached from the job's terminal, and attaches again."""
    env = {**up.env, "PENSTOCK_SERVER": up.url}
    command = ("submit", "-it", "--name", "survivor", "--gpus", "2", "--", "bash", "--norc", "-i")
    with Terminal(env, *command) as terminal:
        terminal.type(b"unset HISTFILE; PS1=; stty -echo size; seen=be''fore; echo $seen\r")
        wait_until(lambda: terminal.shows(b"31 97\r\nbefore\r\n"), terminal.printed)
        terminal.type(b"\x10\x11")
        wait_until(terminal.ended, terminal.printed)
        assert terminal.process.returncode == 0
        assert b"penstock attach" in terminal.printed()
    job_id = str(listed(up, "describe", "job", "survivor")["job_id"])
    tasks = listed(up, "describe", "job", job_id)["tasks"]
    assert isinstance(tasks, list)
    node = tasks[0]["node_id"]
    reporters = [
        line
        for line in processes_of(up.folder)
        if "penstock_services.node_reporter" in line and f"--node-id {node} " in line
    ]
    assert len(reporters) == 1
    os.kill(int(reporters[0].partition(":")[0]), signal.SIGKILL)
    wait_until(lambda: f"{node} ended with code -9" in up.printed(), up.printed)
    wait_until(lambda: up.run("exec", job_id, "--", "true").returncode == 0, "the node's return")
    with Terminal(env, "attach", job_id) as terminal:
        wait_until(lambda: terminal.shows(b"before\r\n"), terminal.printed)
        terminal.type(b"echo $seen and af''ter; exit 0\r")
        wait_until(terminal.ended, terminal.printed)
        assert b"before and after\r\n" in terminal.printed()
        assert terminal.process.returncode == 0
    assert "before and after\r\n" in up.run("logs", job_id).stdout
    found = listed(up, "describe", "job", job_id)
    assert found["attempt"] == 1, "the same attempt went on"


def test_a_killed_database_comes_back_and_no_job_is_lost(up: Installation, tmp_path: Path) -> None:
    """The out-of-memory killer picks Postgres while a job runs; everything waits for it and goes on."""
    gate = tmp_path / "gate"
    command = ("submit", "-d", "--name", "through-the-outage", "--", *until_there(gate))
    job_id = up.run(*command).stdout.strip()
    up.until(job_id, "running")
    masters = [line for line in processes_of(up.folder) if "postgres -D" in line]
    assert len(masters) == 1, masters
    os.kill(int(masters[0].partition(":")[0]), signal.SIGKILL)
    wait_until(lambda: "Postgres died; starting it again" in up.printed(), up.printed)
    gate.touch()

    def watched() -> bool:
        """Not while the gateway starts again."""
        answer = up.run("watch", job_id)
        assert answer.returncode in (Exit.OK, Exit.UNREACHABLE), answer.stdout + answer.stderr
        return answer.returncode == Exit.OK

    wait_until(watched, up.printed)
    assert up.run("submit", "--", "true").returncode == 0
    assert up.run("projections", "verify").returncode == 0
