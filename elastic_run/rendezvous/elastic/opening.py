"""Makes the session of one agent run from what the user said."""

from __future__ import annotations

import os
import socket

from elastic_run import __version__
from elastic_run.core.agent.restart_policy import RestartPolicy
from elastic_run.core.protocol import messages
from elastic_run.rendezvous.elastic.affairs import Affairs
from elastic_run.rendezvous.elastic.backends import TcpBackend
from elastic_run.rendezvous.elastic.deaths import Deaths, name_job
from elastic_run.rendezvous.elastic.hosting import HostedWorkerStore
from elastic_run.rendezvous.elastic.job_session import JobSession

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.elastic.backends import Backend
    from elastic_run.rendezvous.elastic.session import Session, Setup
    from elastic_run.rendezvous.elastic.settings import Settings

__all__ = ["open_session"]


def open_session(
    backend: Backend,
    settings: Settings,
    setup: Setup,
    *,
    min_nodes: int,
    max_nodes: int,
    local_addr: str | None = None,
    describe_join: Callable[[str, int], str] | None = None,
) -> Session:
    """Make the session of one agent run; nothing is said to the store before its `start`.

    Args:
        backend: The job's store.
        settings: Of the rendezvous.
        setup: What the agent knows.
        min_nodes: Smallest number of nodes to run with.
        max_nodes: Largest number of nodes to run with.
        local_addr: The address that others are to use; None for that of the interface that reaches the store.
        describe_join: Says how others join, once the store is there at a host and a port; None where they know.

    Returns:
        The session.
    """
    host = socket.gethostname()
    affairs = Affairs(
        node=f"{host}_{os.getpid()}_{os.urandom(4).hex()}",
        card=_make_card(host, setup),
        rules=_make_rules(settings, setup, min_nodes, max_nodes, has_successors=bool(backend.successors)),
        settings=settings,
        backend=backend,
        local_addr=local_addr or "",
        deaths=Deaths(name_job(backend)),
        shows_waiting=setup.shows_waiting,
    )
    shares_server = isinstance(backend, TcpBackend) and backend.serves_workers
    session = JobSession(affairs, shares_server=shares_server, describe_join=describe_join, is_fenced=setup.is_fenced)
    session.offers_store = not shares_server
    if isinstance(backend, TcpBackend) and backend.serves_workers and backend.hosted is not None:
        session.worker_store = HostedWorkerStore(backend.hosted, backend.endpoint[0])
    return session


def _make_card(host: str, setup: Setup) -> messages.Card:
    return messages.Card(
        host=host,
        pid=os.getpid(),
        local_world_size=setup.local_world_size,
        role=setup.role,
        preferred_rank=setup.preferred_rank,
        version=__version__,
        script=setup.script,
        script_file=setup.script_file,
        has_fixed_rank=setup.has_fixed_rank,
    )


def _make_rules(
    settings: Settings, setup: Setup, min_nodes: int, max_nodes: int, *, has_successors: bool
) -> messages.Rules:
    policy = setup.policy or RestartPolicy()
    return messages.Rules(
        min_nodes=min_nodes,
        max_nodes=max_nodes,
        max_restarts=policy.max_restarts,
        window_count=policy.window_count,
        window_seconds=policy.window_seconds,
        min_uptime=policy.min_uptime,
        no_restart_exit_codes=tuple(sorted(policy.no_restart_exit_codes)),
        max_backoff=policy.max_backoff,
        join_timeout=settings.join_timeout,
        last_call_timeout=settings.last_call_timeout,
        keep_alive_interval=settings.keep_alive_interval,
        keep_alive_max_attempt=settings.keep_alive_max_attempt,
        scale_up_delay=setup.scale_up_delay,
        scale_up_grace=setup.scale_up_grace,
        membership_count=setup.membership_count,
        membership_seconds=setup.membership_seconds,
        exit_barrier_timeout=setup.exit_barrier_timeout,
        has_successors=has_successors,
        split=setup.split,
    )
