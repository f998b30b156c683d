"""A training job as submitted (`JobSpec`): every field with its type, unit and range."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field, structs

from penstock.model.jobs.job_fields import Key
from penstock.model.jobs.job_parts import Environment, NodeChoice, ResourceRequest, RetryPolicy
from penstock.model.nouns.allowed import Allowed, Where
from penstock.model.nouns.commands import (
    MAX_PACKED_CHARS,
    SHORT_WORD_CHARS,
    SHORT_WORDS,
    check_long,
    unpacked,
)
from penstock.model.nouns.process_rules import (
    command_can_run,
    env_can_be_passed,
    has_terminal,
    labels_are_short,
    secrets_can_be_passed,
    workdir_can_be_entered,
    workdir_is_in_code,
)
from penstock.model.nouns.types import (
    MAX_ENV_ENTRIES,
    MAX_GANG_TASKS,
    MAX_OPTIONS,
    MAX_PARENTS,
    MAX_WORKERS,
    Category,
    CheckpointKind,
    Companions,
    Identifier,
    Priority,
    Qos,
    SecretName,
    Sha256,
    ShortText,
    Trait,
    Value,
)
from penstock.model.nouns.worker_range import numbers_between, wrong_shape

Batch = Annotated[int, Meta(ge=1, le=1 << 30)]
Limit = Annotated[int, Meta(ge=1, le=1 << 40)]
"""Milliseconds."""
_ALWAYS = (
    "name owner command env workdir workers parameter_servers resources model batch_size gpu_models retry "
    "queue_timeout_ms run_timeout_ms grace_ms labels"
)


class JobSpec(Value, frozen=True, kw_only=True):
    """A training job as submitted: what to run, not where."""

    ALWAYS = tuple(_ALWAYS.split())
    NOT_AS_IMAGE: ClassVar[tuple[str, ...]] = ("secrets", "code", "prelaunch", "interactive", "may_submit")
    """Keys that nodes which run images alone do not have; nor `checkpoint: sdk`."""
    RULES: ClassVar[Mapping[str, Callable[[Any], None]]] = {
        "command": command_can_run,
        "long_command": check_long,
        "env": env_can_be_passed,
        "workdir": workdir_can_be_entered,
        "labels": labels_are_short,
    }

    name: Annotated[
        Identifier,
        Key(
            "Name of the job, shown in tables.", "resnet50", "Shown in tables; by default the script's name."
        ),
    ] = "job"
    owner: Annotated[Identifier, Key("Owner of the job.", "alice", "Owner of the job; by default you.")] = (
        "unknown"
    )
    command: Annotated[
        tuple[Annotated[str, Meta(max_length=SHORT_WORD_CHARS)], ...],
        Meta(min_length=1, max_length=SHORT_WORDS),
        Key(
            "Program and arguments as a list, which no shell reads; quote numbers. Or a text: the lines of a "
            "script for a shell.",
            ["python", "train.py", "--epochs", "3"],
            None,
        ),
    ]
    """An argv list; never handed to a shell."""
    env: Annotated[
        dict[str, str],
        Meta(max_length=MAX_ENV_ENTRIES),
        Key(
            "Environment variables. Quote numbers. `{secret: NAME}` as a value: an entry of `secrets`.",
            {"OMP_NUM_THREADS": "4"},
            "May be repeated.",
            options=("--env", "-e"),
            metavar="NAME=VALUE",
        ),
    ] = field(default_factory=dict)
    secrets: Annotated[
        dict[str, SecretName],
        Meta(max_length=MAX_ENV_ENTRIES),
        Key(
            "Environment variables that the node sets from its secrets of these names; their values are in "
            "no file or log.",
            {"WANDB_API_KEY": "wandb"},
            "A variable with the value of the nodes' secret of this name. May be repeated.",
            options=("--secret",),
            metavar="VARIABLE=NAME",
        ),
    ] = field(default_factory=dict)
    """Environment variable → name of the secret that the node sets it to; the value exists only in the
    task."""
    workdir: Annotated[
        ShortText | None,
        Key(
            "Folder to run in, on the node, relative to the job file; default: the folder of the job file.",
            "/home/alice/resnet",
            "Folder on the node; by default the job file's, or the current one.",
        ),
    ] = None
    environment: Annotated[
        Environment | None,
        Key(
            "Where Python and other programs come from; `path`: from the node's own PATH.",
            flag=None,
            after="sync",
        ),
    ] = None
    """None: programs of the node's own PATH."""
    code: Annotated[
        Sha256 | None,
        Key(
            "Folder to pack and run in, relative to the job file; `penstock submit` sends it once and nodes "
            "unpack it.",
            ".",
            "Pack this folder, send it once, and run in it on the nodes.",
            name="sync",
            metavar="DIR",
        ),
    ] = None
    """Digest of an archive that the gateway has: it is unpacked into each task's own folder, which `workdir`
    is then relative to."""
    workers: Annotated[
        int,
        Meta(ge=1, le=MAX_WORKERS),
        Key(
            "Workers; they start together or not at all. `{min: 1, max: 8}`: any number in between, chosen "
            "anew for each attempt.",
            4,
            "Number of workers; they start together or not at all.",
            second={"min": 1, "max": 8},
        ),
    ] = 1
    """For a moldable job the maximum; each attempt has a number of its own (`JobState.workers` in the
    ledger)."""
    parameter_servers: Annotated[
        int,
        Meta(ge=0, le=256),
        Key(
            "Parameter servers beside the workers; 0: all-reduce.",
            flag="Parameter servers beside the workers.",
        ),
    ] = 0
    resources: Annotated[
        ResourceRequest, Key("Resources of each worker; estimated if left out.", flag=None)
    ] = ResourceRequest()
    model: Annotated[
        Identifier | None, Key("Name of the network, to learn from earlier runs.", "resnet50")
    ] = None
    batch_size: Annotated[Batch | None, Key("Batch size per worker.", 64, "Batch per worker.")] = None
    category: Annotated[
        Category | None,
        Key(
            "Kind of data (cv, nlp or speech); the initial number of cores depends on it.",
            "cv",
            "Kind of data; the initial number of cores depends on it.",
        ),
    ] = None
    traits: Annotated[
        tuple[Trait, ...],
        Meta(max_length=3),
        Key(
            "Properties that change how many cores the job needs: pipelined, many_weights, "
            "heavy_preprocessing.",
            ["pipelined"],
            "Property of the training that changes its number of cores; may be repeated.",
            options=("--trait",),
        ),
    ] = ()
    iterations: Annotated[
        Annotated[int, Meta(ge=1, le=1 << 53)] | None,
        Key("Planned number of iterations, for the estimate of the remaining time.", 50_000),
    ] = None
    """Planned number of iterations; the remaining time is estimated from it."""
    target_loss: Annotated[
        Annotated[float, Meta(ge=-1e100, le=1e100)] | None,
        Key(
            "The job ends once its loss reaches this value, after `iterations` at the latest.",
            0.35,
            "The job ends once its loss reaches this, after --iterations at the latest.",
        ),
    ] = None
    """The job ends once its loss reaches this value, after `iterations` at the latest."""
    gpu_models: Annotated[
        tuple[Identifier, ...],
        Meta(max_length=16),
        Key(
            "Allowed GPU models; empty: any. `v100` matches every name with this part, such as nvidia-smi's "
            "Tesla V100-SXM2-16GB.",
            ["A100"],
            "Allowed GPU model; may be repeated.",
            options=("--gpu-model",),
        ),
    ] = ()
    """Allowed GPU models; empty: any."""
    nodes: Annotated[
        NodeChoice | None, Key("Nodes on which the job may run, by name or label; default: all.", flag=None)
    ] = None
    """None: any node."""
    retry: Annotated[RetryPolicy, Key("How often a failed job is tried again.", flag=None)] = RetryPolicy()
    queue_timeout_ms: Annotated[
        Limit | None, Key("Give up after waiting this long, each time that the job queues.", "10m")
    ] = None
    """Limit of each wait in the queue: the first, and every one after a lost, failed or preempted attempt."""
    run_timeout_ms: Annotated[Limit | None, Key("Stop after running this long.", "2h")] = None
    grace_ms: Annotated[
        int,
        Meta(ge=0, le=600_000),
        Key(
            "Time between SIGTERM and SIGKILL when the job is stopped.",
            "10s",
            "Time between SIGTERM and SIGKILL.",
        ),
    ] = 10_000
    """Time between SIGTERM and SIGKILL when the job is stopped."""
    labels: Annotated[
        dict[str, str],
        Meta(max_length=64),
        Key(
            "Pairs of free text by which the job can be found.",
            {"team": "vision"},
            "May be repeated.",
            after="may_submit",
            options=("--label",),
            metavar="NAME=VALUE",
        ),
    ] = field(default_factory=dict)
    checkpoint: Annotated[
        CheckpointKind,
        Key(
            "How the job saves its progress when it is stopped: `sdk` (penstock.sdk.checkpoint), `signal` "
            "(on SIGTERM, in a place of the script's choice), `none`.",
            "sdk",
            "How the job saves its progress when it is stopped.",
            after="deadline",
        ),
    ] = "none"
    preemptible: Annotated[
        bool,
        Key(
            "Whether the job may be stopped to make way for another one; false: it runs to its end, and "
            "other jobs wait.",
            flag="Whether the job may be stopped to make way for another one.",
        ),
    ] = True
    """Whether it may be stopped to make way for another job, or to move."""
    priority: Annotated[
        Priority,
        Key(
            "Priority among your own jobs, the larger the earlier; it has no effect on other owners' jobs. "
            "Read by the profile `penstock`.",
            5,
            "Priority among your own jobs, the larger the earlier; 0 by default.",
            metavar="-10…10",
        ),
    ] = 0
    """Priority among the jobs of its owner, the larger the earlier; it has no effect on other owners'
    jobs."""
    min_workers: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None,
        Key(flag="Start with any number from this to --workers; needs --global-batch-size."),
    ] = None
    """The job is moldable: it starts with any number from this to `workers`. None: with `workers` exactly."""
    global_batch_size: Annotated[
        Batch | None,
        Key(
            "In place of `batch_size`: batch size of all workers together; each worker reads its part from "
            "`PENSTOCK_BATCH_SIZE`.",
            512,
            "Batch of all workers together, in place of --batch-size.",
            after="batch_size",
        ),
    ] = None
    """Batch of all workers together, which share it as evenly as possible; `batch_size` is per worker. A
    moldable job has this one."""
    prelaunch: Annotated[
        bool,
        Key(
            'The script waits for its GPUs at `phase("train")` and uses none before: it may launch while the '
            "jobs that hold them end.",
            flag="Whether the job may launch while its GPUs are still in use; its script waits for them at "
            'phase("train").',
            after="checkpoint",
        ),
    ] = False
    """The script waits for its GPUs at the SDK's `phase("train")`, and uses none before: it may launch while
    the jobs that hold them end. Source: Liquid §6.1."""

    qos: Annotated[
        Qos | None,
        Key(
            "Service class: urgent, prior (as soon as alone on one GPU) or normal (twice that).",
            "prior",
            "Service class: urgent, prior or normal.",
            metavar="CLASS",
        ),
    ] = None
    """Service class; None: normal."""
    deadline_ms: Annotated[
        Limit | None,
        Key(
            "Time after submission within which the job should be done, in place of its class.",
            "6h",
            "Time from now within which the job should be done.",
        ),
    ] = None
    """Time after submission within which the job should be done; None: by its class."""
    companions: Annotated[
        Companions,
        Key(
            "Whose jobs may take turns with it on the same GPUs: `tenant`, only your own tenant's; `any`, "
            "also other tenants' that allow any, too.",
            "any",
            "Whose jobs may take turns with it on the same GPUs: tenant, or any that allow it, too.",
            choice=True,
        ),
    ] = "tenant"
    """Whose jobs may take turns with it on the same GPUs. tenant: only its own tenant's. any: also other
    tenants' whose jobs allow any, too."""
    long_command: Annotated[str, Meta(max_length=MAX_PACKED_CHARS)] | None = None
    """The words of a command beyond the bounds of `command`, packed (`penstock.model.nouns.commands`); None:
    `command` has them."""

    retry_of: Identifier | None = None
    """Id of the ended job of which this one is a further try."""
    tied_to: Annotated[
        Literal["follower"] | None,
        Key(
            "`follower`: the job is cancelled when nobody has followed it (`submit`, `wait`) for "
            "`tied_grace`.",
            "follower",
            None,
        ),
    ] = None
    """`follower`: the job is cancelled when no follower has been connected for `tied_grace_ms`."""
    tied_grace_ms: Annotated[
        int,
        Meta(ge=0, le=86_400_000),
        Key(
            "How long a tied job goes on without a follower.",
            "5m",
            "How long a tied job goes on without a follower, up to 24h.",
        ),
    ] = 300_000
    interactive: Annotated[
        bool,
        Key(
            "The job has a terminal, as for a shell: `penstock attach` shows it here; what it shows is its "
            "output, too.",
            flag="Give the job a terminal, as for a shell, and attach to it here.",
            options=("--interactive", "-it"),
        ),
    ] = False
    """Each task's program has a terminal, to which users attach."""
    may_submit: Annotated[
        bool,
        Key(
            "Whether its program may submit jobs, as `penstock submit` or by the client: it gets the "
            "gateway's URL and a token of its own.",
            flag="Whether the job's program may submit jobs: `penstock` works in it, with a token of its "
            "own.",
        ),
    ] = False
    """Its tasks may submit jobs: each has the gateway's URL and a token
    (`penstock.runtime.keys.job_tokens`)."""
    parents: Annotated[tuple[Identifier, ...], Meta(max_length=MAX_PARENTS)] = ()
    """The jobs by which it was submitted: the first that a user submitted, then the one whose task submitted
    the next; the last submitted this one. Set by the gateway."""

    @property
    def argv(self) -> tuple[str, ...]:
        """Program and arguments."""
        return self.command if self.long_command is None else unpacked(self.long_command)

    @property
    def where(self) -> Where:
        """GPU models and nodes that it allows."""
        chosen, image = self.nodes, self.runs_as_image
        if chosen is None:
            return Allowed(self.gpu_models, image=image) if self.gpu_models or image else ()
        return Allowed(self.gpu_models, chosen.only, chosen.exclude, image)

    @property
    def runs_as_image(self) -> bool:
        """Whether nodes that run images alone (`NodeSpec.runs`) can run it."""
        image = self.environment is not None and self.environment.container is not None
        return (
            image and self.checkpoint != "sdk" and not any(getattr(self, name) for name in self.NOT_AS_IMAGE)
        )

    @property
    def timed(self) -> bool:
        """Whether it names a service class or a deadline."""
        return self.qos is not None or self.deadline_ms is not None

    @property
    def fewest_workers(self) -> int:
        """Minimum number of workers that it can start with."""
        return self.workers if self.min_workers is None else self.min_workers

    @property
    def offered(self) -> list[int]:
        """Numbers of workers in its range that are compared: all, or at most MAX_OPTIONS in a geometric
        sequence, with both ends."""
        return numbers_between(self.fewest_workers, self.workers, MAX_OPTIONS)

    @property
    def least(self) -> "JobSpec":
        """As `shaped`, with the fewest workers."""
        return self.shaped(self.fewest_workers)

    def shaped(self, workers: int) -> "JobSpec":
        """The same job with a fixed number of workers, and the largest batch that one of them then has; the
        job itself if it has neither a range nor a global batch."""
        if self.min_workers is None and self.global_batch_size is None:
            return self
        each = None if self.global_batch_size is None else -(-self.global_batch_size // workers)
        return structs.replace(
            self, workers=workers, min_workers=None, batch_size=each, global_batch_size=None
        )

    def __post_init__(self) -> None:
        for name, rule in self.RULES.items():
            rule(getattr(self, name))
        if self.secrets:
            secrets_can_be_passed(self.secrets, self.env)
        if self.code is not None:
            workdir_is_in_code(self.workdir)
        if self.interactive and self.environment is not None:
            has_terminal(self.environment.container)
        if self.workers + self.parameter_servers > MAX_GANG_TASKS:
            raise ValueError(f"workers + parameter_servers exceed {MAX_GANG_TASKS}; ask for fewer")
        if self.min_workers is not None or self.global_batch_size is not None:
            wrong = wrong_shape(
                self.min_workers,
                self.workers,
                self.parameter_servers,
                self.batch_size,
                self.global_batch_size,
            )
            if wrong is not None:
                raise ValueError("{}: {}".format(*wrong))
