"""Ports for engines."""

import socket

from headway.errors import EngineError
from headway.sockets import bound_socket

_LAST_PORT = 65_535


def choose_ports(host: str, first: int, count: int) -> list[int]:
    """`first` and those after it; with `first` 0, free ones, each asked of the system.

    A port that is taken is better found out here, at once: vLLM and SGLang bind theirs only after
    they have loaded the model.

    Raises EngineError when the host is none of this machine's, a port is taken, or the ports end
    before 65536.
    """
    if first and first + count - 1 > _LAST_PORT:
        raise EngineError(f"engine.port {first} leaves no room for {count} engines")
    sockets: list[socket.socket] = []
    try:
        for index in range(count):  # all held at once, so that none is given twice
            sockets.append(_bound(host, first + index if first else 0))
        return [int(listener.getsockname()[1]) for listener in sockets]
    finally:
        for listener in sockets:
            listener.close()


def _bound(host: str, port: int) -> socket.socket:
    try:
        return bound_socket(host, port)
    except socket.gaierror as error:
        raise EngineError(f"engine.host {host!r} cannot be used: {error}") from error
    except OSError as error:
        if not port:
            raise EngineError(f"engine.host {host!r} cannot be bound: {error}") from error
        raise EngineError(
            f"port {port} of {host} cannot be used: {error.strerror}; set another engine.port, or "
            "0 for free ones"
        ) from error
