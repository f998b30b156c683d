"""The command line without a gateway: its help, how it reads jobs, and how it fails."""

import contextlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.core import TyperCommand

from penstock.cli import app, event_text
from penstock.cli.app import hoist, tree
from penstock.cli.common import gateway
from penstock.cli.jobspec import build, default_name, idempotency_key, pairs, read_job_file
from penstock.cli.logs import Following
from penstock.cli.output import duration, memory
from penstock.cli.session import Session
from penstock.client import Client
from penstock.commandline import Entry
from penstock.exits import MEANING, OF_JOB, Exit, Stop, of_job
from penstock.model import external_events, ledger_events  # noqa: F401 - fill the registry
from penstock.model.event import REGISTRY
from penstock.model.transitions import TERMINAL
from penstock.model.types import Environment, JobSpec
from penstock.model.validation import checked_json
from tests.support.command_line import penstock

PENSTOCK = (sys.executable, "-c", "from penstock.cli.main import main; main()")
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments: str, stdin: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
    """The command as a pipeline would run it: no terminal, nobody at the gateway's port."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    return subprocess.run(
        [*PENSTOCK, *arguments], input=stdin, capture_output=True, text=True, timeout=60, check=False,
        env={**clean, "PENSTOCK_SERVER": "http://127.0.0.1:9", **env}, cwd=ROOT,
    )  # fmt: skip


def commands(
    entries: Mapping[str, Entry] = tree().entries, path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], Entry]]:
    for name, entry in entries.items():
        yield (*path, name), entry
        yield from commands(entry.entries, (*path, name))


def test_every_ending_of_a_job_has_an_exit_code_and_every_code_a_meaning() -> None:
    """A pipeline branches on the code: an ending without one would look like a crash of the tool."""
    assert set(OF_JOB) == {str(status) for status in TERMINAL}
    assert set(MEANING) == set(Exit)
    assert [int(code) for code in Exit] == [0, 1, 2, 10, 11, 13, 14, 15, 20, 21, 22, 124, 130, 143]


def test_the_readme_holds_the_same_table_as_the_code() -> None:
    """People read the table in the README and write it into their pipelines."""
    text = (ROOT / "libs/penstock/cli/README.md").read_text()
    for code, meaning in MEANING.items():
        assert f"| {code.value} | {meaning} |" in text


@pytest.mark.parametrize(
    ("state", "own", "propagate", "expected"),
    [
        ("failed", 3, False, 10),
        ("failed", 3, True, 3),
        ("failed", None, True, 10),
        ("succeeded", 0, True, 0),
        ("cancelled", 143, True, 11),
        ("unschedulable", None, True, 13),
        ("timed_out_queued", None, False, 14),
        ("timed_out_running", 143, False, 15),
    ],
)
def test_propagate_passes_on_only_a_failed_jobs_own_code(
    state: str, own: int | None, propagate: bool, expected: int
) -> None:
    """A job stopped by us may also report a code; that must not be mistaken for its own failure."""
    assert of_job(state, own, propagate=propagate) == expected


@pytest.mark.parametrize("path", [(), *(path for path, _ in commands())], ids=" ".join)
def test_every_command_explains_itself(path: tuple[str, ...], capfd: pytest.CaptureFixture[str]) -> None:
    """The first thing a new user types after a command is --help; it must answer without a gateway."""
    assert penstock(*path, "--help", "--server", "http://127.0.0.1:9") == 0
    printed = capfd.readouterr()
    assert "sage:" in printed.out
    assert (path[-1] if path else "penstock") in printed.out
    assert all(
        f"    {example}\n" in printed.out for example in dict(commands()).get(path, Entry("")).examples
    )
    assert printed.err == ""


def test_the_list_of_commands_says_what_the_commands_say() -> None:
    """The list is a table, so that `penstock --help` loads no command; it must not drift from the commands themselves."""
    for path, entry in commands():
        if entry.target:
            module, _, function = entry.target.partition(":")
            first_line = (getattr(import_module(module), function).__doc__ or "").splitlines()[0]
            assert first_line == entry.help, path


@pytest.mark.parametrize("example", [line for _, entry in commands() for line in entry.examples])
def test_the_examples_of_the_help_are_command_lines(example: str) -> None:
    """A user copies one and changes a name: command and options must be as they are."""
    program, *words = shlex.split(example.partition(" > ")[0])
    assert program == "penstock"
    command: Any = tree()
    while hasattr(command, "panels"):
        command = command.get_command(typer.Context(command), name := words.pop(0))
        assert command is not None, name
    command.make_context(name, words)


def test_help_is_quick_because_it_loads_no_command() -> None:
    """A user types `--help` more often than anything else; numpy and rich alone take longer than the rest."""
    script = (
        "import sys; from penstock.cli.app import run; run(['--help']); run(['traces', '--help']);"
        "sys.stderr.write(' '.join(sorted(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not loaded & {"numpy", "rich", "httpx", "yaml", "asyncio", "penstock.simulator"}


@pytest.mark.parametrize(
    ("path", "start", "found"),
    [((), "pro", ["projections"]), (("traces",), "", ["ls", "describe", "convert"])],
)
def test_the_shell_completes_commands(path: tuple[str, ...], start: str, found: list[str]) -> None:
    """Completion reads the same table; it must not load the simulator to offer its name."""
    group = tree()
    for name in path:
        group = group.get_command(typer.Context(group), name)
    names = [item.value for item in group.shell_complete(typer.Context(group), start)]
    assert [name for name in names if not name.startswith("-")] == found


def test_a_token_file_of_another_kind_is_refused_without_its_text(tmp_path: Path) -> None:
    """The gateway's file of hashes, two tokens, a key: the text goes into no error message."""
    path = tmp_path / "token"
    for text in (b"top-secret\nanother\n", b"two secrets", b"", b"\xff\x00", b"secret" * 1_000):
        path.write_bytes(text)
        answer = run("get", "jobs", "--token-file", str(path))
        assert answer.returncode == 21, answer.stderr
        assert "--token-file" in answer.stderr
        assert "penstock token" in answer.stderr
        assert "secret" not in answer.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("version",),
        ("--help",),
        ("traces", "ls"),
        ("traces", "convert", "poisson/1-per-hour"),
        ("submit", "--dry-run", "--", "x"),
    ],
)
def test_a_full_disk_is_a_line_not_a_traceback(arguments: tuple[str, ...]) -> None:
    """`penstock … > list.txt` in a home folder over its quota."""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*PENSTOCK, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert done.returncode == 1, done.stderr
    assert done.stderr == (
        "penstock: what was to be written does not fit: No space left on device; free space there, or write elsewhere\n"
    )


