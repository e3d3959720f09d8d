"""A socket bound to a host and a port, as a server would bind it."""

import socket


def bound_socket(host: str, port: int) -> socket.socket:
    """Bind, not yet listening; port 0 takes a free one. Raises OSError: the host or the port cannot
    be used."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    bound = socket.socket(family, kind, protocol)
    try:
        # A port whose last connections are still winding down is free.
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound
