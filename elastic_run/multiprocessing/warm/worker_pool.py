"""All warm workers of one agent: a template for each CPU binding, and the generation that waits for the next round.

Rules
- A round never fails for lack of a warm worker: a missing one is started as without `--preload`.
- The templates start before the rendezvous, and import during it. A round waits for them, since a worker would import
  no faster, but not for ever.
- The next generation is ordered when a round begins to end, so that it is ready when the old generation is gone.
- A template that dies is replaced a moment later, a few times. A template is unfit if a module can't be imported, ends
  the process, or leaves something that can't be forked. An unfit template is not replaced, unless `--preload auto`
  chose the module: then another template leaves that module out. The user is told once.
"""

from __future__ import annotations

import os

from elastic_run.multiprocessing.process.subreaper import Subreaper
from elastic_run.multiprocessing.warm.template_client import TemplateClient

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from elastic_run.loop import Loop, Timer
    from elastic_run.multiprocessing.process.guardian import Guardian

#: Seconds of waiting after which the user is told; seconds after which imports, and forks, are given up.
_NOTICE = 15.0
_IMPORT_WAIT = 300.0
_FORK_WAIT = 10.0
_MEGABYTE = 1 << 20
#: Templates in a row that may die, and seconds until the next one is started: a round that begins comes first.
_TRIES = 3
_PAUSE = 1.0
#: Seconds that the forks get to disappear at the end.
_FAREWELL = 2.0
_KIB = 1024
#: To look through a process's pages takes milliseconds: of many workers these many are looked at.
_SAMPLE = 8


