"""Stories of pipelines: a job that is tied to its follower ends when the pipeline is gone, and not before."""

from typing import Any

import pytest

from penstock.ledger.replica.snapshot import dump, load
from penstock.model.decisions.ledger_events import JobEnded, StopDecided
from penstock.model.inputs.external_events import JobHoldRequested
from penstock.model.inputs.followers import PIPELINE_GONE, FollowerChanged
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import JobStatus
from penstock.model.schema.topics import Topic
from penstock_services.gateway.core.followers import APART_S, RETURNED_WITHIN_S, Followers
from penstock_services.gateway.core.requests.submission import spec_digest
from penstock_services.placer.core.members.followers import FIRST_MS, LEAST_MS
from penstock_services.placer.core.step import Step
from tests.support.cluster.driver import CellDriver, job_spec, kinds, node_spec

GRACE_MS = 60_000


def tied(**more: Any) -> JobSpec:
    return job_spec(**{"tied_to": "follower", "tied_grace_ms": GRACE_MS, **more})


def cell_with(spec: JobSpec, *, starts: bool = True) -> CellDriver:
    """A cell with this job; `starts`: it runs."""
    cell = CellDriver()
    cell.join(node_spec("n1", gpus=1))
    cell.submit("j", spec)
    if starts:
        cell.start("j")
    return cell


def connect(cell: CellDriver, gateway: str = "g1") -> Step:
    return cell.feed(FollowerChanged(job_id="j", gateway=gateway, connected=True, after=cell.state.seq))


def lose(cell: CellDriver, gateway: str = "g1", silent_ms: int = 0) -> Step:
    return cell.feed(
        FollowerChanged(
            job_id="j", gateway=gateway, connected=False, after=cell.state.seq, silent_ms=silent_ms
        )
    )


def reasons(steps: list[Step]) -> list[str]:
    """Why jobs were stopped or ended."""
    facts = [fact for step in steps for fact in step.facts]
    return [
        fact.detail if isinstance(fact, StopDecided) else fact.reason
        for fact in facts
        if isinstance(fact, StopDecided | JobEnded)
    ]


def test_a_job_whose_runner_was_killed_is_stopped_after_its_grace() -> None:
    """The runner's machine is preempted: no signal reaches the client, its connection breaks."""
    cell = cell_with(tied())
    connect(cell)
    assert cell.at(10 * GRACE_MS) == [], "while it is followed no clock runs"
    gone_ms = cell.now_ms
    lose(cell)
    assert cell.job("j").following.absent_ms == gone_ms
    assert cell.at(11 * GRACE_MS - 1) == []
    [reason] = reasons(cell.at(11 * GRACE_MS))
    assert reason == f"{PIPELINE_GONE} since 1970-01-01T00:26:40Z"
    assert cell.job("j").status is JobStatus.STOPPING
    [ended] = reasons([cell.exit("j.1.w0", 143)])
    assert ended == reason, "the job's reason, as `get jobs` shows it"
    assert cell.state.timers == {}


def test_a_follower_that_comes_back_in_time_keeps_its_job() -> None:
    """A router restarts. The replica of a reader that starts meanwhile has the same timer."""
    cell = cell_with(tied())
    connect(cell)
    lose(cell)
    assert load(dump(cell.state)).jobs["j"].following.absent_ms == cell.now_ms
    cell.at(GRACE_MS - 1)
    connect(cell, "g2")
    assert (cell.job("j").following.gateway, cell.job("j").following.absent_ms) == ("g2", None)
    assert cell.at(5 * GRACE_MS) == []
    assert cell.job("j").status is JobStatus.RUNNING


