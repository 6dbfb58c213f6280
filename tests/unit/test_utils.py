"""Macros, free ports, the environment, loggers, and several epochs of data as one."""

from __future__ import annotations

import itertools
import logging
import socket
from string import Template
from typing import TYPE_CHECKING

import pytest

from elastic_run import utils
from elastic_run.utils import api, data, distributed, get_free_port, get_socket_with_port, macros
from elastic_run.utils.exceptions import describe_exception
from elastic_run.utils.logging import get_logger

if TYPE_CHECKING:
    from collections.abc import Iterator


def test_the_local_rank_is_put_into_arguments() -> None:
    """The macro stands anywhere in an argument; what is no text and what is no macro stays."""
    arguments = ["--rank=${local_rank}", macros.local_rank, "$local_rank/$local_rank", "${HOME}", "$$", 7]
    assert macros.substitute(arguments, "3") == ["--rank=3", "3", "3/3", "${HOME}", "$", 7]
    assert macros.substitute([], "3") == []


def test_substitution_is_that_of_string_template() -> None:
    """Every text of up to seven of these pieces comes out as string.Template's safe_substitute makes it."""
    values = {"a": "<A>", "local_rank": "3", "A_1": "$$", "1": "no name"}
    for length, pieces in (
        (7, ("$", "{", "}", "a")),
        (4, ("$", "${", "}", "a", "local_rank", "A_1", " ", "_", "1", "é", "\u212a", "\n")),
    ):
        for chosen in itertools.product(pieces, repeat=length):
            text = "".join(chosen)
            assert api.safe_substitute(text, values) == Template(text).safe_substitute(values), text


def test_a_missing_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that has to be there is returned, empty or not, and named where it isn't."""
    monkeypatch.setenv("ELASTIC_RUN_PROBE", "")
    assert utils.get_env_variable_or_raise("ELASTIC_RUN_PROBE") == ""
    monkeypatch.delenv("ELASTIC_RUN_PROBE")
    with pytest.raises(ValueError, match=r"^environment variable ELASTIC_RUN_PROBE is not set$"):
        utils.get_env_variable_or_raise("ELASTIC_RUN_PROBE")


def test_a_reserved_port_can_be_connected_to() -> None:
    """The socket listens on the loopback address and on a port of its own."""
    with get_socket_with_port() as first, api.get_socket_with_port() as second:
        assert first.getsockname() != second.getsockname()
        with socket.create_connection(first.getsockname()[:2], timeout=5):
            pass


def test_a_free_port_can_be_taken() -> None:
    """A free port is free."""
    with socket.create_server(("127.0.0.1", get_free_port())):
        pass


def test_a_machine_without_ipv4_gives_an_ipv6_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next address family is tried, and with none left the error says what went wrong with each."""
    unknown = (socket.AF_INET, "192.0.2.1")
    monkeypatch.setattr(distributed, "_LOOPBACK", (unknown, (socket.AF_INET, "127.0.0.1")))
    with get_socket_with_port() as found:
        assert found.getsockname()[0] == "127.0.0.1"
    monkeypatch.setattr(distributed, "_LOOPBACK", (unknown,))
    with pytest.raises(RuntimeError, match=r"no free port on the loopback address \(192\.0\.2\.1: .+\)"):
        get_free_port()


def test_the_hostname_is_the_kernels() -> None:
    """The machine's name is the one that the kernel has."""
    assert distributed.get_hostname() == socket.gethostname()


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


def test_epochs_follow_each_other() -> None:
    """The data of each epoch is asked for with its number, from the first to the last one."""
    cycle = data.CyclingIterator(3, lambda epoch: iter([f"{epoch}a", f"{epoch}b"]), start_epoch=1)
    assert iter(cycle) is cycle
    assert list(cycle) == ["1a", "1b", "2a", "2b"]
    assert list(cycle) == []


def test_epochs_begin_with_the_first_and_each_is_opened_once() -> None:
    """Without a start the first epoch is 0; an epoch is opened when the one before has ended."""
    opened: list[int] = []

    def open_epoch(epoch: int) -> Iterator[int]:
        opened.append(epoch)
        return iter([epoch])

    cycle = data.CyclingIterator(2, open_epoch)
    assert opened == [0]
    assert [next(cycle), opened] == [0, [0]]
    assert [next(cycle), opened] == [1, [0, 1]]
    assert list(cycle) == []
    assert opened == [0, 1]
    assert list(data.CyclingIterator(2, open_epoch, start_epoch=5)) == [5]


def test_many_empty_epochs_are_passed_over() -> None:
    """Ten thousand epochs without data end in the next one that has some (torch: RecursionError)."""
    cycle = data.CyclingIterator(10_000, lambda epoch: iter([epoch] if epoch == 9_999 else []))
    assert list(cycle) == [9_999]


@pytest.mark.parametrize("module", [utils, api, data])
def test_names_that_are_not_there_are_told(module: object) -> None:
    """A name that doesn't exist is an AttributeError that says so."""
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        module.nonsense  # type: ignore[attr-defined] # noqa: B018 - asking for it is the test
