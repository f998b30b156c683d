"""Topics of a Kafka cluster: creating them, verifying and correcting their settings, and rights on them
(ACLs).

Ideal: a topic that exists has the settings of `topic_settings`. Departure: any client may have made or
changed it, and so may Kafka, which by default creates a topic that a client names and deletes its records
after seven days. So no request here lets Kafka create a topic, settings are read back at each start, and a
topic that could lose records is refused.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

from aiokafka.admin import AIOKafkaAdminClient, NewPartitions, NewTopic
from aiokafka.admin.config_resource import ConfigResource, ConfigResourceType
from aiokafka.errors import for_code

from penstock.backoff import retry
from penstock.errors import ConfigurationError, LogError, NotAllowed
from penstock.log.kafka.aiokafka_gaps import (
    alter_topic_configs,
    create_group_acl,
    create_topic_acl,
    delete_acls,
)
from penstock.log.topic_settings import MAX_REPLICAS, suffices, topic_settings
from penstock.model.schema.topics import CELL_TOPICS

LOOK_S = 0.05  # between two looks for a topic
VISIBLE_LIMIT_S = (
    60.0  # leaders are there within 0.1 s, on every broker soon after; a busy machine takes more
)
UNKNOWN_TOPIC, TOPIC_DENIED, CLUSTER_DENIED, TOPIC_EXISTS = 3, 29, 31, 36  # Kafka error codes
SECURITY_DISABLED = 54
OPERATIONS = {"read": 3, "write": 4}  # Kafka's AclOperation
DESCRIBE_CONFIGS = 10  # the same; each right on a topic includes reading its settings
PARTITIONS = "partitions"  # named like a setting in messages
Result = TypeVar("Result")


class Ask(Protocol):
    """A function that sends one admin request and repeats it while the cluster is away. Raises `LogError`."""

    def __call__(self, question: Callable[[AIOKafkaAdminClient], Awaitable[Result]]) -> Awaitable[Result]: ...


class _Absent(LogError):
    """A created topic is not yet known to every broker, or has no leaders."""


class Found(NamedTuple):
    """A topic as the cluster describes it."""

    partitions: int
    replicas: int
    """Replicas of the partition that has the fewest."""
    led: bool
    """Whether each partition has a leader at this moment."""


class Difference(NamedTuple):
    """A setting of an existing topic that is not as wanted."""

    topic: str
    setting: str
    found: str
    wanted: str

    @property
    def harmless(self) -> bool:
        """Whether no record can be lost by it."""
        return self.setting != PARTITIONS and suffices(self.setting, self.found, self.wanted)

    def __str__(self) -> str:
        return f"{self.topic}: {self.setting} is {self.found}, must be {self.wanted}"


class KafkaTopics:
    """The topics, as one identity sees them. `admin_url`: the URL in commands that messages name."""

    def __init__(self, identity: str, admin_url: str, ask: Ask) -> None:
        self._identity = identity
        self._admin_url = admin_url
        self._ask = ask

    async def create(self, topics: Mapping[str, int]) -> dict[str, Found]:
        """Creates missing topics (topic → partitions) and verifies existing ones.

        Existing topics need no right to create; for a missing one without that right raises `NotAllowed`.
        Raises `ConfigurationError` for a topic that could lose records.
        """
        found = await self.ensure(topics)
        wrong = await self.harmful(found)
        if wrong:
            raise self.refusal(wrong, topics)
        return found

    async def ensure(self, topics: Mapping[str, int]) -> dict[str, Found]:
        """Creates missing topics and adds partitions, never removes any; settings are not checked."""
        there = await self.describe(topics)
        missing = {topic: count for topic, count in topics.items() if topic not in there}
        if missing:
            await self._create(missing)
        few = {
            topic: count
            for topic, count in topics.items()
            if topic in there and there[topic].partitions < count
        }
        if few:
            await self._grow(few, there, topics)
        return await self._wait_visible(topics)

    async def describe(self, topics: Iterable[str]) -> dict[str, Found]:
        """The existing ones of these topics."""
        wanted = sorted(topics)
        if not wanted:
            return {}
        found = {}
        for described in await self._ask(lambda admin: admin.describe_topics(wanted)):
            code, topic, partitions = described["error_code"], described["topic"], described["partitions"]
            if code == TOPIC_DENIED:
                raise NotAllowed(f"{self._identity} may neither read nor write {topic}")
            if code != UNKNOWN_TOPIC and partitions:
                found[topic] = Found(
                    len(partitions),
                    min(len(partition["replicas"]) for partition in partitions),
                    all(partition["leader"] >= 0 for partition in partitions),
                )
        return found

    async def differences(self, topics: Mapping[str, Found]) -> list[Difference]:
        """Settings that differ from `topic_settings`, in order of the topics."""
        values = await retry(
            lambda: self._values(topics),
            (_Absent,),
            first_s=LOOK_S,
            longest_s=LOOK_S,
            limit_s=VISIBLE_LIMIT_S,
        )
        return [
            Difference(topic, setting, values[topic].get(setting, "not known"), wanted)
            for topic, found in topics.items()
            for setting, wanted in topic_settings(topic, found.replicas).items()
            if values[topic].get(setting) != wanted
        ]

    async def harmful(self, topics: Mapping[str, Found]) -> list[Difference]:
        """The differences by which records could be lost."""
        return [difference for difference in await self.differences(topics) if not difference.harmless]

    async def correct(self, topics: Mapping[str, Found]) -> list[Difference]:
        """Corrects only settings that could lose records; returns their old values once a broker's answer
        shows the change.

        The other brokers follow within a moment; one that still has the old value refuses a service's start
        until then. Raises `LogError` with the changes that the cluster refused; the others are made.
        """
        differences = await self.harmful(topics)
        if not differences:
            return []
        changes: dict[str, dict[str, str]] = {}
        for difference in differences:
            changes.setdefault(difference.topic, {})[difference.setting] = difference.wanted
        answer = await self._ask(lambda admin: alter_topic_configs(admin, changes))
        refused = [
            f"{topic}: {message or for_code(code).__name__}"
            for code, message, _, topic in answer.responses
            if code
        ]
        if refused:
            raise LogError("the cluster refused to change settings:\n" + "\n".join(refused))

        async def look() -> None:
            left = await self.harmful(topics)
            if left:
                raise _Absent(f"changed, but after {VISIBLE_LIMIT_S:.0f} s still: {left[0]}")

        await retry(look, (_Absent,), first_s=LOOK_S, longest_s=LOOK_S, limit_s=VISIBLE_LIMIT_S)
        return differences

    def refusal(self, wrong: Sequence[Difference], topics: Mapping[str, int]) -> ConfigurationError:
        """The error that names each setting, the value found, the value wanted,
        and the command that sets it."""
        lines = "\n".join(f"  {difference}" for difference in wrong)
        cells = max((topics[topic] for topic in CELL_TOPICS if topic in topics), default=max(topics.values()))
        command = f"python -m penstock.log.kafka_setup {self._admin_url} --correct --cells {cells}"
        return ConfigurationError(
            "Kafka could lose records of these topics, which cannot be restored from elsewhere:\n"
            f"{lines}\nAn administrator of the cluster corrects them with `{command}`"
        )

    async def grant(self, identity: str, verb: str, topic: str) -> None:
        """Lets another identity `read` or `write` a topic, and read its settings;
        idempotent. Raises `LogError`."""
        for operation in (OPERATIONS[verb], DESCRIBE_CONFIGS):
            grant = partial(create_topic_acl, identity=identity, operation=operation, topic=topic)
            answer = await self._ask(grant)
            self._granted(answer, f"{identity}'s right to {verb} {topic}")

    async def grant_join(self, identity: str, prefix: str) -> None:
        """Lets another identity join the consumer groups with this prefix; idempotent. Raises `LogError`."""
        answer = await self._ask(lambda admin: create_group_acl(admin, identity, OPERATIONS["read"], prefix))
        self._granted(answer, f"{identity}'s right to join {prefix}")

    async def withdraw(self, identity: str) -> int:
        """Takes away all rights of an identity, on open connections as well. Returns their number.

        Raises `LogError`.
        """
        answer = await self._ask(lambda admin: delete_acls(admin, identity))
        code, message, deleted = answer.filter_responses[0]
        self._refused(code, message, f"to withdraw {identity}'s rights")
        return len(deleted)

    # --- inside ------------------------------------------------------------------------------------------

    def _granted(self, answer: Any, what: str) -> None:
        """Raises `LogError` unless the cluster gave this right."""
        code, message = answer.creation_responses[0]
        self._refused(code, message, what)

    def _refused(self, code: int, message: str | None, what: str) -> None:
        """Raises `LogError` unless the cluster changed these rights."""
        if code == CLUSTER_DENIED:
            raise NotAllowed(f"{self._identity} may not change rights: {message}")
        if code == SECURITY_DISABLED:
            raise LogError(
                f"this Kafka checks no rights ({message}): leave out --rights, or give its brokers an "
                "authorizer"
            )
        if code:
            raise LogError(f"Kafka refused {what}: {message or for_code(code)}")

    async def _create(self, missing: Mapping[str, int]) -> None:
        brokers = (await self._ask(lambda admin: admin.describe_cluster()))["brokers"]
        replicas = min(MAX_REPLICAS, max(1, len(brokers)))
        wanted = [
            NewTopic(topic, count, replicas, topic_configs=topic_settings(topic, replicas))
            for topic, count in missing.items()
        ]
        answer = await self._ask(lambda admin: admin.create_topics(wanted))
        for topic, code, *_ in answer.topic_errors:  # it does not raise
            if code == TOPIC_DENIED:
                raise NotAllowed(f"{self._identity} may not create {topic}")
            if code not in (0, TOPIC_EXISTS):
                raise LogError(f"Kafka did not create {topic}: {for_code(code).__name__}")

    async def _grow(
        self, few: Mapping[str, int], there: Mapping[str, Found], topics: Mapping[str, int]
    ) -> None:
        wanted = {topic: NewPartitions(count) for topic, count in few.items()}
        try:
            await self._ask(lambda admin: admin.create_partitions(wanted))
        except NotAllowed as error:
            wrong = [
                Difference(topic, PARTITIONS, str(there[topic].partitions), str(count))
                for topic, count in few.items()
            ]
            raise self.refusal(wrong, topics) from error

    async def _wait_visible(self, topics: Mapping[str, int]) -> dict[str, Found]:
        async def look() -> dict[str, Found]:
            found = await self.describe(topics)
            absent = sorted(
                topic
                for topic, count in topics.items()
                if topic not in found or found[topic].partitions < count or not found[topic].led
            )
            if absent:
                raise _Absent(
                    f"{', '.join(absent)}: not there, or without a leader, after {VISIBLE_LIMIT_S:.0f} s"
                )
            return found

        return await retry(look, (_Absent,), first_s=LOOK_S, longest_s=LOOK_S, limit_s=VISIBLE_LIMIT_S)

    async def _values(self, topics: Iterable[str]) -> dict[str, dict[str, str]]:
        """Topic → setting → value, the topic's own or the broker's default."""
        resources = [
            ConfigResource(ConfigResourceType.TOPIC, topic, topic_settings(topic, 1)) for topic in topics
        ]
        found: dict[str, dict[str, str]] = {}
        if not resources:
            return found
        for answer in await self._ask(lambda admin: admin.describe_configs(resources)):
            for code, message, _, topic, entries in answer.resources:
                if code == TOPIC_DENIED:
                    raise NotAllowed(
                        f"{self._identity} may not read the settings of {topic}: Kafka could be deleting "
                        "its records. Give it the right DESCRIBE_CONFIGS: `python -m "
                        f"penstock.log.kafka_setup {self._admin_url} --rights infra/kafka/acls.yaml`"
                    )
                if code == UNKNOWN_TOPIC:
                    raise _Absent(f"{topic} is not known to every broker after {VISIBLE_LIMIT_S:.0f} s")
                if code:
                    raise LogError(
                        f"Kafka does not show the settings of {topic}: {message or for_code(code)}"
                    )
                found[topic] = {name: value for name, value, *_ in entries}
        return found
