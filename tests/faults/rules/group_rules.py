"""What must hold of groups, by the judge's own bookkeeping: equal places rank by rank, room for all, no
stranger, nobody restarted."""

from collections.abc import Iterator
from typing import Any

from tests.faults.rules.ledger_book import Book, Job

MOST = 4
OF_PAPERS = ("muri-s", "muri-l")  # which know no tenants
STOPPED = ("penstock.stop.decided", "penstock.job.requeued", "penstock.job.preempted")


class GroupRules:
    """`wrong` is asked before each fact is booked."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._kept: dict[str, int] = {}
        """Job that runs on as a member → seq of the record that says so."""
        self.joined = 0
        """Jobs that joined somebody who ran already."""
        self.rotations = 0
        """Groups that were given a rotation, by a plan."""

    def wrong(self, kind: str, fact: dict[str, Any]) -> str | None:
        """What is wrong with this fact; None: nothing."""
        if kind == "penstock.group.decided":
            return self._decided(fact)
        if kind in STOPPED and self._kept.get(fact["job_id"]) == self._book.seq:
            return f"{fact['job_id']} runs on as a member of a group, and has {kind} in the same record"
        if kind == "penstock.placement.decided" and fact.get("group"):
            return next(self._joins(fact), None)
        return None

    def _decided(self, fact: dict[str, Any]) -> str | None:
        group_id, job_ids = fact["group_id"], fact["job_ids"]
        self.rotations += bool(fact.get("turns"))
        at = f"group {group_id} of {job_ids}"
        if self._book.frozen:
            return f"{at} is formed while the cell is frozen"
        jobs = {job_id: self._book.jobs.get(job_id) for job_id in job_ids}
        there = {name for name, job in self._book.jobs.items() if job.group == group_id and job.living}
        if not 2 <= len(there | set(job_ids)) <= MOST or len(set(job_ids)) < len(job_ids):
            return f"{at} has, with those being stopped, {sorted(there | set(job_ids))}"
        if self._book.settings.get("profile") not in OF_PAPERS and not _may_meet(
            [job.spec for job in jobs.values() if job]
        ):
            return f"{at} is of several tenants, of which one allows only its own"
        first: list[Any] | None = None
        for job_id, job in jobs.items():
            if (
                job is None
                or (job.held and not job.living)
                or job.stop_reason is not None
                or not (job.living or job.waits)
            ):
                return f"{at}: {job_id} neither runs nor waits"
            if not job.living:
                continue
            self._kept[job_id] = self._book.seq
            places = _places(job)
            if first is not None and places != first:
                return f"{at}: {job_id} has {places}, and not {first}"
            first = places
        left = [name for name in there - set(job_ids) if self._book.jobs[name].stop_reason is None]
        return f"{at}: {left} run on the same GPUs and are left out" if left else None

    def _joins(self, fact: dict[str, Any]) -> Iterator[str]:
        own = [(place["node_id"], place["gpus"]) for place in fact["tasks"]]
        members = {
            name: job
            for name, job in self._book.jobs.items()
            if job.group == fact["group"] and job.living and name != fact["job_id"]
        }
        self.joined += any(job.token < self._book.token for job in members.values())
        for name, job in members.items():
            if _places(job) != own:
                yield f"{fact['job_id']} joins {name}, which has {_places(job)}, with {own}"
        for place in fact["tasks"]:
            node = self._book.nodes[place["node_id"]]
            for other, slots in node.holders.items():
                owner = self._book.job_of(other)
                if set(slots) & set(place["gpus"]) and (owner is None or owner.group != fact["group"]):
                    yield (
                        f"{place['task_id']} gets GPUs {place['gpus']} of {place['node_id']}, {other} has "
                        f"{slots}"
                    )
            beside = [
                job.places[task_id]
                for job in members.values()
                for task_id in job.living
                if job.places[task_id]["rank"] == place["rank"]
            ]
            promised_mib = sum(found["gpu_memory_mib"] for found in (place, *beside))
            room_mib = min((gpu["memory_mib"] for gpu in node.spec["gpus"]), default=0)
            if place["gpus"] and promised_mib > room_mib:
                yield (
                    f"{place['task_id']} joins, and {promised_mib} MiB of {room_mib} are promised of its GPUs"
                )


def _may_meet(specs: list[dict[str, Any]]) -> bool:
    """Whether these are jobs of one tenant, or all allow any companion."""
    owners = {spec["owner"] for spec in specs}
    return len(owners) < 2 or all(spec.get("companions") == "any" for spec in specs)


def _places(job: Job) -> list[Any]:
    return [(place["node_id"], place["gpus"]) for place in job.places.values()]
