"""The control socket: how a command asks an agent that runs on this machine, as the same user.

The agent's side is `agent.control_server` (the socket) and `agent.control_requests` (the table of requests).
"""
