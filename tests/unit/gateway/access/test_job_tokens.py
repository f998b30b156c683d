"""Jobs that submit jobs: whose token a task has, how long, and how far it goes (decision 143)."""

import asyncio
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from penstock.bearer import bearer_token
from penstock.ledger.state.job.job_state import JobState
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import JobCancelRequested, NodeJoined, TaskExited
from penstock.model.jobs.job_spec import JobSpec
from penstock.runtime.keys.job_tokens import PREFIX, Claim, made, parsed
from penstock.runtime.keys.node_keys import NodeKeys
from penstock_services.gateway.core.access import Role
from penstock_services.gateway.core.job_callers import (
    MAX_DEPTH,
    MAX_LIVING,
    descended,
    refuse_too_many,
    task_caller,
)
from penstock_services.gateway.core.problems import Problem
from penstock_services.gateway.core.requests.submission import owned, spec_digest
from penstock_services.gateway.shell.access.job_callers import caller_of_token
from penstock_services.gateway.shell.replica.follower import Follower
from penstock_services.node_reporter.shell.ports import NotStartable
from penstock_services.node_reporter.shell.task_setup.gateway_access import GatewayAccess
from tests.support.cluster.hand_placer import HandPlacer, node_spec
from tests.support.node_reporter.node_cell import node_options, start_order

KEYS = {name: NodeKeys(name.encode() * 16) for name in ("n0", "n1")}
PLAIN = JobSpec(command=("true",), owner="vision")
DRIVER = replace(PLAIN, may_submit=True)


@dataclass
class Driven:
    """A cell of two nodes on which the job `driver` of the owner `vision` runs, on one of them."""

    spec: JobSpec = DRIVER
    placer: HandPlacer = field(default_factory=HandPlacer)

    def __post_init__(self) -> None:
        for name, keys in KEYS.items():
            self.placer.feed(NodeJoined(node=node_spec(name), public_key=keys.public_key))
        self.placer.submit("driver", spec=self.spec)
        self.placer.start("driver")

    @property
    def claim(self) -> Claim:
        """What its task's token says."""
        job = self.placer.state.jobs["driver"]
        [(task_id, task)] = job.tasks.items()
        return Claim(task.place.node_id, "driver", task_id, job.token)

    @property
    def token(self) -> str:
        return made(KEYS[self.claim.node_id], self.claim)

    def refusal(self, token: str) -> Problem:
        with pytest.raises(Problem) as found:
            asyncio.run(caller_of_token(Follower(self.placer.replica), token))
        return found.value


def test_a_task_acts_for_the_owner_of_its_job() -> None:
    """A sweep's driver submits its trials: it may submit and read, and nothing that its owner could not."""
    cell = Driven()
    caller = asyncio.run(caller_of_token(Follower(cell.placer.replica), cell.token))
    assert (caller.roles, caller.tenant) == ({Role.SUBMIT, Role.READ}, "vision")
    assert (caller.by, caller.lineage) == ("vision/job:driver", ("driver",))


async def test_a_task_that_is_quicker_than_the_gateways_reader_waits_for_it() -> None:
    """The task submits in its first millisecond; the gateway has not read yet that it was placed."""
    cell = Driven()
    behind, placed = Follower(HandPlacer().replica), cell.placer
    joined = HandPlacer()
    for name, keys in KEYS.items():
        joined.feed(NodeJoined(node=node_spec(name), public_key=keys.public_key))
    behind.replica = joined.replica
    asked = asyncio.create_task(caller_of_token(behind, cell.token))
    await asyncio.sleep(0)
    assert not asked.done()
    behind.replica = placed.replica
    behind.wake()
    assert (await asked).lineage == ("driver",)


def other(name: str) -> str:
    return "n1" if name == "n0" else "n0"