class WorkerPool:
    """The templates of one agent, which import `modules`, and their forks.

    Args:
        modules: Their names.
        affinities: Logical CPUs of each worker by local rank; None for a worker that inherits its CPUs.
        guardian: The agent's.
        own: Further variables that differ between workers.
        mask: Signals that are blocked when the workers begin; None for the signals that this thread blocks.

    Raises:
        OSError: There can be no warm workers on this system.
    """

    def __init__(
        self,
        modules: Sequence[str],
        affinities: Mapping[int, frozenset[int] | None],
        guardian: Guardian,
        *,
        own: Sequence[str] = (),
        mask: Collection[int] | None = None,
    ) -> None:
        self._modules = modules
        self._affinities = affinities
        self._guardian = guardian
        self._own = own
        self._mask = mask
        self._subreaper = Subreaper()
        self._templates: dict[frozenset[int] | None, TemplateClient] = {}
        self._left: list[TemplateClient] = []
        self._left_out: list[str] = []
        self._argv: Sequence[str] = ()
        self._env: dict[str, str] = {}
        self._losses = 0
        self._is_hopeless = False
        self._loop: Loop | None = None
        self._unsaid: list[str] = []
        self._say: Callable[[str], None] = self._unsaid.append
        self._waiter: Callable[[], None] | None = None
        self._worker_pids: list[int] = []
        self._has_told_sharing = False
        self._timers: list[Timer] = []

    def start(self, argv: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the templates with a worker's command line, and an environment without variables that differ.

        `prepare` orders the first generation.
        """
        self._argv, self._env = argv, dict(env)
        self._start_templates()

    def attach(self, loop: Loop, say: Callable[[str], None]) -> None:
        """Listen to the templates from now on."""
        self._loop, self._say = loop, say
        for line in self._unsaid:
            say(line)
        for template in self._templates.values():
            template.attach(loop)

    @property
    def is_settled(self) -> bool:
        """Whether there is nothing to wait for: the next generation is there, or won't be."""
        return not any(template.is_busy for template in self._templates.values())

    @property
    def _all(self) -> list[TemplateClient]:
        return [*self._templates.values(), *self._left]

    @property
    def _is_ready(self) -> bool:
        return all(template.has_imported for template in self._templates.values())

    @property
    def _doing(self) -> str:
        """The step that the round waits for."""
        if self._is_ready:
            return "forking"
        module = next((each.importing for each in self._templates.values() if each.importing), "")
        return f"importing {module}" if module else "starting"

    def await_settled(self, callback: Callable[[], None]) -> None:
        """Call when there is nothing to wait for any more, from the loop; replaces a callback that waits."""
        self._waiter = callback
        if self._loop is not None and not self._timers:
            wait_limit = _FORK_WAIT if self._is_ready else _IMPORT_WAIT
            self._timers = [
                self._loop.call_later(_NOTICE, self._report_wait),
                self._loop.call_later(wait_limit, lambda: self._end_wait(wait_limit)),
            ]
        self._settle()

    def prepare(self) -> None:
        """Have the next generation forked, since this one is ending; harmless when it is there."""
        self._worker_pids.clear()
        for affinity, template in self._templates.items():
            template.order(sum(own == affinity for own in self._affinities.values()))

    def start_worker(
        self, local_rank: int, argv: Sequence[str], env: Mapping[str, str], streams: Sequence[int]
    ) -> int | None:
        """Let a fork that waits become a worker with its whole command line and environment; return its pid.

        None where there is no such fork, so that the worker has to be started by exec. `streams` are the descriptors
        that it gets as 1 and 2, and the pipe for its stacks, if it gets one.
        """
        template = self._templates.get(self._affinities[local_rank])
        while template is not None and template.forks:  # there may be none any more (`_leave_out`)
            fork = template.forks.pop(0)
            if fork.start(argv, env, streams):
                if not self._has_told_sharing:
                    self._worker_pids.append(fork.pid)
                return fork.pid
            template.discard(fork)
            self._report_lost(1)
        return None

    def report_sharing(self) -> None:
        """Tell once how much memory is saved; call it when the workers of a round are up."""
        if not self._worker_pids:
            return
        pids, self._worker_pids, self._has_told_sharing = self._worker_pids, [], True
        saved = measure_sharing(pids, [template.pid for template in self._templates.values()])
        if saved >= _MEGABYTE:
            workers = f"{len(pids)} warm workers" if len(pids) > 1 else "the warm worker"
            self._say(f"--preload: {workers} and the template share memory: {saved // _MEGABYTE} MB saved so far")

    def close(self) -> None:
        """End the templates and all that waits."""
        self._cancel_timers()
        self._dismiss()
        if self._loop is not None:
            deadline = self._loop.now() + _FAREWELL
            self._loop.run_until(lambda: all(each.is_gone for each in self._all), deadline)
        for template in self._all:
            template.forget()

    def _renew(self) -> None:
        """Replace templates that have died."""
        if not self._is_hopeless and self._losses <= _TRIES:
            try:
                self._start_templates()
            except OSError as error:
                self._give_up(f"the template can't be started: {error.strerror}")

    def _start_templates(self) -> None:
        for affinity in dict.fromkeys(self._affinities.values()):
            template = self._templates.get(affinity)
            if template is None:
                template = TemplateClient(self._subreaper, self._guardian, on_news=self._on_news)
                self._templates[affinity] = template
            if not template.is_there:
                template.start(
                    self._argv,
                    self._env,
                    self._modules,
                    left_out=self._left_out,
                    own=self._own,
                    affinity=affinity,
                    mask=self._mask,
                )
                if self._loop is not None:
                    template.attach(self._loop)

    def _on_news(self, kind: str, text: str) -> None:
        if kind == "done":
            self._losses = 0
        elif kind == "failed":
            self._give_up(text)
        elif kind == "unfit":
            self._leave_out(text)
        elif kind == "idle":
            self._dismiss()
        elif kind == "refused":
            self._say(f"--preload: the template can't fork ({text}): the missing workers start cold")
        elif kind == "lost":
            self._report_lost(int(text))
        elif kind == "gone":
            self._lose(text)
        self._settle()

    def _report_lost(self, count: int) -> None:
        lost = f"{count} forks were killed: {count} workers start"
        self._say(f"--preload: {'a fork was killed: one worker starts' if count == 1 else lost} cold")

    def _leave_out(self, reason: str) -> None:
        """Start other templates without a package that the user has not named."""
        self._say(f"--preload=auto: {reason}: it is left out")
        old = [*self._templates.values()]
        self._left_out += [template.unfit for template in old if template.unfit]
        for template in old:
            template.dismiss()
        self._left += old
        self._templates.clear()
        self._renew()
        self.prepare()

    def _lose(self, how: str) -> None:
        self._losses += 1
        is_last = self._losses > _TRIES
        outlook = "from now on" if is_last else "until there is another template"
        module = next((each.importing for each in self._templates.values() if not each.is_there), "")
        victim = f" (it was importing {module})" if module else ""
        self._say(f"--preload: the workers' template {how}{victim}: workers start cold {outlook}")
        if self._loop is not None and not is_last:
            self._loop.call_later(_PAUSE, self._renew)

    def _give_up(self, reason: str) -> None:
        """Go on without warm workers, and say why, once."""
        if not self._is_hopeless:
            self._say(f"--preload: {reason}: workers start cold")
        self._dismiss()

    def _dismiss(self) -> None:
        self._is_hopeless = True
        for template in self._templates.values():
            template.dismiss()

    def _settle(self) -> None:
        if self.is_settled:
            self._cancel_timers()
            waiter, self._waiter = self._waiter, None
            if waiter is not None:
                waiter()

    def _cancel_timers(self) -> None:
        for timer in self._timers:
            timer.cancel()
        self._timers.clear()

    def _report_wait(self) -> None:
        self._say(f"--preload: still waiting for the workers' template after {_NOTICE:.0f} s: it is {self._doing}")

    def _end_wait(self, wait_limit: float) -> None:
        if not self._is_ready:
            self._give_up(f"the workers' template is still {self._doing} after a wait of {wait_limit:.0f} s")
            self._settle()
            return
        for template in self._templates.values():
            if template.is_busy:
                template.kill()  # it is stopped, perhaps; that it ends is news


def measure_sharing(workers: Collection[int], templates: Collection[int]) -> int:
    """Return the bytes that workers don't need since they are forks; 0 where the kernel doesn't tell.

    Files that are mapped, such as libraries, are shared by any processes and don't count.
    """
    sample = list(workers)[:_SAMPLE]
    seen = [memory for memory in map(_read_memory, sample) if memory is not None]
    if not seen:
        return 0
    saved = sum(anonymous - own for anonymous, own in seen) * len(workers) // len(seen)
    costs = sum(memory[1] for memory in map(_read_memory, templates) if memory is not None)
    return max(0, saved - costs)


def _read_memory(pid: int) -> tuple[int, int] | None:
    """Return a process's anonymous memory, and the share of it that is its own (PSS), in bytes."""
    try:
        fd = os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        lines = os.read(fd, 1 << 14).decode().splitlines()[1:]
    except OSError:
        return None  # it has ended
    finally:
        os.close(fd)
    sizes = {name: int(rest.split()[0]) * _KIB for name, _, rest in (line.partition(":") for line in lines)}
    return (sizes["Anonymous"], sizes["Pss_Anon"]) if {"Anonymous", "Pss_Anon"} <= sizes.keys() else None
