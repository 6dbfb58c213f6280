"""Asks for the GPU use of processes in a thread: a driver that hangs holds up its caller, but not the loop."""

from __future__ import annotations

import threading

from elastic_run.cluster import gpu_use

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from elastic_run.loop import Loop

__all__ = ["ask_gpu_use"]

#: Seconds for the answer.
_WAIT_LIMIT = 1.0
_MEMORY_KEY = "gpu"


def ask_gpu_use(loop: Loop, memory: dict[str, Any], deliver: Callable[[dict[int, gpu_use.GpuUse]], None]) -> None:
    """Give the GPU use by pid to a function, in the loop; nothing where nvidia-ml-py is missing, or does not answer.

    Args:
        loop: The agent's.
        memory: Keeps the question: while an earlier one still waits for the driver, no other one is asked.
        deliver: Called once.
    """
    earlier = memory.get(_MEMORY_KEY)
    if not gpu_use.has_library() or (earlier is not None and earlier.is_alive()):
        deliver({})
        return
    waiting = [deliver]

    def conclude(found: dict[int, gpu_use.GpuUse]) -> None:
        if waiting:
            timer.cancel()
            waiting.pop()(found)

    def read() -> None:
        found = gpu_use.read_gpu_use()
        loop.call_soon_threadsafe(lambda: conclude(found))

    timer = loop.call_later(_WAIT_LIMIT, lambda: conclude({}))
    memory[_MEMORY_KEY] = threading.Thread(target=read, name="gpu use", daemon=True)
    memory[_MEMORY_KEY].start()
