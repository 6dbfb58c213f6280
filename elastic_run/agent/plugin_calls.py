"""Calls of code that is not ours, of which the job needs no answer: event and metric handlers, and what closes a part.

- Such a call never changes how the job ends: what it raises is logged.
- While the agent runs, the calls are made one after another in a thread of their own: one that hangs, in Python or in
  C, holds up neither the job nor its signals, unless it is C code that keeps Python's lock.
- At its end the agent waits until all of them have returned. A second stop signal ends that wait, and so does the
  grace period after the first one; then one line names the call, and no other call is made.
"""

from __future__ import annotations

import _thread
import os
from _queue import SimpleQueue
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.loop import Loop

#: Seconds that a call has at least, whatever the grace period, and before a line speaks of it.
_MOMENT = 1.0


def name_call(part: object, method: str) -> str:
    """Return the name of a call for the user, such as `sites_plugin.Handler.shutdown()`."""
    return f"{type(part).__module__}.{type(part).__qualname__}.{method}()"


def is_ours(function: object) -> bool:
    """Whether a function's code is of this package; `functools.wraps` copies its `__module__`, but not its globals."""
    namespace = getattr(getattr(function, "__func__", function), "__globals__", {})
    return str(namespace.get("__name__")).startswith("elastic_run.")


def close_part(part: object, method: str, post: Callable[[str, Callable[[], object]], None]) -> None:
    """Call a method that closes a part of the agent; `post` makes the call of a plug-in's part."""
    call = getattr(part, method)
    if is_ours(call):
        call()
    else:
        post(name_call(part, method), call)


def make_call(name: str, call: Callable[[], Any]) -> Any:
    """Return the answer of a call that must not change how the job ends; None if it has raised, which is logged."""
    try:
        return call()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        import logging

        from elastic_run.multiprocessing.api import SignalException
        from elastic_run.notices import find_foreign_place
        from elastic_run.utils import describe_exception

        if isinstance(error, SignalException):  # a handler of the program has raised this for a signal
            raise
        place = find_foreign_place(error)
        where = f" at {place}" if place else ""
        trace = error if os.environ.get("LOGLEVEL", "").upper() == "DEBUG" else None
        text = "elastic-run: %s has raised %s%s; the job's result stands"
        logging.getLogger(__name__).log(logging.ERROR, text, name, describe_exception(error), where, exc_info=trace)
        return None


class PluginCalls:
    """The calls that one agent makes of plug-ins; the loop's thread waits for them, any thread may ask for one.

    A call has `grace` seconds after the first of the stop signals that `count_signals` counts; then it `is_given_up`.
    """

    def __init__(
        self, loop: Loop, say: Callable[[str], None], *, grace: float, count_signals: Callable[[], int]
    ) -> None:
        self.is_given_up = False
        self.is_used = False
        self._loop = loop
        self._say = say
        self._grace = max(grace, _MOMENT)
        self._count_signals = count_signals
        self._asked: SimpleQueue[tuple[str, Callable[[], object]] | None] = SimpleQueue()
        self._pending: deque[str] = deque()
        self._current = "", 0.0
        self._is_closed = False

    def post(self, name: str, call: Callable[[], object]) -> None:
        """Make a call when those before it have returned; after `close` at once, in the caller's thread."""
        if self.is_given_up:
            return
        if self._is_closed:
            make_call(name, call)
            return
        if not self._pending:
            self._current = name, self._loop.now()
        self._pending.append(name)
        self._asked.put((name, call))
        if not self.is_used:
            self.is_used = True
            _thread.start_new_thread(self._work, ())

    def _work(self) -> None:
        while (asked := self._asked.get()) is not None:
            self._current = asked[0], self._loop.now()
            make_call(*asked)
            self._pending.popleft()
            self._loop.call_soon_threadsafe(lambda: None)  # wakes the loop

    def close(self) -> None:
        """Wait for all calls, as the rules say."""
        self._wait(lambda: not self._pending)
        self._is_closed = True
        self._asked.put(None)

    def _wait(self, is_done: Callable[[], bool]) -> None:
        # Of the signals before this wait, one counts: the job may be over without an answer to it.
        counted = max(0, self._count_signals() - 1)
        is_told = False
        deadline: float | None = self._loop.now() + (_MOMENT if self._count_signals() > counted else self._grace)
        while not self.is_given_up:
            seen = self._count_signals()
            self._loop.run_until(lambda seen=seen: is_done() or self._count_signals() > seen, deadline)  # type: ignore[misc]
            if is_done():
                return
            from elastic_run.report import lines

            came = self._count_signals() - counted
            name, began = self._current
            seconds = self._loop.now() - began
            if came > 1 or (came and is_told):
                self.is_given_up = True
                self._say(lines.left_call(name, seconds))
            elif came:
                is_told, deadline = True, self._loop.now() + self._grace
                self._say(lines.waiting_for_call(name, seconds, self._grace))
            else:
                deadline = None
                self._say(lines.waiting_for_call(name, seconds))
