"""Folders of a job that are not there, as the gateway warns of them at submission."""

import threading
from pathlib import Path

import msgspec
import pytest

from penstock.ledger.state.node.node_state import NodeState
from penstock.model.jobs.job_parts import Environment
from penstock.model.jobs.job_spec import JobSpec
from penstock.model.nouns.transitions import NodeStatus
from penstock.runtime.this_machine import boot_id, machine_id
from penstock_services.gateway.shell.answers import absent_folders as module
from penstock_services.gateway.shell.answers.absent_folders import MAX_LOOKS, absent_folders
from tests.support.cluster.builders import node
from tests.support.waiting import await_until


async def test_a_file_server_that_hangs_holds_up_a_bounded_number_of_looks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each submission looked in a thread of its own, of those that the gateway has for all its files: after
    some dozens it stood still."""
    found = msgspec.structs.replace(node(), boot_id=boot_id(), machine_id=machine_id())
    monkeypatch.setattr(module, "PATIENCE_S", 3_600)
    here = NodeState(found, 0, NodeStatus.READY, 0, 0, 0, 0)
    spec = JobSpec(command=("true",), workdir=str(tmp_path), environment=Environment(venv=f"{tmp_path}/gone"))
    assert [field for field, *_ in await absent_folders(spec, [here])] == ["environment.venv"]

    server, looks, real = threading.Event(), [], module._absent

    def hangs(paths: dict[str, str]) -> list[tuple[str, str]]:
        looks.append(paths)
        server.wait()
        return real(paths)

    monkeypatch.setattr(module, "_absent", hangs)
    monkeypatch.setattr(module, "PATIENCE_S", 0.05)
    for _ in range(2 * MAX_LOOKS):
        assert await absent_folders(spec, [here]) == []
    await await_until(lambda: len(looks) == MAX_LOOKS, "the threads that look")
    server.set()
    for thread in threading.enumerate():
        if thread.name == "absent-folders":
            thread.join()
    assert len(looks) == MAX_LOOKS
    monkeypatch.setattr(module, "PATIENCE_S", 3_600)
    assert len(await absent_folders(spec, [here])) == 1
