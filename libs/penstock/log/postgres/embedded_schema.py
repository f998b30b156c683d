"""SQL schema and statements of the embedded log, and the encoding of headers in one column.

`partitions.head` is the next offset. An append locks the heads it needs in id order (so appends cannot
deadlock), raises them and inserts its records in one transaction: offsets are given in commit order, leave no
gaps, and a record becomes visible together with all before it. `wanted` is the head that a partition must
have for anything to be appended, or NULL for any. The notification is part of the same transaction, so a
crash cannot lose the wake-up of a committed record.

`append` runs with the rights of the schema's owner, so that a service needs none on the tables: it may append
to the topics that `rights` lists for its role. A role that may insert into the table of records, such as the
owner, may append to all. `read` does the same for roles that may not read all contents: for other keys than
their own they get offsets and times. (They are in PL/pgSQL, which caches the plan: an SQL function with its
owner's rights is planned at each call.)
"""

import struct
from functools import lru_cache

import asyncpg

from penstock.log.port import Headers

CHANNEL = "penstock_log"
EVERYTHING = "*"  # a notification without a partition: look at all of them
VERSION = 5  # stored in the schema's comment; raised with every change below
COMMENT = "penstock log"
_LOCK_KEY = 0x70656E73746F636B  # advisory lock around the creation: the letters of "penstock"

# 7,900 of the 8,000 bytes that Postgres allows per notification.
_CREATE = """
CREATE SCHEMA IF NOT EXISTS penstock_log;
CREATE TABLE IF NOT EXISTS penstock_log.partitions (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic text NOT NULL,
    index integer NOT NULL CHECK (index >= 0),
    head bigint NOT NULL DEFAULT 0,
    UNIQUE (topic, index)
) WITH (fillfactor = 20);
CREATE TABLE IF NOT EXISTS penstock_log.records (
    partition_id integer NOT NULL,
    position bigint NOT NULL,
    timestamp_ms bigint NOT NULL,
    key bytea,
    headers bytea NOT NULL,
    value bytea NOT NULL,
    PRIMARY KEY (partition_id, position)
);
ALTER TABLE penstock_log.records ALTER COLUMN value SET STORAGE EXTERNAL;
CREATE TABLE IF NOT EXISTS penstock_log.rights (
    role name NOT NULL,
    verb text NOT NULL CHECK (verb IN ('read', 'write', 'expire')),
    topic text NOT NULL,
    PRIMARY KEY (role, verb, topic)
);
ALTER TABLE penstock_log.rights ADD COLUMN IF NOT EXISTS key bytea;
DROP FUNCTION IF EXISTS penstock_log.append(
    integer[], integer[], integer[], integer[], bytea[], bytea[], bytea[]
);
CREATE OR REPLACE FUNCTION penstock_log.append(
    ids integer[], counts integer[],
    slots integer[], ranks integer[], keys bytea[], headers bytea[], contents bytea[], wanted bigint[],
    OUT bases bigint[], OUT stamp_ms bigint
) LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
DECLARE
    news text;
    denied text;
BEGIN
    IF NOT has_table_privilege(session_user, 'penstock_log.records', 'INSERT') THEN
        SELECT string_agg(DISTINCT p.topic, ', ') INTO denied FROM penstock_log.partitions p
        WHERE p.id = ANY(ids) AND NOT EXISTS (
            SELECT FROM penstock_log.rights r
            WHERE r.role = session_user AND r.verb = 'write' AND r.topic = p.topic
        );
        IF denied IS NOT NULL THEN
            RAISE EXCEPTION 'role % may not append to %', session_user, denied
                USING ERRCODE = 'insufficient_privilege';
        END IF;
    END IF;
    PERFORM 1 FROM penstock_log.partitions p WHERE p.id = ANY(ids) ORDER BY p.id FOR UPDATE;
    stamp_ms := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    WITH raised AS (
        UPDATE penstock_log.partitions p SET head = p.head + w.n
        FROM unnest(ids, counts) AS w(id, n) WHERE p.id = w.id
        RETURNING p.id, p.head - w.n AS base, p.head
    )
    SELECT array_agg(r.base ORDER BY r.id), string_agg(r.id || ':' || r.head, ',') INTO bases, news
    FROM raised r;
    IF cardinality(bases) IS DISTINCT FROM cardinality(ids) THEN
        RAISE EXCEPTION 'unknown partition among %', ids;
    END IF;
    IF EXISTS (SELECT 1 FROM unnest(bases, wanted) AS w(base, want) WHERE w.base <> w.want) THEN
        RAISE EXCEPTION 'another record was appended first' USING ERRCODE = 'serialization_failure';
    END IF;
    INSERT INTO penstock_log.records (partition_id, position, timestamp_ms, key, headers, value)
    SELECT ids[r.slot], bases[r.slot] + r.rank, stamp_ms, r.key, r.headers, r.content
    FROM unnest(slots, ranks, keys, headers, contents) AS r(slot, rank, key, headers, content);
    PERFORM pg_notify('penstock_log', CASE WHEN length(news) > 7900 THEN '*' ELSE news END);
END $body$;
CREATE OR REPLACE FUNCTION penstock_log.read(ids integer[], first bigint[], row_limit integer)
RETURNS TABLE (id integer, "position" bigint, timestamp_ms bigint, key bytea, headers bytea, value bytea)
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $body$
#variable_conflict use_column
BEGIN
    RETURN QUERY SELECT w.id, r.position, r.timestamp_ms, CASE WHEN m.may THEN r.key ELSE '' END,
        CASE WHEN m.may THEN r.headers ELSE '' END, CASE WHEN m.may THEN r.value ELSE '' END
    FROM unnest(ids, first) WITH ORDINALITY AS w(id, first, turn)
    JOIN penstock_log.partitions p ON p.id = w.id
    JOIN penstock_log.rights g ON g.role = session_user AND g.verb = 'read' AND g.topic = p.topic
    CROSS JOIN LATERAL (
        SELECT * FROM penstock_log.records
        WHERE partition_id = w.id AND position >= w.first ORDER BY position LIMIT row_limit
    ) AS r
    CROSS JOIN LATERAL (SELECT g.key IS NULL OR r.key IS NOT DISTINCT FROM g.key AS may) AS m
    ORDER BY w.turn, r.position
    LIMIT row_limit;
END $body$;
"""

