"""The model's types: valid values of jobs and nodes; others are refused with the field's name."""

import ast
import inspect
import math
import zlib
from base64 import b64encode
from random import Random
from typing import Any, Literal, get_origin, get_type_hints

import msgspec
import pytest
from pydantic import ValidationError

from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns import allowed, commands, process_rules, types, worker_range
from penstock.model.nouns.commands import MAX_ARGUMENT_BYTES, MAX_ARGV_BYTES, command_fields
from penstock.model.nouns.nodes import Gpu, NodeSpec
from penstock.model.nouns.types import (
    MAX_ENV_ENTRIES,
    MAX_GANG_TASKS,
    MAX_GPUS_PER_NODE,
    Estimate,
    ResourceVector,
    TaskPlacement,
    Usage,
    Value,
)
from penstock.model.schema.event import wire_type
from penstock.model.schema.validation import checked
from penstock.model.wire.codec import decode, encode
from penstock.sdk.job_file.jobfile import BadJob, parse_job

UNITS = ("_mib", "_mbps", "_ms", "_percent", "_std", "_bytes")
QUANTITIES = ("memory", "bandwidth", "time", "timeout", "backoff", "utilisation", "grace", "duration")


def bad_fields(error: pytest.ExceptionInfo[ValidationError]) -> set[str]:
    """The first step of each path that the validation complains about."""
    return {str(problem["loc"][0]) if problem["loc"] else "" for problem in error.value.errors()}


def gpus(count: int) -> tuple[Gpu, ...]:
    return tuple(
        Gpu(index=index, uuid=f"GPU-{index}", model="A100", memory_mib=40_960) for index in range(count)
    )


def node(**changes: Any) -> NodeSpec:
    fields: dict[str, Any] = {"node_id": "n-1", "boot_id": "b-1", "cores": 8, "host_memory_mib": 16_384}
    return checked(NodeSpec, {**fields, **changes})


def test_the_smallest_job_is_one_command() -> None:
    """`penstock submit -- python train.py`: everything else is Penstock's to find out."""
    spec = JobSpec(command=("python", "train.py"))
    assert (spec.workers, spec.parameter_servers, spec.retry.max_attempts) == (1, 0, 1)
    assert spec.resources == ResourceRequest()
    assert all(value is None for value in msgspec.structs.asdict(spec.resources).values()), (
        "all left to the estimator"
    )


def test_values_are_frozen_and_compare_by_content() -> None:
    """A spec is shared by queue, explanation and record; nobody may change it under the others."""
    spec = JobSpec(command=("true",))
    with pytest.raises(AttributeError):
        spec.workers = 2  # type: ignore[misc]
    assert spec == JobSpec(command=("true",))
    assert spec != JobSpec(command=("false",))


def pack(text: bytes) -> str:
    return b64encode(zlib.compress(text)).decode()


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"command": ()}, "command"),
        ({"command": ("",)}, "command"),
        ({"command": ("a\0b",)}, "command"),
        ({"command": ("x" * 8_193,)}, "command"),
        ({"command": ("x" * 8_000,) * 3}, "command"),
        ({"command": ("true",) * 513}, "command"),
        ({"env": {"": "1"}}, "env"),
        ({"env": {"A=B": "1"}}, "env"),
        ({"env": {"A": "\0"}}, "env"),
        ({"env": {"A": "x" * (MAX_ARGV_BYTES + 1)}}, "env"),
        ({"env": {f"V{index}": "1" for index in range(MAX_ENV_ENTRIES + 1)}}, "env"),
        ({"workdir": "/tmp\0/x"}, "workdir"),
        ({"labels": {"note": "x" * (MAX_ARGV_BYTES + 1)}}, "labels"),
        ({"name": "no spaces"}, "name"),
        ({"name": ""}, "name"),
        ({"owner": "-dash-first"}, "owner"),
        ({"owner": "x" * 129}, "owner"),
        ({"workers": 0}, "workers"),
        ({"workers": 257}, "workers"),
        ({"parameter_servers": -1}, "parameter_servers"),
        ({"batch_size": 0}, "batch_size"),
        ({"resources": {"gpus": MAX_GPUS_PER_NODE + 1}}, "resources"),
        ({"resources": {"cores": 0}}, "resources"),
        ({"retry": {"max_attempts": 0}}, "retry"),
        ({"queue_timeout_ms": 0}, "queue_timeout_ms"),
        ({"grace_ms": 600_001}, "grace_ms"),
        ({"gpu_models": ("A100",) * 17}, "gpu_models"),
        ({"worker": 2}, "worker"),
    ],
)
def test_jobs_that_cannot_be_are_refused_by_field(changes: dict[str, Any], field: str) -> None:
    """A generated spec is off by one somewhere; the answer must name the field."""
    with pytest.raises(ValidationError) as refused:
        checked(JobSpec, {"command": ("true",), **changes})
    assert bad_fields(refused) == {field}


