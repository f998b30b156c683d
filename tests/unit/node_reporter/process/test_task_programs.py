"""A task's program on its PATH: looked up in advance, and run as exec itself would have found it."""

import os
from pathlib import Path
from typing import Any

import pytest

from penstock_services.node_reporter.shell.ports import Exit, Failure
from penstock_services.node_reporter.shell.process.exits import outcome_of
from penstock_services.node_reporter.shell.task_setup.programs import cause_of, enter, execute, find_program
from tests.support.node_reporter.node_cell import start_order


def asked(*argv: str, path: str, **more: Any) -> dict[str, Any]:
    """Of a request what matters here."""
    return {"argv": list(argv), "env": {"PATH": path}, "code": None, "programs": None, **more}


def program(path: Path, text: str, mode: int = 0o755) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(mode)
    return path


def ran(request: dict[str, Any]) -> str:
    """What the program wrote, run as a leader does; "errno" and the number where nothing could be run."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(write, 1)
            execute(find_program(request), request["argv"], request["env"])
        except OSError as error:
            os.write(1, f"errno {error.errno}".encode())
        finally:
            os._exit(1)
    os.close(write)
    with open(read) as output:
        found = output.read()
    os.waitpid(pid, 0)
    return found


def test_the_first_on_path_that_can_be_executed_is_the_one(tmp_path: Path) -> None:
    """A user's PATH names folders that are not there, and ones with a folder or a plain file of that name."""
    (tmp_path / "folder/train").mkdir(parents=True)
    program(tmp_path / "plain/train", "text", mode=0o644)
    wanted = program(tmp_path / "one/train", "#!/bin/sh\necho one")
    program(tmp_path / "two/train", "#!/bin/sh\necho two")
    path = ":".join(str(tmp_path / name) for name in ("absent", "folder", "plain", "one", "two"))
    assert find_program(asked("train", path=path)) == str(wanted)
    assert ran(asked("train", path=path)) == "one\n"


def test_a_program_for_another_machine_lets_the_next_on_path_run(tmp_path: Path) -> None:
    """A shared folder of tools comes first on PATH, and one of them was built for another processor."""
    program(tmp_path / "arm/train", "\x7fELF but not of here")
    program(tmp_path / "here/train", "#!/bin/sh\necho here")
    assert ran(asked("train", path=f"{tmp_path}/arm:{tmp_path}/here")) == "here\n"


def test_what_no_folder_has_is_reported_as_missing(tmp_path: Path) -> None:
    assert ran(asked("train", path=str(tmp_path))) == "errno 2"


@pytest.mark.parametrize(
    "changes", [{"code": ["archive", "digest", "work"]}, {"programs": ["venv", "/opt/env", []]}]
)
def test_what_is_yet_to_come_is_not_looked_up_in_advance(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The job's own code or environment may bring the program, and must win."""
    program(tmp_path / "train", "#!/bin/sh\necho too early")
    assert find_program(asked("train", path=str(tmp_path), **changes)) is None


@pytest.mark.parametrize("path", ["bin:/usr/bin", ":/usr/bin", "/usr/bin:."])
def test_a_path_relative_to_the_working_folder_is_looked_up_there(path: str) -> None:
    assert find_program(asked("sh", path=path)) is None


def test_a_program_with_a_folder_is_not_searched_for(tmp_path: Path) -> None:
    program(tmp_path / "bin/train", "#!/bin/sh\necho ran")
    assert find_program(asked("bin/train", path=str(tmp_path))) is None
    assert ran(asked(f"{tmp_path}/bin/train", path="/usr/bin")) == "ran\n"


@pytest.mark.parametrize(
    ("name", "text", "mode", "cause", "remedy"),
    [
        ("./crlf.sh", "#!/bin/bash\r\necho hi\r\n", 0o755, "crlf", "sed -i 's/\\r$//' ./crlf.sh"),
        ("./crlf.py", "#!/usr/bin/env python3\r\nprint(1)\r\n", 0o755, "crlf", "CRLF"),
        ("./plain.sh", "echo hi\n", 0o755, "first_line", "`bash ./plain.sh`"),
        ("./train.py", "print(1)\n", 0o644, "mode", "`python3 ./train.py`"),
        ("train.py", "print(1)\n", 0o644, "folder", "`python3 train.py`"),
        ("./old.sh", "#!/opt/gone/bash\necho\n", 0o755, "interpreter", "(#!)"),
    ],
)
def test_a_script_that_cannot_be_executed_has_its_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str, mode: int, cause: str, remedy: str
) -> None:
    """A script from a Windows editor, one without `#!`, and `train.py` as people type it: "No such file"
    helps nobody."""
    monkeypatch.chdir(tmp_path)
    program(tmp_path / name, text, mode)
    answer = ran(asked(name, path="/usr/bin:/bin"))
    assert answer.startswith("errno "), answer
    assert cause_of(name, {"PATH": "/usr/bin:/bin"}) == cause
    ended = Exit(0, 0, None, None, 0, 0, failure=Failure("exec", int(answer.split()[1]), cause))
    found = outcome_of(ended, start_order(1, name))
    assert found is not None
    assert remedy in found.failure


def test_condas_own_scripts_run_as_conda_activate_runs_them(tmp_path: Path) -> None:
    """Compilers and CUDA packages set CC, CUDA_HOME and the like there; `conda env config vars set` writes
    into a file of conda's."""
    (tmp_path / "conda-meta").mkdir()
    (tmp_path / "conda-meta/state").write_text('{"version": 1, "env_vars": {"OF_STATE": "1"}}')
    program(
        tmp_path / "etc/conda/activate.d/10-cc.sh",
        'echo hello; export CC="$CONDA_PREFIX/bin/gcc"\nlocal_one=1\n',
        0o644,
    )
    program(tmp_path / "etc/conda/activate.d/20-two.sh", 'export TWO="$CC\n2"', 0o644)
    program(tmp_path / "etc/conda/activate.d/30-fish.fish", "not for this shell", 0o644)
    base = {"PATH": "/usr/bin:/bin", "RANK": "3", "EMPTY": ""}
    found = enter("conda", str(tmp_path), base, ())
    assert found["CC"] == f"{tmp_path}/bin/gcc"
    assert (found["TWO"], found["OF_STATE"], found["RANK"], found["EMPTY"]) == (
        f"{tmp_path}/bin/gcc\n2",
        "1",
        "3",
        "",
    )
    assert found["PATH"] == f"{tmp_path}/bin:/usr/bin:/bin"
    assert "local_one" not in found
    program(tmp_path / "etc/conda/activate.d/40-bad.sh", "exit 7", 0o644)
    assert "CC" not in enter("conda", str(tmp_path), base, ()), (
        "a script that ends the shell loses its variables, not the job"
    )