FORGED: dict[str, Callable[[Claim], str]] = {
    "another node's key": lambda claim: made(KEYS[other(claim.node_id)], claim),
    "a stranger's key": lambda claim: made(NodeKeys(b"s" * 32), claim),
    "a node that is none": lambda claim: made(KEYS["n0"], claim._replace(node_id="n9")),
    "cut": lambda claim: made(KEYS[claim.node_id], claim)[:-4],
    "another job's claim before a true signature": lambda claim: ".".join(
        (
            *made(KEYS["n0"], claim._replace(job_id="other")).split(".")[:2],
            made(KEYS[claim.node_id], claim).rpartition(".")[2],
        )
    ),
    "no token": lambda claim: f"{PREFIX}!!.??",
    "no claim": lambda claim: f"{PREFIX}W10.W10",
}
FOREIGN: dict[str, Callable[[Claim], str]] = {
    "a node that does not run it": lambda claim: made(
        KEYS[other(claim.node_id)], claim._replace(node_id=other(claim.node_id))
    ),
    "a job that is none": lambda claim: made(KEYS[claim.node_id], claim._replace(job_id="other")),
    "a task that is none": lambda claim: made(KEYS[claim.node_id], claim._replace(task_id="driver.1.9")),
    "an earlier attempt": lambda claim: made(KEYS[claim.node_id], claim._replace(token=claim.token - 1)),
}


@pytest.mark.parametrize("how", FORGED)
def test_a_token_that_its_node_has_not_signed_is_refused(how: str) -> None:
    """Whoever can reach the gateway and reads this page can write such a text."""
    cell = Driven()
    found = cell.refusal(FORGED[how](cell.claim))
    assert (found.status, found.kind) == (401, "job_token_forged")


@pytest.mark.parametrize("how", FOREIGN)
def test_a_node_speaks_for_the_tasks_that_it_runs_and_for_no_others(how: str) -> None:
    """A node was taken over: its key is worth what runs there."""
    cell = Driven()
    found = cell.refusal(FOREIGN[how](cell.claim))
    assert (found.status, found.kind) == (401, "job_token_expired")


@pytest.mark.parametrize("how", ["it ends", "it is cancelled, and ends"])
def test_a_token_ends_with_its_task(how: str) -> None:
    """It was printed into a log that a colleague reads the next day."""
    cell = Driven()
    token = cell.token
    if how != "it ends":
        cell.placer.feed(JobCancelRequested(job_id="driver"))
        claim = cell.claim
        assert task_caller(cell.placer.state, *claim).lineage, "in its grace it may cancel what it submitted"
    cell.placer.finish("driver")
    assert cell.refusal(token).kind == "job_token_expired"


def test_a_gang_s_tasks_have_tokens_of_their_own() -> None:
    """The worker that loads the data has done its part; its token lies in a file that somebody copied."""
    placer = Driven(replace(DRIVER, workers=2)).placer
    job = placer.state.jobs["driver"]
    done, runs = (Claim(task.place.node_id, "driver", name, job.token) for name, task in job.tasks.items())
    placer.feed(
        TaskExited(
            node_id=done.node_id,
            task_id=done.task_id,
            token=done.token,
            cause="exited",
            exit_code=0,
            started_ms=1,
            exited_ms=2,
        )
    )
    assert task_caller(placer.state, *runs).lineage == ("driver",)
    with pytest.raises(Problem, match="ends with its task"):
        task_caller(placer.state, *done)


def test_a_job_that_did_not_ask_for_it_submits_nothing() -> None:
    """Its node gives it no token; one that were taken over could sign one."""
    cell = Driven(PLAIN)
    found = cell.refusal(cell.token)
    assert (found.status, found.kind, "--may-submit" in found.detail) == (403, "may_not_submit", True)


ORDER = start_order(7, "true", gpus=(), may_submit=True)
GATEWAY = "https://node:hunter2@gateway:8742/cell"


def given(folder: Path, order: StartTask, **options: Any) -> tuple[dict[str, str], list[Path]]:
    """What the node gives to a task."""
    return GatewayAccess(node_options(folder, **options), lambda: KEYS["n1"]).give(order, folder, "/bin")


