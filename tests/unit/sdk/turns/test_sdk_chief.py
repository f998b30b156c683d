"""Turns of gangs: rank 0 takes them for all ranks on its node, which follow it only where somebody else is on
their GPUs, and never for long."""

import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from penstock.sdk import stages
from penstock.sdk.sharing import chief, turns
from penstock.sdk.sharing.chief import FollowedTurns, LeadingTurns
from penstock.sdk.sharing.turns import LAST_LOOK_S, MAX_HOLDERS, Changes, Turn, Turns
from penstock.sdk.stages import STAGES, Recorder
from tests.support.waiting import wait_until
from tests.unit.sdk.turns.played_changes import Played, in_line

GPU = STAGES.index("gpu")
ROUNDS = 40
TRIES = 5


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No bound ends a wait on a busy machine, but where a test plays the time."""
    for module, bound in ((turns, "MAX_WAIT_S"), (chief, "MAX_WAIT_S"), (chief, "COMPANY_S")):
        monkeypatch.setattr(module, bound, 3_600.0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a group, as the tasks of a gang of two find it."""
    variables = {
        turns.GROUP: str(tmp_path),
        "PENSTOCK_PHASE_FILE": os.devnull,
        "PENSTOCK_JOB_ID": "ada/gang",
        "WORLD_SIZE": "2",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "PENSTOCK_PEERS", "PENSTOCK_PEERS_FILE", "PENSTOCK_ROLE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def leading(folder: Path, played: Played | None = None) -> LeadingTurns:
    clock = {} if played is None else {"clock": played.clock}
    return LeadingTurns(str(folder), Turns(str(folder), STAGES, lambda: False), len(STAGES), **clock)


def following(folder: Path, played: Played | None = None) -> FollowedTurns:
    """Its time is that of `played`, where that is given."""
    if played is None:
        return FollowedTurns(str(folder), len(STAGES))
    found = FollowedTurns(str(folder), len(STAGES), clock=played.clock)
    found._changes = played
    return found


def in_background(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


def with_company(folder: Path, leader: LeadingTurns, follower: FollowedTurns) -> None:
    """The chief has had to wait for another job's turn once; both ranks have been in the stage once."""
    other = Turn(str(folder / "gpu"), Changes())
    assert other.take()
    leaves = in_background(lambda: (wait_until(lambda: in_line(other), "the chief in line"), other.leave()))
    for one in (leader, follower):
        one.change(GPU)
        one.change(None)
    leaves.join()


def test_another_rank_enters_a_stage_when_the_chief_has(folder: Path) -> None:
    """Another job has the GPUs: rank 1 waits with its chief, and enters with it."""
    leader, follower, entered = leading(folder), following(folder), threading.Event()
    with_company(folder, leader, follower)
    other, changes, waits = Turn(str(folder / "gpu"), Changes()), follower._changes, threading.Event()
    monitored = changes.wait
    changes.wait = lambda seconds: (waits.set(), monitored(seconds))[1]  # type: ignore[method-assign]
    assert other.take()
    follows = in_background(lambda: (follower.change(GPU), entered.set()))
    chief_enters = in_background(lambda: leader.change(GPU))
    wait_until(lambda: in_line(other) and (waits.is_set() or entered.is_set()), "both")
    assert not entered.is_set()
    other.leave()
    for one in (follows, chief_enters):
        one.join()
    assert follower.waits.missed == 0
    assert follower.waits.seconds > 0


def test_a_rank_whose_job_is_alone_waits_for_nobody(folder: Path) -> None:
    """It is a little ahead of its chief in each stage, as one rank always is."""
    leader, follower = leading(folder), following(folder)
    for _ in range(100):
        follower.change(GPU)
        leader.change(GPU)
    assert follower.waits == (0.0, 0)


def test_company_that_has_left_is_forgotten(folder: Path) -> None:
    played = Played()
    leader, follower = leading(folder, played), following(folder, played)
    with_company(folder, leader, follower)
    played.now_s += chief.COMPANY_S
    leader.change(GPU)
    for _ in range(20):
        follower.change(GPU)
    assert follower.waits == (0.0, 0)


def test_the_death_of_the_chief_holds_nobody_up(folder: Path) -> None:
    """The node ends the whole gang anyway; until then rank 1 saves, or fails in its collective."""
    played = Played()
    leader, follower = leading(folder), following(folder, played)
    with_company(folder, leader, follower)
    played.after(5.0, lambda: os.close(leader._file), is_reported=False)
    follower.change(GPU)
    assert 5.0 <= follower.waits.seconds <= 5.0 + LAST_LOOK_S < 6.0


def test_ranks_that_differ_lose_one_bounded_wait(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 evaluates in a stage that rank 0 has not."""
    monkeypatch.setattr(chief, "MAX_WAIT_S", 10.0)
    played = Played()
    leader, follower = leading(folder), following(folder, played)
    with_company(folder, leader, follower)
    for _ in range(10):
        follower.change(GPU)
    bound_s = MAX_HOLDERS * chief.MAX_WAIT_S
    assert bound_s <= follower.waits.seconds <= bound_s + LAST_LOOK_S
    assert follower.waits.missed == 1


def test_a_rank_on_another_node_and_one_before_its_chief_do_not_wait(folder: Path) -> None:
    """There is no file of the chief; when it is there, what was entered before counts."""
    follower = following(folder)
    follower.change(GPU)
    leader = leading(folder)
    leader.change(GPU)
    follower.change(GPU)
    assert follower.waits == (0.0, 0)


def test_files_of_dead_chiefs_are_removed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = leading(folder)
    monkeypatch.setenv("PENSTOCK_JOB_ID", "other")
    leading(folder)
    assert len(list(folder.glob("*.chief"))) == 2, "both live"
    first.close()
    monkeypatch.setenv("PENSTOCK_JOB_ID", "third")
    leading(folder)
    assert sorted(path.name for path in folder.glob("*.chief")) == ["other-1.chief", "third-1.chief"]


@pytest.mark.parametrize(
    ("more", "kind"),
    [
        ({}, LeadingTurns),
        ({"RANK": "1"}, FollowedTurns),
        ({"WORLD_SIZE": "1"}, Turns),
        ({"RANK": "1", "PENSTOCK_PEERS": '[{"rank":2,"role":"ps"}]'}, type(None)),
        ({"PENSTOCK_PEERS": '[{"rank":2,"role":"ps"}]'}, Turns),
        ({"RANK": "2", "PENSTOCK_ROLE": "ps"}, type(None)),
        ({"PENSTOCK_PHASE_FILE": ""}, type(None)),
    ],
)
def test_who_leads_who_follows_and_who_does_neither(
    folder: Path, monkeypatch: pytest.MonkeyPatch, more: dict[str, str], kind: type
) -> None:
    """Workers with parameter servers do not wait for each other, so they do not for turns either."""
    for name, value in more.items():
        monkeypatch.setenv(name, value)
    assert type(stages._join()) is kind


def test_another_rank_reports_no_profile(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    lines: list[str] = []
    now_s = 100.0
    marks = Recorder(lambda: now_s, lambda line: bool(lines.append(line)) or True, stages._join)
    for _ in range(60):
        marks.iteration()
        with marks.stage("gpu"):
            now_s += 1.0
    assert lines == []


def _rank(job: str, rank: int, barrier: Barrier, folder: str, follows: bool, gpu_s: float) -> None:
    """Of a gang: both ranks prepare, learn, and meet."""
    os.environ |= {"PENSTOCK_JOB_ID": job, "RANK": str(rank), "WORLD_SIZE": "2", turns.GROUP: folder}
    os.environ["PENSTOCK_PHASE_FILE"] = os.devnull
    marks = Recorder(join=stages._join if follows or not rank else lambda: None)
    with open(f"{folder}/{job}-{rank}.trace", "w") as trace:
        for _ in range(ROUNDS):
            marks.iteration()
            with marks.stage("cpu"):
                time.sleep(0.002)  # clock: alone on the machine (`make live`)
            with marks.stage("gpu"):
                began = time.monotonic()  # clock: alone on the machine (`make live`)
                time.sleep(gpu_s)  # clock: alone on the machine (`make live`)
                trace.write(f"{began} {time.monotonic()}\n")  # clock: alone on the machine (`make live`)
            barrier.wait()


def overlap(folder: Path, *, follows: bool) -> float:
    """The share of the shorter one's time that two gangs' second ranks are on their GPU at once."""
    folder.mkdir()
    ranks = []
    for job, gpu_s in (("a", 0.02), ("b", 0.005)):
        barrier = multiprocessing.Barrier(2)
        ranks += [
            multiprocessing.Process(
                target=_rank, args=(job, rank, barrier, str(folder), follows, gpu_s), daemon=True
            )
            for rank in range(2)
        ]
    for one in ranks:
        one.start()
    wait_until(lambda: any(one.exitcode for one in ranks) or all(one.exitcode == 0 for one in ranks), "all")
    assert not any(one.exitcode for one in ranks)
    mine, theirs = (
        [tuple(map(float, line.split())) for line in (folder / f"{job}-1.trace").read_text().splitlines()]
        for job in ("a", "b")
    )
    both = sum(max(0.0, min(e, f) - max(b, c)) for b, e in mine for c, f in theirs)
    return both / sum(e - b for b, e in theirs)


@pytest.mark.slow
def test_other_ranks_of_two_gangs_are_not_on_their_gpus_at_once(folder: Path) -> None:
    """If only the chiefs took turns, the others would run ahead and meet on theirs: in one of some tries.
    Part of `make live`."""
    assert any(overlap(folder / f"free-{number}", follows=False) > 0.5 for number in range(TRIES))
    assert overlap(folder / "following", follows=True) < 0.25
