"""Random faults of a cell on Kubernetes: killed and doubled reporters, removed pods, dead nodes."""

from collections.abc import Callable
from functools import partial

from penstock_services.node_reporter.kubernetes.core.manifests import FINALIZER
from penstock_services.node_reporter.kubernetes.core.messages import ConnectionLost
from penstock_services.node_reporter.kubernetes.core.pods import LATE_WRITE_MS
from penstock_services.node_reporter.kubernetes.core.proof import OUT_OF_SERVICE
from tests.support.kubernetes.kubelets import GPU, Kubelet, foreign_pod
from tests.support.kubernetes.simulated_api import ApiError
from tests.support.kubernetes.world import NAMESPACE, World

TROUBLE_MS = 120_000  # so long faults happen; then everything is repaired
CALM_MS = 40_000  # in which a reporter sees that a pod was removed past its finalizer, and has written so
END_MS = 3_600_000  # after which a job that has not ended is lost


class Laboratory:
    """One run of one seed."""

    def __init__(self, seed: int, *, fenced: bool = True) -> None:
        self.world = World(seed, fenced=fenced, sizes=(4, 4, 2))
        self.rng = self.world.rng
        self.stripped: set[str] = set()
        self.cancelled: set[str] = set()
        self._foreign = 0
        self.calm_ms = 0

    def run(self) -> list[str]:
        """Problems; empty: none."""
        world = self.world
        self.session()
        jobs = [f"job{number}" for number in range(self.rng.randint(6, 14))]
        for job_id in jobs:
            gpus, workers = self.rng.choice([(1, 1), (1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (0, 1)])
            cores = self.rng.randint(1, 3)
            at_ms = self.rng.randint(0, TROUBLE_MS // 2)
            if self.rng.random() < 0.15:  # while its start is on its way
                world.schedule(at_ms + self.rng.randint(1, 400), partial(world.cancel, job_id))
            world.schedule(
                at_ms,
                partial(world.submit, job_id, gpus, workers=workers, cores=cores),
            )
        for _ in range(self.rng.randint(4, 24)):
            world.schedule(self.rng.randint(500, TROUBLE_MS), self.fault)
        world.run(lambda: bool(world.problems), TROUBLE_MS)
        self.repair()
        world.run(lambda: bool(world.problems) or len(world.ended) == len(jobs), END_MS)
        world.run(lambda: bool(world.problems), 3 * LATE_WRITE_MS)
        lost = [job_id for job_id in jobs if job_id not in world.ended]
        if lost and not world.problems:
            world.problems.append(f"lost: {lost} have not ended")
        if not world.problems:
            self._nothing_left()
        return world.problems

    def _nothing_left(self) -> None:
        world = self.world
        for kubelet in world.kubelets:
            held = world.cell.state.nodes[f"k/{kubelet.name}"].tasks
            if held:
                world.problems.append(f"{kubelet.name}: the ledger still holds {sorted(held)}")
        for key, pod in world.api.pods.items():
            if FINALIZER in pod["metadata"].get("finalizers", []):
                world.problems.append(f"{key} still has its finalizer: {pod['status']}")

    def session(self) -> None:
        """A reporter begins; it may be killed at any step."""
        found = self.world.begin(finished_pods=3)
        found.crash_odds = self.rng.choice([0.0, 0.0, 0.003, 0.02]) if self.world.odds else 0.0

    def revive(self) -> None:
        """Where no reporter lives, one begins."""
        if not any(session.live for session in self.world.sessions):
            self.session()

    # ------------------------------------------------------------------------------------------------ faults

    def fault(self) -> None:
        kubelet = self.rng.choice(self.world.kubelets)
        faults: list[Callable[[Kubelet], None]] = [
            self.crash,
            self.crash,
            self.second_reporter,
            self.power_cut,
            self.partition,
            self.force_delete,
            self.force_delete,
            self.node_deleted,
            self.foreign,
            self.cordon,
            self.cancel,
            self.quota,
            self.repeat,
            self.api_away,
        ]
        chosen = self.rng.choice(faults)
        self.world.say(f"-- {chosen.__name__} {kubelet.name}")
        chosen(kubelet)
        self.world.schedule(self.rng.randint(200, 8_000), self.revive)

    def crash(self, _: Kubelet) -> None:
        if self.world.now_ms < self.calm_ms:
            return
        for session in self.world.sessions:
            session.crash()

    def second_reporter(self, _: Kubelet) -> None:
        """The former one goes on in its term."""
        if self.world.now_ms >= self.calm_ms:
            self.session()

    def power_cut(self, kubelet: Kubelet) -> None:
        if not kubelet.powered:
            return
        kubelet.power_off()
        self.world.schedule(self.rng.randint(100, 5_000), lambda: self._silent(kubelet))
        if self.rng.random() < 0.3:
            self.world.schedule(self.rng.randint(6_000, 10_000), lambda: self._declare(kubelet))
        kubelet.restarts = self.rng.random() < 0.3
        self.world.schedule(self.rng.randint(10_500, 40_000), lambda: self._on(kubelet))

    def _silent(self, kubelet: Kubelet) -> None:
        if not kubelet.powered and kubelet.name in self.world.api.nodes:
            kubelet.ready = False
            kubelet.publish()

    def _declare(self, kubelet: Kubelet) -> None:
        """A person has made sure that it is off."""
        if not kubelet.powered and kubelet.name in self.world.api.nodes:
            kubelet.taints = [{"key": OUT_OF_SERVICE, "effect": "NoExecute"}]
            kubelet.publish()

    def _on(self, kubelet: Kubelet) -> None:
        if not kubelet.powered:
            kubelet.power_on()

    def partition(self, kubelet: Kubelet) -> None:
        """The node's tasks go on; nobody hears of it."""
        if kubelet.powered and kubelet.name in self.world.api.nodes:
            kubelet.ready = False
            kubelet.publish()
            self.world.schedule(self.rng.randint(500, 30_000), lambda: self._back(kubelet))

    def _back(self, kubelet: Kubelet) -> None:
        if kubelet.powered:
            kubelet.ready = True
            kubelet.publish()

    def force_delete(self, _: Kubelet) -> None:
        """`kubectl delete --force`. Sometimes somebody removes the finalizer, too, after the one
        reporter has seen the pod: else this is that person's word that the task has ended."""
        api = self.world.api
        ours = {key: pod for key, pod in api.pods.items() if key.startswith(f"{NAMESPACE}/")}
        keys = sorted(key for key, pod in ours.items() if pod["spec"].get("nodeName"))
        if not keys:
            return
        key = self.rng.choice(keys)
        pod = api.pods[key]
        uid = pod["metadata"]["uid"]
        try:
            api.delete(key, uid, 0)
            live = [session for session in self.world.sessions if session.live]
            seen = len(live) == 1 and live[0].state.complete
            if (
                self.rng.random() < 0.2
                and seen
                and any(
                    task.pod is not None and task.pod.metadata.uid == uid
                    for task in live[0].state.tasks.values()
                )
            ):
                self.calm_ms = self.world.now_ms + CALM_MS
                live[0].crash_odds = 0.0
                self.stripped.add(str(pod["spec"].get("nodeName")))
                api.release(key, uid, "", ())
        except ApiError:
            return

    def node_deleted(self, kubelet: Kubelet) -> None:
        """Its object goes, the garbage collector fails its pods, and its kubelet registers again."""
        api = self.world.api
        api.put_node(None, kubelet.name)
        self.world.schedule(self.rng.randint(100, 3_000), lambda: self._collect(kubelet))
        self.world.schedule(self.rng.randint(3_000, 20_000), lambda: self._register(kubelet))

    def _collect(self, kubelet: Kubelet) -> None:
        api = self.world.api
        for key, pod in list(api.pods.items()):
            terminal = pod["status"]["phase"] in ("Succeeded", "Failed")
            if pod["spec"].get("nodeName") == kubelet.name and kubelet.name not in api.nodes and not terminal:
                condition = {"type": "DisruptionTarget", "status": "True", "reason": "DeletionByPodGC"}
                status = {**pod["status"], "phase": "Failed", "conditions": [condition]}
                api.set_status(key, pod["metadata"]["uid"], status)
                api.delete(key, pod["metadata"]["uid"], 0)

    def _register(self, kubelet: Kubelet) -> None:
        if kubelet.powered:
            kubelet.publish()
            kubelet.soon()

    def foreign(self, kubelet: Kubelet) -> None:
        self._foreign += 1
        pod = foreign_pod(f"other-{self._foreign}", kubelet.name, **{"cpu": "1500m", GPU: "1"})
        pod["metadata"]["annotations"]["test/lasts_ms"] = str(self.rng.randint(1_000, 30_000))
        self.world.api.create(pod)

    def cordon(self, kubelet: Kubelet) -> None:
        kubelet.unschedulable = not kubelet.unschedulable
        if kubelet.name in self.world.api.nodes:
            kubelet.publish()

    def cancel(self, _: Kubelet) -> None:
        jobs = sorted(self.world.cell.state.jobs.keys() - self.world.ended.keys())
        if jobs:
            self.world.cancel(self.rng.choice(jobs))

    def quota(self, _: Kubelet) -> None:
        """Not without the fence: a refusal is then reported while a create of an earlier session may come."""
        api = self.world.api
        if not api.fenced:
            return
        api.quota_text = "" if api.quota_text else "exceeded quota: pods"

    def api_away(self, _: Kubelet) -> None:
        """Orders come meanwhile."""
        for session in self.world.sessions:
            session.feed(ConnectionLost("no answer for 10 s", self.world.now_ms))
            self.world.schedule(self.rng.randint(1_000, 20_000), session.restored)

    def repeat(self, _: Kubelet) -> None:
        self.world.repeat_orders()

    def repair(self) -> None:
        """Everything works again; nodes whose pods were removed past their finalizers are booted anew."""
        world = self.world
        world.say("-- repair")
        world.odds = 0.0
        for session in world.sessions:
            session.restored()
        world.api.quota_text = ""
        for session in world.sessions:
            session.crash_odds = 0.0
        for kubelet in world.kubelets:
            kubelet.unschedulable = False
            if kubelet.name in self.stripped and kubelet.powered:
                kubelet.power_off()
            if not kubelet.powered:
                kubelet.power_on()
            kubelet.ready = True
            kubelet.publish()
            kubelet.soon()
        self.revive()
