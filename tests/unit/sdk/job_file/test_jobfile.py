"""The job file: human units in, exact machine units out, and every mistake reported at once with its
remedy."""

import math
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.codegen.job_schema import job_schema
from infra.codegen.schemas import ROOT
from penstock.cli.submission.jobspec import located
from penstock.model.jobs.job_parts import ResourceRequest, RetryPolicy
from penstock.model.jobs.job_spec import JobSpec
from penstock.sdk.job_file.job_problems import Problem
from penstock.sdk.job_file.jobfile import MAX_PROBLEMS, BadJob, JobFile, parse_job
from penstock.sdk.job_file.units import MIB_PER_UNIT, MS_PER_UNIT, duration_ms, memory_mib, rate_mbps, show

RESNET = """
name: resnet50
owner: alice
command: [python, train.py, --epochs, "3"]
env: {OMP_NUM_THREADS: "4"}
workers: 2
parameter_servers: 1
resources: {gpus: 1, cores: 4, host_memory: 8GiB, gpu_memory: 10GiB, bandwidth: 2.5Gbit}
retry: {max_attempts: 3, backoff: 5s, backoff_max: 2m}
queue_timeout: 10m
run_timeout: 2h
deadline: 1d
qos: prior
grace: 30
gpu_models: [NVIDIA-A100-40GB]
category: cv
traits: [pipelined, many_weights]
iterations: 50000
target_loss: 1
labels: {team: vision}
"""
VALIDATOR = jsonschema.Draft202012Validator(job_schema())


def problems_of(text: str) -> dict[str, str]:
    """Field → what is wrong with it and the remedy, for a file that must be refused."""
    with pytest.raises(BadJob) as refused:
        parse_job(yaml.safe_load(text))
    return dict(refused.value.problems)


def test_a_dozen_lines_say_it_all() -> None:
    """The file from the guide, as alice writes it."""
    assert parse_job(yaml.safe_load(RESNET)) == JobSpec(
        name="resnet50",
        owner="alice",
        command=("python", "train.py", "--epochs", "3"),
        env={"OMP_NUM_THREADS": "4"},
        workers=2,
        parameter_servers=1,
        resources=ResourceRequest(
            gpus=1, cores=4, host_memory_mib=8_192, gpu_memory_mib=10_240, bandwidth_mbps=2_500
        ),
        retry=RetryPolicy(max_attempts=3, backoff_ms=5_000, backoff_max_ms=120_000),
        queue_timeout_ms=600_000,
        run_timeout_ms=7_200_000,
        deadline_ms=86_400_000,
        qos="prior",
        grace_ms=30_000,
        gpu_models=("NVIDIA-A100-40GB",),
        category="cv",
        traits=("pipelined", "many_weights"),
        iterations=50_000,
        target_loss=1.0,
        labels={"team": "vision"},
    )


def test_a_range_of_workers_shares_one_batch() -> None:
    """Alice's training scales: 1 to 8 workers, whatever there is room for, and always 512 samples an
    iteration."""
    text = "command: [train]\nworkers: {min: 2, max: 8}\nglobal_batch_size: 512"
    expected = JobSpec(command=("train",), min_workers=2, workers=8, global_batch_size=512)
    assert parse_job(yaml.safe_load(text)) == expected
    assert VALIDATOR.is_valid(yaml.safe_load(text))
    one = parse_job(yaml.safe_load("command: [train]\nworkers: {max: 8}\nglobal_batch_size: 8"))
    assert (one.fewest_workers, one.workers) == (1, 8)


def test_defaults_are_those_of_the_spec() -> None:
    """A job by flags and the same job by file must be the same job."""
    assert parse_job({"command": ["true"]}) == JobSpec(command=("true",))


