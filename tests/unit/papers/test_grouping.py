"""Who runs and who shares GPUs: what must hold of any answer of the regroup stages, and of their order after
a restart."""

from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import inf

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.model.decisions.groups import MAX_GROUP_MEMBERS
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.types import StageTimes
from penstock.scheduling.groups.group_plan import group_plan
from penstock.scheduling.groups.interleave import Interleave
from penstock.scheduling.groups.search import group_speeds
from penstock.scheduling.profiles import profile_for
from penstock.scheduling.stages.regroup import Answer, Candidate, PlannedGroup, Question, Regroup
from penstock_papers.muri import grouping
from penstock_papers.muri.authors import authors
from penstock_papers.muri.grouping import MAX_KINDS_MATCHED, Grouper, _Kind
from penstock_papers.muri.list_order import rising
from penstock_papers.muri.matching import match_kinds
from penstock_papers.muri.matching_chains import Pairs, Weights
from penstock_papers.muri.muri import muri_l, muri_s
from penstock_papers.settings import Grouping
from tests.support.cluster import builders as b
from tests.support.cluster.matchings import ENOUGH, expanded, full_weight, weight_of

BOUND_BY = {
    name: StageTimes(
        **{f"{one}_ms": 90.0 if one == name else 5.0 for one in ("storage", "cpu", "gpu", "network")},
        iteration_ms=105.0,
    )
    for name in ("storage", "cpu", "gpu", "network")
}
NOTHING = StageTimes(storage_ms=0, cpu_ms=0, gpu_ms=0, network_ms=0, iteration_ms=10)
SHAPES = ((1, 1, 0, 0), (1, 2, 0, 0), (1, 8, 0, 0), (2, 8, 0, 0), (4, 8, 0, 0), (1, 3, 0, 0), (2, 1, 1, 1))
STAGES: dict[str, Regroup] = {
    "muri-s": muri_s(Grouping(), group_plan),
    "muri-l": muri_l(Grouping(), group_plan),
    "no-blossom": muri_l(Grouping(matching=False), group_plan),
    "no-split": muri_s(Grouping(split=False), group_plan),
    "worst-order": muri_s(Grouping(worst_order=True), group_plan),
    "two": muri_s(Grouping(max_members=2), group_plan),
    "interleave": Interleave(group_plan),
}


def candidate(number: int, **changes: object) -> Candidate:
    shape = (1, 1, 0, 0)
    plain = Candidate(
        job_id=f"job-{number}",
        gpus=1,
        shape=shape,
        stages=list(BOUND_BY.values())[number % 4],
        remaining_s=100.0 + number,
        attained_s=0.0,
        order=number,
        rank=None,
        group="",
        movable=True,
        stop_cost_s=0.0,
        gpu_memory_mib=1_000,
    )
    return msgspec.structs.replace(plain, **changes)


def question(jobs: list[Candidate], nodes: tuple[int, ...] = (8,), memory_mib: int = 0) -> Question:
    return Question(stage="any", jobs=tuple(jobs), node_gpus=nodes, gpu_memory_mib=memory_mib, now_ms=0)


@st.composite
def questions(draw: st.DrawFn) -> Question:
    nodes = tuple(draw(st.lists(st.integers(0, 8), min_size=1, max_size=4)))
    jobs: list[Candidate] = []
    room = list(nodes)
    for number in range(draw(st.integers(0, 40))):
        workers, gpus, servers, server_gpus = shape = draw(st.sampled_from(SHAPES))
        holds, memories = "", [0, 4_000, 9_000]
        shared = [job for job in jobs if job.group and job.shape == shape]
        if shared and draw(st.booleans()):
            holds, memories = draw(st.sampled_from(shared)).group, [0]
            if sum(job.group == holds for job in jobs) == MAX_GROUP_MEMBERS:
                holds = ""
        elif workers == 1 and not servers and draw(st.booleans()):
            at = next((node for node, free in enumerate(room) if free >= gpus), None)
            if at is not None:
                room[at] -= gpus
                holds = f"held-{number}"
        stages = draw(st.sampled_from([*BOUND_BY.values(), NOTHING, None]))
        jobs.append(
            candidate(
                number,
                shape=shape,
                gpus=workers * gpus + servers * server_gpus,
                stages=stages,
                remaining_s=draw(st.sampled_from([0.0, 10.0, 5_000.0, inf])),
                attained_s=draw(st.sampled_from([0.0, 100.0, 1e5])),
                group=holds,
                rank=draw(st.sampled_from([None, (0, 1, number)])),
                gpu_memory_mib=draw(st.sampled_from(memories)),
            )
        )
    return question(jobs, nodes, draw(st.sampled_from([0, 16_000])))


