"""How `penstock submit` builds a job from a job file and flags: what wins, relative paths, mistakes, dry
runs."""

from pathlib import Path

import pytest

from penstock.cli.submission.jobspec import build, default_name, pairs, read_job_file
from penstock.exits import Stop
from penstock.model.jobs.job_parts import Environment
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.validation import checked_json
from tests.support.cli.command_line import penstock
from tests.support.cli.command_process import ROOT, run


def test_all_problems_of_a_job_file_are_reported_at_once(tmp_path: Path) -> None:
    """Nobody wants to learn of five mistakes in five runs of a pipeline."""
    job = tmp_path / "job.yaml"
    job.write_text("command: {run: train.py}\ngpus: 1\nretry: {max_attempts: 0}\n")
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


def test_a_number_is_the_one_that_people_see(tmp_path: Path) -> None:
    """`umask 0022` was 18, `--time 1:30` was 90, and eight GPUs came of `gpus: 010`: YAML 1.1 has octal
    numbers, and those to base 60. As texts they pass in a command; where a number is asked for they are
    named."""
    job = tmp_path / "job.yaml"
    job.write_text("command: [x, --mode, 0755, --at, 12:30:00, --n, 1_000, --id, 0xff, --lr, 1e-3]\n")
    assert build(read_job_file(str(job)), str(job)).command[2::2] == (
        "0755",
        "12:30:00",
        "1_000",
        "0xff",
        "1e-3",
    )
    for text, field in (
        ("resources: {gpus: 010}", "resources.gpus: '010'"),
        ("run_timeout: 1:30", "run_timeout: '1:30'"),
    ):
        job.write_text(f"command: [x]\n{text}\n")
        with pytest.raises(Stop, match=field):
            build(read_job_file(str(job)), str(job))
    job.write_text("command: [x]\nresources: {gpus: 1, gpu_share: .5}\npriority: -1\ngrace: 1.5\n")
    spec = build(read_job_file(str(job)), str(job))
    assert (spec.resources.gpus, spec.priority, spec.grace_ms) == (1, -1, 1_500), "usual numbers stay"


@pytest.mark.parametrize("text", ["---\n{}---\n", "{}---\n# the end\n", "{}...\n", "---\n---\n{}"])
def test_an_empty_document_beside_the_job_is_none(tmp_path: Path, text: str) -> None:
    """A template that ends each of its parts with `---` had its jobs refused as two documents."""
    path = tmp_path / "job.yaml"
    path.write_text(text.format("command: [python3, train.py]\n"))
    assert read_job_file(str(path))["command"] == ["python3", "train.py"]


@pytest.mark.parametrize("text", ["command: &a [x, *a]\n", "x-a: &a {b: {c: *a}}\ncommand: [x]\n"])
def test_an_alias_within_its_own_anchor_is_named(tmp_path: Path, text: str) -> None:
    """A slip in a file with anchors: a value without an end stopped each reader of it with a traceback."""
    job = tmp_path / "job.yaml"
    job.write_text(text)
    with pytest.raises(Stop, match=r"the alias \*a stands within its own anchor"):
        read_job_file(str(job))


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


def test_a_job_has_no_workdir_where_the_submitting_job_runs_in_a_folder_of_its_own(tmp_path: Path) -> None:
    """A driver without `workdir`: no other task has its folder, and on another node not even the path
    exists."""
    job = tmp_path / "work" / "job.yaml"
    job.parent.mkdir()
    job.write_text("command: ['true']\n")
    for line, folder in ((("--", "true"), ROOT), (("-f", str(job)), job.parent)):
        for fifo, workdir in (("/phases", None), (tmp_path / "other/phases", str(folder))):
            more = {"PENSTOCK_PHASE_FILE": str(fifo), "PENSTOCK_JOB_ID": "driver", "PENSTOCK_SERVER": ""}
            answer = run("submit", "--dry-run", "-o", "json", *line, **more)
            assert checked_json(JobSpec, answer.stdout).workdir == workdir
            assert "give the job `may_submit: true`, or --may-submit" in answer.stderr


@pytest.mark.parametrize(
    ("file", "flags", "priority"),
    [("", (), 0), ("priority: -3\n", (), -3), ("priority: -3\n", ("--priority", "7"), 7)],
)
def test_the_flag_for_priority_wins_over_the_job_files(
    file: str, flags: tuple[str, ...], priority: int
) -> None:
    """A sweep's job file asks for less than usual; the one leg that is wanted tonight is submitted with
    more."""
    answer = run("submit", "-f", "-", "--dry-run", "-o", "json", *flags, stdin=f"command: ['true']\n{file}")
    assert answer.returncode == 0, answer.stderr
    assert checked_json(JobSpec, answer.stdout).priority == priority


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
    text: str,
    flags: tuple[str, ...],
    workdir: str | None,
    environment: dict[str, str] | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A job file that ran in its author's folder did not run in a pipeline's, whose working folder is another
    one."""
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
        ("environment: conda", (), "environment: this text is not a mapping"),
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


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (["python", "src/train.py"], "train"),
        (["./run.sh"], "run"),
        (["/bin/true"], "true"),
        (["ünï"], "n"),
        (["-"], "job"),
    ],
)
def test_a_job_without_a_name_is_named_after_its_script(command: list[str], name: str) -> None:
    """Whatever the script is called, the name must pass the job's own rules."""
    assert default_name(command) == name
    assert JobSpec(name=name, command=tuple(command))


def test_pairs_keep_equal_signs_in_values() -> None:
    """`-e OPTS=--a=1`."""
    assert pairs(["OPTS=--a=1", "EMPTY="], "--env") == {"OPTS": "--a=1", "EMPTY": ""}
    with pytest.raises(Stop, match="give NAME=VALUE"):
        pairs(["=x"], "--env")
