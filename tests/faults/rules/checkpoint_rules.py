"""What must hold of checkpoints in log and orders, by the judge's own bookkeeping: a start names the latest
that its job has reported, where all of its tasks can have it, and a node hands it over to no other node than
the one where the ledger has placed that attempt."""

from typing import Any, NamedTuple

from tests.faults.rules.ledger_book import Book

START_TASK = b"penstock.order.start_task.v1"
HAND_OVER, SAVE = b"penstock.order.hand_over_checkpoint.v1", b"penstock.order.checkpoint_task.v1"
CHECKPOINT_ORDERS = (HAND_OVER, SAVE)
Fact = dict[str, Any]


class Latest(NamedTuple):
    """Of one job; `name` of its folder."""

    node_id: str
    name: str
    shared: bool


class Placed(NamedTuple):
    """An attempt, and what was known of its job's checkpoints then."""

    job_id: str
    attempt: int
    nodes: tuple[str, ...]
    latest: Latest | None


class CheckpointRules:
    """`wrong` is asked before each fact is booked, `wrong_order` for each order; both return what is wrong,
    None: nothing."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self.placed: dict[tuple[int, str], Placed] = {}
        """(token, job) →; one record may place several jobs."""
        self.keys: dict[str, dict[str, None]] = {}
        """Node → public keys with which it has joined."""
        self.asked: dict[tuple[int, str], None] = {}
        """(token, task id) of each request to save."""
        self._latest: dict[str, Latest] = {}
        self.fetched_by: dict[tuple[int, str], Latest] = {}
        """(token, job) of an attempt → what it has fetched; orders that are repeated then name it where it is
        now."""
        self._named: dict[tuple[int, str], str | None] = {}
        """(token, job) of a gang's attempt → the checkpoint that the first of its start orders names."""
        self._lost = False
        """There is a history that is lost: what its attempts saved, whose numbers are given again, is as good
        as other checkpoints."""

    def include(self, other: "CheckpointRules") -> None:
        """Orders of a lost history are judged by that history, too."""
        self._lost = True
        self.placed = other.placed | self.placed
        self.keys = other.keys | self.keys
        self.asked = other.asked | self.asked

    def wrong(self, kind: str, fact: Fact) -> str | None:
        job_id = str(fact.get("task_id", "")).rsplit(".", 2)[0]
        match kind:
            case "penstock.node.joined":
                self.keys.setdefault(fact["node"]["node_id"], {})[fact.get("public_key") or ""] = None
            case "penstock.placement.decided":
                nodes = tuple(place["node_id"] for place in fact["tasks"])
                latest = self._latest.get(fact["job_id"])
                key = self._book.token, fact["job_id"]
                self.placed[key] = Placed(fact["job_id"], fact["attempt"], nodes, latest)
            case "penstock.checkpoint.decided":
                self.asked[self._book.token, fact["task_id"]] = None
            case "penstock.task.checkpointed":
                name = fact.get("path", "").rpartition("/")[2]
                self._latest[job_id] = Latest(fact["node_id"], name, fact.get("shared", False))
            case "penstock.task.checkpoint_fetched" if not fact.get("problem"):
                return self._fetched(job_id, fact)
        return None

    def _fetched(self, job_id: str, fact: Fact) -> str | None:
        before, name = self._latest.get(job_id), fact["path"].rpartition("/")[2]
        self._latest[job_id] = self.fetched_by[fact["token"], job_id] = Latest(
            fact["node_id"], name, shared=False
        )
        if before is None or not before.name or before.node_id not in (fact["from_node"], fact["node_id"]):
            return f"{fact['task_id']} has {name} from {fact['from_node']}; the latest is {before}"
        later = _age(name)[0] >= self._book.jobs[job_id].attempt and not self._lost
        if _age(name) < _age(before.name) or later:
            return f"{fact['task_id']} goes on at {name}; the latest is {before}"
        return None

    def wrong_order(self, kind: bytes, order: Fact) -> str | None:
        if kind == SAVE:
            asked = (order["token"], order["task_id"]) in self.asked
            return None if asked else f"{order} is ordered that no valid record decided"
        if kind not in (START_TASK, HAND_OVER):
            return None
        placed = self.placed.get((order["token"], order["job_id"]))
        if placed is None:
            return f"token {order['token']} has not placed {order['job_id']}"
        return self._start(placed, order) if kind == START_TASK else self._hand_over(placed, order)

    def _start(self, placed: Placed, order: Fact) -> str | None:
        name, source, latest = order.get("checkpoint"), order.get("checkpoint_from"), placed.latest
        if name and source is None:
            latest = self.fetched_by.get((order["token"], order["job_id"]), latest)
        at = f"{order['task_id']} starts at {name}, from {source}; the latest is {latest}"
        key = order["token"], order["job_id"]
        if len(placed.nodes) > 1 and self._named.setdefault(key, name) != name:
            return f"{at}, and another of its gang at {self._named[key]}"
        if not name:
            return at if source is not None else None
        if latest is None or latest.name != name:
            return at
        if latest.shared or set(placed.nodes) == {latest.node_id}:
            return at if source is not None else None
        fetches = len(placed.nodes) == 1 and source is not None and source["node_id"] == latest.node_id
        return None if fetches else at

    def _hand_over(self, placed: Placed, order: Fact) -> str | None:
        latest = placed.latest
        own = (order["job_id"], order["attempt"], (order["to_node"],)) == placed[:3]
        there = latest is not None and order["node_id"] == latest.node_id != order["to_node"]
        known = order["public_key"] in self.keys.get(order["to_node"], {})
        return None if own and there and known else f"{order} for {placed}"


def _age(name: str) -> tuple[int, int]:
    _, attempt, _, iteration = name.split("-")
    return int(attempt), int(iteration)
