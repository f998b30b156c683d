"""Jobs to pods of a real API server: `python -m tests.bench.live.kubernetes [PODS [NODES]]`.

All services and the cluster's reporter in one process, on the embedded log; nodes are KWOK's, which start
pods at once. First all jobs at a time: pods per second from the first submission to the last binding. Then
one job after the other: submitted → created, by this process's clock at the watch. The bare server: the same
pods, created by hand with as many calls in flight.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import uvloop

from infra.devservers.kubernetes import KubernetesCluster, kubernetes_cluster
from infra.devservers.kubernetes_parts import Machine
from penstock.clock import wall_ms
from penstock.log.open import open_log
from penstock.log.port import Log, Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.inputs.external_events import JobSubmitted
from penstock.model.jobs.job_parts import Environment, ResourceRequest
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.schema.topics import Topic
from penstock.model.wire.envelope import Envelope, to_wire
from penstock.runtime.service import settle_gc
from penstock.runtime.settings import Settings
from penstock_services.estimator.shell.service import run as run_estimator
from penstock_services.node_reporter.kubernetes.core.objects import Pod
from penstock_services.node_reporter.kubernetes.options import ClusterOptions
from penstock_services.node_reporter.kubernetes.shell.api import MAX_CALLS, ApiServer
from penstock_services.node_reporter.kubernetes.shell.reflector import Changed, Reflector
from penstock_services.node_reporter.kubernetes.shell.session import runner
from penstock_services.placer.shell.service import run as run_placer
from tests.bench.live.pipeline import joined
from tests.bench.machine import quantile
from tests.bench.servers import servers
from tests.support.installation.kubernetes_cell import NAMESPACE, REPORTER, install

PODS, NODES, GPUS = 600, 100, 8
ALONE = 100  # jobs one after the other
SPEC = JobSpec(
    command=("train",),
    environment=Environment(container="train:1"),
    resources=ResourceRequest(gpus=1, cores=1, host_memory_mib=64, gpu_memory_mib=64, bandwidth_mbps=0),
)
PATIENCE_S = 120.0


class Measured(NamedTuple):
    """`alone_ms`: submitted → the pod is in the watch, one job at a time."""

    pods_per_s: float
    cpu_us_per_pod: float
    bare_pods_per_s: float
    alone_ms: list[float]


class Seen:
    """Pods of the namespace, by their job, as a watch of this bench tells them."""

    def __init__(self) -> None:
        self.at_s: dict[str, float] = {}
        self._news = asyncio.Event()

    async def follow(self, api: ApiServer) -> None:
        path = f"/api/v1/namespaces/{NAMESPACE}/pods"
        reflector = Reflector(api, path, Pod, lambda pod: pod.metadata.resource_version)
        async for found in reflector.follow():
            if isinstance(found, Changed) and found.kind == "ADDED":
                pod = found.object.metadata
                self.at_s[pod.annotations.get("penstock.dev/job", pod.name)] = time.perf_counter()
                self._news.set()

    async def until(self, count: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.at_s) < count:
                self._news.clear()
                await self._news.wait()


def _submission(job_id: str) -> Message:
    event = Envelope(
        id=job_id, source="/bench", time_ms=wall_ms(), data=JobSubmitted(job_id=job_id, spec=SPEC)
    )
    headers, value = to_wire(event)
    return Message(Partition(Topic.JOBS, 0), value, headers)


@asynccontextmanager
async def cell(cluster: KubernetesCluster, settings: Settings, nodes: int) -> AsyncIterator[Log]:
    """All services in this process, ready."""
    log, stop = await open_log(settings.log_url, "bench").start(), asyncio.Event()
    await log.create(topic_partitions())
    options = ClusterOptions(
        cluster="k8s", kubeconfig=cluster.kubeconfig(REPORTER), gpu_memory_mib=16_384, namespace=NAMESPACE
    )
    tasks = []
    for service in (run_placer, run_estimator, runner(options)):
        ready = asyncio.Event()
        tasks.append(asyncio.ensure_future(service(settings, stop, log=log, ready=ready)))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
    await joined(log, nodes)
    try:
        yield log
    finally:
        stop.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        await log.close()


def until_ready(cluster: KubernetesCluster, nodes: int) -> None:
    """KWOK makes nodes Ready a moment after they were made."""
    ends_s, ready = time.monotonic() + PATIENCE_S, 0
    while ready < nodes and time.monotonic() < ends_s:
        found = cluster.request("GET", "/api/v1/nodes").body["items"]
        conditions = [each for node in found for each in node["status"].get("conditions", ())]
        ready = sum((each["type"], each["status"]) == ("Ready", "True") for each in conditions)
        time.sleep(0.2)


async def bare(api: ApiServer, pods: int, nodes: int) -> float:
    """Pods per second of the server alone, created placed by hand."""
    room = asyncio.Semaphore(MAX_CALLS)
    container = {"name": "main", "image": "train:1", "resources": {"requests": {"cpu": "1"}}}

    async def create(number: int) -> None:
        spec: dict[str, Any] = {"nodeName": f"n{number % nodes}", "containers": [container]}
        body = {"metadata": {"name": f"bare-{number}"}, "spec": spec}
        async with room:
            answer = await api.call("POST", "/api/v1/namespaces/default/pods", body=body)
            assert answer.done, answer.reason

    began_s = time.perf_counter()
    await asyncio.gather(*map(create, range(pods)))
    return pods / (time.perf_counter() - began_s)


async def measure(pods: int = PODS, nodes: int = NODES) -> Measured:
    with kubernetes_cluster(users=[REPORTER]) as cluster:
        await asyncio.to_thread(install, cluster, "rbac", "fence", "door")
        names = [f"n{number}" for number in range(nodes)]
        await asyncio.to_thread(cluster.start_kwok)
        await asyncio.to_thread(cluster.add_simulated_nodes, names, Machine(gpus=GPUS))
        await asyncio.to_thread(until_ready, cluster, nodes)
        async with servers("embedded") as found, cell(cluster, found.settings, nodes) as log:
            api, seen = await ApiServer.open(cluster.kubeconfig()), Seen()
            following = asyncio.ensure_future(seen.follow(api))
            settle_gc()
            began_s, cpu_s = time.perf_counter(), time.process_time()
            await log.append([_submission(f"j{number}") for number in range(pods)])
            await seen.until(pods)
            together_s = max(seen.at_s.values()) - began_s
            cpu_us = (time.process_time() - cpu_s) / pods * 1e6
            alone_ms = []
            for number in range(ALONE):
                began_s = time.perf_counter()
                await log.append([_submission(f"alone-{number}")])
                await seen.until(pods + number + 1)
                alone_ms.append((seen.at_s[f"alone-{number}"] - began_s) * 1_000)
            bare_pods_per_s = await bare(api, pods, nodes)
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)
            await api.close()
    return Measured(pods / together_s, cpu_us, bare_pods_per_s, alone_ms)


def main() -> None:
    parser = argparse.ArgumentParser(description="Jobs to pods of a real API server.")
    parser.add_argument("pods", nargs="?", type=int, default=PODS)
    parser.add_argument("nodes", nargs="?", type=int, default=NODES)
    given = parser.parse_args()
    found = uvloop.run(measure(given.pods, given.nodes))
    p50, p99 = (quantile(found.alone_ms, share) for share in (0.5, 0.99))
    print(
        f"{found.pods_per_s:.0f} pods/s, the server alone {found.bare_pods_per_s:.0f}; "
        f"{found.cpu_us_per_pod:.0f} us of processor per pod; alone p50 {p50:.1f}, p99 {p99:.1f} ms"
    )


if __name__ == "__main__":
    main()
