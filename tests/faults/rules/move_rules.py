"""What must hold of moves, by the judge's own bookkeeping: nobody else gets a target, and no job loses its
own without cause."""

from typing import Any

from tests.faults.rules.ledger_book import Book, Job

PLACEMENT = "penstock.placement.decided"
WHOLE_GPU = 1_000
MOST_MOVES, ONCE = 4, ("converged", "rebalance")


class MoveRules:
    """`wrong` is asked before each fact is booked."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._arriving = ""
        """The job whose placement must be the next fact."""
        self.arrived = self.given_up = self.converged = self.for_services = 0
        self._judged: set[str] = set()
        self._caused: dict[str, list[str]] = {}
        """Job → causes of the moves that services have asked for."""

    def wrong(self, kind: str, fact: dict[str, Any]) -> str | None:
        """What is wrong with this fact; None: nothing."""
        arriving, self._arriving = self._arriving, ""
        if arriving and (kind, fact.get("job_id")) != (PLACEMENT, arriving):
            return f"{arriving} has stopped and does not take its target; {kind} follows"
        job = self._book.jobs.get(fact.get("job_id", ""))
        if job is None:
            return None
        match kind:
            case "penstock.job.converged":
                self.converged += 1
                again = fact["job_id"] in self._judged
                self._judged.add(fact["job_id"])
                return f"{fact['job_id']} is judged by its convergence again" if again else None
            case "penstock.move.decided":
                return self._decided(job, fact) or self._too_often(fact)
            case "penstock.move.given_up":
                self.given_up += 1
                return None if self._lost(job) else f"{fact['job_id']} gives up a target that is sound"
            case "penstock.job.requeued" if fact["reason"] == "migrated" and job.target:
                self._arriving = fact["job_id"]
            case "penstock.placement.decided" if job.target:
                self.arrived += 1
                places = {place["task_id"]: dict(place) for place in fact["tasks"]}
                return (
                    None
                    if places == job.target
                    else f"{fact['job_id']} moves to {places}, not to {job.target}"
                )
            case "penstock.placement.decided":
                group = fact.get("group")
                mates = (other for other in self._book.jobs.values() if group and other.group == group)
                beside = {task_id: None for mate in mates for task_id in mate.living}
                return self._after(fact) or self._others(fact, beside | self._leaving(fact))
        return None

    def _too_often(self, fact: dict[str, Any]) -> str | None:
        """Once by its convergence, once for the balance, and four times in all: whatever a service asks."""
        if not (cause := fact.get("cause", "")):
            return None
        causes = self._caused.setdefault(fact["job_id"], [])
        causes.append(cause)
        self.for_services += 1
        if len(causes) > MOST_MOVES or (cause in ONCE and causes.count(cause) > 1):
            return f"{fact['job_id']} is moved by services for {', '.join(causes)}"
        return None

    def _leaving(self, fact: dict[str, Any]) -> dict[str, None]:
        """Tasks that the placed ones start after."""
        jobs = (self._book.jobs[job_id] for job_id in fact.get("after", ()) if job_id in self._book.jobs)
        return {task_id: None for job in jobs for task_id in job.living}

    def _after(self, fact: dict[str, Any]) -> str | None:
        """Only who is being stopped, and for whom nothing is kept there, is followed by somebody; who runs
        on, by such as wait for their GPUs."""
        early = fact.get("prelaunch", False)
        for job_id in fact.get("after", ()):
            job = self._book.jobs.get(job_id)
            if job is None or self._shares(job) or job.target:
                return f"{fact['job_id']} starts after {job_id}, which shares its GPUs, or moves"
            if job.stop_reason is None and not (early and job.living.keys() <= job.started.keys()):
                return f"{fact['job_id']} starts after {job_id}, which is not being stopped"
        return None

    def _shares(self, job: Job) -> bool:
        """A group of one is none."""
        others = (other for other in self._book.jobs.values() if other is not job)
        return any(other.group == job.group and bool(other.living) for other in others if job.group)

    def _decided(self, job: Job, fact: dict[str, Any]) -> str | None:
        at = f"{fact['job_id']} is to move"
        if not job.living or job.stop_reason is not None or job.held or fact["attempt"] != job.attempt:
            return f"{at}, and does not run: {job.stop_reason}, held: {job.held}, attempt {job.attempt}"
        if not job.spec.get("preemptible", True) or self._book.frozen:
            return f"{at}, and may not be stopped; frozen: {self._book.frozen!r}"
        for place in fact["tasks"]:
            node = self._book.nodes[place["node_id"]]
            gpus = {node.uuid(slot) for slot in place["gpus"]}
            if node.status != "ready" or node.cordoned or gpus & node.faulted.keys() or gpus - node.present:
                return f"{at} to {place['node_id']}, {node.status}, cordoned: {node.cordoned}, GPUs {gpus}"
            for other, taken in node.cores.items():
                if other not in job.living and taken & set(place["cores"]):
                    return (
                        f"{at} to cores {place['cores']} of {place['node_id']}, of which {other} has {taken}"
                    )
        return self._others(fact, job.living)

    def _others(self, fact: dict[str, Any], own: dict[str, None]) -> str | None:
        """Whole GPUs that somebody else holds, or that are kept for somebody else."""
        for place in fact["tasks"]:
            node = self._book.nodes[place["node_id"]]
            for other, slots in node.holders.items():
                whole = place.get("gpu_share_milli", WHOLE_GPU) == self._share(other) == WHOLE_GPU
                if whole and other not in own and set(slots) & set(place["gpus"]):
                    return (
                        f"{place['task_id']} gets GPUs {place['gpus']} of {place['node_id']}, {other} has "
                        f"{slots}"
                    )
        return None

    def _share(self, task_id: str) -> int:
        job = self._book.job_of(task_id)
        place = {} if job is None else job.places.get(task_id) or job.target.get(task_id, {})
        return int(place.get("gpu_share_milli", WHOLE_GPU))

    def _lost(self, job: Job) -> bool:
        if job.held or self._book.frozen:
            return True
        for place in job.target.values():
            node = self._book.nodes[place["node_id"]]
            gpus = {node.uuid(slot) for slot in place["gpus"]}
            if node.status != "ready" or node.cordoned or gpus & node.faulted.keys() or gpus - node.present:
                return True
        return False
