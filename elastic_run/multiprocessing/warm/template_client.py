"""The agent's side of one template: orders forks, and keeps the waiting forks until they become workers.

Rules
- Nothing here blocks: messages of the template come through the agent's loop, and messages to it fit into its socket.
- A fork is kept once it is a child of this process. A fork that was complete before its template died is as good as
  any. A fork that was not complete is dropped: it ends by itself when its socket is closed.
"""

from __future__ import annotations

import os
import resource

from elastic_run import contract
from elastic_run.multiprocessing.process import process_table
from elastic_run.multiprocessing.process.descendants import Session, find_groups
from elastic_run.multiprocessing.process.fork_exec import inheritable_descriptors, start_process
from elastic_run.multiprocessing.warm import messages
from elastic_run.signals import SIGKILL, signal_name, signal_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from typing import Any

    from elastic_run.loop import Loop
    from elastic_run.multiprocessing.process.guardian import Guardian
    from elastic_run.multiprocessing.process.subreaper import Subreaper

#: A module that ends its process by one of these does so each time; other signals come from outside.
_CRASHES = frozenset(map(signal_number, ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE")))


class Fork:
    """A fork that waits to become a worker, a child of this process; it reads its order from the channel."""

    __slots__ = ("_stat", "channel", "pid")

    def __init__(self, pid: int, channel: _socket.socket) -> None:
        self.pid = pid
        self.channel = channel
        self._stat = process_table.read_stat(pid)

    def kill(self) -> None:
        """End it, unless it has ended and its pid belongs to another process."""
        self.channel.close()
        if self._stat is not None:
            process_table.signal_processes({self.pid: self._stat}, SIGKILL)

    def start(self, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> bool:
        """Let it become a worker, see `WorkerPool.start_worker`; return whether it was there to hear it."""
        # In bytes: the worker's Python may have another encoding than this one.
        variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
        file = messages.put_into_file({"argv": [*map(os.fsencode, argv)], "env": variables})
        try:
            messages.send(self.channel, {}, [file, *streams])
        except OSError:
            return False
        finally:
            os.close(file)
            self.channel.close()
        return True


class TemplateClient:
    """One template and its forks.

    Args:
        subreaper: Makes its forks children of this process.
        guardian: Ends them all should this process die.
        on_news: Called with a kind and a text: `importing` a module, `ready`, `failed` for a reason, `unfit` is a
            module that nobody named (see `unfit`), `idle` without anything to import, `refused` a fork for a reason,
            so many forks are `lost`, forks are `done`, and `gone` with how it ended.
    """

    def __init__(self, subreaper: Subreaper, guardian: Guardian, *, on_news: Callable[[str, str], None]) -> None:
        #: Its process, also after its end; 0 before the start.
        self.pid = 0
        #: Whether it lives, for all that is known, and whether it has all its modules.
        self.is_there = self.has_imported = False
        #: The module that it imports, or was importing when it ended; a package of `auto` that can't be preloaded.
        self.importing = self.unfit = ""
        self.forks: list[Fork] = []
        self._subreaper = subreaper
        self._guardian = guardian
        self._on_news = on_news
        self._channel: _socket.socket | None = None
        self._loop: Loop | None = None
        self._wanted = 0
        self._has_refused = False
        self._ordered: list[_socket.socket] = []
        self._born: list[int] = []
        self._living: set[int] = set()
        self._sessions: dict[int, Session] = {}

    @property
    def is_busy(self) -> bool:
        """Whether forks that were ordered are not there yet."""
        return self.is_there and bool(self._wanted or self._ordered)

    def start(
        self,
        argv: Sequence[str],
        env: Mapping[str, str],
        modules: Sequence[str],
        *,
        left_out: Sequence[str],
        own: Sequence[str],
        affinity: frozenset[int] | None,
        mask: Iterable[int] | None,
    ) -> None:
        """Start the template; see `WorkerPool`. `left_out` are packages that it doesn't choose for `auto`."""
        channel, theirs = messages.open_pair()
        try:
            messages.send(channel, {"modules": list(modules), "left_out": list(left_out), "own": list(own)})
            end = theirs.fileno()
            env = {**env, contract.ENV_TEMPLATE: str(end)}
            # Its stdout is our stderr: prints of an import are no worker's output.
            closed = inheritable_descriptors()
            self.pid = start_process(argv, env, stdout=2, affinity=affinity, closed=closed, kept=[end], mask=mask)
        except OSError:
            channel.close()
            raise
        finally:
            theirs.close()
        self._channel, self.is_there, self.importing = channel, True, ""
        born = process_table.start_time(self.pid)
        self._sessions[self.pid] = Session(born)
        self._guardian.watch(self.pid, born)
        self._guardian.spared.add(self.pid)

    def attach(self, loop: Loop) -> None:
        """Listen to the template from now on."""
        self._loop = loop
        if self._channel is not None:
            loop.add_reader(self._channel.fileno(), self._read_news)
            self._watch(self.pid, self._ended)

    def order(self, count: int) -> None:
        """Have forks made until this many wait."""
        self._wanted = max(0, count - len(self.forks) - len(self._ordered))
        self._order_next()

    def dismiss(self) -> None:
        """End the template and the waiting forks; `is_gone` says when they have ended."""
        self.is_there = False
        self._hang_up()
        for fork in self.forks:
            self.discard(fork)
        self.forks.clear()
        # With all processes that the modules have started.
        process_table.signal_groups(find_groups(self._sessions), SIGKILL)

    def kill(self) -> None:
        """End the template; it is news when it has ended."""
        process_table.signal_children((self.pid,), SIGKILL)

    def forget(self) -> None:
        """Tell the guardian that all is gone."""
        for session in self._sessions:
            self._guardian.forget(session)

    def discard(self, fork: Fork) -> None:
        """End a fork that waits or is already lost."""
        fork.kill()
        self._watch(fork.pid, lambda _: None)

    @property
    def is_gone(self) -> bool:
        """Whether nothing of it is left that this process has to wait for."""
        return not self._living

    def _watch(self, pid: int, callback: Callable[[int], None]) -> None:
        if self._loop is None:
            return
        self._living.add(pid)

        def ended(code: int) -> None:
            self._living.discard(pid)
            callback(code)

        self._loop.watch_exit(pid, ended)

    def _order_next(self) -> None:
        """Send the next part of the order: the kernel limits the descriptors that it passes at once."""
        if not self._wanted or self._ordered or self._channel is None:
            return
        theirs: list[_socket.socket] = []
        try:
            # The kernel drops descriptors beyond the template's own limit; half of the limit is for the template's open
            # files.
            limit, _ = resource.prlimit(self.pid, resource.RLIMIT_NOFILE)
            for _ in range(min(self._wanted, messages.MOST_DESCRIPTORS, max(1, limit // 2))):
                mine, other = messages.open_pair()
                self._ordered.append(mine)
                theirs.append(other)
            messages.send(self._channel, {"kind": "fork"}, [end.fileno() for end in theirs])
            self._wanted -= len(theirs)
        except (ProcessLookupError, BrokenPipeError, ConnectionResetError):
            self._drop_ordered()  # it has just ended, which will be news
        except OSError as error:
            self._drop_ordered()
            self._on_news("refused", error.strerror or str(error))
        finally:
            for end in theirs:
                end.close()

    def _read_news(self) -> None:
        while self._channel is not None:
            try:
                news = messages.receive(self._channel)
            except BlockingIOError:
                return
            if news is None:
                self._hang_up()
                return
            self._answer(self._channel, news[0])

    def _answer(self, channel: _socket.socket, document: dict[str, Any]) -> None:
        kind = str(document["kind"])
        if kind == "born":
            self._born = document["pids"]
            self._subreaper.begin(self.pid)
            try:
                messages.send(channel, {"kind": "leave"})
            except OSError:
                pass  # template and fork helper have died: the exit will be news
        elif kind == "done":
            self._keep_born()
        else:
            if kind in {"importing", "ready"}:
                self.importing, self.has_imported = document["text"], kind == "ready"
            self._has_refused |= kind == "refused"
            self.unfit = document.get("package", "")
            self._on_news(kind, document["text"])

    def _keep_born(self) -> None:
        """Keep the forks of the last order, which are children of this process by now."""
        self._subreaper.end(self.pid)
        born, ordered = self._born, self._ordered
        self._born, self._ordered = [], []
        before = len(self.forks)
        for place, channel in enumerate(ordered):
            if place < len(born) and process_table.is_child(born[place]):
                self.forks.append(Fork(born[place], channel))
            else:
                channel.close()
                self._wanted = 0  # the forks that there are have to suffice
        # Refused, or killed: the fork itself, or its fork helper before this process was ready to take it.
        lost = len(ordered) - (len(self.forks) - before)
        if lost and not self._has_refused:
            self._on_news("lost", str(lost))
        self._has_refused = False
        self._order_next()
        if not self.is_busy:
            self._on_news("done", "")

    def _drop_ordered(self) -> None:
        """Drop the forks that are not complete: they end when their socket is closed."""
        self._wanted = 0
        for channel in self._ordered:
            channel.close()
        for pid in self._born:
            self._watch(pid, lambda _: None)  # it may have become our child
        self._ordered, self._born = [], []

    def _hang_up(self) -> None:
        """Close the channel: the template has ended, or has to end."""
        self.has_imported = False
        if self._channel is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._channel.fileno())
        self._channel.close()
        self._channel = None
        self._subreaper.end(self.pid)
        self._drop_ordered()

    def _ended(self, code: int) -> None:
        self._sessions[self.pid].ended = process_table.ticks_since_boot()
        self._guardian.report_end(self.pid, self._sessions[self.pid].ended)
        self._read_news()  # its last words
        self._hang_up()
        is_news, self.is_there = self.is_there, False
        how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        if is_news and self.importing and (code >= 0 or -code in _CRASHES):
            self._on_news("failed", f"{self.importing} was being imported when the template {how}")
        elif is_news:
            self._on_news("gone", how)
