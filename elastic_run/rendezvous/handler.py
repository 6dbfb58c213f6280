"""The rendezvous handler of jobs of several nodes: it opens sessions, and has torch's interface on top of a session.

Our own agent calls `open_session`. For an agent that knows only torch's methods, the handler opens the session itself:
`next_rendezvous` forms a round, `num_nodes_waiting` shows that the round should stop, and the agent calls again.

A job without an endpoint shows the command with which other nodes join, to be copied to a shell. A token that was made
for this job stands in front, as a variable: `ps` shows no variables to other users. The command has each value that
took effect on this node, as a flag: other nodes have neither its variables (`PET_…`) nor its configuration file.
"""

from __future__ import annotations

import os
import shlex
import socket

from elastic_run import contract
from elastic_run.contract import NO_RUN_ID
from elastic_run.core.config import JobConfig, JoinCommand, NodeConfig
from elastic_run.core.job.documents import NodeInfo
from elastic_run.records import replace
from elastic_run.rendezvous.addresses import find_outward_address, names_loopback
from elastic_run.rendezvous.api import BACKENDS, RendezvousHandler
from elastic_run.rendezvous.events import Setup
from elastic_run.rendezvous.session import Session
from elastic_run.rendezvous.settings import check_static, make_place, read_settings
from elastic_run.store.connecting import format_endpoint

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

    from elastic_run.rendezvous.api import RendezvousInfo, RendezvousParameters
    from elastic_run.rendezvous.settings import Settings
    from elastic_run.rendezvous.torch_rounds import TorchStyleRounds

#: Bytes of the token that a job without an endpoint makes.
_TOKEN_SIZE = 16
_NO_LIMIT = 1_000_000_000


class ElasticRendezvousHandler(RendezvousHandler):
    """One node's part in the rendezvous; without an endpoint (`hosts_anywhere`) it coordinates, and says where."""

    def __init__(
        self, params: RendezvousParameters, settings: Settings, run_id: str, *, hosts_anywhere: bool = False
    ) -> None:
        self._params = params
        self._settings = settings
        self._run_id = run_id
        self._hosts_anywhere = hosts_anywhere
        self._rounds: TorchStyleRounds | None = None
        self._is_shut = False

    # --- sessions ------------------------------------------------------------------------------------------------
    def open_session(self, setup: Setup) -> Session:
        """Make the session of one agent run, which is not started yet; OSError if this node's port is refused."""
        params, settings = self._params, self._settings
        # Nobody knows of the endpoint yet, so others come by the address that this node tells them.
        local_addr = params.local_addr or (find_outward_address() if self._hosts_anywhere else "")
        token, fresh_token = setup.node_config.token, None
        if self._hosts_anywhere and token is None:
            token = fresh_token = os.urandom(_TOKEN_SIZE).hex().encode()
        endpoint = params.endpoint or f"localhost:{BACKENDS['c10d'].default_port}"
        place = make_place(params.backend, endpoint, self._run_id, settings, secret=token or None)
        if self._hosts_anywhere:
            place.serve_anywhere(local_addr)
        elif params.backend == "static" and settings.rank == 0:
            # Now and not by the session's thread: the agent must know where its workers' store is.
            place.serve()
        config = replace(setup.job_config, min_nodes=params.min_nodes, max_nodes=params.max_nodes)
        setup = replace(setup, job_config=config)
        if params.backend == "static":
            node_info = replace(setup.node_info, preferred_rank=settings.rank, has_fixed_rank=True)
            setup = replace(setup, node_info=node_info)
        describe_join = self._make_join_text(setup.node_config, fresh_token) if self._hosts_anywhere else None
        return Session(place, settings, setup, local_addr=local_addr, describe_join=describe_join)

    def _make_join_text(self, config: NodeConfig, fresh_token: bytes | None) -> Callable[[str, int], str]:
        """Return what tells the user how others join, once it is known where this agent listens."""

        def describe(host: str, port: int) -> str:
            line = describe_join_command(
                format_endpoint(host, port), self._run_id, config.join_command, token=fresh_token
            )
            others = "other nodes"
            if names_loopback(host):
                why = "--local-addr is loopback" if self._params.local_addr else "this host has no other address"
                others = f"{host} is loopback ({why}): only agents on this host can reach it; they"
            if config.token:
                others += ", with the token that this one has,"
            return f"{others} join with: {line}"

        return describe

    @property
    def endpoint(self) -> str:
        """The endpoint that the user gave, or an empty string."""
        return self._params.endpoint

    # --- torch's methods -----------------------------------------------------------------------------------------
    def get_backend(self) -> str:
        """Return the name that the user asked for."""
        return self._params.backend

    def get_run_id(self) -> str:
        """Return the id of the job."""
        return self._run_id

    @property
    def use_agent_store(self) -> bool:
        """Whether rank 0's handler serves the workers' store: with torch's methods it does."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Join the next round; RendezvousStateError also if this node is not taken in."""
        if self._rounds is None:
            from elastic_run.rendezvous.torch_rounds import TorchStyleRounds

            self._rounds = TorchStyleRounds(self.open_session(_torch_style_setup()))
        return self._rounds.next_round()

    def is_closed(self) -> bool:
        """Return whether the job is over, as far as this node knows."""
        return self._is_shut or (self._rounds is not None and self._rounds.is_over)

    def set_closed(self) -> None:
        """Say that this node's part is done; the job is over when all have said so."""
        if self._rounds is not None:
            self._rounds.finish()

    def num_nodes_waiting(self) -> int:
        """Return the number of nodes that wait for the next round. If it is above 0, the agent restarts the workers."""
        return 0 if self._rounds is None else self._rounds.num_nodes_waiting

    def shutdown(self) -> bool:
        """Close the session; returns True."""
        self._is_shut = True
        if self._rounds is not None:
            self._rounds.finish()
            self._rounds.close(self._settings.close_timeout)
        return True


