"""The command line without a gateway: its help, its exit codes, what it shows, and how it fails."""

import contextlib
import inspect
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

from penstock import __version__
from penstock.cli import app
from penstock.cli.app import hoist, tree
from penstock.cli.common import gateway
from penstock.cli.following import event_text
from penstock.cli.following.logs import Following
from penstock.cli.output import duration, memory
from penstock.cli.session import Session
from penstock.client import Client
from penstock.commandline import Entry
from penstock.exits import MEANING, OF_JOB, Exit, of_job
from penstock.model import proposals  # noqa: F401 - fill the registry
from penstock.model.nouns.transitions import TERMINAL
from penstock.model.schema.event import REGISTRY
from tests.support.cli.command_line import penstock
from tests.support.cli.command_process import PENSTOCK, ROOT, run


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
    assert [int(code) for code in Exit] == [0, 1, 2, 10, 11, 13, 14, 15, 20, 21, 22, 124, 129, 130, 143]


def test_the_readme_holds_the_same_table_as_the_code() -> None:
    """People read the table in the README and write it into their pipelines."""
    text = (ROOT / "libs/penstock/cli/README.md").read_text()
    for code, meaning in MEANING.items():
        assert f"| {code.value} | {meaning} |" in text


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (
            ("submit", "--dry-run", "--", "cat", "caf\udce9.txt"),
            "command.1: is not UTF-8 text",
        ),
        (("submit", "--dry-run", "--label", "a=\udce9", "--", "x"), "labels.a: is not UTF-8 text"),
        (("get", "jobs", "--owner", "\udce9"), "'\\udce9' is not UTF-8 text"),
        (("queue", "--owner", "\udce9"), "'\\udce9' is not UTF-8 text"),
        (("node", "drain", "\udce9"), "'\\udce9' is not UTF-8 text"),
        (("submit", "--idempotency-key", "\udce9", "--", "x"), "'\\udce9' is not UTF-8 text"),
    ],
)
def test_an_argument_of_another_encoding_is_a_line_not_a_traceback(
    arguments: tuple[str, ...], place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file name from an old disk in a terminal of UTF-8: the shell passes its bytes as they are."""
    assert penstock("--server", "http://127.0.0.1:1", *arguments) == 2
    assert place in capsys.readouterr().err


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
    """The list is a table, so that `penstock --help` loads no command; it must not drift from the commands
    themselves."""
    for path, entry in commands():
        if entry.target:
            module, _, function = entry.target.partition(":")
            docstring = inspect.getdoc(getattr(import_module(module), function)) or ""
            assert " ".join(docstring.partition("\n\n")[0].split()) == entry.help, path


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
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert "typer" in loaded
    assert not loaded & {"numpy", "rich", "httpx", "yaml", "asyncio", "penstock.simulator"}


@pytest.mark.parametrize(
    ("path", "start", "found"),
    [((), "pro", ["profile", "projections"]), (("traces",), "", ["ls", "describe", "convert"])],
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


@pytest.mark.parametrize("arguments", [("version",), ("--version",), ("--version", "get", "jobs")])
def test_the_version_is_printed_as_other_programs_print_it(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """`--version` is what people type first, also in front of a command."""
    assert penstock(*arguments) == 0
    assert capsys.readouterr().out == f"penstock {__version__}\n"


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
            [*PENSTOCK, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1, done.stderr
    *said, last = done.stderr.splitlines(keepends=True)
    assert [line for line in said if "no gateway" not in line] == []
    assert last == (
        "penstock: what was to be written does not fit: No space left on device; free space there, or write "
        "elsewhere\n"
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
        (
            (
                "get",
                "jbos",
            ),
            2,
            ("jbos", "jobs"),
        ),
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
)
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


def test_global_flags_may_stand_anywhere_but_after_the_dashes() -> None:
    """`penstock get jobs --server X` is what people type; the job's own flags are not ours."""
    words = ["submit", "--server", "X", "--token-file=T", "--", "train", "--server", "mine"]
    assert hoist(words) == ["--server", "X", "--token-file=T", "submit", "--", "train", "--server", "mine"]


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


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (None, "–"),
        (0, "0.00 s"),
        (421, "0.42 s"),
        (9_994, "9.99 s"),
        (9_996, "10.0 s"),
        (59_949, "59.9 s"),
        (59_960, "1m 00s"),
        (3_599_600, "1h 00m"),
        (3_661_000, "1h 01m"),
        (93_600_000, "1d 2h"),
        (-5, "0.00 s"),
    ],
)
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
        if kind.split(".")[1]
        in (
            "job",
            "task",
            "placement",
            "stop",
            "node",
            "gpu",
            "cell",
            "plan",
            "migration",
            "cores",
            "throttle",
        )
    }
    known = {kind.rpartition(".v")[0] if kind.rpartition(".v")[2].isdigit() else kind for kind in shown}
    assert known <= set(event_text.TEXTS)


def test_an_event_from_the_future_is_still_shown() -> None:
    """The gateway is newer than the command line on somebody's laptop."""
    assert event_text.describe("penstock.job.teleported.v1", {"x": 1}) == ("job.teleported", "")
    assert event_text.describe("penstock.task.exited", {"task_id": "j.1.w0"}) == ("exited", "")


def test_output_that_breaks_off_is_one_line_and_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    """Interrupted at once, `submit` closed its client before the thread that prints the output had asked for
    any."""
    client = Client("http://127.0.0.1:9")
    client.close()
    Following(client, "a-job").finish()
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert "no further output is shown" in printed.err


def test_a_signal_that_leaves_the_client_locked_does_not_hold_the_command_up() -> None:
    """It came as the main thread had just taken the lock of the client's connections: `submit` did not end
    any more."""
    with typer.Context(TyperCommand("submit"), obj=Session("submit", "http://127.0.0.1:9")) as ctx:
        client = gateway(ctx)
        client._http._transport._pool._optional_thread_lock.__enter__()  # type: ignore[attr-defined]
