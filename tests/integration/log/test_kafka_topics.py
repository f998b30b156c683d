"""Topics on a broker with Kafka's default settings: it creates whatever is asked for, and deletes it after
seven days."""

import asyncio
import shlex
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from aiokafka import AIOKafkaProducer
from aiokafka.admin import AIOKafkaAdminClient
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.protocol.metadata import MetadataRequest

from infra.devservers.build_cache import REPOSITORY
from infra.devservers.kafka import KafkaBroker
from penstock.errors import ConfigurationError, LogError
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.port import Message, Partition
from penstock.log.topic_settings import topic_settings
from penstock.model.schema.topics import Topic
from tests.support.installation.system import clean_environment
from tests.support.waiting import await_until

pytestmark = pytest.mark.kafka

STOCK_RETENTION_MS = "604800000"  # seven days
CREATION_S = 0.3  # a broker answers that a topic is unknown and creates it meanwhile, within 0.1 s
SET_BY_TOPIC = 1  # where a setting comes from: Kafka's ConfigSource DYNAMIC_TOPIC_CONFIG


@pytest_asyncio.fixture
async def log(kafka_bootstrap: str) -> AsyncIterator[KafkaLog]:
    log = await KafkaLog(kafka_bootstrap, "test").start()
    yield log
    await log.close()


@asynccontextmanager
async def raw_admin(broker: KafkaBroker) -> AsyncIterator[AIOKafkaAdminClient]:
    admin = AIOKafkaAdminClient(**broker.client_settings())
    await admin.start()
    try:
        yield admin
    finally:
        await admin.close()


async def topics_of(broker: KafkaBroker) -> list[str]:
    """All that exist; asking for the list creates none."""
    async with raw_admin(broker) as admin:
        return list(await admin.list_topics())


async def settings_of(broker: KafkaBroker, topic: str) -> dict[str, tuple[str, int]]:
    """Setting → value and where it comes from."""
    async with raw_admin(broker) as admin:
        [answer] = await admin.describe_configs([ConfigResource(ConfigResourceType.TOPIC, topic)])
    [(_, _, _, _, entries)] = answer.resources
    return {name: (value, source) for name, value, _, source, *_ in entries}


async def set_to(broker: KafkaBroker, topic: str, **configs: str) -> None:
    """What an administrator's tool does: our settings, and these on top. Returns once the broker answers with
    them.

    A controller confirms a change before the brokers have applied it.
    """
    named = {name.replace("_", "."): value for name, value in configs.items()}
    async with raw_admin(broker) as admin:
        resource = ConfigResource(ConfigResourceType.TOPIC, topic, topic_settings(topic, 1) | named)
        [answer] = await admin.alter_configs([resource])
    assert [resource[0] for resource in answer.resources] == [0]

    async def applied() -> bool:
        found = await settings_of(broker, topic)
        return {name: found[name][0] for name in named} == named

    await await_until(applied, f"{named} of {topic} at the broker")


async def ask_as_others_do(broker: KafkaBroker, *topics: str) -> None:
    """A dashboard looks at topics that are not there yet: Kafka creates them as it likes."""
    async with raw_admin(broker) as admin:
        await admin._send_request(
            MetadataRequest([str(topic) for topic in topics], allow_auto_topic_creation=True)
        )
    async with AIOKafkaProducer(**broker.client_settings()) as producer:
        for topic in topics:
            await producer.send_and_wait(topic, b"before", partition=0)


async def test_asking_for_a_topic_does_not_create_it(
    kafka: KafkaBroker, log: KafkaLog, topic_name: Callable[[str], str]
) -> None:
    """A service starts before the topics are there: Kafka must not make them in its place, for seven days."""
    partition = Partition(topic_name("ledger"), 0)
    with pytest.raises(LogError, match="create its topic first"):
        await log.append([Message(partition, b"{}")])
    with pytest.raises(LogError, match="create its topic first"):
        await log.end_offsets([partition])
    reader = log.reader({partition: 0})
    with pytest.raises(LogError, match="create its topic first"):
        await reader.read()
    await reader.close()
    await asyncio.sleep(CREATION_S)  # clock: in which the broker would create it
    assert partition.topic not in await topics_of(kafka)


async def test_a_deleted_topic_is_not_created_by_its_readers_and_writers(
    kafka: KafkaBroker, log: KafkaLog, topic_name: Callable[[str], str]
) -> None:
    """An administrator deletes the topic under running services, whose clients go on asking for its
    leaders."""
    partition = Partition(topic_name("ledger"), 0)
    await log.create({partition.topic: 1})
    await log.append([Message(partition, b"{}")])
    reader = log.reader({partition: 0})
    assert await reader.read()
    async with raw_admin(kafka) as admin:
        await admin.delete_topics([partition.topic])
    clients = [log._writers["ledger"]._producer.client, reader._consumer._client]
    for client in clients:
        await client.force_metadata_update()
    await asyncio.sleep(CREATION_S)  # clock: in which the broker would create it
    assert partition.topic not in await topics_of(kafka)
    await reader.close()