def test_a_file_that_does_not_fit_is_a_line_not_a_traceback(tmp_path: Path) -> None:
    """The ledger of a long simulation, in a folder with a bound on files."""
    script = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2_000, 2_000)); " + PENSTOCK[-1]
    command = (
        "simulate",
        "poisson/12-per-hour",
        "--cluster",
        "2x8",
        "--profile",
        "fifo",
        "--ledger",
        "l.jsonl",
    )
    done = subprocess.run(
        [sys.executable, "-c", script, *command],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 1, done.stderr
    assert done.stderr.splitlines()[-1].startswith(
        "penstock: what was to be written does not fit: File too large; "
    )
    assert "Traceback" not in done.stderr


def test_help_lists_the_exit_codes() -> None:
    """Found without opening a browser."""
    shown = " ".join(run("--help").stdout.split())
    assert "13 job can never run here" in shown
    assert "22 idempotency key used for another job" in shown


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("get", "jobs"), 20, ("http://127.0.0.1:9", "penstock up", "--server")),
        (("get", "jobs", "--server", "ftp://x"), 2, ("--server", "http://host:port")),
        (("get", "jobs", "--token-file", "/nowhere"), 21, ("/nowhere",)),
        (("get", "jbos",), 2, ("jbos", "jobs")),
        (("submit",), 2, ("after --", "-f")),
        (("submit", "--gpus", "17", "--", "true"), 2, ("resources.gpus", "at most 16")),
        (("submit", "--gpu-memory", "8GB", "--", "true"), 2, ("resources.gpu_memory", "8GiB")),
        (("submit", "-e", "NAME", "--", "true"), 2, ("--env 'NAME'", "NAME=VALUE")),
        (("submit", "--secret", "KEY", "--", "true"), 2, ("--secret 'KEY'", "VARIABLE=NAME")),
        (("submit", "-e", "A=1", "--secret", "A=b", "--", "true"), 2, ("--secret A", "remove one")),
        (("submit", "-f", "/nowhere.yaml"), 2, ("/nowhere.yaml", "No such file")),
        (("submit", "--", "true"), 20, ("penstock up",)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else None,
)  # fmt: skip
def test_a_mistake_is_reported_in_a_line_with_its_remedy(
    arguments: tuple[str, ...], code: int, words: tuple[str, ...]
) -> None:
    """Typing errors and a gateway that is not there are the two most common failures of all."""
    answer = run(*arguments)
    assert answer.returncode == code, answer.stderr
    assert answer.stdout == ""
    assert len(answer.stderr.splitlines()) == 1, answer.stderr
    for word in words:
        assert word in answer.stderr