def test_a_node_gives_a_token_to_the_tasks_that_submit_alone(tmp_path: Path) -> None:
    """In a file that no other user can read; the password of the node's own way to the gateway stays its
    own."""
    (tmp_path / "authority").write_text("the authority")
    known = {"gateway": GATEWAY, "gateway_ca": tmp_path / "authority"}
    assert given(tmp_path, replace(ORDER, may_submit=False), **known) == ({}, [])
    variables, files = given(tmp_path, ORDER, **known)
    assert variables["PENSTOCK_SERVER"] == "https://gateway:8742/cell"
    token, authority = (Path(variables[name]) for name in ("PENSTOCK_TOKEN_FILE", "PENSTOCK_CA"))
    assert (token.stat().st_mode & 0o777, authority.read_text()) == (0o600, "the authority")
    found = parsed(bearer_token(token, "PENSTOCK_TOKEN_FILE"))
    assert found is not None
    assert (found.claim, found.proven(KEYS["n1"].public_key)) == (Claim("n1", "job-7", "job-7.1.0", 7), True)
    assert (shutil.which("penstock", path=variables["PATH"]) or "").startswith(str(tmp_path))
    assert set(files) == {token, authority, tmp_path / "bin"}
    again, _ = given(tmp_path, ORDER, **known, task_gateway="http://10.0.0.1:8742")
    assert (again["PENSTOCK_SERVER"], "PENSTOCK_CA" in again) == ("http://10.0.0.1:8742", False)
    GatewayAccess.forget(tmp_path)
    assert [path for path in files if path.exists()] == []


def test_a_node_that_knows_no_gateway_says_so(tmp_path: Path) -> None:
    """The job would start, and fail at its first submission, hours later."""
    with pytest.raises(NotStartable, match="--gateway URL or --task-gateway URL"):
        given(tmp_path, ORDER)


def test_a_job_that_submits_itself_for_ever_ends_at_a_bound() -> None:
    """`penstock submit --may-submit -- python train.py` stands in train.py itself."""
    spec = DRIVER
    for depth in range(MAX_DEPTH + 1):
        caller = task_caller(Driven(spec).placer.state, *Driven(spec).claim)
        if depth < MAX_DEPTH:
            spec = replace(descended(DRIVER, caller), parents=(*spec.parents, f"ancestor-{depth}"))
    with pytest.raises(
        Problem, match=f"{MAX_DEPTH} deep at most.*ancestor-0 → .*have ancestor-0 submit"
    ) as found:
        descended(DRIVER, caller)
    assert (found.value.status, found.value.kind) == (409, "too_deep")


def test_what_one_job_has_submitted_is_bounded_while_it_lives() -> None:
    """A loop without an end, also where the children submit on: the jobs of others do not count."""
    cell = Driven()
    caller = task_caller(cell.placer.state, *cell.claim)
    child, grandchild = (replace(PLAIN, parents=parents) for parents in (("driver",), ("driver", "x")))
    jobs = [JobState(f"j{number}", child, number, 0) for number in range(MAX_LIVING - 2)]
    strangers = [JobState("s", replace(PLAIN, parents=("other", "driver")), 0, 0), JobState("t", PLAIN, 0, 0)]
    refuse_too_many(caller, [*jobs, *strangers], [grandchild])
    with pytest.raises(Problem, match=f"{MAX_LIVING} may; wait until some have ended") as found:
        refuse_too_many(caller, [*jobs, *strangers], [grandchild, child])
    assert (found.value.status, found.value.kind) == (409, "too_many_jobs")


def test_a_job_acts_on_itself_and_on_what_it_submitted() -> None:
    """A driver with a bug cancels by name what its owner runs beside it."""
    cell = Driven()
    caller = task_caller(cell.placer.state, *cell.claim)
    for job_id, parents in (("driver", ()), ("child", ("driver",)), ("grandchild", ("driver", "child"))):
        caller.demand_own_tree(job_id, parents, job_id)
    for parents in ((), ("parent",)):
        with pytest.raises(Problem) as found:
            caller.demand_own_tree("sibling", parents, "job sibling")
        assert (found.value.status, found.value.kind) == (403, "other_job")


def test_nobody_names_parents_and_a_key_is_for_every_parent() -> None:
    """A driver that is tried again under a new id finds what it has submitted by the same keys."""
    with pytest.raises(Problem, match="parents: is set by the gateway"):
        owned(replace(PLAIN, parents=("driver",)), "vision")
    assert spec_digest(PLAIN) == spec_digest(replace(PLAIN, parents=("driver",)))
