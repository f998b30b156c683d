"""Whatever may happen to groups happens, drawn by a seed: `check` sees every step."""

from random import Random

from penstock.ledger.check.check import check
from penstock.ledger.derived.succession import awaited
from penstock.ledger.replica.snapshot import dump, load
from penstock.ledger.state.job.job_state import JobState
from penstock.model.inputs.external_events import JobCancelRequested, NodeJoined
from penstock.model.nouns.settings import PlacerSettings
from penstock.model.nouns.transitions import JobStatus
from penstock.model.proposals import CoresProposed
from tests.support.cluster.driver import job_spec, node_spec
from tests.unit.ledger.groups.test_groups import BOTH, Cell, answer_in, needs


class Storm:
    """Whatever may happen to groups, drawn by a seed."""

    def __init__(self, seed: int) -> None:
        self.chance = Random(seed)
        self.cell = Cell(PlacerSettings(profile=self.chance.choice(["fifo", "srtf", "tiresias", "penstock"])))
        for name in BOTH:
            self.join(name, "b1")
        self.formed = 0

    def join(self, name: str, boot: str) -> None:
        self.cell.feed(NodeJoined(node=node_spec(name, 2, cores=self.chance.choice((8, 12)), boot=boot)))

    def submit(self, number: int) -> None:
        choice = self.chance.choice
        need = needs(choice((2, 2, 2, 1)), cores=choice((1, 3, 6)), bandwidth_mbps=choice((0, 50, 700)))
        self.cell.submit(f"j{number}", job_spec(workers=choice((1, 2)), attempts=3), need)

    def group(self, first: JobState) -> None:
        state = self.cell.state
        nodes = tuple(task.place.node_id for task in first.tasks.values())
        there = state.groups.get(first.sharing.group, {first.job_id: first})
        ids = [job.job_id for job in there.values() if job.status is not JobStatus.STOPPING]
        ids += [job_id for job_id in state.queue.values() if state.jobs[job_id].workers == len(nodes)]
        step = self.cell.group(*ids[: self.chance.choice((2, 3, 4))], nodes=nodes)
        self.formed += answer_in(step).verdict == "accepted"

    def exit(self, job: JobState) -> None:
        nodes = self.cell.state.nodes
        living = [
            task_id for task_id, task in job.tasks.items() if task_id in nodes[task.place.node_id].tasks
        ]
        self.cell.exit(self.chance.choice(living), self.chance.choice((0, 0, 1)))

    def act(self, number: int) -> None:
        cell, choice = self.cell, self.chance.choice
        cell.at(100 * number)
        alive = [job for job in cell.state.jobs.values() if job.tasks]
        runs = [job for job in alive if job.status in (JobStatus.RUNNING, JobStatus.LAUNCHING)]
        match choice(
            ("submit",) * 5 + ("group",) * 3 + ("start",) * 2 + ("exit",) * 3 + ("cores", "join", "cancel")
        ):
            case "submit":
                self.submit(number)
            case "group" if runs:
                self.group(choice(runs))
            case "start" if runs and (job := choice(runs)).status is JobStatus.LAUNCHING:
                if not awaited(cell.state, job):  # its node lets it wait
                    cell.start(job.job_id)
            case "exit" if alive:
                self.exit(choice(alive))
            case "cores" if runs:
                task_id, cores = choice(list(choice(runs).tasks)), choice((1, 4, 9))
                cell.feed(
                    CoresProposed(
                        proposal_id=f"c{cell.head.seq}",
                        proposer="g",
                        task_id=task_id,
                        cores=cores,
                        reason="r",
                    )
                )
            case "join":
                self.join(choice(BOTH), choice(("b1", f"b{number}")))
            case "cancel" if alive:
                cell.feed(JobCancelRequested(job_id=choice(alive).job_id))
        assert check(load(dump(cell.state))) == []


def test_whatever_members_do_the_books_are_right() -> None:
    """Jobs of all sizes join, change their cores, fail, are cancelled, lose a node and come back; `check`
    sees every step."""
    formed_groups = 0
    for seed in range(40):
        storm = Storm(seed)
        for number in range(60):
            storm.act(number)
        formed_groups += storm.formed
    assert formed_groups > 50
