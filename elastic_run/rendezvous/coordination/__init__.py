"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it.

- `frames`: the messages of a connection; `link`: a connection on a loop.
- `opening`: how a node comes to an agent's port, and what it is answered.
- `listener`: an agent's port; `coordinator_thread`: the coordinator of a job, which decides with `core.job.coordination`.
- `node_thread`: a node's side: it looks for the coordinator, and obeys it.
- `session`: what the agent sees of all this; `handler`: the rendezvous handler.
"""
