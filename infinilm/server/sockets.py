"""The socket that a server listens on, of a host's port or of a path."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from infinilm.server.http_limits import STALL_SECONDS


@contextmanager
def listening(host: str, port: int, uds: str | None) -> Iterator[socket.socket]:
    """On the path of a Unix socket where there is one"""
    sock = unix_socket(uds) if uds else inet_socket(host, port)
    try:
        yield sock
    finally:
        sock.close()
        if uds:
            with suppress(OSError):
                os.unlink(uds)


def inet_socket(host: str, port: int) -> socket.socket:
    if not 0 <= port <= 65535:  # getaddrinfo takes others modulo 65536
        raise ValueError(f"--port must be from 0 to 65535, but is {port}")
    try:
        ((family, *_, place), *_) = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        # All addresses of IPv6, "::", are all of IPv4 too, as other servers have it.
        is_dual = family == socket.AF_INET6 and socket.has_dualstack_ipv6()
        sock = socket.create_server(place[:2], family=family, backlog=2048, dualstack_ipv6=is_dual)
    except (OSError, UnicodeError) as error:
        reason, code = getattr(error, "strerror", None) or error, getattr(error, "errno", None)
        other = "--port" if code in (errno.EADDRINUSE, errno.EACCES) else "--host"
        raise ValueError(f"cannot listen on {host!r}, port {port}: {reason}; take another {other}") from error
    # For the connections too: else what follows a first small write waits 40 ms for the caller's kernel.
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # else an answer is made for a machine that has vanished
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(STALL_SECONDS * 1e3))
    return sock


def unix_socket(path: str) -> socket.socket:
    """In place of one that nobody listens on any more"""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if is_left_over(path):
            os.unlink(path)
        sock.bind(path)
        sock.listen(2048)
    except OSError as error:
        sock.close()
        reason = f"{error.strerror or error}; take another --uds"
        raise ValueError(f"cannot listen on the Unix socket {path!r}: {reason}") from error
    return sock


def is_left_over(path: str) -> bool:
    """Whether a Unix socket refuses all callers, its process being gone. Other errors are of those who live:
    they may have no room for a caller just now, not talk to this user, or take datagrams."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
        caller.setblocking(False)
        return Path(path).is_socket() and caller.connect_ex(path) == errno.ECONNREFUSED


def address(sock: socket.socket) -> str:
    if sock.family == socket.AF_UNIX:
        return str(sock.getsockname())
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
