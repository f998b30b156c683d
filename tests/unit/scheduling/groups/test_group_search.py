"""Which jobs run and which share GPUs: the local search against what must hold of any answer, against no
sharing, and against the best of all answers."""

from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.scheduling.groups.search.group_search import search
from penstock.scheduling.groups.search.group_speeds import MANY, Kinds, Tables
from penstock.scheduling.groups.search.group_weights import SOON, Job, weights

GPUS = 4


def speeds(kinds: Kinds) -> tuple[float, ...]:
    """Kinds 0, 1 and 2 use different resources, and hardly slow each other down. Who meets its own kind, or
    kind 3, which uses everything, has what a turn leaves."""
    if len(kinds) == 1:
        return (1.0,)
    if len(set(kinds)) == len(kinds) and 3 not in kinds:
        return (0.8 - 0.05 * len(kinds),) * len(kinds)
    return (0.9 / len(kinds),) * len(kinds)


TABLES = Tables(speeds)


A_GROUP = st.lists(st.integers(0, 3), min_size=1, max_size=3).map(lambda kinds: tuple(sorted(kinds)))


@given(A_GROUP, A_GROUP)
def test_a_union_has_each_members_speed(first: Kinds, second: Kinds) -> None:
    kinds = tuple(sorted(first + second))
    of_kind = {kind: 1 / (len(kinds) + kind) for kind in kinds}

    union = Tables(lambda asked: tuple(of_kind[kind] for kind in asked)).union(first, second)

    assert union.first == tuple(of_kind[kind] for kind in first)
    assert union.second == tuple(of_kind[kind] for kind in second)
    assert union.total == pytest.approx(sum(union.first) + sum(union.second))


@given(A_GROUP, st.integers(0, 3))
def test_in_place_of_a_member_another_kind_has_the_speed_of_the_union_with_the_rest(
    group: Kinds, kind: int
) -> None:
    tables = Tables(lambda asked: tuple(1 / (len(asked) + one) for one in asked))
    found, most = tables.instead[kind][group]
    for index, (others, new, total) in enumerate(found):
        union = tables.union(group[:index] + group[index + 1 :], (kind,))
        assert others[index] == 0
        assert others[:index] + others[index + 1 :] == union.first
        assert (new, total) == (union.second[0], union.total)
    assert most == max(one.total for one in found)


@pytest.mark.parametrize("seed", range(5))
def test_what_is_foreseen_is_computed_once(seed: int) -> None:
    """Searches ask for combinations, some of them again and again. Where many are missing they are computed
    together; no combination is computed twice."""
    random = Random(seed)
    computed: set[Kinds] = set()

    def many(groups: Sequence[Kinds]) -> list[tuple[float, ...]]:
        assert computed.isdisjoint(groups)
        computed.update(groups)
        return [speeds(kinds) for kinds in groups]

    tables = Tables(speeds, many)
    every = [tuple(sorted(random.choices(range(12), k=random.randint(1, 3)))) for _ in range(80)]
    for _ in range(60):
        groups = random.sample(every, random.randint(1, 30))
        kinds, instead = set(random.choices(range(12), k=random.randint(1, 9))), random.random() < 0.5
        parts = [part for group in groups for part in combinations(group, len(group) - instead) if part]
        missing = {tuple(sorted((*part, kind))) for part in parts for kind in kinds} - computed
        before = set(computed)
        tables.foresee(groups, kinds, instead=instead)
        assert computed - before == (missing if len(missing) >= MANY else set())
    assert computed


def value(jobs: Sequence[Job], plan: Sequence[Sequence[int]], behind: int = 0) -> float:
    """Σ speed · w."""
    worth = weights(jobs, behind, GPUS)
    total = 0.0
    for members in plan:
        of_kind = sorted(members, key=lambda number: (jobs[number].kind, number))
        for number, speed in zip(of_kind, speeds(tuple(jobs[one].kind or 0 for one in of_kind)), strict=True):
            total += speed * worth[number]
    return total


def unshared(jobs: Sequence[Job]) -> list[tuple[int, ...]]:
    """In order, each alone, as long as GPUs are free."""
    free = GPUS
    plan: list[tuple[int, ...]] = []
    for number, job in enumerate(jobs):
        if job.gpus <= free:
            free -= job.gpus
            plan.append((number,))
    return plan


def all_plans(jobs: Sequence[Job], numbers: tuple[int, ...], free: int) -> Iterator[list[tuple[int, ...]]]:
    """Every way to run some of them."""
    if not numbers:
        yield []
        return
    first, rest = numbers[0], numbers[1:]
    yield from all_plans(jobs, rest, free)
    if jobs[first].gpus <= free:
        alike = [number for number in rest if jobs[number].shape == jobs[first].shape]
        for more in range(4):
            for others in combinations(alike, more):
                left = tuple(number for number in rest if number not in others)
                for plan in all_plans(jobs, left, free - jobs[first].gpus):
                    yield [(first, *others), *plan]


def job(
    gpus: int,
    kind: int | None,
    *,
    fixed: bool = False,
    memory_mib: int = 0,
    queue: int | None = None,
    ahead: float = 0.0,
) -> Job:
    return Job(gpus, gpus, kind, fixed, memory_mib, queue, ahead=ahead)


jobs_strategy = st.lists(
    st.builds(
        job,
        st.sampled_from([1, 1, 2, 4, 8]),
        st.sampled_from([0, 1, 2, 3, None]),
        queue=st.sampled_from([None, None, 0, 1, 2]),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(jobs=jobs_strategy, afresh=st.booleans())
def test_every_plan_can_be_carried_out(jobs: list[Job], afresh: bool) -> None:
    """Whatever waits: nobody twice, no more GPUs than there are, four of one shape at most, and the same
    answer when it is asked again from there."""
    plan = search(jobs, [], GPUS, TABLES, afresh=afresh)
    members = [number for group in plan for number in group]
    assert len(members) == len(set(members))
    assert sum(jobs[group[0]].gpus for group in plan) <= GPUS
    for group in plan:
        assert len(group) <= 4
        assert len({jobs[number].shape for number in group}) == 1
        assert len(group) == 1 or all(jobs[number].kind is not None for number in group)
    again = search(jobs, plan, GPUS, TABLES, afresh=False)
    sharing = [one for one in jobs if one.kind is not None]
    if len(sharing) == len(jobs):
        assert value(jobs, again) >= value(jobs, plan) - 1e-9


@settings(max_examples=80, deadline=None)
@given(
    sizes=st.sampled_from([(1,), (2,), (1, 2, 4)]),
    kinds=st.lists(st.integers(0, 3), max_size=7),
    data=st.data(),
)
def test_it_is_never_worse_than_no_sharing_and_near_the_best(
    sizes: tuple[int, ...], kinds: list[int], data: st.DataObject
) -> None:
    """By its own measure: not below the plan in which everybody is alone, and within a tenth of the best of
    all plans where all gangs are of one GPU. Of all 21,845 lists of up to seven gangs of two GPUs 66 are
    further below it, at 0.884.

    With several sizes a quarter: a large gang is not dropped for several small ones at once.
    """
    jobs = [job(data.draw(st.sampled_from(sizes)), kind) for kind in kinds]
    found = value(jobs, search(jobs, [], GPUS, TABLES, afresh=True))
    best = max(value(jobs, plan) for plan in all_plans(jobs, tuple(range(len(jobs))), GPUS))
    assert found >= value(jobs, unshared(jobs)) - 1e-9
    assert found >= {(1,): 0.9, (2,): 0.88, (1, 2, 4): 0.75}[sizes] * best


def test_jobs_that_slow_each_other_down_do_not_share() -> None:
    """A queue of one kind that uses everything: the first four run alone, in order."""
    jobs = [job(1, 3) for _ in range(40)]
    assert search(jobs, [], GPUS, TABLES, afresh=True) == [(0,), (1,), (2,), (3,)]


def test_what_jobs_are_worth_by_what_is_known_of_them() -> None:
    """Three of known run time in order; then two of one queue, which have half a job of it, two others, and
    one that is not listed behind them, and two of the queue after the next; then two with a hundred that are
    not listed: of the one's own queue, before the other's."""
    known = [job(2, 3), job(1, 3), job(4, 3)]
    assert weights(known, 0, GPUS) == [1 + 2 / 4 * 2, 1 + 1 / 4, 1]
    queued = [job(1, 3, queue=1), job(4, 3, queue=1), job(1, 3, queue=3), job(4, 3, queue=3)]
    assert weights(queued, 1, GPUS) == [SOON**2 + 3.5 / 4, SOON**2 + 3.5, 1 + 1.5 / 4, 1 + 1.5]
    long_queue = [job(1, 3, queue=0, ahead=50.0), job(1, 3, queue=2, ahead=100.0)]
    assert weights(long_queue, 100, GPUS) == [SOON**2 + 51 / 4, 1]


def test_a_new_gang_of_unknown_run_time_takes_the_place_of_jobs_that_have_run_long() -> None:
    """Four small jobs run, two queues by attained service further on, and how long is not known. A gang of
    four comes: it may end soon, and they will hardly."""
    small = [job(1, 3, queue=2) for _ in range(4)]
    running = [(1,), (2,), (3,), (4,)]
    new = search([job(4, 3, queue=0), *small], running, GPUS, TABLES, afresh=False)
    assert new == [(0,)]
    assert search([job(4, 3, queue=2), *small], running, GPUS, TABLES, afresh=False) == running


def test_a_gang_does_not_take_the_place_of_its_equals_for_having_come_first() -> None:
    """The same in a long queue: by its place the gang of four would have more jobs behind it than the four
    small ones together, but nothing shows that it ends before them."""
    jobs = [job(4, 3, queue=2), *(job(1, 3, queue=2) for _ in range(24))]
    running = [(1,), (2,), (3,), (4,)]
    assert search(jobs, running, GPUS, TABLES, afresh=True) == running


def test_nobody_shares_while_gpus_are_free() -> None:
    """Three complementary jobs on four GPUs: each has its own."""
    jobs = [job(1, 0), job(1, 1), job(1, 2)]
    assert search(jobs, [(0, 1, 2)], GPUS, TABLES, afresh=False) == [(0,), (1,), (2,)]


def test_a_long_queue_of_complements_shares_every_gpu() -> None:
    """With thousands behind them what counts is how much is done in all: each GPU has one job of each
    kind."""
    jobs = [job(1, number % 3) for number in range(60)]
    plan = search(jobs, [], GPUS, TABLES, afresh=True, behind=5_000)
    assert [sorted(jobs[number].kind or 0 for number in group) for group in plan] == [[0, 1, 2]] * GPUS


def test_small_jobs_move_together_for_gangs_that_find_no_room() -> None:
    """Four small jobs have a GPU each, and three gangs of two GPUs wait behind them: two and two of the small
    ones share, and the gangs share what is then free."""
    jobs = [job(1, number % 2) for number in range(4)] + [job(2, number) for number in range(3)]
    apart = [(0,), (1,), (2,), (3,)]
    plan = search(jobs, apart, GPUS, TABLES, afresh=False)
    assert value(jobs, plan) > value(jobs, apart)
    assert (4, 5, 6) in plan
    assert sorted(number for group in plan for number in group) == list(range(7))


@pytest.mark.parametrize("afresh", [False, True])
def test_who_may_not_be_stopped_keeps_running(afresh: bool) -> None:
    """A job that says so came last in the order: it keeps its GPUs, with or without company."""
    jobs = [job(4, 0), job(4, 1), job(4, 3, fixed=True)]
    plan = search(jobs, [(2,)], GPUS, TABLES, afresh=afresh)
    assert any(2 in group for group in plan)


def test_memory_binds() -> None:
    """Two complementary jobs whose memory does not fit on one GPU do not share it."""
    jobs = [job(4, 0, memory_mib=600), job(4, 1, memory_mib=600)]
    assert search(jobs, [], GPUS, TABLES, afresh=True, memory_mib=1_000) == [(0,)]
    assert search(jobs, [], GPUS, TABLES, afresh=True, memory_mib=1_200) == [(0, 1)]


def test_a_plan_goes_on_unless_another_is_clearly_better() -> None:
    """Equal jobs that run are not exchanged for others that wait."""
    jobs = [job(1, 3) for _ in range(8)]
    running = [(0,), (1,), (2,), (3,)]
    assert search(jobs, running, GPUS, TABLES, afresh=True) == running


@pytest.mark.parametrize("gpus", [0, GPUS])
def test_nothing_to_plan(gpus: int) -> None:
    """No jobs, no GPUs, or a gang larger than the cell: nobody runs."""
    assert search([], [], gpus, TABLES, afresh=True) == []
    assert search([job(8, 0)], [], gpus, TABLES, afresh=True) == []