@pytest.mark.parametrize("held", [False, True])
def test_a_job_that_waits_or_is_held_is_cancelled_too(held: bool) -> None:
    """The pipeline was killed while its job queued, between the answer to its submission and its stream."""
    cell = CellDriver()
    cell.submit("j", tied())
    if held:
        cell.feed(JobHoldRequested(job_id="j"))
    assert cell.at(GRACE_MS - 1) == []
    [reason] = reasons(cell.at(GRACE_MS))
    assert reason.startswith(PIPELINE_GONE)
    assert cell.state.ended["j"] == "cancelled"


def test_without_a_grace_there_is_time_to_connect_and_for_another_gateway_to_answer() -> None:
    """`--tied-grace 0s`: the shortest there is."""
    cell = cell_with(tied(tied_grace_ms=0))
    assert reasons(cell.at(FIRST_MS - 1)) == []
    connect(cell)
    assert cell.at(FIRST_MS + 1) == []
    lose(cell)
    assert reasons(cell.at(FIRST_MS + LEAST_MS)) == []
    assert len(reasons(cell.at(FIRST_MS + 1 + LEAST_MS))) == 1


def test_the_time_before_a_loss_was_reported_counts() -> None:
    """A gateway that was restarted waits for its followers, and then reports those that are gone since its
    start."""
    cell = cell_with(tied())
    connect(cell)
    cell.at(30_000)
    lose(cell, silent_ms=10_000)
    assert cell.job("j").following.absent_ms == cell.now_ms - 10_000
    assert reasons(cell.at(20_000 + GRACE_MS - 1)) == []
    assert len(reasons(cell.at(20_000 + GRACE_MS))) == 1


def test_a_job_that_is_not_tied_lives_without_a_follower() -> None:
    cell = cell_with(job_spec())
    assert kinds(connect(cell)) == []
    assert cell.at(1_000_000) == []


def test_copies_and_reports_of_another_run_change_nothing() -> None:
    """An append whose answer was lost is sent again; and a gateway that has lost a connection does not
    know that another has one."""
    cell = cell_with(tied())
    copy = FollowerChanged(job_id="j", gateway="g1", connected=True, after=cell.state.seq)
    cell.feed(copy)
    for refused in (copy, FollowerChanged(job_id="j", gateway="g2", connected=False, after=cell.state.seq)):
        assert kinds(cell.feed(refused)) == []
    lose(cell)
    assert kinds(cell.feed(copy)) == [], "it is older than the loss"
    assert len(reasons(cell.at(GRACE_MS))) == 1


class Gateways:
    """Two gateways of one cell, whose reports the placer takes at once."""

    def __init__(self) -> None:
        self.cell, self.now_s, self.reports = cell_with(tied()), 0.0, 0
        self.known: list[Followers] = []
        self.begin("g1")

    def begin(self, name: str) -> Followers:
        self.known.append(Followers(name, self.now_s))
        return self.known[-1]

    def until(self, now_s: float) -> float | None:
        """Reports until none is due; in how many s the next one may be."""
        self.now_s, self.cell.now_ms = now_s, 1_000_000 + round(1_000 * now_s)
        while True:
            due = [gateway.due(self.cell.state, now_s) for gateway in self.known]
            events = [event for found, _ in due for event in found]
            if not events:
                return min((wait for _, wait in due if wait is not None), default=None)
            for event in events:
                self.reports += 1
                self.cell.feed(event)

    @property
    def followed(self) -> bool:
        return self.cell.job("j").following.absent_ms is None


def test_a_gateway_reports_connections_and_losses() -> None:
    """One follower, then a second one beside it: only the first connection and the last loss count."""
    cell = Gateways()
    [gateway] = cell.known
    gateway.opened(["j"], "submit")
    assert cell.until(1.0) is not None
    assert cell.followed
    gateway.opened(["j"], "wait")
    gateway.closed(["j"], "submit", 2.0)
    cell.until(2.0)
    assert cell.followed
    gateway.closed(["j"], "wait", 3.0)
    cell.until(3.0)
    assert not cell.followed
    assert cell.reports == 2


