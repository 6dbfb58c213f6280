"""Lines of a node that waits, and how long it tries again."""

from __future__ import annotations

import contextlib
import re
import signal
import socket
import time
from typing import TYPE_CHECKING

import pytest

from elastic_run.core.job.membership import Ended, Formed
from elastic_run.rendezvous.events import Lost
from tests.support.launch import ELASTIC_RUN
from tests.support.sessions import FAST, free_port, tcp_node
from tests.support.terminal import Screen
from tests.support.wait import stretched, wait_until

if TYPE_CHECKING:
    from contextlib import ExitStack

    from tests.support.launch import Launch, Worker
    from tests.support.terminal import Terminal


CONF = "last_call_timeout=3,keep_alive_interval=0.5"
TERM = {"TERM": "xterm"}
#: The line as it is written each time: begun at the left, followed by an erasure, with the cursor back at the left.
SHOWN = r"\r([^\r\n]*waiting: [^\r\n]*)\x1b\[J\r"


def place(port: int, conf: str = CONF) -> tuple[str, ...]:
    """Return the flags that make two nodes meet at a port of this machine."""
    endpoint = f"--rdzv-endpoint=localhost:{port}"
    return ("--rdzv-backend=c10d", endpoint, "--rdzv-id=j", f"--rdzv-conf={conf}", "--nnodes=2", "--nproc-per-node=1")


def shown(terminal: Terminal) -> list[str]:
    """Return the lines that were shown so far."""
    return [match[1] for match in re.finditer(SHOWN, terminal.output.decode())]


def test_the_line_is_rewritten_and_gone_when_all_are_there(terminal: Terminal, launch: Launch, worker: Worker) -> None:
    """It counts down in its place; when the round begins one ordinary line is left, and workers' lines are whole."""
    path = worker("say('rank', rank, 'is here')\nos.write(2, b'and says so\\n')")
    port = free_port()
    terminal.start(*place(port), path, env=TERM)
    terminal.wait_output(rf"(?s){SHOWN}.*{SHOWN}.*{SHOWN}.*{SHOWN}")
    lefts = [re.search(r"gives up in (\d+):(\d\d)", line) for line in shown(terminal)]
    seconds = [60 * int(left[1]) + int(left[2]) for left in lefts if left]
    assert len(seconds) == len(lefts)
    assert seconds[0] > seconds[-1] > seconds[0] - 30
    assert f"waiting: 1/2 nodes ({socket.gethostname()}), " in shown(terminal)[-1]
    assert Screen().feed(bytes(terminal.output)).rows[0].startswith("elastic-run: waiting: 1/2 nodes")
    other = launch(*place(port), path)
    assert terminal.wait_exit() == 0
    assert other.wait_exit() == 0
    rows = Screen().feed(bytes(terminal.output)).rows
    assert re.fullmatch(r"elastic-run: 2 nodes are there after 0:\d\d", rows[0])
    assert re.fullmatch(r"rank [01] is here", rows[1])
    assert rows[2:] == ["and says so"]


def test_other_lines_never_mix_with_it(terminal: Terminal, worker: Worker) -> None:
    """What the launcher has to say meanwhile, also through its log, stands above it on lines of its own."""
    port = free_port()
    terminal.start(*place(port), worker("pass"), env=TERM)
    terminal.wait_output(SHOWN)
    with socket.create_connection(("localhost", port)) as stranger:
        stranger.sendall(b"\xff" * 4096)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    terminal.wait_output("does not fit the store's protocol")
    before = len(shown(terminal))
    terminal.wait_output(rf"(?s)(?:{SHOWN}.*){{{before + 1}}}")
    rows = Screen(400).feed(bytes(terminal.output)).rows
    assert rows[0].startswith("elastic-run: refused a message at port")
    assert "waiting" not in rows[0]
    assert rows[1].startswith("elastic-run: waiting: 1/2 nodes (")
    assert len(rows) == 2