async def test_every_setting_of_a_new_topic_is_its_own(
    kafka: KafkaBroker, log: KafkaLog, topic_name: Callable[[str], str]
) -> None:
    """The broker's defaults are changed later, and no topic of ours follows them."""
    topic = topic_name("ledger")
    await log.create({topic: 2})
    found = await settings_of(kafka, topic)
    wanted = topic_settings(topic, 1)
    assert wanted["retention.ms"] == "-1"
    assert {name: found[name] for name in wanted} == {
        name: (value, SET_BY_TOPIC) for name, value in wanted.items()
    }


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("retention.ms", STOCK_RETENTION_MS),
        ("retention.bytes", "1000000"),
        ("cleanup.policy", "compact"),
        ("unclean.leader.election.enable", "true"),
        ("max.message.bytes", "900000"),
    ],
)
async def test_a_setting_that_could_lose_records_is_refused(
    kafka: KafkaBroker, log: KafkaLog, topic_name: Callable[[str], str], setting: str, value: str
) -> None:
    """A clean-up script of the cluster's owner goes over all topics: the next start of a service names what
    it did."""
    topic = topic_name("ledger")
    await log.create({topic: 1})
    await set_to(kafka, topic, **{setting.replace(".", "_"): value})
    wanted = topic_settings(topic, 1)[setting]
    with pytest.raises(ConfigurationError) as refused:
        await log.create({topic: 1})
    assert f"{topic}: {setting} is {value}, must be {wanted}" in str(refused.value)
    assert f"penstock.log.kafka_setup kafka://{kafka.bootstrap} --correct" in str(refused.value)
    assert str(refused.value).count("must be") == 1


async def test_a_stricter_setting_is_left_alone(
    kafka: KafkaBroker, log: KafkaLog, topic_name: Callable[[str], str]
) -> None:
    """The owner of the cluster lets larger records through: nothing is lost by it."""
    topic = topic_name("ledger")
    await log.create({topic: 1})
    await set_to(kafka, topic, max_message_bytes="5000000")
    await log.create({topic: 1})


# --- the set-up command
# ---------------------------------------------------------------------------------------


@pytest_asyncio.fixture
async def stock_broker(kafka: KafkaBroker) -> AsyncIterator[KafkaBroker]:
    """The broker without Penstock's topics: what other tests left goes, and so does what this one makes."""
    await delete_ours(kafka)
    yield kafka
    await delete_ours(kafka)


async def delete_ours(broker: KafkaBroker) -> None:
    there = sorted(set(await topics_of(broker)) & set(Topic))
    async with raw_admin(broker) as admin:
        await admin.delete_topics(there)

    async def gone() -> bool:
        return not set(await topics_of(broker)) & set(Topic)

    await await_until(gone, f"the end of {there}")


def run_module(module: str, *arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=REPOSITORY,
        env=clean_environment(**environment),
        capture_output=True,
        text=True,
        check=False,
    )


async def test_a_ledger_that_kafka_made_is_refused_and_the_command_in_the_message_mends_it(
    stock_broker: KafkaBroker,
) -> None:
    """Day one: a dashboard asked for the topics before anybody ran the set-up. Nothing works until they are
    right."""
    await ask_as_others_do(stock_broker, *Topic)
    assert (await settings_of(stock_broker, Topic.LEDGER))["retention.ms"][0] == STOCK_RETENTION_MS

    first = run_module("penstock.log.kafka_setup", stock_broker.url())
    assert first.returncode == 2, first.stdout + first.stderr
    refused = run_module(
        "penstock_services.placer", PENSTOCK_LOG=stock_broker.url(), PENSTOCK_OPERATOR_KEY="trust-log"
    )
    assert refused.returncode == 2, refused.stderr
    for output in (first.stderr, refused.stderr):
        assert "Traceback" not in output
        assert f"penstock.ledger.v1: retention.ms is {STOCK_RETENTION_MS}, must be -1" in output
        assert f"penstock.jobs.v1: retention.ms is {STOCK_RETENTION_MS}, must be -1" in output
    [command] = [
        line.partition("`")[2].strip("`.") for line in refused.stderr.splitlines() if "--correct" in line
    ]

    argv = shlex.split(command)
    assert argv[:3] == ["python", "-m", "penstock.log.kafka_setup"]
    mended = run_module(argv[2], *argv[3:])
    assert mended.returncode == 0, mended.stdout + mended.stderr
    assert f"penstock.ledger.v1: retention.ms was {STOCK_RETENTION_MS}, is now -1" in mended.stdout
    assert (await settings_of(stock_broker, Topic.LEDGER))["retention.ms"] == ("-1", SET_BY_TOPIC)
    again = run_module("penstock.log.kafka_setup", stock_broker.url(), "--correct")
    assert again.returncode == 0
    assert "is now" not in again.stdout

    log = await KafkaLog(stock_broker.bootstrap, "placer").start()
    ledger = Partition(Topic.LEDGER, 0)
    await log.create({Topic.LEDGER: 1})
    assert await log.end_offsets([ledger]) == {ledger: 1}, "what was in it is still there"
    await log.close()


async def test_the_correction_changes_nothing_else(stock_broker: KafkaBroker) -> None:
    """The owner compresses this topic, lets larger records through, and gave it more partitions: the owner's
    business."""
    log = await KafkaLog(stock_broker.bootstrap, "test").start()
    await log.create({Topic.DEAD_LETTERS: 3})
    await log.close()
    await set_to(
        stock_broker,
        Topic.DEAD_LETTERS,
        compression_type="zstd",
        max_message_bytes="5000000",
        unclean_leader_election_enable="true",
    )
    done = run_module("penstock.log.kafka_setup", stock_broker.url(), "--correct")
    assert done.returncode == 0, done.stderr
    found = await settings_of(stock_broker, Topic.DEAD_LETTERS)
    assert found["compression.type"] == ("zstd", SET_BY_TOPIC)
    assert found["max.message.bytes"] == ("5000000", SET_BY_TOPIC)
    assert "penstock.deadletters.v1: max.message.bytes is 5000000, 1048588 would do" in done.stdout
    assert found["unclean.leader.election.enable"] == ("false", SET_BY_TOPIC)
    async with raw_admin(stock_broker) as admin:
        [described] = await admin.describe_topics([Topic.DEAD_LETTERS.value])
    assert len(described["partitions"]) == 3