@cache
def packs(sizes: tuple[int, ...], nodes: tuple[int, ...]) -> bool:
    """Whether tasks of these GPUs, falling, fit on nodes with as many free: by trying every node."""
    if not sizes or not sizes[0]:
        return True
    return any(
        packs(sizes[1:], tuple(sorted((*nodes[:at], free - sizes[0], *nodes[at + 1 :]))))
        for at, free in enumerate(nodes)
        if free >= sizes[0] and (at == 0 or nodes[at - 1] != free)
    )


@pytest.mark.parametrize("stage", STAGES)
@settings(deadline=None, max_examples=30)
@given(asked=questions())
def test_what_holds_of_any_answer(stage: str, asked: Question) -> None:
    """Nobody runs twice, members are of one shape and fit together, all fit the nodes, and the same question
    has the same answer."""
    found = STAGES[stage].solve(asked)
    jobs = {job.job_id: job for job in asked.jobs}
    members = [job_id for group in found.groups for job_id in group.job_ids]
    assert len(set(members)) == len(members)
    sizes: list[int] = []
    for group in found.groups:
        assert len(group.job_ids) <= 4
        shapes = {jobs[job_id].shape for job_id in group.job_ids}
        [(workers, gpus, servers, server_gpus)] = shapes
        if len(group.job_ids) > 1:
            assert all(jobs[job_id].stages is not None for job_id in group.job_ids)
            assert group.turns is not None
            assert sorted(group.turns.job_ids) == sorted(group.job_ids)
            if asked.gpu_memory_mib:
                assert sum(jobs[job_id].gpu_memory_mib for job_id in group.job_ids) <= asked.gpu_memory_mib
        sizes += (*(gpus,) * workers, *(server_gpus,) * servers)
    assert packs(tuple(sorted(sizes, reverse=True)), tuple(sorted(asked.node_gpus)))
    assert STAGES[stage].solve(asked) == found


@pytest.mark.parametrize("stage", STAGES)
def test_an_empty_question_and_one_of_a_single_job(stage: str) -> None:
    assert STAGES[stage].solve(question([])).groups == ()
    [alone] = STAGES[stage].solve(question([candidate(1)])).groups
    assert alone.job_ids == ("job-1",)
    assert alone.turns is None
    assert STAGES[stage].solve(question([candidate(1, gpus=64, shape=(8, 8, 0, 0))])).groups == ()


@pytest.mark.parametrize("stage", ["muri-s", "muri-l", "interleave"])
def test_four_that_complement_each_other_share_one_gpu(stage: str) -> None:
    """One GPU, four jobs, each bound by another resource."""
    [group] = STAGES[stage].solve(question([candidate(number) for number in range(4)], (1,))).groups
    assert set(group.job_ids) == {"job-0", "job-1", "job-2", "job-3"}
    assert group.turns is not None
    assert sum(group.turns.speeds) > 1.6


