"""LAW 1 on real Kafka: the broker itself refuses a ledger record from anybody but the placer."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest
from aiokafka.admin import AIOKafkaAdminClient

from infra.devservers.kafka import ADMIN, KafkaBroker, acl_table
from penstock.cli.operations.doctor import Finding
from penstock.errors import ConfigurationError, LogError, NotAllowed
from penstock.local.doctor.reach import log_findings
from penstock.log.kafka.aiokafka_gaps import alter_topic_configs, create_topic_acl
from penstock.log.kafka.kafka import KafkaLog, Sasl
from penstock.log.kafka.topics import OPERATIONS
from penstock.log.kafka_setup import prepare, prepare_kafka
from penstock.log.open import open_log
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_partitions
from penstock.model.schema.topics import Topic
from penstock.runtime.settings import Settings
from tests.support.gateway.canaries import found_in, new_canary
from tests.support.node_reporter.forgeries import WRITERS, forged_records_change_nothing
from tests.support.waiting import await_until

pytestmark = pytest.mark.kafka

IDENTITIES = sorted(acl_table())


@asynccontextmanager
async def connected(broker: KafkaBroker, identity: str) -> AsyncIterator[KafkaLog]:
    """The log that the services use, under this identity."""
    log = await KafkaLog(broker.bootstrap, identity, sasl=Sasl(identity, broker.passwords[identity])).start()
    try:
        yield log
    finally:
        await log.close()


@asynccontextmanager
async def new_topic(broker: KafkaBroker, topic: str) -> AsyncIterator[tuple[KafkaLog, KafkaLog]]:
    """Connections of the administrator and of the placer, which has no right to this new topic yet."""
    async with connected(broker, ADMIN) as admin, connected(broker, "placer") as placer:
        await admin.create({topic: 1})
        yield admin, placer


async def allowed(act: Callable[[], Awaitable[object]]) -> None:
    """Returns once the broker lets it happen: a controller confirms a right before the brokers have applied
    it."""

    async def done() -> bool:
        try:
            await act()
        except NotAllowed:
            return False
        return True

    await await_until(done, "the right to have reached the broker")


async def may_write(broker: KafkaBroker, identity: str) -> dict[str, bool]:
    """Topic → whether one record was accepted. The administrator checks that a refused one left no trace."""
    answers = {}
    async with connected(broker, identity) as log, connected(broker, ADMIN) as admin:
        for topic in Topic:
            partition = Partition(topic, 0)
            before = await admin.end_offsets([partition])
            try:
                await log.append([Message(partition, b"{}", key=b"k")])  # a compacted topic wants a key
                answers[str(topic)] = True
            except NotAllowed:
                answers[str(topic)] = False
            after = await admin.end_offsets([partition])
            assert after[partition] == before[partition] + answers[str(topic)]
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
    assert await may_write(guarded_kafka, identity) == {str(topic): topic in allowed for topic in Topic}


async def test_a_wrong_password_gets_nowhere(
    guarded_kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An old secret is still mounted after a rotation: the service must report it and not look idle, and not
    show it."""
    yesterday, today = new_canary(), guarded_kafka.passwords["placer"]
    monkeypatch.setattr(logging.getLogger("aiokafka"), "propagate", True)
    with caplog.at_level(logging.DEBUG), caplog.at_level(logging.DEBUG, "aiokafka"):
        with monkeypatch.context() as soon:
            soon.setattr("penstock.log.kafka.retries.START_LIMIT_S", 1.0)  # as if the broker were away
            with pytest.raises(LogError, match="placer") as refused:
                await open_log(guarded_kafka.url("placer").replace(today, yesterday), "placer").start()
        async with connected(guarded_kafka, "placer") as log:
            await log.end_offsets([Partition(Topic.LEDGER, 0)])
    assert "aiokafka" in {record.name.partition(".")[0] for record in caplog.records}
    shown = f"{refused.value!r} {refused.value.__cause__!r} {caplog.text}"
    assert found_in(shown.encode(), [yesterday, today]) == []


async def test_a_service_that_may_not_read_settings_says_which_right_it_needs(
    guarded_kafka: KafkaBroker, topic_name: Callable[[str], str]
) -> None:
    """Rights were given by hand, or before services read settings: READ alone does not show how long records
    stay."""
    topic = topic_name("ledger")
    async with new_topic(guarded_kafka, topic) as (admin, placer):
        client = AIOKafkaAdminClient(**guarded_kafka.client_settings(ADMIN))
        await client.start()
        await create_topic_acl(client, "placer", OPERATIONS["read"], topic)
        await client.close()
        await allowed(lambda: placer.end_offsets([Partition(topic, 0)]))
        with pytest.raises(
            NotAllowed, match=f"placer may not read the settings of {topic}: .*DESCRIBE_CONFIGS"
        ):
            await placer.create({topic: 1})
        await admin.topics.grant("placer", "read", topic)
        await allowed(lambda: placer.create({topic: 1}))


async def test_too_few_partitions_are_refused_where_a_service_may_not_add_any(
    guarded_kafka: KafkaBroker, topic_name: Callable[[str], str]
) -> None:
    """A second cell is configured before the administrator has run the set-up again."""
    topic = topic_name("ledger")
    async with new_topic(guarded_kafka, topic) as (admin, placer):
        await admin.topics.grant("placer", "write", topic)
        await allowed(lambda: placer.create({topic: 1}))
        with pytest.raises(ConfigurationError, match=f"{topic}: partitions is 1, must be 2") as refused:
            await placer.create({topic: 2})
        assert "kafka://ADMIN:PASSWORD@" in str(refused.value)
        assert "--cells 2" in str(refused.value)
        await admin.create({topic: 2})
        await placer.create({topic: 2})


