"""Secrets are references: from the job file to the task, and what looks like one is noticed."""

from pathlib import Path
from time import process_time

import pytest

from penstock.model.codec import decode, encode
from penstock.model.external_events import JobSubmitted
from penstock.model.types import JobSpec
from penstock.sdk.jobfile import BadJob, parse_job
from penstock.sdk.secrets import suspicions
from penstock_services.node_reporter.shell.ports import SecretMissing
from penstock_services.node_reporter.shell.secrets import MAX_SECRET_BYTES, Secrets


def test_a_job_file_names_secrets_where_it_sets_variables() -> None:
    spec = parse_job({"command": ["train"], "env": {"LR": "0.1", "WANDB_API_KEY": {"secret": "wandb"}}})
    assert (spec.env, spec.secrets) == ({"LR": "0.1"}, {"WANDB_API_KEY": "wandb"})
    event = JobSubmitted(job_id="j", spec=spec)
    assert decode("penstock.job.submitted.v1", encode(event)) == event
    assert b"secrets" not in encode(JobSpec(command=("true",))), "ledgers of before stay as they are"


@pytest.mark.parametrize(
    "wrong",
    [{"secret": "../../etc/shadow"}, {"secret": ""}, {"secret": "a/b"}, {"secret": "x", "value": "y"}, 7],
)
def test_a_reference_that_is_none_is_refused(wrong: object) -> None:
    """A path would be read as root."""
    with pytest.raises(BadJob, match=r"(env|secrets)\.KEY"):
        parse_job({"command": ["train"], "env": {"KEY": wrong}})


def test_one_variable_has_one_source() -> None:
    with pytest.raises(ValueError, match="remove one"):
        JobSpec(command=("true",), env={"KEY": "x"}, secrets={"KEY": "y"})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, mode, content in (
        ("wandb", 0o600, b"canary\n"), ("open", 0o644, b"canary"), ("large", 0o600, b"x" * (MAX_SECRET_BYTES + 1)),
        ("binary", 0o600, b"\xff\xfe"), ("nul", 0o400, b"can\0ary"), ("empty", 0o600, b""),
    ):  # fmt: skip
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    (tmp_path / "folder").mkdir()
    return tmp_path


def test_a_node_finds_secrets_in_its_folder_then_in_its_environment(folder: Path) -> None:
    found = Secrets(
        folder, {"PENSTOCK_SECRET_HF_TOKEN": "from-env", "PENSTOCK_SECRET_WANDB": "no", "HOME": "/"}
    )
    assert found.resolve({"A": "wandb", "B": "hf-token", "C": "empty"}) == {
        "A": "canary",
        "B": "from-env",
        "C": "",
    }
    assert Secrets(None, {"PENSTOCK_SECRET_X": "1"}).resolve({"A": "x"}) == {"A": "1"}


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("missing", "has no secret 'missing'.*--secrets-dir"),
        ("open", "mode 0644.*0600"),
        ("large", "exceeds"),
        ("binary", "not UTF-8"),
        ("nul", "NUL"),
        ("folder", "cannot be read"),
    ],
)
def test_a_secret_that_cannot_be_used_is_named_without_its_value(
    folder: Path, name: str, complaint: str
) -> None:
    with pytest.raises(SecretMissing, match=f"KEY: .*{complaint}") as raised:
        Secrets(folder, {}).resolve({"KEY": name})
    assert "canary" not in str(raised.value)


SECRET_LOOKING = {
    "WANDB_API_KEY": "x1",
    "DB_PASSWORD": "hunter2",
    "hf_token": "abc",
    "A": "AKIAIOSFODNN7EXAMPLE",
    "B": "ghp_0123456789abcdefghijABCDEFGHIJ",
    "C": "postgresql://ana:hunter2@db/x",
    "D": "kJ8vQ2xZ7mP4wR9tL1nB6cY3hF5sD0aG",
    "E": "-----BEGIN RSA PRIVATE KEY-----\nMII",
    "F": "Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
}
ORDINARY = {
    "OMP_NUM_THREADS": "4", "PYTHONPATH": "/data/projects/vision/src/models:/opt/lib/python3", "TOKENIZERS_PARALLELISM": "false",
    "MODEL": "meta-llama/Llama-3.1-70B-Instruct", "URL": "https://example.org/data/set-1", "MAX_TOKENS": "4096",
    "SHA": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08", "USE_AUTH": "true", "RUN": "resnet50-imagenet-lr0.1",
    "UUID": "GPU-5c2d1f0e-7a8b-4c3d-9e1f-0a2b3c4d5e6f", "CKPT": "/mnt/a1/b2/Checkpoint_Final_Epoch99_Best",
}  # fmt: skip


def test_what_looks_like_a_secret_is_noticed_and_the_rest_is_not() -> None:
    assert {field for field, _ in suspicions(SECRET_LOOKING)} == {f"env.{name}" for name in SECRET_LOOKING}
    assert list(suspicions(ORDINARY, ["train", "--lr", "0.1"])) == []
    assert [field for field, _ in suspicions({}, ["sync", "--to", "s3://key:secret@host/b"])] == ["command.2"]
    names = {"A": "wandb", "B": "team-a.hf-token", "C": "ghp_0123456789abcdefghijABCDEFGHIJ012345"}
    assert [field for field, _ in suspicions({}, secrets=names)] == ["secrets.C"], "its text, not its name"
    assert not any(value in why for _, why in suspicions(SECRET_LOOKING) for value in SECRET_LOOKING.values())


@pytest.mark.parametrize("text", ["a", "eyJ", "a://", "a://b:", "eyJ0123456789.", "xoxb-", "-----BEGIN "])
def test_a_large_variable_does_not_stop_the_gateway(text: str) -> None:
    """A user passes a data set in a variable. Looking for secrets in it took half a minute of the gateway's event loop."""
    began_s = process_time()
    list(suspicions({"BLOB": text * ((1 << 16) // len(text))}))
    assert process_time() - began_s < 2
