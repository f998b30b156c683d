"""Secrets are references: from the job file to the task, and what looks like one is noticed."""

from pathlib import Path
from time import process_time

import pytest

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import decode, encode
from penstock.sdk.job_file.jobfile import BadJob, parse_job
from penstock.sdk.job_file.secrets import suspicions
from penstock_services.node_reporter.shell.ports import SecretMissing
from penstock_services.node_reporter.shell.task_setup.secrets import MAX_SECRET_BYTES, Secrets
from penstock_services.placer.core.orders import start_orders
from tests.support.cluster.driver import CellDriver, job_spec, node_spec


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


def test_an_order_names_the_tenant_of_a_job_that_asks_for_secrets() -> None:
    """The node divides its secrets by it; an order without secrets is as it was."""
    cell = CellDriver()
    cell.join(node_spec("n1"))
    for job_id, secrets in (("asks", {"KEY": "wandb"}), ("plain", {})):
        cell.submit(job_id, job_spec(owner="vision", secrets=secrets))
    orders = {
        job_id: start_orders(cell.state, job_id, cell.state.jobs[job_id].token)[0]
        for job_id in ("asks", "plain")
    }
    assert [(order.owner, b'"owner"' in encode(order)) for order in orders.values()] == [
        ("vision", True),
        (None, False),
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`vision`, `speech` and `a/b` are tenants."""
    for name, mode, content in (
        ("vision/wandb", 0o600, b"canary\n"),
        ("vision/open", 0o644, b"canary"),
        ("vision/large", 0o600, b"x" * (MAX_SECRET_BYTES + 1)),
        ("vision/binary", 0o600, b"\xff\xfe"),
        ("vision/nul", 0o400, b"can\0ary"),
        ("vision/empty", 0o600, b""),
        ("vision/folder/x", 0o600, b"canary"),
        ("speech/wandb", 0o600, b"canary-speech"),
        ("speech/only", 0o600, b"canary-speech"),
        ("shared/proxy", 0o600, b"for-all"),
        ("shared/wandb", 0o600, b"not the tenant's own"),
        ("flat", 0o600, b"canary"),
        ("a/b/wandb", 0o600, b"nested"),
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
        (tmp_path / name).chmod(mode)
    return tmp_path


ENVIRONMENT = {
    "PENSTOCK_SECRET_VISION__HF_TOKEN": "from-env",
    "PENSTOCK_SECRET_VISION__WANDB": "no",
    "HOME": "/",
    "PENSTOCK_SECRET_SHARED__HF_TOKEN": "not the tenant's own",
    "PENSTOCK_SECRET_SHARED__MIRROR": "for-all-from-env",
    "PENSTOCK_SECRET_FLAT_TOO": "canary",
    "PENSTOCK_SECRET_VISION_HF__TOKEN": "canary",
}


def test_a_node_finds_a_tenants_secrets_first_then_shared_ones(folder: Path) -> None:
    """In its folder, which a mounted Kubernetes secret is as well, then in its environment."""
    found = Secrets(folder, ENVIRONMENT)
    asked = {"A": "wandb", "B": "hf-token", "C": "empty", "D": "proxy", "E": "mirror"}
    assert found.resolve(asked, "vision") == {
        "A": "canary",
        "B": "from-env",
        "C": "",
        "D": "for-all",
        "E": "for-all-from-env",
    }
    assert found.resolve({"A": "wandb"}, "a/b") == {"A": "nested"}
    assert found.resolve({"A": "wandb", "B": "hf-token"}, None) == {
        "A": "not the tenant's own",
        "B": "not the tenant's own",
    }
    assert Secrets(None, ENVIRONMENT).resolve({"A": "hf-token"}, "vision") == {"A": "from-env"}


@pytest.mark.parametrize(
    "tenant", ["vision", "Speech", "speech/x", "a", "a/../speech", "a/.", "x", "shared", None]
)
@pytest.mark.parametrize("name", ["only", "b", "speech", "hf", "flat"])
def test_no_tenant_is_given_anothers_secret(folder: Path, tenant: str | None, name: str) -> None:
    """A job of vision names what speech has, and tenants with odd names reach for their neighbour's
    folder."""
    env = {
        **ENVIRONMENT,
        "PENSTOCK_SECRET_SPEECH__ONLY": "canary",
        "PENSTOCK_SECRET_VISION_HF__TOKEN": "canary",
    }
    with pytest.raises(SecretMissing, match=name) as raised:
        Secrets(folder, env).resolve({"KEY": name}, tenant)
    assert "canary" not in str(raised.value)


def test_a_name_that_two_secrets_could_share_is_not_looked_for_in_the_environment() -> None:
    """`a-b` and `a_b`, `X` and `x` are one variable; only one spelling has it."""
    env = {"PENSTOCK_SECRET_A_B__X": "canary"}
    assert Secrets(None, env).resolve({"K": "x"}, "a-b") == {"K": "canary"}
    for tenant, name in (
        ("a_b", "x"),
        ("a.b", "x"),
        ("A-b", "x"),
        ("a-b", "X"),
        ("a", "b--x"),
        ("a-b-", "x"),
    ):
        with pytest.raises(SecretMissing, match="K: "):
            Secrets(None, env).resolve({"K": name}, tenant)


@pytest.mark.parametrize(
    ("name", "complaint"),
    [
        ("missing", "has no secret 'missing' for vision.*vision/missing.*--secrets-dir.*shared/missing"),
        ("flat", "belongs to no tenant.*vision/flat.*shared/flat"),
        ("flat-too", "belongs to no tenant.*PENSTOCK_SECRET_VISION__FLAT_TOO"),
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
        Secrets(folder, ENVIRONMENT).resolve({"KEY": name}, "vision")
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
    "OMP_NUM_THREADS": "4",
    "PYTHONPATH": "/data/projects/vision/src/models:/opt/lib/python3",
    "TOKENIZERS_PARALLELISM": "false",
    "MODEL": "meta-llama/Llama-3.1-70B-Instruct",
    "URL": "https://example.org/data/set-1",
    "MAX_TOKENS": "4096",
    "SHA": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
    "USE_AUTH": "true",
    "RUN": "resnet50-imagenet-lr0.1",
    "UUID": "GPU-5c2d1f0e-7a8b-4c3d-9e1f-0a2b3c4d5e6f",
    "CKPT": "/mnt/a1/b2/Checkpoint_Final_Epoch99_Best",
}


def test_what_looks_like_a_secret_is_noticed_and_the_rest_is_not() -> None:
    assert {field for field, _ in suspicions(SECRET_LOOKING)} == {f"env.{name}" for name in SECRET_LOOKING}
    assert list(suspicions(ORDINARY, ["train", "--lr", "0.1"])) == []
    assert [field for field, _ in suspicions({}, ["sync", "--to", "s3://key:secret@host/b"])] == ["command.2"]
    names = {"A": "wandb", "B": "team-a.hf-token", "C": "ghp_0123456789abcdefghijABCDEFGHIJ012345"}
    assert [field for field, _ in suspicions({}, secrets=names)] == ["secrets.C"], "its text, not its name"
    assert not any(value in why for _, why in suspicions(SECRET_LOOKING) for value in SECRET_LOOKING.values())


@pytest.mark.parametrize("text", ["a", "eyJ", "a://", "a://b:", "eyJ0123456789.", "xoxb-", "-----BEGIN "])
def test_a_large_variable_does_not_stop_the_gateway(text: str) -> None:
    """A user passes a data set in a variable. Looking for secrets in it took half a minute of the gateway's
    event loop."""
    began_s = process_time()
    list(suspicions({"BLOB": text * ((1 << 16) // len(text))}))
    assert process_time() - began_s < 2
