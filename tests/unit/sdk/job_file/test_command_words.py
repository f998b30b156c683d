"""Commands of people who come from sbatch, SkyPilot or dstack: scripts for a shell, and words that only a
shell reads."""

import subprocess
from collections.abc import Mapping
from typing import Any

import pytest

from penstock.model.jobs.job_spec import JobSpec
from penstock.sdk.job_file.command_words import script_command, slips
from penstock.sdk.job_file.job_warnings import warnings_of
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def problems(fields: Mapping[str, Any]) -> dict[str, str]:
    with pytest.raises(BadJob) as refused:
        parse_job(fields)
    return {problem.field: problem.text for problem in refused.value.problems}


@pytest.mark.parametrize(
    "fields",
    [
        {"command": "echo one\necho two\n"},
        {"script": "echo one\r\necho two\r\n"},
        {"script": ["echo one", "echo two"]},
        {"command": "#!/bin/sh\necho one; echo two"},
        {"script": "#!/usr/bin/env -S python3 -u\nprint('one')\nprint('two')"},
        {"command": "[[ a = a ]] && for word in one two; do echo $word; done"},
    ],
)
def test_the_lines_of_a_script_run_in_a_shell(fields: dict[str, Any]) -> None:
    """Two commands below each other, as `run: |` of SkyPilot and `script:` of GitLab have them; some files
    come from Windows."""
    spec = parse_job(fields)
    answer = subprocess.run(spec.command, capture_output=True, text=True, check=True)
    assert answer.stdout == "one\ntwo\n"
    assert not list(warnings_of(spec))


def test_a_script_ends_at_its_first_command_that_fails() -> None:
    """`pip install` fails, and the training would run for hours with the old version."""
    answer = subprocess.run(
        script_command("false\necho trained"), capture_output=True, text=True, check=False
    )
    assert (answer.returncode, answer.stdout) == (1, "")
    by_itself = script_command("#!/bin/bash\nfalse\necho $0 $1", "train.sbatch", ["arg"])
    assert (
        subprocess.run(by_itself, capture_output=True, text=True, check=True).stdout == "train.sbatch arg\n"
    )


@pytest.mark.parametrize(
    ("fields", "field", "text"),
    [
        ({"command": " \n"}, "command", "is empty"),
        ({"script": "#!/usr/bin/perl\nprint 1"}, "script", "perl"),
        ({"script": "x", "command": ["y"]}, "script", "remove one"),
        ({"script": {"a": 1}}, "script", "list of lines"),
        ({"script": ["x", 1]}, "script", "list of lines"),
        ({"run": "x", "command": ["y"]}, "run", "`command: |`"),
        ({"envs": {}, "command": ["y"]}, "envs", "`env`"),
        ({"num_nodes": 2, "command": ["y"]}, "num_nodes", "`workers`"),
        ({"accelerators": "V100", "command": ["y"]}, "accelerators", "`gpu_models`"),
        ({"array": "0-3", "command": ["y"]}, "array", "a job of its own"),
    ],
)
def test_what_cannot_be_read_is_named_with_the_remedy(fields: dict[str, Any], field: str, text: str) -> None:
    """A file for another scheduler, half translated."""
    assert text in problems(fields)[field]


def test_an_anchor_for_other_jobs_may_stand_in_the_file() -> None:
    """`x-common: &common`, as in Compose files: the key is for YAML alone."""
    assert parse_job({"x-common": {"gpus": 1}, "command": ["x"]}) == JobSpec(command=("x",))


@pytest.mark.parametrize(
    ("command", "remedy"),
    [
        (["python3 -c 'print(1)'"], "quotes around the whole"),
        (["cd", "/data"], "--workdir /data"),
        (["FOO=secret", "python3", "train.py"], "-e FOO=…"),
        (["source", "venv/bin/activate"], "--venv venv"),
        (["export", "A=b"], "-e A=…"),
        (["ulimit", "-n", "1"], "bash -c"),
        (["&&", "x"], "bash -c"),
        (["python3\r"], "sed"),
        (["[[", "-f", "x", "]]"], "bash -c"),
        (["conda", "activate", "torch"], "--conda torch"),
        (["module", "load", "cuda"], "bash -lc"),
        (["2>&1", "x"], "bash -c"),
    ],
)
def test_a_program_that_exists_nowhere_is_refused(command: list[str], remedy: str) -> None:
    """Words of the shell as a program: the node would find no such file, after a wait in the queue."""
    text = problems({"command": command})["command"]
    assert remedy in text
    assert "secret" not in text, "values of variables are not shown"
    (doubt,) = warnings_of(JobSpec(command=tuple(command)))
    assert remedy in doubt.remedy, "by the API, too"


