"""Standing connection to the gateway, whose break reports to the cell that this machine is gone (decision
39).

Nothing is sent on it, and nothing on this node depends on it: the node works without a gateway.
"""

import asyncio
import logging
from pathlib import Path
from urllib.parse import quote

import httpx

from penstock.backoff import Backoff
from penstock.bearer import bearer_token
from penstock.errors import ConfigurationError
from penstock.keepalive import SOCKET_OPTIONS
from penstock.text.redaction import without_password
from penstock.tls import SYSTEM_CA, client_context, misfit

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.2, 5.0  # below a gateway's time-out for a replacement
CONNECT_TIMEOUT_S = 5.0
GOODBYE_TIMEOUT_S = 2.0

logger = logging.getLogger(__name__)


class Connection:
    """Of one reporter to one gateway. Raises `ConfigurationError` for files that cannot be used."""

    def __init__(self, gateway: str, node_id: str, token_file: Path | None, ca: Path | None = None) -> None:
        self._gateway = gateway
        self._ca = SYSTEM_CA if ca is None else str(ca)
        self._path = f"/v1/nodes/{quote(node_id)}/connection"
        headers = {}
        if token_file is not None:
            headers["Authorization"] = f"Bearer {bearer_token(token_file, '--gateway-token-file')}"
        timeout = httpx.Timeout(CONNECT_TIMEOUT_S, read=None)
        encrypted = not gateway.startswith("http://")
        if ca is not None and not encrypted:
            raise ConfigurationError(
                f"--gateway {without_password(gateway)} is not encrypted, and --gateway-ca names an "
                "authority: write https://, or leave it out"
            )
        verify = client_context(self._ca, "--gateway-ca") if encrypted else False
        transport = httpx.AsyncHTTPTransport(verify=verify, socket_options=SOCKET_OPTIONS)
        try:
            self._http = httpx.AsyncClient(
                base_url=gateway, headers=headers, timeout=timeout, transport=transport, trust_env=False
            )
        except (httpx.InvalidURL, ValueError):  # whose text has a part of the address, perhaps of a password
            raise ConfigurationError(
                f"--gateway {without_password(gateway)}: no usable address; give http://host:port"
            ) from None

    async def keep(self) -> None:
        """Connects again whenever the connection ends, until cancelled;
        then reports the end of this reporter."""
        backoff = Backoff(FIRST_PAUSE_S, LONGEST_PAUSE_S)
        warned = ""
        try:
            while True:
                why = ""
                try:
                    async with self._http.stream("POST", self._path) as response:
                        if response.status_code == httpx.codes.OK:
                            backoff.reset()
                            warned = ""
                            async for _ in response.aiter_raw():
                                pass
                        else:
                            why = (
                                f"{response.status_code} "
                                f"{(await response.aread()).decode(errors='replace')[:300]}"
                            )
                except httpx.HTTPError as error:
                    remedy = await asyncio.to_thread(misfit, error, self._gateway, self._ca, "--gateway-ca")
                    why = remedy or repr(error)
                if why and why != warned:
                    warned = why
                    logger.warning("no standing connection to the gateway: %s; trying again", why)
                await asyncio.sleep(backoff.next_s())
        finally:
            await self._goodbye()

    async def _goodbye(self) -> None:
        try:
            async with asyncio.timeout(GOODBYE_TIMEOUT_S):
                await self._http.delete(self._path)
                await self._http.aclose()
        except (httpx.HTTPError, TimeoutError) as error:
            logger.warning("the gateway does not know that this reporter ends: %r", error)
