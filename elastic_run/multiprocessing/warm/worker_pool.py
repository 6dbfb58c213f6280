"""All warm workers of one agent: a template for each CPU binding, and the generation that waits for the next round.

Rules
- A round never fails for lack of a warm worker: a missing one is started as without `--preload`. The templates start
  before the rendezvous. A round waits for their imports, since a worker would import no faster, but not for ever.
- The next generation is ordered when a round begins to end, so that it is ready when the old generation is gone.
- A template is unfit if a module can't be imported, ends the process, or leaves something that can't be forked. Neither
  an unfit template nor a dead one is replaced: workers start cold from then on, and the user is told once.
- A fork is kept once it is a child of this process, also if its template died then. Any other fork ends by itself when
  its socket is closed.
- Forks become children of this process, since it is a subreaper as long as there are templates. Of several agents that
  preload in threads of one program, the first that ends restores the setting: the others' workers start cold then.
"""

from __future__ import annotations

import marshal
import os

from elastic_run import contract
from elastic_run.multiprocessing import process_table
from elastic_run.multiprocessing.fork_exec import (
    has_child,
    inheritable_descriptors,
    open_unnamed,
    start_process,
    start_time,
)
from elastic_run.multiprocessing.warm import messages
from elastic_run.signals import SIGKILL, signal_name

TYPE_CHECKING = False
if TYPE_CHECKING:
    import _socket
    from collections.abc import Callable, Collection, Mapping, Sequence
    from typing import Any

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.guardian import Guardian

#: Forks that are ordered at once: a message carries a descriptor for each, and a template may have a low limit of them.
_MOST_ORDERED = 16
#: Seconds of waiting after which the user is told; seconds after which imports, and forks, are given up.
_NOTICE = 15.0
_IMPORT_WAIT = 300.0
_FORK_WAIT = 10.0


