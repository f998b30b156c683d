"""`penstock import`, and foreign files and flags at `penstock submit`: what a newcomer types on the first
day."""

from pathlib import Path
from time import process_time

import pytest
import yaml

from penstock.sdk.job_file.jobfile import parse_job
from penstock.text.redaction import without_passwords
from tests.support.cli import peers
from tests.support.cli.command_line import penstock

Capture = pytest.CaptureFixture[str]


def test_a_file_is_converted_and_what_differs_is_named_on_stderr(tmp_path: Path, capsys: Capture) -> None:
    """stdout is the job file alone: it goes into a file, or into `submit -f -`."""
    path, out = tmp_path / "sky.yaml", tmp_path / "job.yaml"
    path.write_text(peers.SKY[0])
    assert penstock("import", str(path)) == 0
    printed = capsys.readouterr()
    assert parse_job({**yaml.safe_load(printed.out), "sync": None}).workers == 4
    assert f"{path}: resources.use_spot: " in printed.err
    assert penstock("import", str(path), "-o", str(out)) == 0
    assert out.read_text() == printed.out
    assert penstock("submit", "--dry-run", "-f", str(path)) == 2
    assert (
        f"{path}: is a SkyPilot file, not a job file: `penstock import {path}` converts it"
        in capsys.readouterr().err
    )
    assert penstock("import", str(path), "-o", str(tmp_path)) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (peers.DETERMINED[2], "nothing in it can run here"),
        ("type: service\nname: s\n", "nothing in it can run here"),
        ("apiVersion: apps/v1\nkind: Deployment\n", "nothing in it can run here"),
        ("hello: world\n", "no known kind"),
        ("a: [\n", "not valid YAML"),
    ],
)
def test_a_file_of_which_nothing_can_run_ends_with_a_code(
    tmp_path: Path, capsys: Capture, text: str, complaint: str
) -> None:
    """A script that goes on with an empty job file would submit nothing, and say nothing."""
    path = tmp_path / "file"
    path.write_text(text)
    assert penstock("import", str(path)) == 2
    printed = capsys.readouterr()
    assert complaint in printed.err
    assert printed.out == ""
    assert penstock("import", str(tmp_path / "gone")) == 2


def test_what_would_do_something_else_is_not_submitted(tmp_path: Path, capsys: Capture) -> None:
    """A script of an array, and a file with several jobs: one job of them would look like success."""
    script, several = tmp_path / "train.sbatch", tmp_path / "pipeline.yaml"
    script.write_text(peers.SBATCH[0])
    several.write_text(peers.SKY[2])
    assert penstock("import", str(script), "--submit") == 2
    assert "#SBATCH --array" in capsys.readouterr().err.splitlines()[-1]
    assert penstock("import", str(several), "--submit") == 2
    assert "holds 2 jobs" in capsys.readouterr().err


def test_a_script_with_sbatch_lines_is_read_where_it_is_submitted(tmp_path: Path, capsys: Capture) -> None:
    """`sbatch train.sbatch 3` becomes `penstock submit -- ./train.sbatch 3`: its lines count, flags win."""
    script = tmp_path / "train.sbatch"
    script.write_text(peers.SBATCH[1])
    assert penstock("submit", "--dry-run", "--gpus", "1", "-o", "json", "--", str(script), "3") == 0
    printed = capsys.readouterr()
    job = yaml.safe_load(printed.out)
    assert (job["resources"]["gpus"], job["resources"]["cores"], job["run_timeout_ms"]) == (1, 8, 5_400_000)
    assert (job["name"], job["env"]) == ("train", {"MODE": "fast"})
    assert job["command"][:3] == ["/bin/bash", "-l", "-c"]
    assert job["command"][4:] == ["train.sbatch", "3"]
    assert "#SBATCH --mail-type: has no equivalent" in printed.err
    script.write_text(peers.SBATCH[0])
    assert penstock("submit", "--dry-run", "--", str(script)) == 2
    assert "#SBATCH --array" in capsys.readouterr().err
    assert penstock("submit", "--dry-run", "-e", "SLURM_ARRAY_TASK_ID=1", "--", str(script)) == 0, (
        "one task of it"
    )


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("--time", "use --run-timeout"),
        ("-t", "use --run-timeout"),
        ("--gres=gpu:2", "use --gpus"),
        ("--gpus-per-node", "use --gpus"),
        ("-N", "use --workers"),
        ("--num-nodes", "use --workers"),
        ("--mem", "use --host-memory"),
        ("--cpus-per-task", "use --cores"),
        ("--job-name", "use --name"),
        ("--image", "use --container"),
        ("--wrap", "give program and arguments after --"),
        ("--nodelist", "use --only-node"),
        ("-w", "use --only-node"),
        ("--exclude", "use --exclude-node"),
        ("--partition", "`nodes` in a job file"),
        ("--array", "each task of an array as a job of its own"),
        ("--dependency", "penstock wait JOB && penstock submit"),
        ("--shm-size", "leave it out"),
        ("--prioritee", "--priority"),
    ],
)
def test_a_flag_of_another_scheduler_names_its_equivalent(flag: str, remedy: str, capsys: Capture) -> None:
    """Fingers that have typed `sbatch --time` for ten years."""
    assert penstock("submit", flag, "1", "--", "true") == 2
    message = capsys.readouterr().err
    assert remedy in message, message
    assert flag.split("=")[0] in message


def test_unknown_keys_come_before_nothing_to_run(tmp_path: Path, capsys: Capture) -> None:
    """A file with `run: |` alone: to say that there is nothing to run is true and helps nobody."""
    path = tmp_path / "job.yaml"
    path.write_text("name: block\nrun: |\n  pip list\n")
    assert penstock("submit", "-f", str(path)) == 2
    message = capsys.readouterr().err
    assert "run: is not known; write `command: |`" in message
    path.write_text("name: empty\n")
    assert penstock("submit", "-f", str(path)) == 2
    assert "nothing to run" in capsys.readouterr().err
    path.write_text("command: |\n  pip list\n  python eval.py\n")
    assert penstock("submit", "--dry-run", "-f", str(path)) == 0
    assert "name: eval" in capsys.readouterr().out


def test_a_long_argument_is_searched_for_passwords_in_linear_time() -> None:
    """A command line with 128 KiB in one argument took minutes before it was even read."""
    began_s = process_time()
    assert without_passwords("x" * 131_000 + " https://u:p@host/") == "x" * 131_000 + " https://u:***@host/"
    assert process_time() - began_s < 5
