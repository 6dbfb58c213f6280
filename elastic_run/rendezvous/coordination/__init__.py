"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it.

| module | what it holds |
|---|---|
| `frames`, `link` | the messages of a connection; a connection on a loop |
| `opening`, `token_proof` | what both sides say before the first document, and how they prove the job's token |
| `listener` | an agent's port, and what strangers can do there |
| `coordinator`, `coordinator_thread` | the coordinator of a job, and its thread |
| `questions`, `left_out_nodes` | `status`, `stacks` and drains across nodes |
| `node_thread`, `round_entry` | a node's side: it obeys the coordinator, and tells the agent; the way into a round |
| `coordinator_search`, `places`, `lease_place` | how an agent finds the coordinator, or becomes it |
| `outage` | what the user is told while there is no coordinator |
| `session`, `handler` | what the agent sees of all this; torch's interface on top of it |
| `hosting` | a workers' store in a thread, for agents that know only torch's interface |
"""