def test_every_problem_is_reported_at_once() -> None:
    """A first attempt in the CI of another team: ten mistakes, one answer."""
    found = problems_of(
        """
        nmae: resnet50
        owner: "al ice"
        command: {run: python train.py}
        workers: "2"
        gpus: 1
        env: {EPOCHS: 3, A=B: "1"}
        resources: {gpu: 1, cores: 9999, host_memory: 8GB, gpu_memory: lots}
        retry: {max_attempts: 0, backoff: 5 parsecs, backoff_max: 9999d}
        queue_timeout: -1
        run_timeout: yes
        """
    )
    remedies = {
        "nmae": "did you mean `name`?",
        "owner": "use letters, digits",
        "command": "such as [python, train.py]",
        "workers": "'2' is not a whole number; write one without quotes",
        "gpus": "write it under `resources`",
        "env.EPOCHS": "a number is not a text; quote it",
        "resources.gpu": "did you mean `gpus`?",
        "resources.cores": "9999 is out of range; give at most 1024",
        "resources.host_memory": "did you mean 8GiB?",
        "resources.gpu_memory": "write a size such as 512MiB or 8GiB",
        "retry.max_attempts": "give at least 1",
        "retry.backoff": "write a duration such as 90s, 10m, 2h or 1d",
        "retry.backoff_max": "'9999d' is out of range; give at most 1d",
        "queue_timeout": "-1 is negative",
        "run_timeout": "True is not a duration",
    }
    assert set(found) == set(remedies)
    for field, remedy in remedies.items():
        assert remedy in found[field], found[field]


@pytest.mark.parametrize(
    ("text", "field", "remedy"),
    [
        ("{}", "command", "is missing; add it"),
        ("command: []", "command", "at least 1 entries"),
        ("command: [train, 3]", "command.1", "a number is not a text; quote it"),
        ("command: [train, yes]", "command.1", "True is not a text; quote it"),
        ('command: ["a\\0"]', "command", "NUL"),
        ('command: [""]', "command", "name a program"),
        ("command: [x]\nworkers: 256\nparameter_servers: 257", "parameter_servers", "at most 256"),
        (
            "command: [x]\nworkers: {min: 4, max: 2}\nglobal_batch_size: 8",
            "workers.min",
            "4 is more than the most",
        ),
        ("command: [x]\nworkers: {max: 300}\nglobal_batch_size: 999", "workers.max", "at most 256"),
        ("command: [x]\nworkers: {min: 0, max: 2}\nglobal_batch_size: 8", "workers.min", "at least 1"),
        ("command: [x]\nworkers: {min: 1}", "workers.max", "is missing; add it, such as `max: 8`"),
        ("command: [x]\nworkers: {max: 2, most: 8}\nglobal_batch_size: 8", "workers.most", "is not known"),
        ("command: [x]\nworkers: {min: 1, max: two}", "workers.max", "write one without quotes"),
        ("command: [x]\nworkers: [1, 8]", "workers", "a list is not a whole number"),
        ("command: [x]\nworkers: {max: 8}", "global_batch_size", "is missing"),
        ("command: [x]\nworkers: {max: 8}\nbatch_size: 64", "global_batch_size", "in place of batch_size"),
        ("command: [x]\nworkers: {max: 8}\nglobal_batch_size: 7", "global_batch_size", "give at least 8"),
        ("command: [x]\nbatch_size: 8\nglobal_batch_size: 8", "batch_size", "remove one of them"),
        (
            "command: [x]\nworkers: {max: 8}\nparameter_servers: 1\nglobal_batch_size: 8",
            "parameter_servers",
            "remove them or give one number of workers",
        ),
        ("command: [x]\nlabels:", "labels", "is empty; give a value or remove the line"),
        ("command: [x]\nretry: 3", "retry", "is not a mapping"),
        ("command: [x]\nworkers: 1.5", "workers", "not a whole number"),
        ("command: [x]\nworkers: true", "workers", "not a whole number"),
        ("command: [x]\n7: 1", "7", "write names as text"),
        ("command: [x]\nenv: {7: a}", "env.7", "quote it"),
        ("command: [x]\nqueue_timeout_ms: 1", "queue_timeout_ms", "did you mean `queue_timeout`?"),
        ("command: [x]\nresources: {owner: me}", "resources.owner", "belongs at the top level"),
        ("command: [x]\nqueue_timeout: 0", "queue_timeout", "give at least 1ms"),
        ("command: [x]\ngrace: 1h", "grace", "'1h' is out of range; give at most 10m"),
        ("command: [x]\nresources: {gpu_memory: .inf}", "resources.gpu_memory", "not a finite size"),
        ("command: [x]\nresources: {bandwidth: 1kbit}", "resources.bandwidth", "800Mbit"),
        (f"command: [x]\nworkers: 0x{'f' * 5_000}", "workers", "is out of range"),
        ("command: [x]\nresources: {gpu_share: 0}", "resources.gpu_share", "give at least 0.001"),
        ("command: [x]\nresources: {gpu_share: half}", "resources.gpu_share", "write one without quotes"),
        ("command: [x]\nresources: {gpu_share: .nan}", "resources.gpu_share", "write one such as 0.5"),
        ("command: [x]\nresources: {gpu_share: 2}", "resources.gpu_share", "give at most 1"),
        (
            "command: [x]\nresources: {gpus: 4, gpu_share: 0.5}",
            "resources",
            "ask for one GPU or for whole ones",
        ),
        ("command: [x]\nzzz: 1", "zzz", "use one of name, owner, command"),
        ("command: [x]\ncategory: vision", "category", "use one of 'cv', 'nlp' or 'speech'"),
        ("command: [x]\ncategory:\n  - cv", "category", "use one of 'cv'"),
        ("command: [x]\ntraits: pipelined", "traits", "not a list"),
        ("command: [x]\ntraits: [pipelined, big]", "traits.1", "'big' is not known; use one of 'pipelined',"),
        ("command: [x]\ntraits: [pipelined, pipelined, pipelined, pipelined]", "traits", "at most 3 entries"),
        ("command: [x]\niterations: 0", "iterations", "give at least 1"),
        ("command: [x]\niterations: 1e6", "iterations", "not a whole number"),
        ("command: [x]\niteration: 10", "iteration", "did you mean `iterations`?"),
        ("command: [x]\ntarget_loss: .nan", "target_loss", "write one such as 0.5"),
        ("command: [x]\ntarget_loss: -1.0e+101", "target_loss", "give at least -1e+100"),
        ("command: [x]\npreemptible: 'no'", "preemptible", "neither true nor false"),
        ("command: [x]\npreemptible: 0", "preemptible", "neither true nor false"),
        ("command: [x]\npreemptible: never", "preemptible", "write one of them without quotes"),
        ("command: [x]\npriority: 11", "priority", "give at most 10"),
        ("command: [x]\npriority: -11", "priority", "give at least -10"),
        ("command: [x]\npriority: high", "priority", "write one without quotes"),
        ("command: [x]\ncheckpoint: torch", "checkpoint", "use one of 'none', 'sdk' or 'signal'"),
        ("command: [x]\ntarget_loss: low", "target_loss", "write one without quotes"),
    ],
)
def test_each_mistake_names_field_and_remedy(text: str, field: str, remedy: str) -> None:
    """Each of these was typed by somebody within the first hour."""
    found = problems_of(text)
    assert set(found) == {field}
    assert remedy in found[field]


