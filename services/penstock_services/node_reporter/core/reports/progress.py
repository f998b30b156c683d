"""Parser of the progress lines that training scripts write into the FIFO of their task: from bytes to events.

Ideal: every line becomes an event. Departure: a script may be hostile or broken, so lines are bounded in
length, events in number, progress is reported at growing intervals, and of a gang only rank 0 reports
progress and stages. Lines in another format are counted and ignored; they never affect the next one. Format:
`libs/penstock/sdk/README.md`.
"""

from typing import Annotated, Literal, NamedTuple

import msgspec
from pydantic import ValidationError

from penstock.model.inputs.external_events import (
    StageSample,
    StagesMeasured,
    StepsMeasured,
    TaskCheckpointed,
    TaskPhaseChanged,
    TelemetrySampled,
)
from penstock.model.schema.event import Event
from penstock.model.schema.validation import checked
from penstock.sdk.reporter.lines import LINE_BYTES
from penstock_services.node_reporter.core.reports.losses import LossFilter
from penstock_services.node_reporter.core.reports.step_times import StepFilter
from penstock_services.node_reporter.core.reports.turn_waits import WaitFilter

PHASES_KNOWN = frozenset({b"launch", b"ready", b"train", b"save"})
MAX_CHANGES = 1_000  # of phase per task, since a script may write its phase in every step
MAX_STEPS = 200  # events per task and its last line: 10^8 iterations at intervals that grow by a tenth
GROWTH_TENTHS = 11
MAX_STAGES = 16  # events per task
MAX_CHECKPOINTS = 1_000  # events per task and its last one: one an hour for six weeks
CHECKPOINT_NAME = r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\Z"
MS_PER_S = 1_000


class Report(NamedTuple):
    """An event made from a script's line; `name`: the end of its id. Losses and step times go to the
    telemetry topic, the rest to the nodes' own."""

    name: str
    event: Event


class LineSplitter:
    """Cuts chunks into lines. A line longer than LINE_BYTES is skipped up to its end and counted."""

    def __init__(self) -> None:
        self.too_long = 0
        self._rest = b""
        self._skips = False

    def cut(self, chunk: bytes) -> list[bytes]:
        """The lines that are complete now, without their ends;
        a phase's name is complete without a line end."""
        *lines, rest = (self._rest + chunk).split(b"\n")
        if self._skips and lines:
            lines, self._skips = lines[1:], False
        if self._skips:
            rest = b""
        elif len(rest) >= LINE_BYTES:
            self.too_long += 1
            self._skips, rest = True, b""
        elif rest.strip() in PHASES_KNOWN:
            lines, rest = [*lines, rest], b""
        self._rest = rest
        fitting = [line for line in lines if len(line) < LINE_BYTES]
        self.too_long += len(lines) - len(fitting)
        return fitting

    def end(self) -> list[bytes]:
        """The incomplete last line."""
        rest, self._rest = self._rest, b""
        return [rest] if rest else []


