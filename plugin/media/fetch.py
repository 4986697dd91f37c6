"""Fetches one web address into a file: no redirect, no proxy, and no address nobody has checked.

The host's name is resolved once. Every address it has must pass the policy, and the connection goes
to those addresses and no other: a name that resolves differently a moment later changes nothing.
TLS still verifies the host's name. Runs on the event loop; name service and disk on worker threads.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING, BinaryIO

from mindstream.plugin.media.addresses import AddressPolicy, IPAddress, refuse_non_public
from mindstream.plugin.media.formats import MediaError
from mindstream.plugin.media.sources import Url

if TYPE_CHECKING:
    import aiohttp

DOMAINS_VARIABLE = "ALLOWED_MEDIA_DOMAINS_ENV"
# A host that sends one byte now and then never meets read_timeout: the whole fetch ends after this
# many times read_timeout.
_TOTAL_READ_TIMEOUTS = 10
_READ_BYTES = 256 * 1024

# Media work alone waits for a slow name server or a huge picture, never a tokenizer.
WORKERS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="media")

Resolver = Callable[[str, int], Awaitable[list[IPAddress]]]


async def resolve(host: str, port: int) -> list[IPAddress]:
    """Every address of a host, by the system's name service. Raises OSError."""
    lookup = partial(socket.getaddrinfo, host, port, type=socket.SOCK_STREAM)
    found = await asyncio.get_running_loop().run_in_executor(WORKERS, lookup)
    # A scope (fe80::1%eth0) names an interface; the address is judged without it.
    return [ip_address(str(entry[4][0]).partition("%")[0]) for entry in found]


@dataclass(frozen=True, slots=True)
class FetchRules:
    """Where a fetch may go and how long it may take (seconds)."""

    allowed_domains: frozenset[str] | None  # host names, lower case; None: the variable is not set
    connect_timeout: float = 5.0
    read_timeout: float = 30.0
    refuse_address: AddressPolicy = refuse_non_public
    resolve: Resolver = resolve
    ssl_context: ssl.SSLContext | None = None  # None: the system's certificate authorities


def allowed_domains(environment: Mapping[str, str]) -> frozenset[str] | None:
    """The hosts of ALLOWED_MEDIA_DOMAINS_ENV, separated by commas; None if it is not set."""
    value = environment.get(DOMAINS_VARIABLE)
    if value is None:
        return None
    hosts = (host.strip().strip("[]").rstrip(".").lower() for host in value.split(","))
    return frozenset(host for host in hosts if host)


async def fetch(url: Url, rules: FetchRules, max_bytes: int) -> BinaryIO:
    """The content in an unnamed temporary file, at its start. Raises MediaError."""
    _check_domain(url.host, rules.allowed_domains)
    addresses = await _checked_addresses(url, rules)
    # The caller closes it, as it does a local file.
    file: BinaryIO = tempfile.TemporaryFile()  # noqa: SIM115 - see above
    try:
        await _download(url, addresses, rules, max_bytes, file)
        file.seek(0)
    except BaseException:
        file.close()
        raise
    return file


def _check_domain(host: str, allowed: frozenset[str] | None) -> None:
    if allowed is None:
        raise MediaError(
            f"is a web address, and this server fetches none: set {DOMAINS_VARIABLE} to the hosts "
            "that it may fetch from"
        )
    if host not in allowed:
        raise MediaError(f"names the host {host}, which {DOMAINS_VARIABLE} does not list")


async def _checked_addresses(url: Url, rules: FetchRules) -> list[IPAddress]:
    try:
        found = await asyncio.wait_for(rules.resolve(url.host, url.port), rules.connect_timeout)
    except asyncio.TimeoutError:
        raise MediaError(
            f"names the host {url.host}, which was not resolved in {rules.connect_timeout:g} s"
        ) from None
    except (OSError, UnicodeError):
        found = []
    if not found:
        raise MediaError(f"names the host {url.host}, which has no address")
    for address in found:
        reason = rules.refuse_address(address)
        if reason is not None:
            raise MediaError(
                f"names the host {url.host}, which has {reason} ({address}); only public addresses "
                "are fetched from"
            )
    return found