class WorkerPool:
    """The templates of one agent, which import `modules`, and their forks; OSError where the system allows none."""

    def __init__(
        self,
        modules: Sequence[str],
        affinities: Mapping[int, frozenset[int] | None],
        guardian: Guardian,
        *,
        own: Sequence[str] = (),
        mask: Collection[int] | None = None,
    ) -> None:
        self._was_subreaper = process_table.is_subreaper()
        if not process_table.set_subreaper(is_on=True):
            message = "this system or Python has no subreapers"
            raise OSError(message)
        self.modules = modules
        self.guardian = guardian
        #: Variables that differ between workers beside those that always do; signals that are blocked when they begin.
        self.own = own
        self.mask = mask
        self.loop: Loop | None = None
        self._unsaid: list[str] = []
        self.say: Callable[[str], None] = self._unsaid.append
        #: Logical CPUs of each worker by local rank; None for a worker that inherits its CPUs.
        self._affinities = affinities
        self._templates = {affinity: TemplateClient(self, affinity) for affinity in affinities.values()}
        self._waiter: Callable[[], None] | None = None
        self._timers: list[Timer] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the templates with a worker's command line, and an environment without variables that differ."""
        for template in self._templates.values():
            template.start(argv, env)

    def attach(self, loop: Loop, say: Callable[[str], None]) -> None:
        """Listen to the templates from now on."""
        self.loop, self.say = loop, say
        for line in self._unsaid:
            say(line)
        for template in self._templates.values():
            template.listen()

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: the next generation is there, or won't be."""
        return not any(template.is_busy for template in self._templates.values())

    def await_settled(self, callback: Callable[[], None]) -> None:
        """Call when there is nothing to wait for any more, from the loop; replaces a callback that waits."""
        self._waiter = callback
        if self.loop is not None and not self._timers:
            wait_limit = _FORK_WAIT if self._is_ready else _IMPORT_WAIT
            waiting = f"--preload: still waiting for the workers' template after {_NOTICE:.0f} s: it is"
            self._timers = [
                self.loop.call_later(_NOTICE, lambda: self.say(f"{waiting} {self._doing}")),
                self.loop.call_later(wait_limit, lambda: self._end_wait(wait_limit)),
            ]
        self.settle()

    def prepare(self) -> None:
        """Have the next generation forked, since this one is ending; harmless when it is there."""
        for affinity, template in self._templates.items():
            template.order(sum(own == affinity for own in self._affinities.values()))

    def start_worker(
        self, local_rank: int, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> int | None:
        """Let a fork that waits become a worker with its whole command line and environment; return its pid, or None.

        `streams` are the descriptors that it gets as 1 and 2, and the pipe for its stacks, if it gets one.
        """
        template = self._templates[self._affinities[local_rank]]
        while template.forks:
            fork = template.forks.pop(0)
            if fork.start(argv, env, streams):
                return fork.pid
            template.discard(fork)
            self.report_lost(1)
        return None

    def close(self) -> None:
        """End the templates and all that waits."""
        self._cancel_timers()
        templates = self._templates.values()
        for template in templates:
            template.dismiss()
        if self.loop is not None:
            self.loop.run_until(lambda: not any(each.living for each in templates), self.loop.now() + 2.0)
        for template in templates:
            template.forget()
        process_table.set_subreaper(is_on=self._was_subreaper)

    # --- what templates report ---------------------------------------------------------------------------------------
    def settle(self) -> None:
        """Go on with the round that waits, if there is nothing to wait for."""
        if self.is_settled:
            self._cancel_timers()
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                waiter()

    def report_lost(self, count: int) -> None:
        """Tell that forks were killed, or refused."""
        self.say(f"--preload: workers that start cold, since their forks are missing: {count}")

    def give_up(self, reason: str) -> None:
        """Go on without warm workers, and say why, once."""
        if any(template.is_there for template in self._templates.values()):
            self.say(f"--preload: {reason}: workers start cold")
        for template in self._templates.values():
            template.dismiss()

    # --- the wait of a round -----------------------------------------------------------------------------------------
    @property
    def _is_ready(self) -> bool:
        return all(template.has_imported for template in self._templates.values())

    @property
    def _doing(self) -> str:
        if self._is_ready:
            return "forking"
        module = next((each.importing for each in self._templates.values() if each.importing), "")
        return f"importing {module}" if module else "starting"

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _end_wait(self, wait_limit: float) -> None:
        self.give_up(f"the workers' template is still {self._doing} after a wait of {wait_limit:.0f} s")
        self.settle()


class TemplateClient:
    """The agent's side of one template: orders forks, and keeps the waiting forks until they become workers."""

    def __init__(self, pool: WorkerPool, affinity: frozenset[int] | None) -> None:
        #: Whether it lives, for all that is known, and whether it has all its modules.
        self.is_there = self.has_imported = False
        #: The module that it imports, or was importing when it ended.
        self.importing = ""
        self.forks: list[_Fork] = []
        self._pid = 0
        self._pool = pool
        self._affinity = affinity
        self._channel: _socket.socket | None = None
        self._wanted = 0
        #: Our channels to the forks that are being made, and their pids once they are known.
        self._ordered: list[_socket.socket] = []
        self._born: list[int] = []
        #: Its processes that this process has to wait for.
        self.living: set[int] = set()
        self._session = process_table.Session(0)

    @property
    def is_busy(self) -> bool:
        """Whether forks that were ordered are not there yet."""
        return self.is_there and bool(self._wanted or self._ordered)

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the template."""
        pool = self._pool
        channel, theirs = messages.open_pair()
        try:
            messages.send(channel, {"modules": [*pool.modules], "own": [*pool.own]})
            end = theirs.fileno()
            self._pid = start_process(
                argv,
                {**env, contract.ENV_TEMPLATE: str(end)},
                stdout=2,  # prints of an import are no worker's output
                affinity=self._affinity,
                closed=inheritable_descriptors(),
                kept=[end],
                mask=pool.mask,
            )
        except OSError:
            channel.close()
            raise
        finally:
            theirs.close()
        self._channel, self.is_there = channel, True
        self._session.born = start_time(self._pid)
        pool.guardian.watch(self._pid, self._session.born)
        pool.guardian.spared.add(self._pid)
        self.listen()

    def listen(self) -> None:
        """Listen to the template, once there is a loop."""
        if self._pool.loop is not None and self._channel is not None:
            self._pool.loop.add_reader(self._channel.fileno(), self._read_news)
            self._watch(self._pid, self._ended)

    def order(self, count: int) -> None:
        """Have forks made until this many wait."""
        self._wanted = max(0, count - len(self.forks) - len(self._ordered))
        self._order_next()

    def dismiss(self) -> None:
        """End the template and the waiting forks, with all processes that the modules have started."""
        self.is_there = False
        self._hang_up()
        for fork in self.forks:
            self.discard(fork)
        self.forks.clear()
        if self._pid:
            process_table.signal_groups(process_table.find_groups({self._pid: self._session}), SIGKILL)

    def forget(self) -> None:
        """Tell the guardian that all is gone."""
        if self._pid:
            self._pool.guardian.forget(self._pid)

    def discard(self, fork: _Fork) -> None:
        """End a fork that waits or is already lost."""
        fork.kill()
        self._watch(fork.pid, lambda _: None)

    def _watch(self, pid: int, callback: Callable[[int], None]) -> None:
        if self._pool.loop is None:
            return
        self.living.add(pid)

        def ended(code: int) -> None:
            self.living.discard(pid)
            callback(code)

        self._pool.loop.watch_exit(pid, ended)

    def _order_next(self) -> None:
        """Send the next part of the order."""
        if not self._wanted or self._ordered or self._channel is None:
            return
        theirs: list[_socket.socket] = []
        try:
            for _ in range(min(self._wanted, _MOST_ORDERED)):
                mine, other = messages.open_pair()
                self._ordered.append(mine)
                theirs.append(other)
            messages.send(self._channel, {"kind": "fork"}, [end.fileno() for end in theirs])
            self._wanted -= len(theirs)
        except (BrokenPipeError, ConnectionResetError):
            self._drop_ordered()  # it has just ended, which will be news
        except OSError as error:
            self._drop_ordered()
            self._report_refusal(error.strerror or str(error))
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
            self._answer(news[0])

    def _answer(self, news: dict[str, Any]) -> None:
        match news["kind"]:
            case "importing":
                self.importing = news["text"]
            case "ready":
                self.importing, self.has_imported = "", True
            case "failed":
                self._pool.give_up(news["text"])
            case "born":
                self._born = news["pids"]
            case "done":
                self._keep_born()
            case "refused":
                self._report_refusal(news["text"])
        self._pool.settle()

    def _report_refusal(self, reason: str) -> None:
        self._pool.say(f"--preload: the template can't fork: {reason}")

    def _keep_born(self) -> None:
        """Keep the forks of the last order, which are children of this process by now."""
        born, ordered = self._born, self._ordered
        self._born, self._ordered = [], []
        before = len(self.forks)
        for place, channel in enumerate(ordered):
            if place < len(born) and has_child(born[place]):
                self.forks.append(_Fork(born[place], channel))
            else:
                channel.close()
                self._wanted = 0  # the forks that there are have to suffice
        if lost := len(ordered) - (len(self.forks) - before):
            self._pool.report_lost(lost)
        self._order_next()

    def _drop_ordered(self) -> None:
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
        if self._pool.loop is not None:
            self._pool.loop.remove_reader(self._channel.fileno())
        self._channel.close()
        self._channel = None
        self._drop_ordered()

    def _ended(self, code: int) -> None:
        self._session.ended = process_table.ticks_since_boot()
        self._pool.guardian.report_end(self._pid, self._session.ended)
        self._read_news()  # its last words
        self._hang_up()
        if self.is_there:
            self.is_there = False
            how = f"was killed by {signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
            victim = f" while it imported {self.importing}" if self.importing else ""
            self._pool.say(f"--preload: the workers' template {how}{victim}: workers start cold from now on")
        self._pool.settle()


class _Fork:
    """A fork that waits to become a worker, a child of this process; it reads its order from the channel."""

    __slots__ = ("_channel", "_stat", "pid")

    def __init__(self, pid: int, channel: _socket.socket) -> None:
        self.pid = pid
        self._channel = channel
        self._stat = process_table.read_stat(pid)

    def kill(self) -> None:
        """End it, unless it has ended and its pid belongs to another process."""
        self._channel.close()
        if self._stat is not None:
            process_table.signal_processes({self.pid: self._stat}, SIGKILL)

    def start(self, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]) -> bool:
        """Let it become a worker, see `WorkerPool.start_worker`; return whether it was there to hear it."""
        # In bytes: the worker's Python may have another encoding than this one.
        variables = {os.fsencode(name): os.fsencode(value) for name, value in env.items()}
        file = open_unnamed(marshal.dumps({"argv": [*map(os.fsencode, argv)], "env": variables}))
        try:
            messages.send(self._channel, {}, [file, *streams])
        except OSError:
            return False
        finally:
            os.close(file)
            self._channel.close()
        return True
