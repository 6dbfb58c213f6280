"""One rendezvous on this machine, for tests of the launcher on several nodes: its flags, its store, its coordinator."""

from __future__ import annotations

import contextlib

from elastic_run.core.job.discovery import COORDINATES
from elastic_run.rendezvous.coordination.opening import Credentials, Hello, ask
from elastic_run.store.errors import StoreConnectionError
from tests.support.wait import DEADLINE, wait_until

#: A last call that no test waits for, and heartbeats that show a loss soon.
CONF = "last_call_timeout=3,keep_alive_interval=0.5"
RUN_ID = "j"


def place(port: int, conf: str = CONF) -> tuple[str, ...]:
    """Return the flags of nodes whose store is at a port of this machine."""
    endpoint = f"--rdzv-endpoint=localhost:{port}"
    return ("--rdzv-backend=c10d", endpoint, f"--rdzv-id={RUN_ID}", f"--rdzv-conf={conf}")


def wait_coordinated(port: int, token: bytes | None = None, run_id: str = RUN_ID) -> None:
    """Wait until the first node of a job has made itself its coordinator."""
    credentials = None if token is None else Credentials(token)

    def is_coordinated() -> bool:
        with contextlib.suppress(StoreConnectionError):
            answer, _, _ = ask(
                ("localhost", port), Hello(run_id, "", "", ""), DEADLINE, credentials, dark_after=DEADLINE
            )
            return answer.role == COORDINATES
        return False

    wait_until(is_coordinated, what=f"a coordinator at port {port}")
