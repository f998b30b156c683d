"""Stories of tenants that share GPUs in turns: only where both allow it, and `why` says so."""

from itertools import combinations
from random import Random

import pytest

from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.groups.validate_groups import clash, marks_of
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.stages.regroup import Candidate, Question
from penstock.why.explain import explain
from tests.unit.ledger.groups.test_group_promises import COMPUTER, READER, Cell

ONE_GPU = (1, 1, 0, 0)


def test_jobs_of_two_tenants_are_not_grouped() -> None:
    """A stranger's training on one's own GPU could slow it down, and see what it leaves in memory. The
    batcher does not ask for that, the placer would refuse it, and `why` names the setting."""
    cell = Cell()
    cell.enter("ours", COMPUTER, runs=True)
    cell.enter("theirs", READER, owner="speech", companions="any")
    assert cell.planned() == []
    refused = cell.group("ours", "theirs")
    assert (refused.verdict, refused.reason) == ("refused", "infeasible")
    assert refused.detail == (
        "ours and theirs are of two tenants, vision and speech; they share GPUs only where both allow it "
        "(`companions: any`), and ours did not"
    )
    assert explain(cell.state, "theirs").detail.endswith(f"; it shares no GPUs: {refused.detail}")


def test_jobs_of_two_tenants_that_both_allow_any_companion_are_grouped() -> None:
    cell = Cell()
    cell.enter("ours", COMPUTER, runs=True, companions="any", preemptible=False)
    cell.enter("theirs", READER, owner="speech", companions="any")
    assert cell.planned() == [("ours", "theirs")]


def test_jobs_of_one_tenant_are_grouped_as_ever() -> None:
    """And a third one, of a tenant that allows nothing, does not get in."""
    cell = Cell()
    cell.enter("one", COMPUTER, runs=True, preemptible=False)
    cell.enter("other", READER)
    cell.enter("stranger", READER, owner="speech")
    assert cell.planned() == [("one", "other")]
    assert cell.group("one", "other", "stranger").verdict == "refused"


def test_a_job_that_shares_for_another_reason_is_not_told_of_tenants() -> None:
    """It could share the GPU of a job of its own tenant: no rule of tenants keeps it waiting."""
    cell = Cell(nodes=2)
    cell.enter("ours", COMPUTER, runs=True)
    cell.enter("theirs", COMPUTER, runs=True, owner="speech")
    cell.enter("waits", READER)
    assert "tenants" not in explain(cell.state, "waits").detail


def test_only_papers_algorithms_group_all_tenants() -> None:
    cell = Cell("muri-s")
    cell.enter("ours", COMPUTER, runs=True, preemptible=False)
    cell.enter("theirs", READER, owner="speech")
    assert cell.planned() == [("ours", "theirs")]


def times(chance: Random) -> StageTimes:
    parts = [chance.uniform(1, 100) for _ in range(4)]
    return StageTimes(
        storage_ms=parts[0], cpu_ms=parts[1], gpu_ms=parts[2], network_ms=parts[3], iteration_ms=sum(parts)
    )


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("profile", ["penstock", "interleave"])
def test_no_plan_groups_what_is_apart(profile: str, seed: int) -> None:
    """Sixty jobs of five kinds, three tenants and some that allow any, four GPUs: whatever the search
    does."""
    chance = Random(f"{profile} {seed}")
    kinds = [times(chance) for _ in range(5 if seed % 2 else 60)]
    pairs = [(chance.randrange(5), chance.randrange(5)) for _ in range(6)]
    jobs = []
    for number in range(60):
        kind = chance.randrange(5)
        marks = sum(((kind == one) | (kind == other) << 1) << 2 * n for n, (one, other) in enumerate(pairs))
        runs = f"g{number // 2}" if number < 4 and not pairs else ""
        jobs.append(
            Candidate(
                f"j{number}",
                1,
                ONE_GPU,
                kinds[kind if seed % 2 else number],
                chance.uniform(10, 1_000),
                0.0,
                number,
                None,
                runs,
                True,
                0.0,
                100,
                chance.choice(["", "a", "b", "c"]),
                marks,
            )
        )
    stage = profile_for(Cell(profile).state.settings).regroup
    assert isinstance(stage, Interleave)
    answer = stage.solve(Question(profile, tuple(jobs), (4,), 16_384, 1_000))
    by_id = {job.job_id: job for job in jobs}
    shared = [group for group in answer.groups if len(group.job_ids) > 1]
    assert shared
    for group in shared:
        members = [by_id[job_id] for job_id in group.job_ids]
        assert len({job.circle for job in members}) == 1
        assert not clash([job.apart for job in members])


def test_marks_tell_the_sides_of_a_pair_apart() -> None:
    """Neighbouring pairs have neighbouring bits; and a kind may be apart from itself."""
    pairs = [("a", "b"), ("b", "c"), ("d", "d")]
    cell = Cell()
    marks = {}
    for kind in "abcde":
        cell.enter(kind, owner="o")
        found = [tuple(f"o {one} 0 1" for one in pair) for pair in pairs]
        marks[kind] = marks_of([(one, other) for one, other in found], cell.job(kind))
    apart = {
        (one, other)
        for one, other in [*combinations("abcde", 2), *zip("abcde", "abcde", strict=True)]
        if clash([marks[one], marks[other]])
    }
    assert apart == {("a", "b"), ("b", "c"), ("d", "d")}
