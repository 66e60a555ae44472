"""Ports for servers of other processes."""

from __future__ import annotations

import atexit
import socket

_held: list[socket.socket] = []


def free_port() -> int:
    """A port of loopback for a server that sets SO_REUSEADDR, as the store of a process group does.

    A socket that does not listen keeps it until this process ends, so that nobody else is given it before that server.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    _held.append(held)
    return int(held.getsockname()[1])


@atexit.register
def _close() -> None:
    for each in _held:
        each.close()