def test_who_would_be_slower_together_is_not_grouped() -> None:
    """Four that all keep the GPU busy: the first runs alone."""
    alike = [candidate(number, stages=BOUND_BY["gpu"]) for number in range(4)]
    for stage in ("muri-s", "interleave"):
        [group] = STAGES[stage].solve(question(alike, (1,))).groups
        assert group.job_ids == ("job-0",)
    [forced] = STAGES["no-split"].solve(question(alike, (1,))).groups
    assert len(forced.job_ids) == 4


@pytest.mark.parametrize("stage", ["muri-s", "muri-l", "interleave"])
def test_thousands_of_identical_jobs(stage: str) -> None:
    alike = [candidate(number, stages=BOUND_BY["gpu"], remaining_s=100.0) for number in range(3_000)]
    found = STAGES[stage].solve(question(alike, (8,) * 8))
    assert len(found.groups) == 64


@pytest.mark.parametrize("stage", ["muri-s", "interleave"])
def test_who_may_not_be_stopped_keeps_its_gpus(stage: str) -> None:
    """A job that may not be stopped runs with 8 GPUs; shorter ones come."""
    held = candidate(0, gpus=8, shape=(1, 8, 0, 0), group="held", movable=False, remaining_s=1e6)
    found = STAGES[stage].solve(question([held, *(candidate(number) for number in range(1, 9))]))
    assert [group.job_ids for group in found.groups if "job-0" in group.job_ids] == [("job-0",)]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("movable", [True, False])
def test_of_a_member_whose_stages_are_not_known_any_more(stage: str, movable: bool) -> None:
    """Two take turns; a new estimate of the second has no stages. Who may not be stopped is planned,
    alone."""
    first = candidate(0, group="held", movable=movable)
    second = candidate(1, group="held", movable=movable, stages=None)
    found = STAGES[stage].solve(question([first, second], (1,)))
    [group] = found.groups
    assert "job-1" in group.job_ids or movable
    assert len(group.job_ids) == 1 or not movable


def test_members_that_hold_the_same_gpus_stay_together() -> None:
    """Four pairs of equal weight are possible; the pairs that are there go on."""
    kinds = [BOUND_BY["storage"], BOUND_BY["gpu"]]
    jobs = [
        candidate(number, stages=kinds[number % 2], group=f"held-{(number * 3) % 8 // 2}", remaining_s=100.0)
        for number in range(8)
    ]
    found = muri_s(Grouping(max_members=2), group_plan).solve(question(jobs, (4,)))
    held = {job.job_id: job.group for job in jobs}
    assert len(found.groups) == 4
    for group in found.groups:
        assert len(group.job_ids) == 2
    together = sum(len({held[job_id] for job_id in group.job_ids}) == 1 for group in found.groups)
    assert together == 4


@given(st.lists(st.integers(-50, 50), max_size=30))
def test_ranks_change_for_as_few_as_possible(positions: list[int]) -> None:
    """A list is sorted anew: who keeps its place among the others keeps its rank."""
    found = rising(positions)
    assert all(one < other for one, other in pairwise(found))
    if all(one < other for one, other in pairwise(positions)):
        assert found == positions


@pytest.mark.parametrize("profile", ["muri-s", "muri-l", "interleave"])
def test_a_question_is_read_from_the_state_and_answered_with_a_plan(profile: str) -> None:
    """Four jobs wait for one GPU: one group is proposed, on the node that there is."""
    state = b.cell(nodes=1, gpus=1, settings=PlacerSettings(profile=profile))
    stage = profile_for(state.settings).regroup
    assert stage is not None
    assert stage.question(state) is None
    for name, stages in BOUND_BY.items():
        job = b.queued(state, name, worker=b.need(gpus=1))
        assert job.estimate is not None
        job.estimate = msgspec.structs.replace(job.estimate, stages=stages, run_ms=100_000)
    asked = profile_for(state.settings).regroup
    assert asked is not None
    read = asked.question(state)
    assert read is not None
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(read), type=Question) == read
    answer = asked.solve(read)
    [group] = answer.groups
    assert set(group.job_ids) == set(BOUND_BY)
    plan = asked.plan(state, answer)
    [unit] = plan.units
    assert unit.kind == "group"
    assert {job.job_id for job in unit.jobs} == set(BOUND_BY)
    assert {node for job in unit.jobs for node in job.nodes} == set(state.nodes)
    assert not plan.stops
    assert {rank.job_id for rank in plan.ranks} == set(BOUND_BY)


