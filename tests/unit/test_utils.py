"""Macros, free ports, the environment, and loggers."""

from __future__ import annotations

import logging
import socket
from importlib import import_module

import pytest

from elastic_run import utils
from elastic_run.utils import (
    describe_exception,
    get_free_port,
    get_hostname,
    get_logger,
    get_socket_with_port,
    macros,
)


def test_the_local_rank_is_put_into_arguments() -> None:
    """The macro stands anywhere in an argument; what is no text and what is no macro stays."""
    arguments = ["--rank=${local_rank}", macros.local_rank, "$local_rank/$local_rank", "${HOME}", "$$", 7]
    assert macros.substitute(arguments, "3") == ["--rank=3", "3", "3/3", "${HOME}", "$", 7]
    assert macros.substitute([], "3") == []


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that has to be there is returned, empty or not, and named where it isn't."""
    monkeypatch.setenv("ELASTIC_RUN_PROBE", "")
    assert utils.get_env_variable_or_raise("ELASTIC_RUN_PROBE") == ""
    monkeypatch.delenv("ELASTIC_RUN_PROBE")
    with pytest.raises(ValueError, match=r"^environment variable ELASTIC_RUN_PROBE is not set$"):
        utils.get_env_variable_or_raise("ELASTIC_RUN_PROBE")


def test_a_reserved_port_can_be_connected_to() -> None:
    """The socket listens on the loopback address and on a port of its own."""
    with get_socket_with_port() as first, get_socket_with_port() as second:
        assert first.getsockname() != second.getsockname()
        with socket.create_connection(first.getsockname()[:2], timeout=5):
            pass


def test_a_free_port_can_be_taken() -> None:
    """A free port is free."""
    with socket.create_server(("127.0.0.1", get_free_port())):
        pass


def test_the_hostname_is_the_kernels() -> None:
    """The machine's name is the one that the kernel has."""
    assert get_hostname() == socket.gethostname()


def test_a_logger_takes_its_level_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logger is named after the module that asks for it and has the level of LOGLEVEL, else WARNING."""
    monkeypatch.delenv("LOGLEVEL", raising=False)
    assert (get_logger().name, get_logger().level) == (__name__, logging.WARNING)
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert get_logger("elastic-run-probe").level == logging.DEBUG


class _SpeechlessError(Exception):
    """An exception whose text can't be had."""

    def __str__(self) -> str:
        raise KeyError


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("one\n  two"), "ValueError: one two"),
        (ValueError(), "ValueError"),
        (_SpeechlessError(), "_SpeechlessError"),
    ],
)
def test_an_exception_is_told_in_one_line(error: Exception, text: str) -> None:
    """Its class alone where it has no message, or where its own code fails."""
    assert describe_exception(error) == text


def test_the_other_modules_are_torchs() -> None:
    """What only programs with torch need is torch's own; a name that doesn't exist is an AttributeError."""
    theirs = import_module("torch.distributed.elastic.utils.store")
    assert utils.store.get_all is theirs.get_all
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        utils.nonsense  # type: ignore[attr-defined] # noqa: B018 - asking for it is the test
