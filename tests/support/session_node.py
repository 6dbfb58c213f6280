"""One node of a job in a process of its own, for `NodeProcess`.

`python -m tests.support.session_node PORT MIN MAX HOST SUCCESSOR` prints each event in a line, and obeys the lines of
its standard input.
"""

from __future__ import annotations

import json
import sys

from elastic_run.core.policy import RestartPolicy
from elastic_run.rendezvous.elastic.session import Setup
from tests.support.sessions import Node, tcp_node
from tests.support.wait import wait_until

_HOST = {"auto": None, "yes": True, "no": False}


def main() -> None:
    """Run until standard input ends or says `close`."""
    port, least, most, successor = (int(word) for word in (*sys.argv[1:4], sys.argv[5]))
    setup = Setup(local_world_size=1, policy=RestartPolicy(1 if successor else 0))
    successors = (successor,) if successor else ()
    node = tcp_node(port, (least, most), is_host=_HOST[sys.argv[4]], setup=setup, successors=successors)
    deliver = node._deliver

    def tell(event: object) -> None:
        deliver(event)  # type: ignore[arg-type]  # what the session delivers
        sys.stdout.write(f"{event}\n")
        sys.stdout.flush()

    node._deliver = tell  # type: ignore[method-assign]
    node.start()
    sys.stdout.write(f"farewell {json.dumps(node.session.farewell())}\n")
    sys.stdout.flush()
    wait_until(lambda: node.is_waiting)
    sys.stdout.write("waiting\n")
    sys.stdout.flush()
    for line in sys.stdin:
        if line.strip() == "close":
            break
        _obey(node, line.strip())
    node.close()
    sys.stdout.write("closed\n")


def _obey(node: Node, order: str) -> None:
    if order == "done":
        node.done()
    elif order == "fail":
        node.fail()
    elif order == "leave":
        node.session.leave("signal", "told to stop")


if __name__ == "__main__":
    main()