def test_all_problems_of_a_job_file_are_reported_at_once(tmp_path: Path) -> None:
    """Nobody wants to learn of five mistakes in five runs of a pipeline."""
    job = tmp_path / "job.yaml"
    job.write_text("command: python train.py\ngpus: 1\nretry: {max_attempts: 0}\n")
    answer = run("submit", "-f", str(job))
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 3, answer.stderr
    for field in ("command", "gpus", "retry.max_attempts"):
        assert f": {field}: " in answer.stderr
    assert all(str(job) in line for line in answer.stderr.splitlines())


def test_yaml_errors_name_line_and_column(tmp_path: Path) -> None:
    """An indentation slip, the classic."""
    job = tmp_path / "job.yaml"
    job.write_text("name: x\ncommand: [python\nworkers: 2\n")
    answer = run("submit", "-f", str(job))
    assert answer.returncode == 2
    assert f"{job}:3:" in answer.stderr


def test_a_field_that_stands_twice_in_a_job_file_is_refused_with_both_lines(tmp_path: Path) -> None:
    """A block pasted below another: the second `gpus` used to win without a word."""
    job = tmp_path / "job.yaml"
    job.write_text("command: [python]\nresources:\n  gpus: 4\n  cores: 2\n  gpus: 1\n")
    answer = run("submit", "-f", str(job), "--dry-run")
    assert answer.returncode == 2, answer.stdout
    assert f"{job}:5:3: " in answer.stderr
    assert "`gpus`" in answer.stderr
    assert "line 3" in answer.stderr
    job.write_text("x: &x {A: a}\ncommand: [python]\nenv: {<<: *x, A: b}\n")
    assert "x: is not known" in run("submit", "-f", str(job), "--dry-run").stderr, "to merge is no repetition"


def test_a_command_beside_a_job_file_that_has_one_is_refused() -> None:
    """`submit -f job.yaml -- python other.py` used to run other.py under the file's name and resources."""
    both = run("submit", "-f", "-", "--dry-run", "--", "python", "b.py", stdin="command: [python, a.py]\n")
    assert both.returncode == 2, both.stdout
    assert "'python'" in both.stderr
    assert "after --" in both.stderr
    assert len(both.stderr.splitlines()) == 1
    one = run("submit", "-f", "-", "--dry-run", "--", "python", "b.py", stdin="workers: 2\n")
    assert one.returncode == 0, one.stderr
    assert "b.py" in one.stdout


@pytest.mark.parametrize(
    ("file", "flags", "complaint"),
    [
        ("", ("-e", "A=x", "--secret", "A=s"), "--env A and --secret A"),
        ("", ("-e", "A=x", "-e", "A=y"), "--env A"),
        ("", ("--secret", "A=x", "--secret", "A=y"), "--secret A"),
        ("", ("--label", "A=x", "--label", "A=y"), "--label A"),
        ("env: {A: x}\nsecrets: {A: s}\n", (), "A stands in env and in secrets"),
        ("env: {A: {secret: t}}\nsecrets: {A: s}\n", (), "A stands in env and in secrets"),
        ("secrets: {A: s}\n", ("-e", "A=x"), "A stands in env and in secrets"),
    ],
)
def test_a_variable_has_one_source(file: str, flags: tuple[str, ...], complaint: str) -> None:
    """A token both in clear text and as a secret: which of them the job saw used to depend on the order."""
    answer = run("submit", "-f", "-", "--dry-run", *flags, stdin=f"command: [x]\n{file}")
    assert answer.returncode == 2, answer.stdout
    assert complaint in answer.stderr
    assert len(answer.stderr.splitlines()) == 1, answer.stderr


def test_a_dry_run_needs_no_gateway_and_prints_what_would_be_submitted() -> None:
    """A pipeline's lint stage checks job files where no scheduler is reachable."""
    answer = run("submit", "-f", "-", "--dry-run", "-o", "json", stdin="command: ['true']\nrun_timeout: 2h\n")
    assert answer.returncode == 0, answer.stderr
    spec = checked_json(JobSpec, answer.stdout)
    assert spec.run_timeout_ms == 7_200_000
    assert spec.workdir == str(ROOT)


