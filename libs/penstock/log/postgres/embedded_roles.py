"""Access control of the embedded log: which role may append to, read and expire which topics, enforced by
Postgres.

Appending is checked by `penstock_log.append` once for each batch. Reading and expiring are checked by row
security, from which the owner of the tables is exempt: it costs nothing in an installation with one DSN for
all services.

A node's own role reads through `penstock_log.read`, which returns the records with the node's id as their
key; of the other records in the same partition it returns offsets and times, since a reader's offsets have no
gaps.
"""

import re
from hashlib import sha256

import asyncpg

from penstock.log.postgres.embedded_schema import ADD_PARTITIONS, ensure_schema
from penstock.log.topic_settings import FOR_EVER, JOIN, RETENTION_MS, Rights, topic_partitions
from penstock.model.schema.topics import Topic

NODE_REPORTER = "node-reporter"
NODE_REPORTER_RIGHTS: Rights = {
    NODE_REPORTER: {
        "write": [Topic.NODES, Topic.TELEMETRY, Topic.DEAD_LETTERS],
        "read": [Topic.ORDERS],
    }
}
"""As in infra/kafka/acls.yaml, for an installation that has no checkout; a test compares them."""

EXPIRES = "placer"
"""The service that deletes expired records: one runs per cell, and writes most of them."""

_SHORTEST_MS = min(ms for ms in RETENTION_MS.values() if ms != FOR_EVER)

# The inner SELECT refers to nothing outside, so that it is evaluated once for each statement and not for each
# row.
_VISIBLE = """partition_id = ANY (ARRAY(
    SELECT p.id FROM penstock_log.partitions p JOIN penstock_log.rights r ON r.topic = p.topic
    WHERE r.role = current_user AND r.verb {verbs}
))"""
_POLICIES = f"""
ALTER TABLE penstock_log.records ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS readers ON penstock_log.records;
CREATE POLICY readers ON penstock_log.records FOR SELECT USING (
    {_VISIBLE.format(verbs="IN ('read', 'expire')")}
);
ALTER TABLE penstock_log.rights ENABLE ROW LEVEL SECURITY;
DROP POLICY IF EXISTS own ON penstock_log.rights;
CREATE POLICY own ON penstock_log.rights FOR SELECT USING (role = current_user);
DROP POLICY IF EXISTS expired ON penstock_log.records;
CREATE POLICY expired ON penstock_log.records FOR DELETE USING (
    {_VISIBLE.format(verbs="= 'expire'")}
    AND timestamp_ms < extract(epoch FROM statement_timestamp()) * 1000 - {_SHORTEST_MS}
);
"""


def role_of(service: str) -> str:
    """The service's role in Postgres."""
    return f"penstock_{service.replace('-', '_')}"


def node_role(node_id: str) -> str:
    """The role of one node's reporter; not the node's id, which may be too long for a name in Postgres and
    have other characters."""
    readable = re.sub(r"[^a-z0-9]+", "_", node_id.lower())[:30].strip("_")
    return f"penstock_node_{readable}_{sha256(node_id.encode()).hexdigest()[:12]}"


async def grant_log(connection: asyncpg.Connection, rights: Rights, cells: int = 1) -> None:
    """Creates tables and partitions, and gives each service's role, which must exist, these rights and no
    others.

    `connection` is an administrator's: it owns the tables from now on, or has made them before.
    """
    await ensure_schema(connection)
    topics = topic_partitions(cells)
    await connection.execute(ADD_PARTITIONS, list(topics), list(topics.values()))
    async with connection.transaction():
        await connection.execute(_POLICIES)
        for service, verbs in rights.items():
            role = role_of(service)
            await connection.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA penstock_log FROM {role}")
            await connection.execute(f"GRANT USAGE ON SCHEMA penstock_log TO {role}")
            await connection.execute(f"GRANT SELECT ON ALL TABLES IN SCHEMA penstock_log TO {role}")
            given = [
                (role, verb, str(topic)) for verb, names in verbs.items() if verb != JOIN for topic in names
            ]
            if service == EXPIRES:
                await connection.execute(f"GRANT DELETE ON penstock_log.records TO {role}")
                given += [(role, "expire", topic) for topic, ms in RETENTION_MS.items() if ms != FOR_EVER]
            await connection.execute("DELETE FROM penstock_log.rights WHERE role = $1", role)
            await connection.executemany("INSERT INTO penstock_log.rights VALUES ($1, $2, $3)", given)


async def grant_node(connection: asyncpg.Connection, node_id: str, rights: Rights) -> None:
    """Gives the node's role, which must exist, the rights of a node-reporter; it may read only the records
    for this node.

    After `grant_log`, as the same administrator.
    """
    role, verbs = node_role(node_id), rights[NODE_REPORTER]
    own = {"read": node_id.encode()}
    given = [(role, verb, str(topic), own.get(verb)) for verb, names in verbs.items() for topic in names]
    await connection.execute(f"REVOKE ALL ON ALL TABLES IN SCHEMA penstock_log FROM {role}")
    await connection.execute(f"GRANT USAGE ON SCHEMA penstock_log TO {role}")
    await connection.execute(f"GRANT SELECT ON penstock_log.partitions, penstock_log.rights TO {role}")
    await connection.execute(
        f"GRANT SELECT (partition_id, position, timestamp_ms) ON penstock_log.records TO {role}"
    )
    await connection.execute("DELETE FROM penstock_log.rights WHERE role = $1", role)
    await connection.executemany(
        "INSERT INTO penstock_log.rights (role, verb, topic, key) VALUES ($1, $2, $3, $4)", given
    )
