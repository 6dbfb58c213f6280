"""The TLS and the user of an etcd cluster, from `--rdzv-conf`: under torch's names and our own."""

from __future__ import annotations

from elastic_run.files import read_user_file
from elastic_run.records import dataclass

TYPE_CHECKING = False
if TYPE_CHECKING:
    import ssl
    from collections.abc import Mapping
    from typing import Any

__all__ = ["EtcdUser", "read_tls", "read_user"]

#: torch's two etcd backends call the same things by different names.
_CERTIFICATE = ("cert", "ssl_cert")
_KEY = ("key", "ssl_cert_key")
_AUTHORITY = ("cacert", "ca_cert")
#: Bytes of a password's file; a device may have no end.
_LONGEST_PASSWORD = 1 << 16


@dataclass(frozen=True, slots=True)
class EtcdUser:
    """A user of the cluster."""

    name: str
    password: str


def read_user(conf: Mapping[str, Any]) -> EtcdUser | None:
    """Return the user, or None.

    Raises:
        ValueError: A setting is wrong, or the file that it names can't be read.
    """
    user, password = str(conf.get("user", "")), str(conf.get("password", ""))
    path = conf.get("password_file")
    if path:
        try:
            password = read_user_file(str(path), _LONGEST_PASSWORD).decode().rstrip("\n")
        except OSError as error:
            message = f"rendezvous setting password_file={path}: {error.strerror}"
            raise ValueError(message) from error
        except UnicodeDecodeError as error:
            message = f"rendezvous setting password_file={path}: not a text in UTF-8"
            raise ValueError(message) from error
    if not user and not password:
        return None
    if not user:
        message = "rendezvous setting password needs user=NAME"
        raise ValueError(message)
    return EtcdUser(user, password)


def read_tls(conf: Mapping[str, Any]) -> ssl.SSLContext | None:
    """Return how to talk TLS, or None for plain HTTP. A server's certificate must be valid for its name or address.

    Raises:
        ValueError: A setting is wrong, or a file that it names can't be used.
    """
    protocol = str(conf.get("protocol", "http")).strip().lower()
    if protocol not in ("http", "https"):
        message = f"rendezvous setting protocol={protocol!r}: not http or https"
        raise ValueError(message)
    files = [_either(conf, names) for names in (_AUTHORITY, _CERTIFICATE, _KEY)]
    given = ", ".join(file for file in files if file)
    if protocol == "http":
        if given:
            message = f"rendezvous setting protocol=http doesn't go with a certificate ({given}): give protocol=https"
            raise ValueError(message)
        return None
    import ssl

    authority, certificate, key = files
    try:
        context = ssl.create_default_context(cafile=authority)
        if certificate:
            context.load_cert_chain(certificate, key)
    except OSError as error:
        message = f"rendezvous settings for TLS: can't use {given}: {error.strerror or error}"
        raise ValueError(message) from error
    return context


def _either(conf: Mapping[str, Any], names: tuple[str, str]) -> str | None:
    value = conf.get(names[0]) or conf.get(names[1])
    return None if value is None else str(value)
