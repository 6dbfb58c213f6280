"""The control socket: how a command asks an agent that runs on this machine, as the same user.

The agent's side is `agent.control_server` (the socket) and `agent.control_requests` (the table of requests).

| module | what it holds |
|---|---|
| `client` | asks one agent, or all agents of this user on this machine |
| `jobs` | finds the job that a command's RUN means |
| `socket_directory` | the directory of the sockets, its permissions, and stale sockets |
| `wire` | the format of a request and of its answer, and their limits |
"""