def test_a_connection_that_breaks_again_and_again_does_not_flood_the_ledger() -> None:
    """A proxy cuts each stream after 0.2 s, for a minute."""
    cell = Gateways()
    [gateway] = cell.known
    for number in range(300):
        gateway.opened(["j"], number)
        cell.until(number / 5)
        gateway.closed(["j"], number, number / 5)
        cell.until(number / 5)
    assert cell.reports <= 2 * 60 / APART_S + 2
    assert cell.until(60.0 + APART_S) is None
    assert not cell.followed, "the last loss is reported, late"


def test_after_a_restart_a_job_is_lost_unless_its_follower_returns() -> None:
    """A gateway is killed: nobody reports what it had. Its next run does, some time after its start."""
    cell = Gateways()
    cell.known[0].opened(["j"], "submit")
    cell.until(1.0)
    cell.known.clear()
    cell.now_s = 100.0
    again = cell.begin("g2")
    assert cell.until(101.0) == pytest.approx(RETURNED_WITHIN_S - 1.0)
    again.opened(["j"], "submit")
    cell.until(100.0 + RETURNED_WITHIN_S)
    assert cell.cell.job("j").following.gateway == "g2"
    cell.known.clear()
    cell.now_s = 200.0
    cell.begin("g3")
    cell.until(200.0 + RETURNED_WITHIN_S)
    assert not cell.followed
    assert cell.cell.job("j").following.absent_ms == cell.cell.now_ms - 1_000 * RETURNED_WITHIN_S


def test_what_a_killed_gateway_had_reported_is_looked_at_even_if_it_is_read_late() -> None:
    """Gateway and placer end together. The placer comes back last, and reads then that the job has a
    follower: at the gateway that is no more."""
    cell = Gateways()
    cell.known[0].opened(["j"], "submit")
    [late], _ = cell.known[0].due(cell.cell.state, 0.0)
    cell.known.clear()
    again = cell.begin("g2")
    again.jobs_end = cell.cell.state.inputs_read(Topic.JOBS) + 1
    assert cell.until(RETURNED_WITHIN_S) is None, "until the placer has read it"
    cell.cell.feed(late)
    assert cell.followed
    cell.until(2 * RETURNED_WITHIN_S)
    assert not cell.followed


def test_a_follower_that_moves_to_another_gateway_keeps_its_job() -> None:
    """A balancer sends it there; the first gateway reports its loss, and the second one that the follower
    is there."""
    cell = Gateways()
    first, second = cell.known[0], cell.begin("g2")
    first.opened(["j"], "submit")
    cell.until(20.0)
    second.opened(["j"], "submit")
    first.closed(["j"], "submit", 21.0)
    cell.until(21.0)
    assert cell.followed
    assert cell.cell.job("j").following.gateway == "g2"
    cell.begin("g3")
    cell.until(21.0 + RETURNED_WITHIN_S)
    assert cell.followed, "a gateway that starts doubts all others, and they answer"


def test_a_report_that_could_not_be_written_is_due_again() -> None:
    """The log is away for a moment; and a break is noticed before the ledger shows the connection."""
    cell = Gateways()
    [gateway] = cell.known
    gateway.opened(["j"], "submit")
    reports, _ = gateway.due(cell.cell.state, 0.0)
    assert gateway.due(cell.cell.state, 0.0)[0] == [], "it is under way"
    gateway.failed(reports)
    assert gateway.due(cell.cell.state, 0.0)[0] == reports
    gateway.closed(["j"], "submit", 1.0)
    assert gateway.due(cell.cell.state, 1.0)[0] == [], "as far as it knows the ledger has no connection"
    cell.cell.feed(reports[0])
    cell.until(1.0)
    assert not cell.followed


def test_the_same_job_tied_or_not_is_one_submission() -> None:
    """A step submits with --detach, where it is not tied, and a later one follows under the same key."""
    assert spec_digest(tied()) == spec_digest(job_spec())