@pytest.mark.parametrize(
    ("command", "literal"),
    [
        ("python3 train.py && echo two", "&&"),
        ("python3 train.py --rank $RANK", "$RANK"),
        ("python3 train.py --out=${HOME}/x", "${HOME}"),
        ("ls *.py", "*.py"),
        ("ls ~/data", "~/data"),
        ("python3 train.py > log.txt", ">"),
        ("echo $(hostname)", "$(…)"),
        ("python3 train.py --seed $seed", "$seed"),
        ("echo `hostname`", "`hostname`"),
        ("python3 train.py >log.txt", ">log.txt"),
        ("python3 train.py 2>err.txt", "2>err.txt"),
        ("python3 train.py |& tee log", "|&"),
        ("ls ~ana/data", "~ana/data"),
        ("~/run.sh", "~/run.sh"),
        ("$HOME/run.sh", "$HOME"),
        ("run*.sh", "run*.sh"),
        ("./a.sh;./b.sh", ";"),
    ],
)
def test_what_a_shell_would_have_changed_is_a_warning(command: str, literal: str) -> None:
    """`$RANK` in quotes, so that each worker shall have its own: the program would get the five letters."""
    (slip,) = slips(command.split())
    assert not slip.certain
    assert f"gets {literal} as it stands" in slip.message


@pytest.mark.parametrize(
    "command",
    [
        ["python", "train.py", "--lr", "1e-3", "--dir=${now:%Y}/${model.name}"],
        ["sh", "-c", "cd /tmp && echo $RANK"],
        ["bash", "-lc", "source x; ls *.py"],
        ["awk", "{print $NF}", "*.txt"],
        ["find", ".", "-exec", "rm", "{}", ";"],
        ["cut", "-d", "|", "-f", "1"],
        ["python", "-c", "import os; print(os.environ['HOME'], '$HOME', 2 * 3)"],
        ["/opt/My Tools/train"],
        ["python", "train.py", "lr=0.1,0.2", "a b"],
        ["grep", "-E", "^a|b$", "x"],
        ["pytest", "-k", "a and not b", "--pattern", "x>1"],
    ],
)
def test_usual_commands_have_no_warning(command: list[str]) -> None:
    """A false alarm at each submission would teach people to read none."""
    assert [slip for slip in slips(command) if slip.certain or "/My" not in command[0]] == []


def first_task(workers: int, env: dict[str, str]) -> dict[str, str]:
    """Environment of the first task of a job whose own variables are these."""
    driver = CellDriver()
    driver.join(node_spec("n0"))
    driver.submit("job", job_spec(workers=workers, env=env), estimate(1))
    return driver.environments("job")[0]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_variable_that_each_task_has_from_its_node_is_a_warning(workers: int) -> None:
    """`--env MASTER_PORT=29500` from a notebook, `RANK=5` from another cluster: the job has its own, and its
    user would wonder. All that a task has is tried as the job's own."""
    mine = dict.fromkeys([*first_task(workers, {}), "TZ"], "mine")
    found = first_task(workers, mine)
    replaced = {name for name, value in found.items() if value != "mine"}
    assert {"MASTER_PORT", "CUDA_VISIBLE_DEVICES"} < replaced
    spec = JobSpec(command=("true",), env=mine, workers=workers)
    assert {f"env.{name}" for name in replaced - {"LOCAL_RANK", "LOCAL_WORLD_SIZE"}} == {
        doubt.field for doubt in warnings_of(spec) if "has no effect" in doubt.message
    }


def test_a_name_that_no_shell_reads_is_a_warning() -> None:
    """A job script never sees `my-flag`; an exported function of bash has such a name on purpose."""
    env = {"my-flag": "1", "1ST": "1", "A B": "1", "_ok2": "1", "BASH_FUNC_ml%%": "() { :; }"}
    doubts = list(warnings_of(JobSpec(command=("true",), env=env)))
    assert [doubt.field for doubt in doubts] == ["env.my-flag", "env.1ST", "env.A B"]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"command": ["x", "caf\udce9"]}, "command.1"),
        ({"command": ["x"], "env": {"A": "\ud800"}}, "env.A"),
        ({"command": ["x"], "env": {"\udcff": "1"}}, "env"),
        ({"command": ["x"], "labels": {"team": "\udce9"}}, "labels.team"),
        ({"command": ["x"], "workdir": "/home/ren\udce9"}, "workdir"),
        ({"script": "echo \udce9"}, "script"),
        ({"command": ["x"], "nodes": {"only": ["\udce9"]}}, "nodes.only.0"),
    ],
)
def test_a_text_of_another_encoding_names_its_field(fields: dict[str, Any], field: str) -> None:
    """A shell with LANG=de_DE.ISO-8859-1, a folder from an old disk, an escape in a generated file."""
    assert "is not UTF-8 text; write it in UTF-8" in problems(fields)[field]