async def _download(
    url: Url, addresses: list[IPAddress], rules: FetchRules, max_bytes: int, file: BinaryIO
) -> None:
    import aiohttp
    from yarl import URL

    timeout = aiohttp.ClientTimeout(
        total=rules.connect_timeout + _TOTAL_READ_TIMEOUTS * rules.read_timeout,
        sock_connect=rules.connect_timeout,
        connect=rules.connect_timeout,
        sock_read=rules.read_timeout,
    )
    host = f"[{url.host}]" if ":" in url.host else url.host
    address = URL(f"{url.scheme}://{host}:{url.port}{url.target}", encoded=True)
    try:
        async with (
            aiohttp.TCPConnector(
                resolver=_pinned(url.host, addresses),
                ssl=rules.ssl_context or True,
                use_dns_cache=False,
                force_close=True,
            ) as connector,
            aiohttp.ClientSession(
                connector=connector,
                timeout=timeout,
                auto_decompress=False,
                cookie_jar=aiohttp.DummyCookieJar(),
                headers={"Accept-Encoding": "identity", "User-Agent": "mindstream"},
            ) as session,
            session.get(address, allow_redirects=False) as response,
        ):
            _check_response(response, url.host, max_bytes)
            await _read(response, max_bytes, file)
    except asyncio.TimeoutError:
        raise MediaError(
            f"was not fetched from {url.host} in time ({rules.connect_timeout:g} s to connect, "
            f"{rules.read_timeout:g} s without a byte, {timeout.total:g} s in all)"
        ) from None
    except aiohttp.ClientConnectorCertificateError:
        raise MediaError(f"names the host {url.host}, whose TLS certificate is not valid") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, MediaError):
            raise
        raise MediaError(f"was not fetched from {url.host}: {type(error).__name__}") from None


def _pinned(host: str, addresses: list[IPAddress]) -> aiohttp.abc.AbstractResolver:
    from aiohttp.abc import AbstractResolver, ResolveResult

    class Pinned(AbstractResolver):
        """Knows one host, by the addresses that were checked."""

        async def resolve(
            self, wanted: str, port: int = 0, family: socket.AddressFamily = socket.AF_INET
        ) -> list[ResolveResult]:
            if wanted.rstrip(".").lower() != host:
                raise OSError(f"{wanted} was not checked")
            return [
                ResolveResult(
                    hostname=host,
                    host=str(address),
                    port=port,
                    family=socket.AF_INET if address.version == 4 else socket.AF_INET6,
                    proto=0,
                    flags=socket.AI_NUMERICHOST,
                )
                for address in addresses
            ]

        async def close(self) -> None:
            """Holds nothing."""

    return Pinned()


def _check_response(response: aiohttp.ClientResponse, host: str, max_bytes: int) -> None:
    if 300 <= response.status < 400:
        raise MediaError(f"is answered by {host} with a redirect, which is not followed")
    if response.status != 200:
        raise MediaError(f"is answered by {host} with status {response.status}")
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity":
        raise MediaError(f"is answered by {host} in the encoding {encoding[:20]!r}, not asked for")
    if (response.content_length or 0) > max_bytes:
        raise MediaError(f"may have at most {max_bytes} bytes, got {response.content_length}")


async def _read(response: aiohttp.ClientResponse, max_bytes: int, file: BinaryIO) -> None:
    loop = asyncio.get_running_loop()
    size = 0
    pending = bytearray()
    async for data in response.content.iter_chunked(_READ_BYTES):
        size += len(data)
        if size > max_bytes:
            raise MediaError(f"may have at most {max_bytes} bytes, got more")
        pending += data
        if len(pending) >= _READ_BYTES:
            await loop.run_in_executor(WORKERS, file.write, bytes(pending))
            pending.clear()
    await loop.run_in_executor(WORKERS, _write_last, file, bytes(pending))


def _write_last(file: BinaryIO, data: bytes) -> None:
    file.write(data)
    file.flush()
    os.lseek(file.fileno(), 0, os.SEEK_SET)