APPEND = "SELECT bases, stamp_ms FROM penstock_log.append($1, $2, $3, $4, $5, $6, $7, $8)"
PARTITIONS = "SELECT id, topic, index FROM penstock_log.partitions"
HEADS = "SELECT id, head FROM penstock_log.partitions WHERE id = ANY($1::integer[])"
BEGINNINGS = """
SELECT p.id, coalesce(
    (SELECT min(position) FROM penstock_log.records WHERE partition_id = p.id), p.head
) AS first
FROM penstock_log.partitions p WHERE p.id = ANY($1::integer[])
"""
ADD_PARTITIONS = """
INSERT INTO penstock_log.partitions (topic, index)
SELECT t.topic, i FROM unnest($1::text[], $2::integer[]) AS t(topic, n)
CROSS JOIN generate_series(0, t.n - 1) AS i
ORDER BY t.topic, i
ON CONFLICT (topic, index) DO NOTHING
"""
EXPIRE = """
WITH oldest AS (
    SELECT p.id, r.position,
        r.timestamp_ms < extract(epoch FROM clock_timestamp()) * 1000 - t.retention_ms AS expired
    FROM unnest($1::text[], $2::bigint[]) AS t(topic, retention_ms)
    JOIN penstock_log.partitions p ON p.topic = t.topic
    CROSS JOIN LATERAL (
        SELECT position, timestamp_ms FROM penstock_log.records
        WHERE partition_id = p.id ORDER BY position LIMIT $3
    ) AS r
), first_to_stay AS (
    SELECT id, min(position) AS position FROM oldest WHERE NOT expired GROUP BY id
), gone AS (
    DELETE FROM penstock_log.records r USING oldest o LEFT JOIN first_to_stay s ON s.id = o.id
    WHERE r.partition_id = o.id AND r.position = o.position AND o.expired
        AND o.position < coalesce(s.position, o.position + 1)
    RETURNING 1
)
SELECT count(*) FROM gone
"""
DELETE_BEFORE = """
WITH oldest AS (
    SELECT position FROM penstock_log.records
    WHERE partition_id = $1 AND position < $2 ORDER BY position LIMIT $3
)
DELETE FROM penstock_log.records WHERE partition_id = $1 AND position <= (SELECT max(position) FROM oldest)
"""
# if true, a delete removes no row and raises no error
SOME_HIDDEN = "SELECT row_security_active('penstock_log.records')"
EXPIRE_ALONE = f"SELECT pg_try_advisory_xact_lock({_LOCK_KEY + 1})"  # one program at a time
ANY_EXPIRED = """
SELECT EXISTS (
    SELECT FROM unnest($1::text[], $2::bigint[]) AS t(topic, retention_ms)
    JOIN penstock_log.partitions p ON p.topic = t.topic
    CROSS JOIN LATERAL (
        SELECT timestamp_ms FROM penstock_log.records WHERE partition_id = p.id ORDER BY position LIMIT 1
    ) AS r
    WHERE r.timestamp_ms < extract(epoch FROM clock_timestamp()) * 1000 - t.retention_ms
) AS expired
"""
READ = """
SELECT w.id, r.position, r.timestamp_ms, r.key, r.headers, r.value
FROM unnest($1::integer[], $2::bigint[]) WITH ORDINALITY AS w(id, first, turn)
CROSS JOIN LATERAL (
    SELECT position, timestamp_ms, key, headers, value FROM penstock_log.records
    WHERE partition_id = w.id AND position >= w.first ORDER BY position LIMIT $3
) AS r
ORDER BY w.turn, r.position
LIMIT $3
"""

