"""One node of a job in a process of its own, for `NodeProcess`.

`python -m tests.support.session_node PORT MIN MAX HOST SUCCESSORS [CLOCK [BACKEND ENDPOINT]]` prints each event in a
line, and obeys the lines of its standard input. With the clock `suspends` the monotonic clock of the process stands
still while the process is stopped, as that of a machine does in suspend. A backend and an endpoint replace the store at
the port.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import TYPE_CHECKING

from elastic_run.rendezvous import RendezvousParameters
from tests.support.configs import plain_setup
from tests.support.sessions import FAST, Node, handler_node, tcp_node
from tests.support.wait import wait_until

if TYPE_CHECKING:
    from collections.abc import Callable

#: Seconds without a tick of the clock after which the process was stopped, or had no processor for as long.
_STOPPED = 0.5
_HOST = {"auto": None, "yes": True, "no": False}


def main() -> None:
    """Run until standard input ends or says `close`."""
    port, least, most = (int(word) for word in sys.argv[1:4])
    successors = tuple(int(word) for word in sys.argv[5].split(",") if word != "0")
    setup = plain_setup(max_restarts=1 if successors else 0)
    if sys.argv[6:7] == ["suspends"]:
        time.monotonic = _make_suspended_clock()
    if sys.argv[7:]:
        backend, endpoint = sys.argv[7:9]
        conf = {**FAST, "store_type": "file"} if backend == "c10d" else FAST
        node = handler_node(RendezvousParameters(backend, endpoint, "job", least, most, "127.0.0.1", **conf), setup)
    else:
        node = tcp_node(port, (least, most), is_host=_HOST[sys.argv[4]], setup=setup, successors=successors)
    deliver = node._deliver

    def tell(event: object) -> None:
        deliver(event)  # type: ignore[arg-type]  # what the session delivers
        sys.stdout.write(f"{event}\n")
        sys.stdout.flush()

    node._deliver = tell  # type: ignore[method-assign]
    node.start()
    wait_until(lambda: node.is_waiting)
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "close":
            break
        _obey(node, line.strip())
    node.close()
    sys.stdout.write("closed\n")


def _make_suspended_clock() -> Callable[[], float]:
    """Return a monotonic clock for which no time passes while this process is stopped."""
    lock = threading.Lock()
    true_clock = time.monotonic
    last, slept = true_clock(), 0.0

    def tell() -> float:
        nonlocal last, slept
        with lock:
            now = true_clock()
            if now - last > _STOPPED:
                slept += now - last
            last = now
            return now - slept

    def tick() -> None:
        while True:
            tell()
            time.sleep(_STOPPED / 10)

    threading.Thread(target=tick, daemon=True).start()
    return tell


def _obey(node: Node, order: str) -> None:
    if order == "done":
        node.done()
    elif order == "fail":
        node.fail()
    elif order == "leave":
        node.session.leave("signal", "told to stop")


if __name__ == "__main__":
    main()