def test_who_runs_and_is_not_planned_is_stopped_where_its_place_is_needed() -> None:
    """A plan that starts nobody leaves it alone."""
    state = b.cell(nodes=1, gpus=1)
    running = b.queued(state, "running", worker=b.need(gpus=1))
    b.placed_on(state, running, next(iter(state.nodes)))
    b.queued(state, "waits", worker=b.need(gpus=1))
    assert list(group_plan(state, Answer((PlannedGroup(("waits",), None),))).stops) == ["running"]
    assert not group_plan(state, Answer(())).stops


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_a_plan_does_not_depend_on_how_many_groups_are_predicted_at_once(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hundred jobs that all differ: one by one, all at once, and by a stage that has planned them
    before."""
    rng = np.random.default_rng(seed)
    jobs = []
    for number in range(200):
        storage, cpu, gpu, network = rng.uniform(1, 200, 4).tolist()
        whole = storage + cpu + gpu + network
        stages = StageTimes(
            storage_ms=storage, cpu_ms=cpu, gpu_ms=gpu, network_ms=network, iteration_ms=whole
        )
        jobs.append(candidate(number, stages=stages, gpu_memory_mib=0))
    asked = question(jobs, (8, 8))
    answers = []
    for many in (1, 10**9):
        monkeypatch.setattr(group_speeds, "MANY", many)
        stage = Interleave(group_plan)
        answers += [stage.solve(asked), stage.solve(asked)]
    assert all(answer == answers[0] for answer in answers)
    assert any(len(group.job_ids) > 1 for group in answers[0].groups)


@pytest.mark.parametrize(("jobs", "kinds"), [(150, 130), (400, 70)])
def test_profiles_that_nearly_all_differ_are_planned_soon_and_well(
    jobs: int, kinds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each team measures its own networks, and some jobs are repeated: a matching of kinds, whose time grows
    with their cube, took minutes, and the batcher's worker was ended before it."""

    def few(counts: Sequence[int], weights: Weights) -> Pairs:
        assert len(counts) <= MAX_KINDS_MATCHED, "exchanges take minutes"
        return match_kinds(counts, weights)

    monkeypatch.setattr(grouping, "match_kinds", few)
    rng = np.random.Generator(np.random.PCG64(jobs))
    stages = [
        StageTimes(
            storage_ms=one, cpu_ms=two, gpu_ms=three, network_ms=four, iteration_ms=one + two + three + four
        )
        for one, two, three, four in rng.uniform(1, 100, (kinds, 4)).tolist()
    ]
    many = [candidate(number, stages=stages[number % kinds]) for number in range(jobs)]
    grouper = Grouper(authors(), Grouping())
    matched: list[float] = []
    inner = grouper._match

    def match(kinds: tuple[_Kind, ...], counts: tuple[int, ...], memory_mib: int) -> Pairs:
        pairs = inner(kinds, counts, memory_mib)
        assert all(
            sum(count * pair.count(kind) for pair, count in pairs.items()) <= there
            for kind, there in enumerate(counts)
        )
        weights = [[grouper._weight(one, other, memory_mib) for other in kinds] for one in kinds]
        full = full_weight(expanded(counts, weights))
        matched.append(weight_of(pairs, weights) / full)
        return pairs

    grouper._match = match  # type: ignore[assignment]
    found = grouper.groups(many, [job.remaining_s for job in many], (8,) * (jobs // 32), 0)
    assert sum(map(len, found)) > jobs // 2
    assert matched
    assert min(matched) >= ENOUGH
