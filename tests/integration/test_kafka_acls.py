"""LAW 1 on real Kafka: the broker itself refuses a ledger record from anybody but the placer."""

import pytest
from aiokafka import AIOKafkaProducer
from aiokafka.errors import TopicAuthorizationFailedError

from penstock.events.topics import Topic
from penstock.testing.kafka import KafkaBroker, acl_table

pytestmark = pytest.mark.kafka

IDENTITIES = sorted(acl_table())


async def may_write(broker: KafkaBroker, identity: str, topics: list[str]) -> dict[str, bool]:
    """Tries one record on each topic as this identity."""
    producer = AIOKafkaProducer(acks="all", enable_idempotence=True, **broker.client_settings(identity))
    await producer.start()
    answers = {}
    try:
        for topic in topics:
            try:
                await producer.send_and_wait(topic, b"{}", partition=0)
                answers[topic] = True
            except TopicAuthorizationFailedError:
                answers[topic] = False
    finally:
        await producer.stop()
    return answers


def test_the_table_gives_the_ledger_and_the_orders_to_the_placer_alone() -> None:
    """A hurried edit of acls.yaml must not hand the ledger to a second writer."""
    for topic in (Topic.LEDGER, Topic.ORDERS):
        assert [who for who in IDENTITIES if topic in acl_table()[who]["write"]] == ["placer"]
    for who in IDENTITIES:
        assert Topic.DEAD_LETTERS in acl_table()[who]["write"], f"{who} could not report what it cannot read"
        named = acl_table()[who]["write"] + acl_table()[who]["read"]
        assert set(named) <= set(Topic), "a right on a topic that does not exist is a typing error"


@pytest.mark.parametrize("identity", IDENTITIES)
async def test_an_identity_writes_its_own_topics_and_no_other(
    guarded_kafka: KafkaBroker, identity: str
) -> None:
    """A bug, or a stolen password of another service, tries to write where only its owner may."""
    allowed = set(acl_table()[identity]["write"])
    answers = await may_write(guarded_kafka, identity, [str(topic) for topic in Topic])
    assert answers == {str(topic): topic in allowed for topic in Topic}
