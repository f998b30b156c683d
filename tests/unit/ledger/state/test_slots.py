"""Slots are not indexes (a slot stays while a task holds it, whatever becomes of the machine's GPUs)."""

from msgspec.structs import replace

from penstock.model.decisions.orders import StartTask
from penstock.model.inputs.external_events import NodeJoined, RunningTask, TaskStarted
from penstock.model.nouns.nodes import NodeSpec
from tests.support.cluster.driver import CellDriver, estimate, job_spec, node_spec


def without(spec: NodeSpec, *uuids: str) -> NodeSpec:
    """The same machine, after these GPUs were taken out: NVML numbers the others anew."""
    left = [gpu for gpu in spec.gpus if gpu.uuid not in uuids]
    return replace(spec, gpus=tuple(replace(gpu, index=index) for index, gpu in enumerate(left)))


def test_orders_do_not_name_the_gpu_of_a_member_that_has_ended() -> None:
    """The second worker is done before the first has started, and its GPU is taken out. The order to start
    the first, which its node gets again when it joins, raised `IndexError`, at each start of a placer
    anew."""
    cell = CellDriver()
    node = node_spec("n1", 2)
    cell.join(node)
    cell.submit("gang", job_spec(workers=2), estimate(1))
    first, last = (cell.job("gang").tasks[f"gang.1.w{rank}"].place for rank in (0, 1))
    assert (first.gpus, last.gpus) == ((0,), (1,))
    [_, started] = [order for order in cell.orders() if isinstance(order, StartTask)]
    assert started.job_gpu_uuids == ("GPU-n1-0", "GPU-n1-1")
    token = cell.job("gang").token
    cell.feed(TaskStarted(node_id="n1", task_id="gang.1.w1", token=token, pid=7, started_ms=cell.now_ms))
    cell.exit("gang.1.w1")
    cell.feed(NodeJoined(node=without(node, "GPU-n1-1"), tasks=()))
    [again] = [order for order in cell.orders() if isinstance(order, StartTask)]
    assert (again.gpu_uuids, again.job_gpu_uuids) == (("GPU-n1-0",), ())


def test_a_gpu_keeps_its_slot_while_a_task_holds_it() -> None:
    """The first GPU is taken out from under nobody; the task on the second keeps slot 1, and its GPU's name.
    The next job gets neither the slot that is empty nor the one that is held."""
    cell = CellDriver()
    node = node_spec("n1", 3)
    cell.join(node)
    for job_id in ("a", "b"):
        cell.submit(job_id, need=estimate(1))
        cell.start(job_id)
    cell.exit("a.1.w0")
    token = cell.job("b").token
    cell.feed(NodeJoined(node=without(node, "GPU-n1-0"), tasks=(RunningTask(task_id="b.1.w0", token=token),)))
    state = cell.state.nodes["n1"]
    assert (state.slot_of("GPU-n1-1"), state.gpu_model(1)) == (1, "V100")
    assert state.gpu_model(0) == ""
    assert state.present_gpu_mask == 0b110
    cell.submit("c", need=estimate(1))
    [order] = [order for order in cell.orders() if isinstance(order, StartTask)]
    assert order.gpu_uuids == ("GPU-n1-2",)