async def doctors_view(url: str, cell_index: int = 0) -> dict[str, Finding]:
    findings = await asyncio.to_thread(lambda: list(log_findings(url, node=False, cell_index=cell_index)))
    return {finding.what: finding for finding in findings}


async def view_of_topics(url: str, *, well: bool) -> Finding | None:
    """None: it is not so."""
    found = (await doctors_view(url))["topics"]
    return found if well != bool(found.remedy) else None


async def test_the_doctor_finds_what_is_wrong_with_topics_and_names(
    guarded_kafka: KafkaBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A topic that an administrator gave a week of retention, a second cell without partitions, a password of
    yesterday."""
    url = guarded_kafka.url("placer")
    well = await doctors_view(url)
    assert not any(finding.remedy for finding in well.values()), well
    assert "none could lose records" in well["topics"].found
    second = (await doctors_view(url, cell_index=7))["topics"]
    assert re.search(r"penstock\.ledger\.v1 \(has [1-7] of 8 partitions\)", second.found)
    assert "penstock.log.kafka_setup" in second.remedy
    client = AIOKafkaAdminClient(**guarded_kafka.client_settings(ADMIN))
    await client.start()
    async with connected(guarded_kafka, ADMIN) as admin:
        topics = await admin.topics.describe([Topic.PROPOSALS])
        await alter_topic_configs(client, {Topic.PROPOSALS: {"retention.ms": "604800000"}})
        try:
            wrong = await await_until(lambda: view_of_topics(url, well=False), "the setting at the broker")
            assert "penstock.proposals.v1: retention.ms is 604800000, must be -1" in wrong.found
            assert "--correct" in wrong.remedy
        finally:
            await admin.topics.correct(topics)
            await client.close()
            await await_until(lambda: view_of_topics(url, well=True), "the old setting at the broker")
    monkeypatch.setattr("penstock.local.doctor.reach.REACH_S", 1.5)
    yesterday = url.replace(guarded_kafka.passwords["placer"], new_canary())

    async def not_let_in() -> Finding | None:
        found = (await doctors_view(yesterday))["log"]
        return found if "did not let this identity in" in found.found else None

    refused = await await_until(not_let_in, "an answer within 1.5 s; on a busy machine not the first time")
    assert "name and password" in refused.remedy


async def test_only_the_administrator_deletes_records(guarded_kafka: KafkaBroker) -> None:
    """The ledger's head is archived by an administrator; the placer's own password, stolen, deletes nothing
    of it."""
    ledger = Partition(Topic.LEDGER, 0)
    async with connected(guarded_kafka, "placer") as placer, connected(guarded_kafka, ADMIN) as admin:
        end = (await placer.append([Message(ledger, b"{}"), Message(ledger, b"{}")]))[-1]
        first = await placer.begin_offsets([ledger])
        with pytest.raises(NotAllowed):
            await placer.delete_before({ledger: end})
        assert await placer.begin_offsets([ledger]) == first
        await admin.delete_before({ledger: end})
        assert await placer.begin_offsets([ledger]) == {ledger: end}


async def test_a_nodes_rights_are_withdrawn_while_it_is_connected(
    guarded_kafka: KafkaBroker, tmp_path: Path
) -> None:
    """A machine with its password is gone: its open connection and new ones are refused, others go on."""
    rights = {identity: dict(verbs) for identity, verbs in acl_table().items()}
    place, orders = Partition(Topic.NODES, 0), Partition(Topic.ORDERS, 0)
    others = {identity: verbs for identity, verbs in rights.items() if identity != LEAVES}
    async with connected(guarded_kafka, LEAVES) as node, connected(guarded_kafka, "gateway") as gateway:
        await node.append([Message(place, b"{}")])
        try:
            lines = await prepare(guarded_kafka.url(ADMIN), others, 1, correct=False, withdraw=[LEAVES])
            assert lines[-1] == f"withdrawn: all 8 rights of {LEAVES}"
            await await_until(
                lambda: refused(lambda: node.append([Message(place, b"{}")])), "the broker to refuse it"
            )
            async with connected(guarded_kafka, LEAVES) as again:
                assert await refused(lambda: again.end_offsets([orders]))
            await gateway.append([Message(place, b"{}")])
        finally:
            await prepare(guarded_kafka.url(ADMIN), rights, 1, correct=False)
            await allowed(lambda: node.append([Message(place, b"{}")]))
    file = tmp_path / "rights.yaml"
    file.write_text(f"{LEAVES}:\n  read: [{Topic.ORDERS}]\n")
    with pytest.raises(ConfigurationError, match="remove it there first"):
        prepare_kafka(guarded_kafka.url(ADMIN), file, 1, False, [LEAVES])


LEAVES = "node-reporter"


async def refused(act: Callable[[], Awaitable[object]]) -> bool:
    try:
        await act()
    except NotAllowed:
        return True
    return False


async def test_forged_records_change_nothing(guarded_kafka: KafkaBroker) -> None:
    """A job has read the node-reporter's password: the broker lets it write to the nodes' topic, in the name
    of any node."""
    settings = Settings(log_url=guarded_kafka.url("placer"), cell_index=1)
    async with AsyncExitStack() as stack:
        admin = await stack.enter_async_context(connected(guarded_kafka, ADMIN))
        await admin.create(topic_partitions(2))
        logs = {
            topic: await stack.enter_async_context(connected(guarded_kafka, identity))
            for topic, identity in WRITERS.items()
        }
        await forged_records_change_nothing(settings, logs)