def test_a_narrow_window(terminal: Terminal, worker: Worker) -> None:
    """It never takes more than one row, and leaves nothing behind, also when the window becomes narrower."""
    screen = Screen()
    terminal.start(*place(free_port()), worker("pass"), env=TERM)
    terminal.wait_output(SHOWN)
    terminal.resize(24, 37)
    terminal.wait_output(r"\rwaiting: 1/2 nodes, gives up in 9:\d\d\x1b\[J\r")
    before = terminal.output.rindex(b"\x1b[J\r", 0, terminal.output.index(b"\rwaiting: ")) + len(b"\x1b[J\r")
    screen.feed(bytes(terminal.output[:before]))
    screen.resize(37)
    assert len(screen.rows) > 1  # what a terminal makes of the longer line
    screen.widest = 0
    screen.feed(bytes(terminal.output[before:]))
    assert screen.widest < 37
    assert [row[:19] for row in screen.rows] == ["waiting: 1/2 nodes,"]
    terminal.resize(24, 12)
    terminal.wait_output(r"\r[^\r]{1,11}\x1b\[J\r")


def test_a_store_that_is_not_there_yet(terminal: Terminal, launch: Launch, worker: Worker) -> None:
    """Trouble with the connection is named and counted in the same line, and so is its end."""
    port = free_port()
    path = worker("pass")
    terminal.start(*place(port, f"{CONF},is_host=false"), path, env=TERM)
    terminal.wait_output(rf"waiting: store localhost:{port}: nobody listens, gives up in 9:5\d")
    other = launch(*place(port), path)
    assert terminal.wait_exit() == 0
    assert other.wait_exit() == 0
    rows = Screen().feed(bytes(terminal.output)).rows
    assert any(re.match(rf"elastic-run: the store at localhost:{port} answers after \d+ s$", row) for row in rows), rows
    assert not any("waiting" in row for row in rows)


def _is_listening(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("localhost", port)) == 0


def test_the_line_says_when_a_job_starts_with_the_nodes_that_are_there(launch: Launch, worker: Worker) -> None:
    """Where the minimum is there, the job does not give up when the time is over."""
    endpoint = f"--rdzv-endpoint=localhost:{free_port()}"
    agent = launch("--nnodes=1:2", "--rdzv-backend=c10d", endpoint, worker("pass"))
    agent.wait_line(r"waiting: 1/2 nodes \(.+\), starts in 0:[23]\d; other nodes need ")
    agent.send(signal.SIGTERM)
    assert agent.wait_exit() == 143


def test_a_spare_says_that_it_is_one(terminal: Terminal, launch: Launch, worker: Worker) -> None:
    """A node that the job has no room for says so in that line, which is gone when it takes over."""
    port = free_port()
    path = worker("say('rank', rank, 'is here')\nsignal.pause()")
    host = launch(*place(port), path)
    wait_until(lambda: _is_listening(port))
    leaver = launch(*place(port), path)
    host.wait_line("is here")
    leaver.wait_line("is here")
    terminal.start(*place(port), path, env=TERM)
    terminal.wait_output(r"\relastic-run: waiting: as a spare, until one of the job's 2 nodes is lost\x1b\[J\r")
    leaver.send(signal.SIGTERM)
    said = leaver.stdout.strip()
    terminal.wait_output(said)
    rows = Screen().feed(bytes(terminal.output)).rows
    assert [re.sub(r"0:\d\d", "0:00", row) for row in rows] == [
        "elastic-run: 2 nodes are there after 0:00",
        said,
    ]


def test_an_interrupt_leaves_what_was_waited_for(terminal: Terminal, worker: Worker) -> None:
    """After Ctrl-C the last state stays as an ordinary line, and the report follows it."""
    terminal.start(*place(free_port()), worker("pass"), env=TERM)
    terminal.wait_output(SHOWN)
    terminal.type("\x03")
    assert terminal.wait_exit() == 128 + signal.SIGINT
    rows = [row for row in Screen().feed(re.sub(rb"\x1b\[\d*m", b"", bytes(terminal.output))).rows if row]
    waits = [number for number, row in enumerate(rows) if "waiting: 1/2 nodes" in row]
    assert waits == [0], rows
    assert rows[0].startswith("elastic-run: waiting: 1/2 nodes")
    assert len(rows) > 1