@pytest.mark.parametrize("data", [None, [], "python train.py", 3])
def test_a_file_that_is_no_mapping_is_refused(data: Any) -> None:
    """`penstock submit -f train.py` by mistake."""
    with pytest.raises(BadJob, match="is not a mapping"):
        parse_job(data)


def test_answers_are_bounded() -> None:
    """A binary or generated file with ten thousand wrong entries must not fill the terminal."""
    with pytest.raises(BadJob) as refused:
        parse_job({"command": ["x" * 100_000, *range(10_000)], **{f"k{n}": "v" * 10_000 for n in range(500)}})
    assert len(refused.value.problems) == MAX_PROBLEMS
    assert len(str(refused.value)) < 20_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("500ms", 500),
        ("90s", 90_000),
        ("10m", 600_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("1h30m", 5_400_000),
        ("1.5h", 5_400_000),
        ("0.1s", 100),
        (90, 90_000),
        ("90", 90_000),
        (0.25, 250),
        ("0.25", 250),
    ],
)
def test_durations(text: object, expected: int) -> None:
    """Plain numbers are seconds, as everywhere on a command line."""
    assert duration_ms(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("512MiB", 512),
        ("8GiB", 8_192),
        ("8 GiB", 8_192),
        ("1TiB", 1 << 20),
        ("0.5MiB", 1),
        (100, 100),
        ("100", 100),
        (1.5, 2),
        ("1.5", 2),
    ],
)
def test_sizes_round_up(text: object, expected: int) -> None:
    """A cap below what was asked would kill the job."""
    assert memory_mib(text) == expected


@pytest.mark.parametrize(
    "text", ["", " ", "m", "10 m", "-5s", "1e3s", "5S", "1h 30m", "∞", None, [], True, math.nan]
)
def test_what_is_no_duration(text: object) -> None:
    """None of these may be guessed at."""
    with pytest.raises(ValueError, match="write a duration such as 90s"):
        duration_ms(text)


def test_rates() -> None:
    """Bandwidth is sold in bits."""
    assert [rate_mbps(value) for value in ("800Mbit", "10Gbit", 25, "25")] == [800, 10_000, 25, 25]
    with pytest.raises(ValueError, match="10Gbit"):
        rate_mbps("10GB")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(0, 10**12))