class ProgressParser:
    """The progress of one task. `leads`: it reports for its gang (rank 0).

    `checkpoints`: the job's folder of them, "": it has none; `shared`: other nodes have it, too.
    """

    def __init__(
        self,
        node_id: str,
        task_id: str,
        token: int,
        *,
        leads: bool,
        checkpoints: str = "",
        shared: bool = False,
    ) -> None:
        self.garbage = 0
        """Lines in another format."""
        self.dropped = 0
        """Valid lines that are not reported: beyond the bounds, repeated, or between two reported ones."""
        self._lines = LineSplitter()
        self._task = {"node_id": node_id, "task_id": task_id, "token": token}
        self._leads = leads
        self._phase = b""
        self._changes = 0
        self._begun = 0
        self._done = 0
        self._steps = 0
        self._held: StepsMeasured | None = None
        self._stages = 0
        self._losses = LossFilter()
        self._step_times = StepFilter()
        self._turn_waits = WaitFilter()
        self._folder, self._shared = checkpoints, shared
        self._checkpoints = 0
        self._saved: TaskCheckpointed | None = None
        self.exhausted: tuple[str, str] = ("", "")
        """Memory that the script last reported as exhausted, and the error's name:
        for its exit, if it fails."""

    def parse(self, chunk: bytes, now_ms: int) -> list[Report]:
        """The events that follow from these bytes, in order."""
        return self._parsed(self._lines.cut(chunk), now_ms)

    def end(self, now_ms: int) -> list[Report]:
        """The task is over: events from the rest of its last line, and its last progress."""
        reports = self._parsed(self._lines.end(), now_ms)
        self.garbage += self._lines.too_long
        self._lines.too_long = 0
        if self._held is not None:
            reports.append(_steps_report(self._held))
            self._held = None
        if self._saved is not None:
            reports.append(self._checkpoint_report(self._saved))
            self._saved = None
        return reports

    def _parsed(self, lines: list[bytes], now_ms: int) -> list[Report]:
        return [report for line in lines for report in self._line(line.strip(), now_ms) if report is not None]

    def _line(self, line: bytes, now_ms: int) -> tuple[Report | None, ...]:
        if line in PHASES_KNOWN:
            return (self._on_phase(line, now_ms),)
        if not line:
            return ()
        event = _event_of(
            line, {**self._task, "at_ms": now_ms}, {"folder": self._folder, "shared": self._shared}
        )
        if isinstance(event, _Exhausted):
            self.exhausted = (event.memory, event.error)
            return ()
        if event is None:
            self.garbage += 1
            return ()
        if isinstance(event, _Loss):
            return (self._on_loss(event.loss, now_ms),) if self._leads else ()
        if isinstance(event, _Window):
            return (self._on_window(event, now_ms),) if self._leads else ()
        report = loss = None
        if self._leads:
            match event:
                case StepsMeasured():
                    report = self._on_steps(event)
                    loss = None if event.loss is None else self._on_loss(event.loss, now_ms)
                case StagesMeasured():
                    report = self._on_stages(event)
                case TaskCheckpointed():
                    report = self._on_checkpoint(event)
        self.dropped += report is None
        return report, loss

    def _on_loss(self, loss: float, now_ms: int) -> Report | None:
        """A sample of telemetry, where it may matter for the job's convergence."""
        return self._sample("loss", loss, now_ms) if self._losses.passes(loss, now_ms) else None

    def _on_window(self, window: "_Window", now_ms: int) -> Report | None:
        """A sample of telemetry, where it differs from the last one, or is the first with other cores."""
        if not self._step_times.passes(window.step_ms, now_ms, window.cores):
            self.dropped += 1
            return None
        return self._sample("step_ms", window.step_ms, now_ms)

    def _sample(self, name: str, value: float, now_ms: int) -> Report:
        task = {"node_id": self._task["node_id"], "task_id": self._task["task_id"]}
        return Report(f"{name}/{now_ms}", checked(TelemetrySampled, {**task, "at_ms": now_ms, name: value}))

    def _on_phase(self, phase: bytes, now_ms: int) -> Report | None:
        """Each change, up to the bound."""
        if phase == self._phase:
            return None
        self._phase = phase
        self._changes += 1
        if self._changes > MAX_CHANGES:
            self.dropped += 1
            return None
        fields = {**self._task, "phase": phase.decode(), "at_ms": now_ms}
        return Report(f"{phase.decode()}/{now_ms}", checked(TaskPhaseChanged, fields))

    def _on_steps(self, steps: StepsMeasured) -> Report | None:
        """The first, then at growing intervals from it, and those whose waits differ; the last one is held
        back until the end."""
        done = steps.done
        if done <= max(self._done, self._held.done if self._held is not None else 0):
            return None
        if not self._done:
            self._begun = done - 1
        far = 10 * (done - self._begun) >= GROWTH_TENTHS * (self._done - self._begun)
        waits = self._turn_waits.passes(steps)
        if not waits and (self._steps == MAX_STEPS or not (far or done == steps.total)):
            self._held = steps
            return None
        self._steps += not waits
        self._turn_waits.published(steps)
        self._done, self._held = done, None
        return _steps_report(steps)

    def _on_stages(self, stages: StagesMeasured) -> Report | None:
        if self._stages == MAX_STAGES:
            return None
        self._stages += 1
        return Report(f"stages/{stages.at_ms}/{self._stages}", stages)

    def _on_checkpoint(self, saved: TaskCheckpointed) -> Report | None:
        """Each, up to the bound; then the last one is held back until the end."""
        if self._checkpoints == MAX_CHECKPOINTS:
            self._saved = saved
            return None
        return self._checkpoint_report(saved)

    def _checkpoint_report(self, saved: TaskCheckpointed) -> Report:
        self._checkpoints += 1
        return Report(f"checkpoint/{saved.at_ms}/{self._checkpoints}", saved)


