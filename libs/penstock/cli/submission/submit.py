"""`penstock submit`: builds the job, submits it once (idempotency key), follows it,
and ends with its exit code."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, cast

import typer
from msgspec.structs import replace

from penstock.cli.common import Output, gateway
from penstock.cli.following import follow
from penstock.cli.output import Format, dump, duration, remark
from penstock.cli.queries import deadlines
from penstock.cli.signals import exit_code, held, terminable
from penstock.cli.submission import ci, dry_run, job_flags, jobspec
from penstock.cli.submission.sbatch import script_fields
from penstock.cli.terminals import attach
from penstock.client import Client, NotPermitted
from penstock.client.connection import TIMEOUT_S, WORKER_TIMEOUT_S
from penstock.exits import Exit, Stop
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.wire.codec import as_written
from penstock.sdk.code_archive import Packed
from penstock.text.redaction import brief

MAX_TRIES = 100  # of one step that fails; then the last one counts
REPEATED = 200  # status of a key that was used before with the same job

FileFlag = Annotated[
    str | None, typer.Option("--file", "-f", metavar="FILE", help="Job file in YAML; - for stdin.")
]

CommandWords = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND…", help="Program and arguments, after --.")
]
PathFlag = Annotated[
    bool,
    typer.Option("--path", help="Use the node's own PATH, even where the job file names an environment."),
]
StrictFlag = Annotated[
    bool,
    typer.Option("--strict-deadline", help="Submit only if the job is in time with a probability of 95 %."),
]
DryRunFlag = Annotated[
    bool,
    typer.Option(
        "--dry-run", help="Only check the job, also whether the cell could ever run it, and print it."
    ),
]
DetachFlag = Annotated[bool, typer.Option("--detach", "-d", help="Print the job's id and exit at once.")]
QuietFlag = Annotated[bool, typer.Option("--quiet", "-q", help="Print the job's states, not its output.")]
CancelFlag = Annotated[
    bool | None,
    typer.Option(
        "--cancel-on-interrupt/--no-cancel-on-interrupt",
        help="Ctrl-C, SIGTERM and SIGHUP cancel the job, too; in CI by default.",
    ),
]
TiedFlag = Annotated[
    bool | None,
    typer.Option(
        "--tied/--no-tied",
        help="The cell cancels the job when nobody follows it any more, as after kill -9; in CI by default, "
        "but with --detach.",
    ),
]
KeyFlag = Annotated[
    str | None,
    typer.Option(
        metavar="KEY", help="Idempotency key: the same key submits once; by default from the CI's variables."
    ),
]


@job_flags.taken(
    "command file name owner gpus cores host_memory gpu_memory bandwidth workers min_workers",
    "parameter_servers model batch_size global_batch_size category trait iterations target_loss gpu_model",
    "only_node exclude_node prefer_node env secret label workdir venv conda container path sync max_attempts",
    "queue_timeout run_timeout qos deadline strict_deadline grace preemptible prelaunch checkpoint",
    "companions priority interactive detach propagate quiet cancel_on_interrupt tied tied_grace may_submit *",
    "idempotency_key only_check output",
)
def submit(
    ctx: typer.Context,
    command: CommandWords = None,
    file: FileFlag = None,
    path: PathFlag = False,
    strict_deadline: StrictFlag = False,
    detach: DetachFlag = False,
    propagate: Annotated[bool, typer.Option(help="Exit with the job's own exit code if it failed.")] = False,
    quiet: QuietFlag = False,
    cancel_on_interrupt: CancelFlag = None,
    tied: TiedFlag = None,
    idempotency_key: KeyFlag = None,
    only_check: DryRunFlag = False,
    output: Output = Format.TABLE,
    **flags: Any,
) -> None:
    """Submit a job, follow it to its end and print its output. Ctrl-C stops following; the job continues."""
    fields, command = _read(file, command, flags["env"] or [], packed=flags["sync"] is not None)
    fields |= jobspec.located(job_flags.fields(flags, fields, path=path), os.getcwd())
    fields |= _tied(tied, detach=detach)
    fields, code = jobspec.synced(fields)
    spec = spec_of(fields, job_flags.sections(flags), command, file or "command line")
    if only_check:
        return dry_run.show(partial(gateway, ctx), spec, output)
    how = (idempotency_key, output, detach, propagate, cancel_on_interrupt, quiet, strict_deadline)
    attached = attach.follower(ctx, flags["interactive"] and not detach, propagate=propagate)
    raise typer.Exit(Submission(partial(gateway, ctx), spec, *how, code, attached).run())


def submit_fields(ctx: typer.Context, fields: dict[str, Any], source: str) -> int:
    """Submits the job of these fields alone, and follows it; the exit code. Raises `Stop`."""
    fields, code = jobspec.synced(fields)
    spec = spec_of(fields, {}, None, source)
    return Submission(
        partial(gateway, ctx), spec, None, Format.TABLE, False, False, False, False, False, code
    ).run()


def _read(
    file: str | None, command: list[str] | None, env: list[str], *, packed: bool
) -> tuple[dict[str, Any], list[str] | None]:
    """Fields of the job file, or of a script with `#SBATCH` lines as the program of a command; and the
    command. Raises `Stop`."""
    if file is not None:
        return jobspec.read_job_file(file, packed=packed), command
    array = ["array"] if any(entry.startswith("SLURM_ARRAY_TASK_ID=") for entry in env) else []
    of_script = script_fields(command, array) if command else None
    return ({}, command) if of_script is None else (of_script, None)


def _tied(tied: bool | None, *, detach: bool) -> dict[str, Any]:
    """`tied_to` as by the flag; without a flag in CI, unless nobody follows."""
    if tied is None and (detach or not ci.is_ci()):
        return {}
    return {"tied_to": None if tied is False else "follower"}


@dataclass(slots=True)
class Submission:
    """One submission and what follows."""

    connect: Callable[[], Client]
    spec: JobSpec
    given_key: str | None
    """None: the key follows from the CI's variables and the job, or is random."""
    output: Format
    detach: bool
    propagate: bool
    cancels: bool | None
    """Whether an interruption cancels the job, too; None: in CI."""
    quiet: bool
    strict: bool
    """The job is submitted only if its deadline is met with the odds that count as certain."""
    code: Packed | None = None
    """The archive of the folder to send with the job, if any."""
    attached: Callable[[Client, str], int] | None = None
    """Follows the job on its terminal."""
    job_id: str | None = None
    key: str = field(init=False)
    client: Client = field(init=False)

    def __post_init__(self) -> None:
        self.key = self.given_key or ci.idempotency_key(self.spec)
        self.cancels = ci.is_ci() if self.cancels is None else self.cancels
        self.client = self.connect()

    def run(self) -> int:
        """Submits, and follows unless detached; the exit code."""
        with terminable():
            try:
                if self.spec.tied_to is not None and not self.detach:
                    self._untie_unless_it_may_follow()
                # A signal before the answer would leave a job whose id only the gateway knows.
                with held(really=bool(self.cancels)):
                    answer = self._hand_in()
                return self._print(answer) if self.detach or not self._may_follow() else self._follow()
            except KeyboardInterrupt as stop:
                with suppress(OSError):  # the terminal may be gone
                    self._interrupted()
                return int(exit_code(stop))

    def _untie_unless_it_may_follow(self) -> None:
        """A tied job that this token cannot follow would be cancelled."""
        try:
            self.client.get("/v1/jobs", limit=1)
        except NotPermitted:
            self.spec = replace(self.spec, tied_to=None)
            remark("warning: the job is not tied to this command, since the token may not read")

    def _hand_in(self) -> dict[str, Any]:
        if self.code is not None:
            remark(f"sync: {self.code.summary}")
            self.client.send_code(self.code)
        derived = self.key
        for number in range(2, MAX_TRIES + 2):
            status, answer = self._post()
            job = self._earlier(str(answer["job_id"])) if status == REPEATED else None
            if job is None or self.given_key is not None or not ci.is_tried_again(job):
                break
            how = ": ".join(filter(None, (job["outcome"], job["reason"])))
            remark(f"{job['job_id']} has ended ({how}); submitted once more")
            self.key, self.spec = f"{derived}.{number}", replace(self.spec, retry_of=job["job_id"])
        self.job_id = str(answer["job_id"])
        if answer.get("deadline"):
            remark(deadlines.in_a_line(answer["deadline"]))
        for warning in answer.get("warnings", ()):
            remark(f"warning: {warning['field']} {warning['message']}; {warning['remedy']}")
        if status == REPEATED:
            remark(self._repeated(self.job_id, job))
        return cast(dict[str, Any], answer)

    def _post(self) -> tuple[int, Any]:
        key, strict = {"Idempotency-Key": self.key}, True if self.strict else None
        bound_s = WORKER_TIMEOUT_S if strict else TIMEOUT_S
        return self.client.posted(
            "/v1/jobs", as_written(self.spec), key, patience_s=bound_s, strict_deadline=strict
        )

    def _earlier(self, job_id: str) -> dict[str, Any] | None:
        """The job that was submitted before under this key; None: this token may submit and not read."""
        try:
            return cast(dict[str, Any], self.client.get(f"/v1/jobs/{job_id}"))
        except NotPermitted:
            return None

    def _repeated(self, job_id: str, job: dict[str, Any] | None) -> str:
        ago = "" if job is None else f" {duration(max(0, job['now_ms'] - job['submitted_ms']))} ago"
        more = "; to run it again, or as a leg of a matrix, give each a key: --idempotency-key"
        return f"already submitted{ago} as {job_id}{more if self.given_key is None else ''}"

    def _print(self, answer: dict[str, Any]) -> int:
        if self.output in (Format.JSON, Format.YAML):
            dump(answer, self.output)
        else:
            print(self.job_id)
        return 0

    def _may_follow(self) -> bool:
        """Whether this token may read. One that may only submit has done its work: the job is submitted."""
        try:
            self.client.get(f"/v1/jobs/{self.job_id}")
        except NotPermitted as error:
            remark(
                f"submitted, and not followed: {error}; to follow a job, give a token with the role read. "
                "With --detach this is not tried."
            )
            return False
        return True

    def _follow(self) -> int:
        if self.attached is not None:
            return self.attached(self.client, str(self.job_id))
        data = self.output in (Format.JSON, Format.YAML)
        shows = follow.Shows.PHASES if self.quiet else follow.Shows.OUTPUT
        tied = self.spec.tied_to is not None
        job = follow.to_end(self.client, str(self.job_id), follow.Shows.NOTHING if data else shows, tied=tied)
        if data:
            dump(job, self.output)
        return follow.exit_code(job, propagate=self.propagate)

    def _interrupted(self) -> None:
        """Cancels the job, or leaves it running, and prints which."""
        job_id = self.job_id
        if job_id is None:
            remark(
                "\nInterrupted before the gateway answered; the job may be submitted. The same command with "
                f"--idempotency-key {self.key} finds it, or submits it."
            )
            return
        if self.cancels:
            try:
                with held():
                    self.connect().post(f"/v1/jobs/{job_id}/cancel", {"reason": ci.INTERRUPTED})
                remark(f"\nCancelled {job_id}.")
                return
            except Stop as stop:
                remark(f"\n{job_id} was not cancelled: {stop}")
        goes_on = "goes on"
        if self.spec.tied_to is not None:
            goes_on = f"is cancelled in {duration(self.spec.tied_grace_ms)} unless `penstock wait` follows it"
        remark(
            f"\nStopped following; {job_id} {goes_on}.\n  penstock watch {job_id}\n  penstock cancel {job_id}"
        )


