"""What must hold of proposed plans, by the judge's own bookkeeping: whole units, once, in time, on the nodes
that they name; and windows end."""

from collections.abc import Iterator
from typing import Any

from tests.faults.rules.ledger_book import Book

PLACEMENT = "penstock.placement.decided"
Ref = tuple[str, str, int]
"""(proposer, proposal, unit)."""


class PlanRules:
    """`wrong` is asked before each fact is booked."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._seq = 0
        self._plans: dict[tuple[str, str], dict[str, Any]] = {}
        """(proposer, proposal) → the plan, of each that was not answered before."""
        self._answers: dict[tuple[str, str], tuple[int, str]] = {}
        """(proposer, proposal) → seq and verdict of its first answer."""
        self._kept: dict[str, tuple[Ref, list[str]]] = {}
        """Job → unit and nodes that are kept for it."""
        self._starting: dict[Ref, tuple[set[str], set[str]]] = {}
        """Unit → the jobs that the present record has started, and those that it has to start: members of a
        group may run already."""
        self._begun: dict[Ref, int] = {}
        """Unit → seq of the record that started it."""
        self._until_ms = 0
        """When the window that is open ends; 0: none is."""
        self._over = False
        """Whether its timer has fired in the present record."""
        self.started = self.waited = self.copies = self.expired = self.windows = 0
        self.groups_waited = self.next_members = self.stops = 0
        self._present: dict[str, Any] | None = None
        """The plan that was proposed last, unless it is a copy."""
        self._stops: set[str] = set()
        """Jobs that were stopped for it."""

    def wrong(self, kind: str, fact: dict[str, Any]) -> str | None:
        """What is wrong with this fact, or with the whole record before; None: nothing."""
        if self._seq != self._book.seq:
            if (found := self._whole()) is not None:
                return found
            self._seq = self._book.seq
        job = self._book.jobs.get(fact.get("job_id", ""))
        match kind:
            case "penstock.plan.proposed":
                key = fact["proposer"], fact["proposal_id"]
                self._present = None
                if key not in self._answers:
                    self._plans[key] = self._present = fact
                    self._stops = set()
            case "penstock.proposal.answered":
                return self._answered(fact)
            case "penstock.plan.adopted":
                return self._adopted(fact)
            case "penstock.placement.decided":
                return self._placed(fact, moves=job is not None and bool(job.target))
            case "penstock.move.decided":
                return self._others(fact["job_id"], [place["node_id"] for place in fact["tasks"]])
            case "penstock.job.preempted" if fact["reason"].startswith("plan of "):
                return self._stopped(fact)
            case "penstock.job.ended":
                self._kept.pop(fact["job_id"], None)
            case "penstock.batch_window.opened" | "penstock.batch_window.closed":
                return self._window(kind, fact)
            case "penstock.timer.fired" if fact["timer_id"] == "cell:batch_window":
                self._over = bool(self._until_ms)
        return None

    def _whole(self) -> str | None:
        """The record that has ended started whole units, and the window whose time was over is closed."""
        starting, self._starting, over, self._over = self._starting, {}, self._over, False
        for ref, (jobs, planned) in starting.items():
            if jobs != planned:
                return (
                    f"of the unit {ref} {sorted(jobs)} were started at seq {self._seq}, and not "
                    f"{sorted(planned - jobs)}"
                )
        return f"seq {self._seq}: the time of the batch window is over, and it is open" if over else None

    def _unit(self, ref: Ref) -> dict[str, Any]:
        found: dict[str, Any] = self._plans[ref[0], ref[1]]["units"][ref[2]]
        return found

    def _answered(self, fact: dict[str, Any]) -> str | None:
        key = fact["proposer"], fact["proposal_id"]
        former, copy_of = self._answers.get(key), fact.get("copy_of", 0)
        if former is None:
            if (wrong := self._answered_stops(fact)) is not None:
                return wrong
            self._answers[key] = self._seq, fact["verdict"]
            self.expired += fact["reason"] == "expired"
            return f"{key} is answered as a copy of seq {copy_of}" if copy_of else None
        self.copies += 1
        if (copy_of, fact["verdict"]) != former:
            return f"{key} was answered {former}, its copy {(copy_of, fact['verdict'])}"
        return None

    def _stopped(self, fact: dict[str, Any]) -> str | None:
        """For a plan only whom it names may be stopped, for a job of it, and by the batcher alone."""
        plan, job_id = self._present, fact["job_id"]
        if plan is None or job_id not in plan.get("stops", ()) or plan["proposer"] != "batcher":
            return f"{job_id} is stopped for a plan that does not say so"
        if fact["by_job_id"] not in {job["job_id"] for unit in plan["units"] for job in unit["jobs"]}:
            return f"{job_id} is stopped for {fact['by_job_id']}, which is in no unit of the plan"
        if not self._book.jobs[job_id].living:
            return f"{job_id} is stopped for a plan, and does not run"
        self._stops.add(job_id)
        self.stops += 1
        return None

    def _answered_stops(self, fact: dict[str, Any]) -> str | None:
        """Each stop is made or refused, and none where no unit is accepted."""
        plan = self._present
        if plan is None or (plan["proposer"], plan["proposal_id"]) != (fact["proposer"], fact["proposal_id"]):
            return None
        refused = [found["job_id"] for found in fact.get("not_stopped", ())]
        if fact.get("stopped", 0) != len(self._stops) or not self._stops.isdisjoint(refused):
            return (
                f"{len(self._stops)} jobs were stopped for a plan, its answer says {fact.get('stopped', 0)}"
            )
        if self._stops and not fact.get("started", 0) + fact.get("waiting", 0):
            return f"{sorted(self._stops)} are stopped, and no unit starts or waits"
        return None

    def _adopted(self, fact: dict[str, Any]) -> str | None:
        self._kept = {}
        for unit in fact["units"]:
            proposed = unit.get("proposed")
            if proposed is None:
                continue
            ref = _ref(proposed["of"])
            self._kept[unit["job_id"]] = ref, unit["nodes"]
            if not self._names(ref, unit["job_id"], unit["nodes"]):
                return f"{unit['nodes']} are kept for {unit['job_id']}; {ref} does not say so"
        return next(self._halves(fact["units"]), None)

    def _halves(self, units: list[dict[str, Any]]) -> Iterator[str]:
        """A unit waits as a whole: its jobs in the queue, and of a group those who run."""
        waiting: dict[Ref, set[str]] = {}
        for unit in units:
            if (proposed := unit.get("proposed")) is not None:
                named = waiting.setdefault(_ref(proposed["of"]), set())
                named |= {unit["job_id"], *(proposed.get("group") or ())}
        for ref, named in waiting.items():
            planned = {job["job_id"] for job in self._unit(ref)["jobs"]}
            if named != planned:
                yield f"of the unit {ref} {sorted(named)} wait, planned are {sorted(planned)}"

    def _placed(self, fact: dict[str, Any], *, moves: bool) -> str | None:
        job_id, nodes = fact["job_id"], [place["node_id"] for place in fact["tasks"]]
        of = fact.get("unit")
        kept = self._kept.pop(job_id, None)
        if of is None:
            if kept is not None:
                return f"{job_id} is placed without its unit {kept[0]}"
            return None if moves else self._others(job_id, nodes)
        ref = _ref(of)
        if (ref[0], ref[1]) not in self._plans:
            return f"{job_id} is placed by {ref}, which nobody has proposed"
        if not self._names(ref, job_id, nodes):
            return f"{job_id} is placed on {nodes}; {ref} does not say so"
        if self._begun.setdefault(ref, self._seq) != self._seq:
            return f"{ref} starts at seq {self._begun[ref]} and again at seq {self._seq}"
        until_ms = self._plans[ref[0], ref[1]].get("valid_until_ms")
        if until_ms is not None and self._book.now_ms > until_ms:
            return f"{ref} was valid until {until_ms}, {job_id} starts at {self._book.now_ms}"
        self.started += 1
        self.waited += kept is not None
        self.groups_waited += kept is not None and bool(fact.get("group"))
        self.next_members += bool(fact.get("after"))
        if ref not in self._starting:
            unit, book = self._unit(ref), self._book.jobs
            runs = {name for name in book if unit.get("kind") == "group" and book[name].living}
            self._starting[ref] = set(), {job["job_id"] for job in unit["jobs"]} - runs
        self._starting[ref][0].add(job_id)
        return self._others(job_id, nodes, ref)

    def _names(self, ref: Ref, job_id: str, nodes: list[str]) -> bool:
        return any(job["job_id"] == job_id and job["nodes"] == list(nodes) for job in self._unit(ref)["jobs"])

    def _others(self, job_id: str, nodes: list[str], ref: Ref | None = None) -> str | None:
        """Nothing of a node that is kept for a unit goes to a stranger. Units of one plan go by their
        order."""
        for other, (owner, kept) in self._kept.items():
            same_plan = ref is not None and ref[:2] == owner[:2] and ref[2] < owner[2]
            if other != job_id and owner != ref and not same_plan and not set(kept).isdisjoint(nodes):
                return f"{job_id} gets nodes of {nodes}, of which {kept} are kept for {other} of {owner}"
        return None

    def _window(self, kind: str, fact: dict[str, Any]) -> str | None:
        if kind == "penstock.batch_window.closed":
            found = None if self._until_ms else "a batch window is closed, and none is open"
            self._until_ms, self._over = 0, False
            return found
        length_ms = self._book.settings.get("batch_window_ms", 0)
        if self._until_ms or fact["until_ms"] != self._book.now_ms + length_ms or not length_ms:
            return (
                f"a batch window opens until {fact['until_ms']} of {length_ms} ms, open until "
                f"{self._until_ms}"
            )
        self._until_ms = fact["until_ms"]
        self.windows += 1
        return None


def _ref(of: dict[str, Any]) -> Ref:
    return of["proposer"], of["proposal_id"], of["unit"]