def _steps_report(steps: StepsMeasured) -> Report:
    return Report(f"steps/{steps.done}", steps)


class _Steps(msgspec.Struct, forbid_unknown_fields=True):
    done: int
    total: int | None = None
    steps: int = 0
    step_ms: float = 0.0
    loss: float | None = None
    waited_ms: float = 0.0
    missed_turns: int = 0


class _Stages(msgspec.Struct, forbid_unknown_fields=True):
    iterations: int
    samples: list[tuple[float, float, float, float, float]]
    """Each: ms, then the use of storage, CPU, GPU and network."""


class _Exhausted(msgspec.Struct, forbid_unknown_fields=True):
    memory: Literal["host_memory", "gpu_memory"]
    error: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9_.:]{1,100}\Z")]


class _Checkpoint(msgspec.Struct, forbid_unknown_fields=True):
    path: Annotated[str, msgspec.Meta(pattern=CHECKPOINT_NAME)]
    """Its name in the job's folder."""
    iteration: int
    bytes: int = 0
    seconds: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


class _Loss(msgspec.Struct, forbid_unknown_fields=True):
    done: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    loss: Annotated[float, msgspec.Meta(ge=-1e100, le=1e100)]


class _Window(msgspec.Struct, forbid_unknown_fields=True):
    steps: Annotated[int, msgspec.Meta(ge=1, le=1 << 53)]
    step_ms: Annotated[float, msgspec.Meta(gt=0, le=1e9)]
    cores: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)] = 0


class _Line(msgspec.Struct, forbid_unknown_fields=True):
    """A progress line: one of these fields."""

    steps: _Steps | None = None
    stages: _Stages | None = None
    checkpoint: _Checkpoint | None = None
    exhausted: _Exhausted | None = None
    loss: _Loss | None = None
    window: _Window | None = None


_DECODER = msgspec.json.Decoder(_Line)


def _event_of(
    line: bytes, task: dict[str, object], checkpoints: dict[str, object]
) -> StepsMeasured | StagesMeasured | TaskCheckpointed | _Exhausted | _Loss | _Window | None:
    """None for a line in another format.
    `checkpoints`: the job's folder of them, and whether it is shared."""
    try:
        found = _DECODER.decode(line)
        given = (found.steps, found.stages, found.checkpoint, found.exhausted, found.loss, found.window)
        if sum(field is not None for field in given) != 1:
            return None
        if found.checkpoint is not None:
            return _checkpointed(found.checkpoint, task, **checkpoints)
        if (own := found.exhausted or found.loss or found.window) is not None:
            return own
        if found.steps is not None:
            return checked(StepsMeasured, msgspec.structs.asdict(found.steps) | task)
        if found.stages is not None:
            samples = [
                StageSample(lasted_ms=lasted, storage=storage, cpu=cpu, gpu=gpu, network=network)
                for lasted, storage, cpu, gpu, network in found.stages.samples
            ]
            fields = {**task, "iterations": found.stages.iterations, "samples": samples}
            return checked(StagesMeasured, fields)
    except (msgspec.DecodeError, UnicodeDecodeError, ValidationError):
        pass
    return None


def _checkpointed(
    found: _Checkpoint, task: dict[str, object], folder: object, shared: object
) -> TaskCheckpointed | None:
    """None where the job has no folder. Raises `ValidationError`."""
    if not folder:
        return None
    fields = {
        "path": f"{folder}/{found.path}",
        "iteration": found.iteration,
        "size_bytes": found.bytes,
        "save_ms": round(MS_PER_S * found.seconds),
        "shared": shared,
    }
    return checked(TaskCheckpointed, task | fields)
