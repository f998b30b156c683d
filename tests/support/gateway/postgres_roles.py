"""Removal of the roles that a test has made: they belong to the server, not to the test's database."""

from collections.abc import Iterable
from urllib.parse import urlsplit

import asyncpg


async def drop_roles(dsn: str, urls: Iterable[str]) -> None:
    """Those of these URLs, with what they own in the database of `dsn`, an administrator's."""
    admin = await asyncpg.connect(dsn)
    for url in urls:
        role = urlsplit(url).username
        await admin.execute(f"DROP OWNED BY {role} CASCADE")
        await admin.execute(f"DROP ROLE {role}")
    await admin.close()