def test_what_is_shown_is_read_back_the_same(number: int) -> None:
    """Messages and defaults in the schema are written with `show`; people copy them into their files."""
    assert duration_ms(show(number, MS_PER_UNIT)) == number
    assert memory_mib(show(number, MIB_PER_UNIT)) == number


# ------------------------------------------------------------------------------------------ schema for
# editors


def test_the_schema_knows_and_explains_every_field() -> None:
    """Completion in the editor is the first documentation that people see."""
    jsonschema.Draft202012Validator.check_schema(job_schema())
    schema = job_schema()
    assert set(schema["properties"]) == {*JobFile.model_fields, "script"}
    for part in (schema, *schema["$defs"].values()):
        assert part["additionalProperties"] is False
        for name, entry in part["properties"].items():
            target = schema["$defs"].get(entry.get("$ref", "").removeprefix("#/$defs/"), entry)
            assert target.get("description"), name
            for example in entry.get("examples", ()):
                VALIDATOR.evolve(schema={**entry, "$defs": schema["$defs"]}).validate(example)


def test_defaults_in_the_schema_are_in_peoples_units() -> None:
    """A default of 1000 beside "seconds" would read as a quarter of an hour."""
    retry = job_schema()["$defs"]["Retry"]["properties"]
    assert (retry["backoff"]["default"], retry["backoff_max"]["default"]) == ("1s", "1m")
    assert job_schema()["properties"]["grace"]["default"] == "10s"
    written = {name: entry["default"] for name, entry in retry.items()}
    assert parse_job({"command": ["x"], "retry": written}) == JobSpec(command=("x",))


def test_editor_and_parser_agree_on_the_guides_file() -> None:
    """What the editor marks green must be accepted, and what it underlines refused."""
    VALIDATOR.validate(yaml.safe_load(RESNET))
    for wrong in (
        {"command": ["x"], "queue_timeout": "soon"},
        {"script": 1},
        {"command": ["x"], "gpus": 1},
    ):
        assert not VALIDATOR.is_valid(wrong)
        with pytest.raises(BadJob):
            parse_job(wrong)


@pytest.mark.parametrize("path", sorted((ROOT / "tilt/jobs").glob("*.yaml")), ids=lambda path: path.name)
def test_sample_jobs_are_valid(path: Any) -> None:
    """The samples are what people copy first."""
    data = yaml.safe_load(path.read_text())
    VALIDATOR.validate(data)
    parse_job(located(data, str(path.parent)) | {"sync": None})


def test_one_sample_shows_every_field() -> None:
    """People look for the spelling of a field there, before they look for documentation."""
    shown = yaml.safe_load((ROOT / "tilt/jobs/nightly.yaml").read_text())
    assert {*shown, "batch_size"} == set(JobFile.model_fields)
    assert "# or batch_size: 256" in (ROOT / "tilt/jobs/nightly.yaml").read_text()  # a job has one of the two


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6) | st.integers(), inner, max_size=3)
    ),
    max_leaves=6,
)
NAMES = st.sampled_from([*JobFile.model_fields, "gpus", "max_attempts", "backoff", "zzz"]) | st.text(
    max_size=6
)


@pytest.mark.parametrize(
    ("data", "field"),
    [
        ({"[key]": {}}, "[key]"),
        ({"resources": {"[key]": 1}}, "resources.[key]"),
        ({"env": {"[key]": 1}}, "env.[key]"),
        ({"workers": {"min": 1, "max": 2, "number": 3}}, "workers.number"),
        ({"workers": {"min": 1, "max": 2, "range": 3}}, "workers.range"),
    ],
)
def test_words_that_the_validator_uses_itself_are_the_user_s(data: dict[str, Any], field: str) -> None:
    """A generator writes its placeholders unfilled: they are shown where they stand."""
    with pytest.raises(BadJob) as refused:
        parse_job({"command": ["true"], **data})
    assert [problem.field for problem in refused.value.problems] == [field]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.dictionaries(NAMES, ANYTHING | st.dictionaries(NAMES, ANYTHING, max_size=3), max_size=6))
def test_whatever_the_file_holds_the_answer_is_a_job_or_a_list_of_problems(data: dict[str, Any]) -> None:
    """Files come from generators, editors and mistakes; a traceback is never the answer."""
    problems: tuple[Problem, ...] = ()
    try:
        parse_job({"command": ["true"], **data})
    except BadJob as refused:
        problems = refused.problems
        assert problems
    assert all(field and text for field, text in problems)
