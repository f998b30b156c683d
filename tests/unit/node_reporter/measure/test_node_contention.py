"""Who waits for cores: samples while it lasts and one at its end, from the kernel's triggers or from what
threads have waited."""

# clocks: the whole file runs in virtual time

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

import pytest

from penstock_services.node_reporter.core.reports.stalls import LEAST_PERCENT, REPEAT_S, WINDOW_S, StallFilter
from penstock_services.node_reporter.shell.measure.contention import Contention
from penstock_services.node_reporter.shell.ports import Key, Pressure
from tests.support.virtual_time import run_virtually

KEY, OTHER = ("job-1.1.0", 1), ("job-2.1.0", 2)
GROUP = ("/sys/fs/cgroup/n1@7",)
Published = list[tuple[float, str | None, dict[str, float]]]


class PlayedTrigger:
    """The kernel's: looks each window at what has been waited since the last one. `share`: of the time, from
    now on."""

    def __init__(self, *, leaves_out: int = 0) -> None:
        self.share = 0.0
        self.gone = False
        self.closed = False
        self._leaves_out = leaves_out
        """Every so manieth window; 0: none."""
        self._waited_s, self._at_s, self._windows = 0.0, 0.0, 0
        self._loop = asyncio.get_running_loop()

    def turn(self, share: float) -> None:
        """That from now on so much of the time is waited."""
        self._pass()
        self.share = share

    def watch(self, fired: Callable[[], None]) -> None:
        self._fired = fired
        self._loop.call_later(WINDOW_S, self._window, 0.0)

    def read(self) -> Pressure | None:
        self._pass()
        return None if self.gone else Pressure(round(self._waited_s * 1e6), 17.0)

    def close(self) -> None:
        self.closed = True

    def remove(self) -> None:
        """Its group goes: the descriptor is ready for ever."""
        self.gone = True
        self._fired()

    def _pass(self) -> None:
        now_s = self._loop.time()
        self._waited_s += self.share * (now_s - self._at_s)
        self._at_s = now_s

    def _window(self, before_s: float) -> None:
        if self.closed:
            return
        self._pass()
        self._windows += 1
        left_out = self._leaves_out and not self._windows % self._leaves_out
        if self._waited_s - before_s >= LEAST_PERCENT / 100 * WINDOW_S and not left_out:
            self._fired()
        self._loop.call_later(WINDOW_S, self._window, self._waited_s)


class PlayedMeters:
    """A machine with these triggers, by group; the machine's own is under None."""

    def __init__(self, triggers: Mapping[tuple[str, ...] | None, PlayedTrigger]) -> None:
        self._triggers = triggers
        self.threads: dict[int, dict[int, int]] = {}
        """By shim: what its threads have waited, ns."""
        self.bytes: dict[Key | None, dict[str, int]] = {}
        self.followed: list[Key] = []

    def use(self, shim: int) -> tuple[float, int]:
        return 0.0, 0

    def gpu(self, uuid: str) -> None:
        return None

    def gpu_memory_of(self, shim: int, uuid: str) -> None:
        return None

    def pressure(self, groups: Sequence[str] | None) -> PlayedTrigger | None:
        return self._triggers.get(None if groups is None else tuple(groups))

    def waits(self, shim: int) -> Mapping[int, int]:
        return dict(self.threads.get(shim, {}))

    def traffic(self, key: Key | None) -> Mapping[str, int]:
        return dict(self.bytes.get(key, {}))

    def follow_traffic(self, key: Key, shim: int) -> None:
        self.followed.append(key)

    def forget_traffic(self, key: Key) -> None:
        self.followed.remove(key)


class Story:
    """A node's contention in virtual time, and what it has published."""

    def __init__(self, *triggered: tuple[str, ...] | None, leaves_out: int = 0) -> None:
        self.triggers = {groups: PlayedTrigger(leaves_out=leaves_out) for groups in triggered}
        self.meters = PlayedMeters(self.triggers)
        self.published: Published = []
        self.contention = Contention(self.meters, self._sample, 100_000)

    def begin(self, *keys: Key) -> None:
        """Tasks run, and the sampler ticks for the first time."""
        for shim, key in enumerate(keys, 7):
            self.contention.follow(key, shim, GROUP)
        self.contention.tick()

    def _sample(self, task_id: str | None, **measured: float) -> None:
        self.published.append((asyncio.get_running_loop().time(), task_id, measured))

    def stalls(self, task_id: str | None = KEY[0]) -> list[tuple[float, float]]:
        """(s, percent) of those published of this task."""
        found = [
            (at_s, what.get("cpu_stalled_percent")) for at_s, who, what in self.published if who == task_id
        ]
        return [(at_s, round(percent, 3)) for at_s, percent in found if percent is not None]


def play(story: Callable[[], Coroutine[Any, Any, None]]) -> None:
    run_virtually(story())


def test_nothing_is_published_while_nobody_waits_and_one_sample_ends_it() -> None:
    """A quiet hour; then a job of preprocessing takes half of its time for a minute."""

    async def story() -> None:
        it = Story(GROUP, None)
        it.begin(KEY)
        await asyncio.sleep(3_600)
        assert it.published == []
        it.triggers[GROUP].turn(0.5)
        await asyncio.sleep(60)
        it.triggers[GROUP].turn(0.0)
        await asyncio.sleep(3_600)
        first, second, *repeats, last = it.stalls()
        assert first == (3_602.0, 17.0), "the moving average of 10 s, before there is a window to measure"
        assert second == (3_604.0, 50.0)
        assert {percent for _, percent in repeats} == {50.0}
        assert 5 <= len(repeats) <= 60 / REPEAT_S
        assert last[0] <= 3_660 + 2 * WINDOW_S
        assert last[1] < LEAST_PERCENT
        assert it.stalls(None) == [], "others of this machine did not wait"

    play(story)