def spec_of(
    fields: dict[str, Any], sections: dict[str, dict[str, Any]], command: list[str] | None, source: str
) -> JobSpec:
    """The job of file and flags together. Raises `Stop` with every problem."""
    for section, more in sections.items():
        _merge(fields, section, job_flags.given(more))
    if command:
        if known := fields.get("command") or fields.get("script"):
            program = brief(known[0] if isinstance(known, list) else known)
            reason = f"has a command already (program {program}); leave out either that or the one after --"
            raise Stop(Exit.BAD_SPEC, f"{source}: {reason}")
        fields["command"] = command
    text = fields.get("script", fields.get("command"))
    if "script" in fields and isinstance(text, list):
        text = "\n".join(map(str, text))
    if not text:
        jobspec.build({**fields, "command": ["true"]}, source)  # an unknown key, and the like, come first
        raise Stop(Exit.BAD_SPEC, "nothing to run; give a command after --, or a job file with -f")
    if "name" not in fields and isinstance(text, list | str):
        fields["name"] = jobspec.default_name(text if isinstance(text, str) else [str(word) for word in text])
    return jobspec.build(fields, source)


def _merge(fields: dict[str, Any], section: str, more: dict[str, Any]) -> None:
    """Merges flags over the file, field by field.
    A section that is not a mapping is left for the parser to refuse."""
    if more:
        known = fields.get(section) or {}
        if isinstance(known, dict):
            fields[section] = {**known, **more}
