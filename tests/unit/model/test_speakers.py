"""Who may say what about what is one table, and each row holds."""

import secrets

import pytest
from msgspec import structs

from infra.codegen.examples import EXAMPLES
from penstock.model.inputs.estimates import ProfilePlanned
from penstock.model.inputs.external_events import (
    JobProgress,
    NodeChanged,
    NodeJoined,
    TaskExited,
    WorkProgressed,
)
from penstock.model.schema.event import REGISTRY, Event, wire_type
from penstock.model.schema.topics import INPUT_TOPICS
from penstock.model.wire.envelope import Envelope, signed_bytes, to_wire
from penstock.model.wire.speakers import RULES, Speaker, Subject
from penstock.runtime.keys.node_keys import NodeKeys, PlacerKeys
from penstock_services.placer.core.answer import Answer, Input, Moment, answer_input
from penstock_services.placer.core.guard import GUARDS, refusal
from penstock_services.placer.shell.identity import Identity
from tests.support.cluster.driver import CellDriver, node_spec

OF_TASKS = sorted(
    (model for model, rule in RULES.items() if rule.subject is Subject.OWN_TASK), key=lambda model: model.TYPE
)
UNSAID = sorted(
    (model for model, rule in RULES.items() if rule.speaker is Speaker.NOBODY), key=lambda model: model.TYPE
)


def test_every_type_on_a_topic_has_a_row() -> None:
    assert {model for model in REGISTRY.values() if model.TOPIC is not None} == set(RULES)


@pytest.fixture
def cell() -> CellDriver:
    """Job `a` runs on node n1; node n2 is idle."""
    driver = CellDriver()
    for node_id in ("n1", "n2"):
        keys = NodeKeys(KEYS[node_id])
        driver.feed(NodeJoined(node=node_spec(node_id, 1), incarnation=1, public_key=keys.public_key))
    driver.submit("a")
    driver.start("a")
    assert driver.job("a").tasks["a.1.w0"].place.node_id == "n1"
    return driver


KEYS = {"n1": secrets.token_bytes(32), "n2": secrets.token_bytes(32)}


def told(cell: CellDriver, event: Event, signer: str) -> Answer:
    """The placer's answer to an event on its own topic that this node has signed."""
    assert event.TOPIC is not None
    envelope = Envelope(f"e{cell.head.seq}", f"/{signer}", 1, event)
    headers, value = to_wire(envelope)
    data = signed_bytes("default", envelope.id, wire_type(type(event)), value)
    read = Input(
        event.TOPIC,
        0,
        cell.state.positions.get((event.TOPIC, 0), 0),
        (*headers, *NodeKeys(KEYS[signer]).proofs(data)),
        value,
    )
    identity = Identity("default", PlacerKeys(secrets.token_bytes(32)), b"g" * 32)
    moment = Moment(cell.head.seq + 1, cell.head.term, cell.now_ms)
    return answer_input(cell.core, moment, read, None, identity.forged)


@pytest.mark.parametrize("model", OF_TASKS, ids=lambda model: model.TYPE)
def test_a_node_speaks_of_its_own_tasks_alone(cell: CellDriver, model: type[Event]) -> None:
    """n2 signs correctly, in its own name, what it says of a task on n1."""
    example = next(found for found in EXAMPLES.values() if type(found) is model)
    said = structs.replace(example, node_id="n2", task_id="a.1.w0", token=cell.job("a").token)
    assert model in GUARDS
    assert refusal(cell.state, said) is not None
    assert told(cell, said, "n2").draft.outcome != "committed"


def test_a_node_does_not_speak_for_another(cell: CellDriver) -> None:
    exited = TaskExited(
        node_id="n1",
        task_id="a.1.w0",
        token=cell.job("a").token,
        cause="exited",
        exit_code=0,
        started_ms=1,
        exited_ms=2,
    )
    answer = told(cell, exited, "n2")
    assert answer.draft.outcome == "dead_lettered"
    assert answer.draft.reason == "forged: not signed by node n1, which signs what it sends"


@pytest.mark.parametrize("model", UNSAID, ids=lambda model: model.TYPE)
def test_what_no_service_sends_is_not_accepted(cell: CellDriver, model: type[Event]) -> None:
    said = {
        WorkProgressed: WorkProgressed(
            node_id="n2", jobs=(JobProgress(job_id="a", attained_s=0.0, remaining_s=1e12),)
        ),
        NodeChanged: NodeChanged(node=node_spec("n2", 2), incarnation=1),
        ProfilePlanned: EXAMPLES[wire_type(ProfilePlanned)],
    }[model]
    assert model.TOPIC in INPUT_TOPICS
    answer = told(cell, said, "n2")
    assert answer.draft.outcome == "dead_lettered"
    assert answer.draft.reason == f"forged: no service sends {wire_type(model)}"
    assert cell.job("a").progress.remaining_s is None