def test_a_dumb_terminal_gets_ordinary_lines(terminal: Terminal, worker: Worker) -> None:
    """Where nothing can be erased a line is written every ten seconds."""
    terminal.start(*place(free_port()), worker("pass"), env={"TERM": "dumb"})
    terminal.wait_output(r"elastic-run: waiting: 1/2 nodes[^\r\n]*\r\n")
    assert b"\x1b" not in terminal.output


def test_a_job_in_the_background_draws_nothing(terminal: Terminal, worker: Worker) -> None:
    """While the shell has the terminal the launcher writes ordinary lines only."""
    program = ("sh", "-c", 'set -m; "$@" & wait', "sh", *ELASTIC_RUN)
    terminal.start(*place(free_port()), worker("pass"), env=TERM, program=program)
    terminal.wait_output(r"elastic-run: waiting: 1/2 nodes[^\r\n]*\r\n")
    assert b"\x1b" not in terminal.output


class FakeConsole:
    """A console that shows everything.

    Args:
        shows: Whether it can show a line that is rewritten.
    """

    is_in_background = False
    columns = 80

    def __init__(self, *, shows: bool = True) -> None:
        self.lines: list[str] = []
        self._shows = shows

    def show_line(self, text: str) -> bool:
        """Take a line."""
        if self._shows:
            self.lines.append(text)
        return self._shows

    def hide_line(self) -> None:
        """Nothing to do."""

    def say(self, text: str) -> None:
        """Take an ordinary line."""
        self.lines.append(f"{text}\n")


# --- deadlines of retries ---------------------------------------------------------------------------------------------
#: Seconds beyond what was asked for; the promise is one.
_LATE = 1.0


def test_a_store_that_does_not_answer_is_given_up_in_time(stack: ExitStack) -> None:
    """Where the port takes connections and says nothing, or nobody listens, join_timeout is kept within a second."""
    listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    ports = {"sends no answer": listener.getsockname()[1], "refused": free_port()}
    begun = time.monotonic()
    nodes = [
        (kind, join_timeout, stack.enter_context(tcp_node(port, (2, 2), is_host=False, conf=_conf(join_timeout))))
        for join_timeout in (1.0, 4.0)
        for kind, port in ports.items()
    ]
    for kind, join_timeout, node in nodes:
        lost = node.wait_for(Lost)
        assert kind in lost.detail
        assert join_timeout - 0.1 <= time.monotonic() - begun < stretched(join_timeout + _LATE)


def _conf(join_timeout: float) -> dict[str, str]:
    return {**FAST, "join_timeout": str(join_timeout), "keep_alive_interval": "3"}


def test_a_store_that_comes_late_is_found(stack: ExitStack) -> None:
    """A store that comes shortly before the end of that time is joined as any other."""
    port = free_port()
    conf = {**FAST, "join_timeout": "5"}
    first = stack.enter_context(tcp_node(port, (2, 2), is_host=False, conf=conf))
    with pytest.raises(AssertionError):
        first.wait_for(Formed, deadline=2)
    second = stack.enter_context(tcp_node(port, (2, 2), is_host=True, conf=conf))
    for node in (first, second):
        node.wait_for(Formed)


def test_after_the_end_no_store_is_missed(stack: ExitStack) -> None:
    """A node whose workers take their time to end asks for the store no more, nor takes the place of its host."""
    port, next_port = free_port(), free_port()
    host, other = (
        stack.enter_context(tcp_node(port, (2, 2), is_host=is_host, successors=(next_port,)))
        for is_host in (True, False)
    )
    for node in (host, other):
        node.wait_for(Formed)
        node.done()
    assert {node.wait_for(Ended).end.verdict for node in (host, other)} == {"success"}
    host.close()
    with socket.create_server(("127.0.0.1", port)) as listener, socket.create_server(("127.0.0.1", next_port)):
        listener.settimeout(2 * float(FAST["keep_alive_interval"]))
        with pytest.raises(TimeoutError):
            listener.accept()