READ_OWN = "SELECT * FROM penstock_log.read($1, $2, $3)"  # for roles that may not read every key
OWN_RIGHTS = (  # whether this role reads every key, and whether it deletes what has expired
    "SELECT has_column_privilege('penstock_log.records', 'value', 'SELECT'), "
    "has_table_privilege('penstock_log.records', 'DELETE')"
)


async def ensure_schema(connection: asyncpg.Connection) -> None:
    """Creates or renews the log's tables; several programs may do so at once.

    Tables of a newer version stay: during an upgrade a service of the former version may start once more.
    """
    if await made_by(connection) >= VERSION:
        return
    async with connection.transaction():
        await connection.execute("SELECT pg_advisory_xact_lock($1)", _LOCK_KEY)
        if await made_by(connection) < VERSION:
            await connection.execute(_CREATE)
            await connection.execute(f"COMMENT ON SCHEMA penstock_log IS '{COMMENT} {VERSION}'")


async def made_by(connection: asyncpg.Connection) -> int:
    """The version that made the tables; 0: there are none, or they have no version."""
    comment = await connection.fetchval(
        "SELECT obj_description(to_regnamespace('penstock_log'), 'pg_namespace')"
    )
    number = (comment or "").removeprefix(COMMENT).strip()
    return int(number) if number.isdecimal() else 0


_LENGTHS = struct.Struct(">HI")  # bytes of the name, bytes of the value


def pack_headers(headers: Headers) -> bytes:
    """Per header: name length (2 bytes), value length (4 bytes), name (UTF-8), value."""
    if not headers:
        return b""
    parts: list[bytes] = []
    for name, value in headers:
        parts.append(_label(name, len(value)))
        parts.append(value)
    return b"".join(parts)


@lru_cache(maxsize=4_096)
def _label(name: str, value_bytes: int) -> bytes:
    label = name.encode()
    return _LENGTHS.pack(len(label), value_bytes) + label


def unpack_headers(packed: bytes) -> Headers:
    """The inverse of `pack_headers`."""
    headers = []
    at, end = 0, len(packed)
    while at < end:
        name_bytes, value_bytes = _LENGTHS.unpack_from(packed, at)
        at += _LENGTHS.size
        middle = at + name_bytes
        headers.append((packed[at:middle].decode(), packed[middle : middle + value_bytes]))
        at = middle + value_bytes
    return tuple(headers)
