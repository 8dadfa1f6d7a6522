"""HTTP/1.1 as far as a client of streams needs it: one request a connection."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

MAX_HEADERS = 256
MAX_LINE = 16 << 20  # bytes
MAX_SIZE = 1 << 10  # bytes that tell the size of a chunk
READ_AT_ONCE = 1 << 16


class WireError(Exception):
    """What a server has sent is no HTTP, or too much of it."""


@dataclass(frozen=True)
class Address:
    """Where a server is: a host and a port, or a Unix socket; and what the paths of its API begin with."""

    host: str
    port: int = 0
    is_secure: bool = False
    uds: str | None = None
    prefix: str = "/v1"

    @classmethod
    def of(cls, url: str) -> Address:
        """From http://host:port, https://host or unix:/path/of/a.sock; /v1 at its end may be left out."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise wrong_url(url) from error
        if parts.scheme == "unix" and parts.path:
            return cls("localhost", uds=parts.path)
        is_more = parts.query or parts.fragment or "@" in parts.netloc  # which no request would have
        if parts.scheme not in ("http", "https") or not parts.hostname or port == 0 or is_more:
            raise wrong_url(url)
        path, is_secure = parts.path.rstrip("/"), parts.scheme == "https"
        prefix = path if path.endswith("/v1") else f"{path}/v1"
        return cls(parts.hostname, port or (443 if is_secure else 80), is_secure, prefix=prefix)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self.uds is not None:
            return await asyncio.open_unix_connection(self.uds)
        context = ssl.create_default_context() if self.is_secure else None
        return await asyncio.open_connection(self.host, self.port, ssl=context)

    @property
    def authority(self) -> str:
        if self.uds is not None:
            return self.host
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def wrong_url(url: str) -> ValueError:
    wanted = "http://HOST:PORT, https://HOST or unix:/PATH/OF/A.SOCK"
    return ValueError(f"the base URL must be {wanted}, but is {url!r}")


@dataclass
class Response:
    """A status and headers; the body is read as it comes."""

    status: int
    headers: dict[str, str]
    reader: asyncio.StreamReader

    def parts(self) -> AsyncIterator[bytes]:
        """The body in whatever pieces it comes"""
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            return chunks(self.reader)
        if (length := self.headers.get("content-length")) is not None:
            return counted(self.reader, number(length, 10))
        return all_of(self.reader)

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines, without their ends"""
        rest = b""
        async for part in self.parts():
            *whole, rest = (rest + part).split(b"\n")
            for line in whole:
                yield line.rstrip(b"\r")
            if len(rest) > MAX_LINE:
                raise WireError(f"a line has more than {MAX_LINE} bytes")
        if rest:
            yield rest

    async def whole(self) -> bytes:
        body = b""
        async for part in self.parts():
            body += part
            if len(body) > MAX_LINE:
                raise WireError(f"the body has more than {MAX_LINE} bytes")
        return body


@asynccontextmanager
async def request(
    address: Address, method: str, path: str, headers: Mapping[str, str], body: bytes = b""
) -> AsyncIterator[Response]:
    """Ask, and hear the answer's beginning. Leaving the block ends the connection, wherever the answer is."""
    reader, writer = await address.connect()
    try:
        writer.write(head_of(address, method, path, headers, len(body)) + body)
        await writer.drain()
        yield await response(reader)
    finally:
        writer.transport.abort()


def head_of(address: Address, method: str, path: str, headers: Mapping[str, str], length: int) -> bytes:
    own = {"host": address.authority, "connection": "close", "content-length": str(length)}
    lines = [f"{method} {address.prefix}{path} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in {**own, **headers}.items()]
    if any("\r" in line or "\n" in line for line in lines):
        raise ValueError("a header must not have the end of a line in it, but the API key or the URL has")
    return "\r\n".join([*lines, "", ""]).encode()


async def response(reader: asyncio.StreamReader) -> Response:
    version, _, rest = (await line_of(reader)).partition(" ")
    if not version.startswith("HTTP/1."):
        raise WireError(f"the answer begins with {version[:40]!r}, which is no HTTP")
    headers: dict[str, str] = {}
    for _ in range(MAX_HEADERS):
        name, _, value = (await line_of(reader)).partition(":")
        if not name:
            return Response(number(rest[:3], 10), headers, reader)
        headers[name.strip().lower()] = value.strip()
    raise WireError(f"the answer has more than {MAX_HEADERS} headers")


async def line_of(reader: asyncio.StreamReader) -> str:
    try:
        line = await reader.readline()
    except ValueError as error:  # longer than asyncio reads at once
        raise WireError("a header is too long") from error
    if not line.endswith(b"\n"):
        raise EOFError("the connection ended in the midst of an answer")
    return line.decode("latin-1").rstrip("\r\n")


def number(text: str, base: int) -> int:
    try:
        found = int(text, base)
    except ValueError as error:
        raise WireError(f"a number was due, but {text[:40]!r} came") from error
    if found < 0:
        raise WireError(f"a length must not be below 0, but is {found}")
    return found


async def chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """Up to the empty one; nothing else comes on a connection."""
    came = bytearray()
    while True:
        while (chunk := taken(came)) is None:
            came += await some_of(reader)
        if not chunk:
            return
        yield chunk


def taken(came: bytearray) -> bytes | None:
    """The next chunk, off what came; None where it is not whole yet"""
    told, mark, _ = came[:MAX_SIZE].partition(b"\r\n")
    if not mark and len(came) < MAX_SIZE:
        return None
    length = number(told.partition(b";")[0].decode("latin-1"), 16)
    if not mark or length > MAX_LINE:
        raise WireError(f"a chunk has more than {MAX_LINE} bytes, or more than {MAX_SIZE} to say how many")
    begin = len(told) + 2
    if len(came) < begin + length + 2:
        return None
    chunk = bytes(came[begin : begin + length])
    del came[: begin + length + 2]
    return chunk


async def counted(reader: asyncio.StreamReader, length: int) -> AsyncIterator[bytes]:
    while length:
        part = await some_of(reader, length)
        length -= len(part)
        yield part


async def all_of(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while part := await reader.read(READ_AT_ONCE):
        yield part


async def some_of(reader: asyncio.StreamReader, most: int = READ_AT_ONCE) -> bytes:
    part = await reader.read(min(most, READ_AT_ONCE))
    if not part:
        raise EOFError("the connection ended in the midst of an answer")
    return part