def _torch_style_setup() -> Setup:
    """Return what is known of an agent that says nothing: it counts its restarts by itself."""
    config = JobConfig(
        max_restarts=_NO_LIMIT, max_backoff=0.0, scale_up_delay=0.0, scale_up_grace=0.0, membership_window=None
    )
    node_info = NodeInfo(socket.gethostname(), os.getpid(), 1)
    # Without a token, since torch's methods have no way to show one that was made here.
    return Setup(config, NodeConfig(token=b""), node_info)


def create_handler(params: RendezvousParameters) -> ElasticRendezvousHandler:
    """Return the handler of a job of several nodes, or raise ValueError; nothing is opened yet."""
    settings = read_settings(params.backend, params.config)
    if params.backend == "static":
        check_static(params.endpoint, settings.rank, params.max_nodes)
        return ElasticRendezvousHandler(params, settings, params.run_id or NO_RUN_ID)
    if params.backend == "c10d" and settings.store_type == "tcp" and not params.endpoint.strip():
        if settings.is_host is False:
            message = "rendezvous setting is_host=false needs an endpoint: give --rdzv-endpoint=HOST:PORT"
            raise ValueError(message)
        if "last_call_timeout" not in settings.job_settings:
            # Nobody can know of this endpoint yet: the job starts with the fewest nodes, and grows.
            settings = replace(settings, job_settings={**settings.job_settings, "last_call_timeout": 0.0})
        run_id = params.run_id if params.run_id not in ("", NO_RUN_ID) else os.urandom(4).hex()
        return ElasticRendezvousHandler(params, settings, run_id, hosts_anywhere=True)
    if params.backend == "c10d" and not params.endpoint.strip():
        message = "rendezvous setting store_type=file needs the path of a file that all nodes see: give --rdzv-endpoint"
        raise ValueError(message)
    if not params.run_id:
        message = f"a job whose nodes meet at {params.endpoint} needs a run id, the same on all its nodes"
        raise ValueError(message)
    make_place(params.backend, params.endpoint, params.run_id, settings)
    return ElasticRendezvousHandler(params, settings, params.run_id)


#: All nodes of a job must agree on it: the first one starts with the fewest nodes.
_NO_LAST_CALL = "last_call_timeout=0"
_CONF = "--rdzv-conf"
#: Flags that are said otherwise to other nodes: of the rendezvous, and what is true of this node only.
_REPLACED = (_CONF, "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--local-addr", "--node-rank")
_NO_COMMAND = JoinCommand(("elastic-run",), (), ("...",))


def describe_join_command(
    endpoint: str, run_id: str, command: JoinCommand | None, *, token: bytes | None = None
) -> str:
    """Return the command for other nodes, as one line for a shell; `token` is the one that was made for this job."""
    command = command or _NO_COMMAND
    values = dict(word.partition("=")[::2] for word in command.flags)
    settings = [values.get(_CONF, "")]
    if "last_call_timeout" not in settings[0]:
        settings.append(_NO_LAST_CALL)
    words = [
        *command.command,
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={endpoint}",
        f"--rdzv-id={run_id}",
        f"{_CONF}={','.join(filter(None, settings))}",
        *(word for word in command.flags if word.partition("=")[0] not in _REPLACED),
        *command.program,
    ]
    secret = [] if token is None else [f"{contract.ENV_RDZV_TOKEN}={token.decode()}"]
    return " ".join([*secret, *map(_quote, words)])


def _quote(word: str) -> str:
    """Quote a word for a shell, in one line: what a terminal would obey is written as bash, zsh and ksh read it."""
    if word.isprintable():
        return shlex.quote(word)
    plain = range(ord(" "), ord("~") + 1)
    letters = (chr(byte) if byte in plain and byte not in b"'\\" else f"\\x{byte:02x}" for byte in os.fsencode(word))
    return f"$'{''.join(letters)}'"