@pytest.mark.parametrize("path", sorted((ROOT / "tilt/jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_every_sample_job_is_valid(path: Path) -> None:
    """Samples are copied; a broken one breaks many."""
    assert build(read_job_file(str(path)) | {"sync": None}, path.name).command[0] == "python"
    assert path.read_text().startswith("# yaml-language-server: $schema=../../schemas/job.schema.json\n")


@pytest.mark.parametrize(
    ("text", "flags", "workdir", "environment"),
    [
        ("", (), "project/jobs", None),
        ("workdir: ..\nenvironment: {venv: ../venv}", (), "project", {"venv": "project/venv"}),
        ("environment: {conda: torch}", ("--workdir", "data"), "here/data", {"conda": "torch"}),
        ("environment: {conda: ./env}", (), "project/jobs", {"conda": "project/jobs/env"}),
        ("environment: {venv: v}", ("--venv", "../v"), "project/jobs", {"venv": "v"}),
        ("environment: {venv: v}", ("--container", "pytorch"), "project/jobs", {"container": "pytorch"}),
        ("environment: {venv: v}", ("--path",), "project/jobs", None),
        ("environment: path", (), "project/jobs", None),
        ("environment: {container: ../torch.sif}", (), "project/jobs", {"container": "project/torch.sif"}),
        ("", ("--container", "./torch.sif"), "project/jobs", {"container": "here/torch.sif"}),
        ("", ("--sync", "."), None, None),
    ],
)
def test_relative_paths_are_of_the_job_files_folder_and_of_flags_of_the_current_one(
    text: str, flags: tuple[str, ...], workdir: str | None, environment: dict[str, str] | None, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A job file that ran in its author's folder did not run in a pipeline's, whose working folder is another one."""
    folder, here = tmp_path / "project" / "jobs", tmp_path / "here"
    folder.mkdir(parents=True)
    here.mkdir()
    monkeypatch.chdir(here)
    file = folder / "job.yaml"
    file.write_text(f"command: [python, train.py]\n{text}\n")
    assert penstock("submit", "-f", str(file), "--dry-run", "-o", "json", *flags) == 0
    found = checked_json(JobSpec, capsys.readouterr().out)
    assert found.workdir == (workdir and str(tmp_path / workdir))
    asked = environment and {
        kind: where if where in ("torch", "pytorch") else str(tmp_path / where)
        for kind, where in environment.items()
    }
    assert found.environment == (asked and Environment(**asked))


@pytest.mark.parametrize(
    ("text", "flags", "complaint"),
    [
        (
            "environment: {venv: a, conda: b}",
            (),
            "environment: give exactly one of venv, conda and container",
        ),
        ("environment: {}", (), "environment: give exactly one of venv"),
        ("environment: {docker: a}", (), "environment.docker: is not known"),
        ("environment: conda", (), "environment: this text is no mapping"),
        ("environment: {container: --privileged}", (), "environment: it is empty or begins with '-'"),
        ("", ("--venv", "a", "--path"), "--venv and --path: programs come from one place"),
    ],
)
def test_programs_come_from_one_place(
    text: str, flags: tuple[str, ...], complaint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which of two environments a job ran in would depend on the order."""
    file = tmp_path / "job.yaml"
    file.write_text(f"command: [x]\n{text}\n")
    assert penstock("submit", "-f", str(file), "--dry-run", *flags) == 2
    assert complaint in capsys.readouterr().err


def test_flags_win_over_the_file() -> None:
    """One job file, tried with other numbers."""
    answer = run(
        "submit", "-f", "tilt/jobs/digits-mlp.yaml", "--dry-run", "-o", "json", "--gpus", "4", "-e", "A=1"
    )
    spec = checked_json(JobSpec, answer.stdout)
    assert (spec.resources.gpus, spec.env, spec.batch_size) == (4, {"A": "1"}, 64)


def test_in_ci_a_repeated_step_submits_once_and_another_job_is_another() -> None:
    """A CI system restarts a step after its runner's network failed; the first submission had arrived."""
    env = {"GITHUB_REPOSITORY": "a/b", "GITHUB_RUN_ID": "7", "GITHUB_RUN_ATTEMPT": "1", "GITHUB_JOB": "train"}
    one, two = JobSpec(command=("a",)), JobSpec(command=("b",))
    assert idempotency_key(one, env) == idempotency_key(one, dict(reversed(env.items())))
    assert idempotency_key(one, env) != idempotency_key(two, env)
    assert idempotency_key(one, env) != idempotency_key(one, {**env, "GITHUB_RUN_ATTEMPT": "2"})
    assert idempotency_key(one, {}) != idempotency_key(one, {}), "by hand each submission is a new job"
    assert idempotency_key(one, {"GITHUB_RUN_ID": "7"}).startswith("cli-"), "half a CI is none"


def test_global_flags_may_stand_anywhere_but_after_the_dashes() -> None:
    """`penstock get jobs --server X` is what people type; the job's own flags are not ours."""
    words = ["submit", "--server", "X", "--token-file=T", "--", "train", "--server", "mine"]
    assert hoist(words) == ["--server", "X", "--token-file=T", "submit", "--", "train", "--server", "mine"]


@pytest.mark.parametrize(
    ("command", "name"),
    [(["python", "src/train.py"], "train"), (["./run.sh"], "run"), (["/bin/true"], "true"), (["ünï"], "n"), (["-"], "job")],
)  # fmt: skip
def test_a_job_without_a_name_is_named_after_its_script(command: list[str], name: str) -> None:
    """Whatever the script is called, the name must pass the job's own rules."""
    assert default_name(command) == name
    assert JobSpec(name=name, command=tuple(command))


@pytest.mark.parametrize(
    ("words", "expected"),
    [("penstock ho", "hold"), ("penstock get j", "jobs job"), ("penstock get jobs --state r", "running")],
)
def test_the_shell_completes_commands_and_states(
    words: str, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """`penstock ho<TAB>`: the words of the line, and nothing else in it."""
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(words.count(" ")))
    with contextlib.suppress(SystemExit):
        app.run([])
    assert capsys.readouterr() == (expected.replace(" ", "\n") + "\n", "")


def test_pairs_keep_equal_signs_in_values() -> None:
    """`-e OPTS=--a=1`."""
    assert pairs(["OPTS=--a=1", "EMPTY="], "--env") == {"OPTS": "--a=1", "EMPTY": ""}
    with pytest.raises(Stop, match="give NAME=VALUE"):
        pairs(["=x"], "--env")


@pytest.mark.parametrize(
    ("ms", "text"),
    [(None, "–"), (0, "0.00 s"), (421, "0.42 s"), (9_994, "9.99 s"), (9_996, "10.0 s"), (59_949, "59.9 s"),
     (59_960, "1m 00s"), (3_599_600, "1h 00m"), (3_661_000, "1h 01m"), (93_600_000, "1d 2h"), (-5, "0.00 s")],
)  # fmt: skip
def test_durations_never_show_sixty_of_anything(ms: int | None, text: str) -> None:
    """Rounding at the border of a unit."""
    assert duration(ms) == text


def test_memory_is_shown_in_binary_units() -> None:
    """As job files are written."""
    assert [memory(mib) for mib in (None, 512, 16_384, 1_536)] == ["–", "512 MiB", "16 GiB", "1.5 GiB"]


def test_every_event_of_a_job_has_words() -> None:
    """A new event type must not reach people as a bare type name."""
    shown = {
        kind
        for kind in REGISTRY
        if kind.split(".")[1] in ("job", "task", "placement", "stop", "node", "gpu", "cell")
    }
    known = {kind.rpartition(".v")[0] if kind.rpartition(".v")[2].isdigit() else kind for kind in shown}
    assert known <= set(event_text.TEXTS)


def test_an_event_from_the_future_is_still_shown() -> None:
    """The gateway is newer than the command line on somebody's laptop."""
    assert event_text.describe("penstock.job.teleported.v1", {"x": 1}) == ("job.teleported", "")
    assert event_text.describe("penstock.task.exited", {"task_id": "j.1.w0"}) == ("exited", "")


def test_output_that_breaks_off_is_one_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted at once, `submit` closed its client before the thread that prints the output had asked for any."""
    client = Client("http://127.0.0.1:9")
    client.close()
    Following(client, "a-job").finish()
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "no further output is shown" in printed.err


def test_a_signal_that_leaves_the_client_locked_does_not_hold_the_command_up() -> None:
    """It came as the main thread had just taken the lock of the client's connections: `submit` did not end any more."""
    with typer.Context(TyperCommand("submit"), obj=Session("submit", "http://127.0.0.1:9")) as ctx:
        client = gateway(ctx)
        client._http._transport._pool._optional_thread_lock.__enter__()  # type: ignore[attr-defined]
