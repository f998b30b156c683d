"""A training job as submitted (`JobSpec`): every field with its type, unit and range."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta, field, structs

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


class JobSpec(Value, frozen=True, kw_only=True):
    """A training job as submitted: what to run, not where."""

    OMITTED = (
        "secrets",
        "category",
        "traits",
        "iterations",
        "target_loss",
        "environment",
        "code",
        "checkpoint",
        "preemptible",
        "min_workers",
        "global_batch_size",
        "priority",
        "prelaunch",
        "qos",
        "deadline_ms",
        "companions",
        "nodes",
        "long_command",
        "retry_of",
        "tied_to",
        "tied_grace_ms",
        "interactive",
        "may_submit",
        "parents",
    )
    RULES: ClassVar[Mapping[str, Callable[[Any], None]]] = {
        "command": command_can_run,
        "long_command": check_long,
        "env": env_can_be_passed,
        "workdir": workdir_can_be_entered,
        "labels": labels_are_short,
    }

    name: Identifier = "job"
    owner: Identifier = "unknown"
    command: Annotated[
        tuple[Annotated[str, Meta(max_length=SHORT_WORD_CHARS)], ...],
        Meta(min_length=1, max_length=SHORT_WORDS),
    ]
    """An argv list; never handed to a shell."""
    env: Annotated[dict[str, str], Meta(max_length=MAX_ENV_ENTRIES)] = field(default_factory=dict)
    secrets: Annotated[dict[str, SecretName], Meta(max_length=MAX_ENV_ENTRIES)] = field(default_factory=dict)
    """Environment variable → name of the secret that the node sets it to; the value exists only in the
    task."""
    workdir: ShortText | None = None
    environment: Environment | None = None
    """None: programs of the node's own PATH."""
    code: Sha256 | None = None
    """Digest of an archive that the gateway has: it is unpacked into each task's own folder, which `workdir`
    is then relative to."""
    workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] = 1
    """For a moldable job the maximum; each attempt has a number of its own (`JobState.workers` in the
    ledger)."""
    parameter_servers: Annotated[int, Meta(ge=0, le=256)] = 0
    resources: ResourceRequest = ResourceRequest()
    model: Identifier | None = None
    batch_size: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    category: Category | None = None
    traits: Annotated[tuple[Trait, ...], Meta(max_length=3)] = ()
    iterations: Annotated[int, Meta(ge=1, le=1 << 53)] | None = None
    """Planned number of iterations; the remaining time is estimated from it."""
    target_loss: Annotated[float, Meta(ge=-1e100, le=1e100)] | None = None
    """The job ends once its loss reaches this value, after `iterations` at the latest."""
    gpu_models: Annotated[tuple[Identifier, ...], Meta(max_length=16)] = ()
    """Allowed GPU models; empty: any."""
    nodes: NodeChoice | None = None
    """None: any node."""
    retry: RetryPolicy = RetryPolicy()
    queue_timeout_ms: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    """Limit of each wait in the queue: the first, and every one after a lost, failed or preempted attempt."""
    run_timeout_ms: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    grace_ms: Annotated[int, Meta(ge=0, le=600_000)] = 10_000
    """Time between SIGTERM and SIGKILL when the job is stopped."""
    labels: Annotated[dict[str, str], Meta(max_length=64)] = field(default_factory=dict)
    checkpoint: CheckpointKind = "none"
    preemptible: bool = True
    """Whether it may be stopped to make way for another job, or to move."""
    priority: Priority = 0
    """Priority among the jobs of its owner, the larger the earlier; it has no effect on other owners'
    jobs."""
    min_workers: Annotated[int, Meta(ge=1, le=MAX_WORKERS)] | None = None
    """The job is moldable: it starts with any number from this to `workers`. None: with `workers` exactly."""
    global_batch_size: Annotated[int, Meta(ge=1, le=1 << 30)] | None = None
    """Batch of all workers together, which share it as evenly as possible; `batch_size` is per worker. A
    moldable job has this one."""
    prelaunch: bool = False
    """The script waits for its GPUs at the SDK's `phase("train")`, and uses none before: it may launch while
    the jobs that hold them end. Source: Liquid §6.1."""

    qos: Qos | None = None
    """Service class; None: normal."""
    deadline_ms: Annotated[int, Meta(ge=1, le=1 << 40)] | None = None
    """Time after submission within which the job should be done; None: by its class."""
    companions: Companions = "tenant"
    """Whose jobs may take turns with it on the same GPUs. tenant: only its own tenant's. any: also other
    tenants' whose jobs allow any, too."""
    long_command: Annotated[str, Meta(max_length=MAX_PACKED_CHARS)] | None = None
    """The words of a command beyond the bounds of `command`, packed (`penstock.model.nouns.commands`); None:
    `command` has them."""

    retry_of: Identifier | None = None
    """Id of the ended job of which this one is a further try."""
    tied_to: Literal["follower"] | None = None
    """`follower`: the job is cancelled when no follower has been connected for `tied_grace_ms`."""
    tied_grace_ms: Annotated[int, Meta(ge=0, le=86_400_000)] = 300_000
    interactive: bool = False
    """Each task's program has a terminal, to which users attach."""
    may_submit: bool = False
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
        chosen = self.nodes
        if chosen is None:
            return Allowed(self.gpu_models) if self.gpu_models else ()
        return Allowed(self.gpu_models, chosen.only, chosen.exclude)

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