def test_bounds_are_inclusive() -> None:
    """The largest job that the docs promise must pass."""
    spec = JobSpec(
        command=("x" * 8_192, "y" * 8_192),
        env={"A": "x" * (MAX_ARGV_BYTES - 1)},
        workers=256,
        parameter_servers=MAX_GANG_TASKS - 256,
        resources=ResourceRequest(gpus=MAX_GPUS_PER_NODE),
    )
    assert spec.workers + spec.parameter_servers == MAX_GANG_TASKS
    assert len(encode(spec).decode()) < 65_536, "a record with the largest job stays below the bound"


def test_sizes_are_counted_in_bytes_not_in_characters() -> None:
    """An argument in Chinese takes three bytes per character on the way to execve."""
    with pytest.raises(ValueError, match=f"exceed {MAX_ARGV_BYTES}"):
        JobSpec(command=("训" * (MAX_ARGV_BYTES // 6 + 1),) * 2)


@pytest.mark.parametrize(
    "words",
    [
        ["python3", "-c", "print()", "x" * MAX_ARGUMENT_BYTES],
        ["cat", *map(str, range(3_000))],
        ["echo", "训" * 40_000, "\u0001" * 9_000],
        ["true"],
    ],
)
def test_a_long_command_is_packed_and_comes_out_as_it_was(words: list[str]) -> None:
    """A sweep of hydra with a generated list of files: up to 128 KiB in one argument, as far as the kernel
    goes."""
    spec = JobSpec(**command_fields(words))
    assert spec.argv == tuple(words)
    event = JobSubmitted(job_id="j", spec=spec)
    assert decode(wire_type(JobSubmitted), encode(event)) == event
    assert (spec.long_command is None) == (len(words) == 1), "short ones are as they were"
    noise = b64encode(Random(1).randbytes(98_000)).decode()
    assert (
        len(encode(JobSubmitted(job_id="j", spec=JobSpec(**command_fields([noise])))))
        < JobSubmitted.MAX_BYTES
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["x", "y" * (MAX_ARGUMENT_BYTES + 1)], "argument 1 has 131072 bytes; a program takes 131071 in one"),
        (["y" * 100_000, "y" * 100_000], "200000 bytes exceed"),
        (["x\0" * 9_000], "NUL"),
        (["", "x" * 9_000], "the program, is empty"),
    ],
)
def test_what_no_process_can_be_started_with_is_refused(words: list[str], complaint: str) -> None:
    """The node would report E2BIG, after a wait in the queue."""
    with pytest.raises(ValueError, match=complaint):
        JobSpec(**command_fields(words))
    with pytest.raises(BadJob, match=complaint):
        parse_job({"command": words})


@pytest.mark.parametrize(
    "packed", ["", "????", "eJwrSS0uAQAEXQHB", pack(b'{"a": 1}'), pack(b"[1]"), pack(b"[" * 50)]
)
def test_a_packed_command_that_is_none_is_refused(packed: str) -> None:
    """Anybody may send the field: each reader unpacks it."""
    with pytest.raises(ValidationError):
        checked(JobSpec, {"command": ("x",), "long_command": packed})


def test_all_bad_fields_come_in_one_answer() -> None:
    """One round trip per mistake makes people give up."""
    with pytest.raises(ValidationError) as refused:
        checked(
            JobSpec,
            {"command": ("\0",), "env": {"=": "1"}, "workdir": "\0", "workers": 0, "owner": "a b"},
        )
    assert bad_fields(refused) == {"command", "env", "workdir", "workers", "owner"}


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_no_noun_takes_a_number_that_json_lacks(number: float) -> None:
    """NVML divides by zero on an idle GPU and reports NaN."""
    with pytest.raises(ValidationError):
        checked(ResourceVector, {"gpu_utilisation_percent": number})
    with pytest.raises(ValidationError):
        checked(Usage, {"gpu_utilisation_percent": number})
    with pytest.raises(ValidationError):
        checked(Estimate, {"worker": {}, "confidence": number, "tier": "default", "source": "none"})


def test_a_node_lists_its_gpus_in_order() -> None:
    """Masks index GPUs by position: a gap after a GPU fell off the bus would shift every placement."""
    assert len(node(gpus=gpus(MAX_GPUS_PER_NODE)).gpus) == MAX_GPUS_PER_NODE
    assert node().gpus == ()
    for wrong in (gpus(3)[1:], (*gpus(2), gpus(1)[0]), gpus(2)[::-1]):
        with pytest.raises(ValidationError, match="in order"):
            node(gpus=wrong)
    for field, value in (("cores", 0), ("host_memory_mib", 0), ("node_id", ""), ("boot_id", " ")):
        with pytest.raises(ValidationError, match=field):
            node(**{field: value})


def test_a_placement_names_gpus_and_cores_that_can_exist() -> None:
    """A GPU index of 16 on a board of 16 would be a bit beyond every mask."""
    good = {"task_id": "j.1.w0", "role": "worker", "rank": 0, "node_id": "n-1"}
    assert TaskPlacement(**good, gpus=(0, 15), cores=(0, 1_023)).gpus == (0, 15)
    for field, value in (
        ("gpus", (16,)),
        ("gpus", (-1,)),
        ("cores", (1_024,)),
        ("rank", 512),
        ("role", "boss"),
    ):
        with pytest.raises(ValidationError, match=field):
            checked(TaskPlacement, {**good, field: value})


def test_back_off_and_confidence_have_ranges() -> None:
    """An estimator that is 120 % sure, or a back-off of a year, is a bug at its source."""
    with pytest.raises(ValidationError, match="confidence"):
        checked(Estimate, {"worker": {}, "confidence": 1.2, "tier": "user", "source": "asked"})
    with pytest.raises(ValidationError, match="tier"):
        checked(Estimate, {"worker": {}, "confidence": 1.0, "tier": "oracle", "source": "asked"})
    with pytest.raises(ValidationError, match="backoff_ms"):
        checked(RetryPolicy, {"backoff_ms": 31_536_000_000})


def all_nouns() -> list[type[Value]]:
    return [kind for _, kind in inspect.getmembers(types, inspect.isclass) if issubclass(kind, Value)]


@pytest.mark.parametrize("noun", all_nouns(), ids=lambda noun: noun.__name__)
def test_names_of_quantities_end_with_their_unit(noun: type[Value]) -> None:
    """`memory = 8192` was MiB for the writer and GiB for the reader."""
    for name, hint in get_type_hints(noun).items():
        if get_origin(hint) is not Literal and any(quantity in name for quantity in QUANTITIES):
            assert name.endswith(UNITS), f"{noun.__name__}.{name}"
    assert noun.__struct_config__.frozen


def test_the_nouns_import_nothing_that_acts() -> None:
    """The simulator and every core use these very classes: no clock, file or chance may hide in them."""
    nouns = {module.__name__ for module in (allowed, worker_range, process_rules)}
    for module in (types, allowed, worker_range, process_rules):
        tree = ast.parse(inspect.getsource(module))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported <= {"typing", "collections.abc", "msgspec", "penstock.model.nouns.commands", *nouns}
        assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    packing = ast.walk(ast.parse(inspect.getsource(commands)))
    found = {alias.name for node in packing if isinstance(node, ast.Import) for alias in node.names}
    assert found == {"base64", "binascii", "json", "zlib"}
