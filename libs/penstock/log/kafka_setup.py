"""Set-up of a Kafka cluster for Penstock: its topics, and the rights of each service (ACLs). Run again at any
time.

    python -m penstock.log.kafka_setup kafka://admin:password@host:9092 [--rights FILE] [--cells N]
        [--correct] [--withdraw IDENTITY]

Prints the resulting topics and rights, and the changes. Exit status: 0 done, 1 the cluster refused or cannot
be reached, 2 wrong arguments, or a topic could lose records and `--correct` was not given.
"""

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from penstock import commandline
from penstock.errors import ConfigurationError
from penstock.log.kafka.kafka import KafkaLog
from penstock.log.open import open_log
from penstock.log.topic_settings import JOIN, Rights, topic_partitions
from penstock.model.schema.topics import GUARD_GROUPS, Topic

MAX_CELLS = 1_000  # PENSTOCK_CELL_INDEX is 0–999


async def grant_all(log: KafkaLog, rights: Rights) -> int:
    """Gives every identity its rights; returns how many. Raises `LogError`."""
    count = 0
    for identity, verbs in rights.items():
        for verb, names in verbs.items():
            for name in names:
                await (
                    log.topics.grant_join(identity, name)
                    if verb == JOIN
                    else log.topics.grant(identity, verb, name)
                )
                count += 1
    return count


def read_rights(path: Path) -> Rights:
    """The rights in a YAML file. Raises `ConfigurationError` if it names a verb, a topic or a group that does
    not exist."""
    import yaml

    try:
        table = yaml.safe_load(path.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigurationError(f"--rights {path}: {error}") from error
    if not isinstance(table, dict) or not all(isinstance(verbs, dict) for verbs in table.values()):
        raise ConfigurationError(f"--rights {path}: is not a table; see infra/kafka/acls.yaml")
    for identity, verbs in table.items():
        for verb, names in verbs.items():
            unknown = sorted(set(names) - ({GUARD_GROUPS} if verb == JOIN else set(Topic)))
            if verb not in ("read", "write", JOIN) or unknown:
                raise ConfigurationError(
                    f"--rights {path}: {identity}: {verb} {', '.join(unknown)}: give read or write, "
                    f"and topics of Penstock; or {JOIN}, and {GUARD_GROUPS}"
                )
    return dict(table)


async def prepare(
    url: str, rights: Rights, cells: int, *, correct: bool, withdraw: Sequence[str] = ()
) -> list[str]:
    """Creates missing topics and rights; returns a line for each existing one and each change.

    `correct`: changes settings of topics that exist. `withdraw`: identities that lose all rights. Raises
    `LogError`; `ConfigurationError` for a topic that could lose records.
    """
    found = open_log(url, "setup")
    if not isinstance(found, KafkaLog):
        raise ConfigurationError("the URL must begin with kafka://; other logs need no preparation")
    log = await found.start()
    try:
        wanted = topic_partitions(cells)
        corrected = await log.topics.correct(await log.topics.ensure(wanted)) if correct else []
        there = await log.topics.create(wanted)
        other = await log.topics.differences(there)
        granted = await grant_all(log, rights)
        withdrawn = [(identity, await log.topics.withdraw(identity)) for identity in withdraw]
    finally:
        await log.close()
    counts = ", ".join(f"{topic} ({each.partitions}, {each.replicas})" for topic, each in there.items())
    return [
        *(f"{each.topic}: {each.setting} was {each.found}, is now {each.wanted}" for each in corrected),
        *(f"{each.topic}: {each.setting} is {each.found}, {each.wanted} would do" for each in other),
        f"topics (partitions, copies): {counts}",
        f"rights: {granted} for {len(rights)} identities",
        *(f"withdrawn: all {count} rights of {identity}" for identity, count in withdrawn),
    ]


app = commandline.new_app()


@app.command()
def prepare_kafka(
    url: Annotated[
        str,
        typer.Argument(
            envvar="PENSTOCK_LOG", help="URL of an administrator: kafka://[user:password@]host:port."
        ),
    ] = "",
    rights: Annotated[
        Path | None, typer.Option(help="infra/kafka/acls.yaml, for a cluster that checks rights.")
    ] = None,
    cells: Annotated[
        int, typer.Option(min=1, max=MAX_CELLS, help="Scheduling domains: partitions of the cell topics.")
    ] = 1,
    correct: Annotated[
        bool,
        typer.Option(
            "--correct", help="Also change settings of existing topics that differ from Penstock's."
        ),
    ] = False,
    withdraw: Annotated[
        list[str] | None,
        typer.Option(metavar="IDENTITY", help="Take away all rights of this identity, at once; repeatable."),
    ] = None,
) -> None:
    """Prepare a Kafka for Penstock: its topics, and the rights of each service.
    May be run again at any time."""
    if not url:
        raise ConfigurationError(
            "URL: not given; give kafka://[user:password@]host:port, or set PENSTOCK_LOG"
        )
    logging.getLogger("aiokafka").setLevel(logging.CRITICAL)
    table = read_rights(rights) if rights is not None else {}
    if both := sorted({*(withdraw or ())} & {*table}):
        raise ConfigurationError(
            f"--withdraw {both[0]}: --rights {rights} gives it rights; remove it there first"
        )
    print("\n".join(asyncio.run(prepare(url, table, cells, correct=correct, withdraw=withdraw or ()))))


if __name__ == "__main__":
    commandline.start(app, "python -m penstock.log.kafka_setup")
