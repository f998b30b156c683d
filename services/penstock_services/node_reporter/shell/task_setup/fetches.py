"""Fetches of a task's code, and of its job's checkpoint from another node, before the task starts; they run
in the background."""

import asyncio
import logging
from collections.abc import Callable

from penstock.clock import wall_ms
from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import CheckpointFetched
from penstock_services.node_reporter.core.inputs import Gone, Outcome
from penstock_services.node_reporter.shell.ports import Host, Key, NotStartable

logger = logging.getLogger(__name__)

Fetching = asyncio.Task[CheckpointFetched | None]


class Fetches:
    """Of one session. `gone` receives the end of a task that will not start, `came` the result of a
    checkpoint's fetch; after either, and when a task's fetches are complete (`ready`), `wake` is called."""

    def __init__(
        self,
        host: Host,
        gone: Callable[[Gone], None],
        came: Callable[[CheckpointFetched], None],
        wake: Callable[[], None],
    ) -> None:
        self.ready: list[StartTask] = []
        """Tasks whose fetches are complete."""
        self._host = host
        self._gone, self._came, self._wake = gone, came, wake
        self._under_way: dict[Key, Fetching] = {}
        self._stopped: set[Key] = set()

    def needs(self, order: StartTask) -> bool:
        """Whether anything has to be fetched or created first."""
        return (order.code is not None or order.checkpoint is not None) and order not in self.ready

    def begin(self, order: StartTask) -> None:
        """Fetches its code and its folder of checkpoints, under a lease, which is renewed meanwhile as if the
        task ran."""
        key = (order.task_id, order.token)
        task = asyncio.get_running_loop().create_task(self._host.fetch(order))
        self._under_way[key] = task
        task.add_done_callback(lambda done: self._ended(order, key, done))

    def stop(self, key: Key) -> bool:
        """The task is to stop: it never starts. False: it has no fetch."""
        task = self._under_way.get(key)
        if task is None or not task.cancel():
            return False
        self._stopped.add(key)
        return True

    def close(self) -> None:
        """The next session begins anew."""
        for task in self._under_way.values():
            task.cancel()

    def _ended(self, order: StartTask, key: Key, task: Fetching) -> None:
        if self._under_way.get(key) is task:
            del self._under_way[key]
        if task.cancelled():
            if key in self._stopped:
                self._stopped.discard(key)
                self._gone(Gone(*key, Outcome(exited_ms=wall_ms())))
            return
        error = task.exception()
        if error is not None and not isinstance(error, Exception):
            return  # the process ends: the next one begins anew
        if error is not None:
            if not isinstance(error, NotStartable):
                logger.error("task %s cannot be started", key[0], exc_info=error)
            self._gone(Gone(*key, Outcome(exited_ms=wall_ms(), failure=str(error) or repr(error))))
            return
        if (came := task.result()) is not None:
            self._came(came)
        self.ready.append(order)
        self._wake()
