"""Rendezvous endpoints and settings, as users write them.

Each mistake is one line that names the text, what is wrong with it and what is allowed. Written without regular
expressions and the ipaddress module: this is on the path to the first worker, and both are slow to import.
"""

from __future__ import annotations

import socket

__all__ = ["is_host", "parse_rendezvous_config", "parse_rendezvous_endpoint"]

_MAX_PORT = 65535
_HOST_PUNCTUATION = "_.-"


def parse_rendezvous_config(config_str: str) -> dict[str, str]:
    """Read ``key=value,key=value``; blanks around keys and values don't count, a value may contain ``=``.

    Raises:
        ValueError: An entry has no ``=``, no key or no value, or a key is there twice (torch: the last one wins).
    """
    config: dict[str, str] = {}
    if not config_str.strip():
        return config
    for entry in config_str.split(","):
        key, equals, value = (part.strip() for part in entry.partition("="))
        if not (key and equals and value):
            missing = "key" if not key else "value" if equals else "'='"
            message = f"{entry.strip()!r} in {config_str!r} has no {missing}; it must be key=value[,key=value]"
            raise ValueError(message)
        if key in config:
            message = f"{key!r} is set twice in {config_str!r}, to {config[key]!r} and to {value!r}"
            raise ValueError(message)
        config[key] = value
    return config


#: torch's launcher imports it by this name.
_parse_rendezvous_config = parse_rendezvous_config


def parse_rendezvous_endpoint(endpoint: str | None, default_port: int) -> tuple[str, int]:
    """Read ``host``, ``host:port``, ``[ipv6]`` or ``[ipv6]:port``.

    None and "" are localhost. An IPv6 address without brackets is understood as well: with a port where the rest is an
    address by itself (as torch does it), else without. Returns the host without brackets, and the port.

    Raises:
        ValueError: The port is not a number between 0 and 65535, or the host is not a name or an address.
    """
    text = (endpoint or "").strip()
    if not text:
        return "localhost", default_port
    host, port = _split_endpoint(text)
    if port is None:
        number = default_port
    elif port.isascii() and port.isdigit() and int(port[:6]) <= _MAX_PORT and len(port) <= len(str(_MAX_PORT)):
        number = int(port)
    else:
        message = f"rendezvous endpoint {text!r}: port {port!r} is not a number from 0 to {_MAX_PORT}"
        raise ValueError(message)
    if not is_host(host):
        message = f"rendezvous endpoint {text!r}: {host!r} is not a host name, an IPv4 or an [IPv6] address"
        raise ValueError(message)
    return host, number


def _split_endpoint(text: str) -> tuple[str, str | None]:
    if text.startswith("[") and text.endswith("]"):
        return text[1:-1], None
    host, colon, port = text.rpartition(":")
    if not colon or (":" in host and not host.startswith("[") and not _is_ipv6(host) and _is_ipv6(text)):
        return text, None
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    return host, port


def is_host(text: str) -> bool:
    """Tell whether a text can be the name or the address of a machine, without brackets; nobody is asked for it."""
    if "%" in text:  # fe80::1%eth0: the network card that a link-local address belongs to
        address, _, card = text.partition("%")
        return _is_ipv6(address) and card.isalnum()
    if ":" in text:
        return _is_ipv6(text)
    if "." in text and all(char in "0123456789." for char in text):
        return _is_ipv4(text)
    return bool(text) and all(char.isalnum() or char in _HOST_PUNCTUATION for char in text)


def _is_ipv4(text: str) -> bool:
    """Short forms such as 127.1 count, as they do when a name is looked up."""
    try:
        socket.inet_aton(text)
    except OSError:
        return False
    return True


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text)
    except (OSError, ValueError):
        return False
    return True


def can_bind(family: int, address: tuple[object, ...]) -> bool:
    """Tell whether a socket can be bound to an address, which is one of this machine then."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True