def test_a_window_that_the_kernel_leaves_out_does_not_end_it() -> None:
    """On a busy machine it reports every second or third window only: measured, not assumed to be over."""

    async def story() -> None:
        it = Story(GROUP, leaves_out=2)
        it.begin(KEY)
        it.triggers[GROUP].turn(0.8)
        await asyncio.sleep(60)
        assert min(percent for _, percent in it.stalls()[1:]) == 80.0
        assert len(it.stalls()) <= 2 + 60 / REPEAT_S

    play(story)


def test_what_changes_is_published_at_most_once_a_window() -> None:
    """Neighbours come and go all the time."""

    async def story() -> None:
        it = Story(GROUP)
        it.begin(KEY)
        for number in range(300):
            it.triggers[GROUP].turn(0.2 + 0.7 * (number % 2))
            await asyncio.sleep(1.7)
        times = [at_s for at_s, _ in it.stalls()]
        assert 50 <= len(times) <= 1.7 * 300 / WINDOW_S
        assert all(0 <= percent <= 100 for _, percent in it.stalls())

    play(story)


def test_a_task_whose_group_has_gone_is_watched_no_more() -> None:
    """It ends: its descriptor is ready for ever, which would keep this process busy."""

    async def story() -> None:
        it = Story(GROUP)
        it.begin(KEY)
        it.triggers[GROUP].turn(0.9)
        await asyncio.sleep(5)
        it.triggers[GROUP].remove()
        assert it.triggers[GROUP].closed
        before = len(it.published)
        await asyncio.sleep(60)
        it.contention.forget(KEY)
        assert len(it.published) == before

    play(story)


def test_with_its_last_task_a_node_waits_no_more() -> None:
    """The last sample of the node reported that some thread waits, and nothing is watched from now on."""

    async def story() -> None:
        it = Story(GROUP, None)
        it.meters.bytes[None] = {"0": 0}
        it.begin(KEY, OTHER)
        it.triggers[None].turn(0.9)
        await asyncio.sleep(10)
        it.meters.bytes[None] = {"0": 500_000_000_000}
        it.contention.tick()
        it.contention.forget(OTHER)
        before = len(it.published)
        it.contention.forget(KEY)
        ends = [(who, what) for _, who, what in it.published[before:]]
        assert ends == [(None, {"cpu_stalled_percent": 0.0}), (None, {"memory_bandwidth_percent": 0.0})]
        assert it.meters.followed == []
        assert it.triggers[None].closed
        await asyncio.sleep(60)
        assert len(it.published) == before + 2

    play(story)


def test_without_triggers_it_is_read_what_threads_have_waited() -> None:
    """A kernel without PSI: two threads wait for a quarter of the time each, one ends; the node has the
    greatest of its tasks."""

    async def story() -> None:
        it = Story()
        it.meters.threads = {7: {1: 50_000_000_000, 2: 0}, 8: {3: 0}}
        it.begin(KEY, OTHER)
        for second in range(1, 30):
            await asyncio.sleep(2)
            waited = 500_000_000 * min(second, 10)
            it.meters.threads[7] = {1: 50_000_000_000 + waited, 2: waited} if second < 8 else {2: waited}
            it.contention.tick()
        assert it.stalls()[0] == (2.0, 50.0)
        assert (16.0, 25.0) in it.stalls()
        assert it.stalls()[-1] == (22.0, 0.0)
        assert it.stalls(OTHER[0]) == []
        assert it.stalls(None) == it.stalls()

    play(story)


def test_traffic_is_published_where_it_changes_by_ten_points() -> None:
    """In percent of the 100 GB/s of this node."""

    async def story() -> None:
        it = Story(GROUP, None)
        it.contention.follow(KEY, 7, GROUP)
        moved = {None: 0, KEY: 0}
        for gb_s in (30, 31, 35, 80, 78, 81, 5):
            for key, share in ((None, 1.0), (KEY, 0.5)):
                it.meters.bytes[key] = {"0": moved[key]}
                moved[key] += round(2e9 * gb_s * share)
            it.contention.tick()
            await asyncio.sleep(2)
        found = [(who, what["memory_bandwidth_percent"]) for _, who, what in it.published]
        assert [percent for who, percent in found if who is None] == [30.0, 80.0]
        assert [percent for who, percent in found if who == KEY[0]] == [15.0, 40.0]

    play(story)


def test_a_task_that_ends_before_the_first_tick_has_no_trigger() -> None:
    """Of short tasks there are many, and a trigger takes the kernel longer than some of them run."""

    async def story() -> None:
        it = Story(GROUP, None)
        it.contention.follow(KEY, 7, GROUP)
        it.contention.forget(KEY)
        assert not any(trigger.closed for trigger in it.triggers.values())
        it.triggers[GROUP].turn(0.9)
        await asyncio.sleep(60)
        assert it.published == []

    play(story)


@pytest.mark.parametrize("percent", [0.0, LEAST_PERCENT - 0.1])
def test_a_filter_lets_nothing_pass_of_who_does_not_wait(percent: float) -> None:
    found = StallFilter()
    assert not any(found.passes(percent, at_s) for at_s in range(100))
    assert not found.waits
