"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it.

| module | what it holds |
|---|---|
| `coordinator_search` | how an agent finds its coordinator, or becomes it |
| `coordinator_thread` | the coordinator of a job, which decides with `core.job.coordination`; an agent's port |
| `frames` | the messages of a connection |
| `handler` | the rendezvous handler |
| `lease_place` | where the nodes of a job meet if a lease says who coordinates |
| `left_out_nodes` | the nodes that the job goes on without, for `elastic-run status` |
| `link` | a connection on a loop |
| `listener` | what comes to an agent's port |
| `node_thread` | a node's side: it looks for the coordinator, and obeys it |
| `opening` | how a node comes to an agent's port, and what it is answered |
| `outage` | how long a node looks for a coordinator, and what its user is told |
| `places` | where the nodes of a job meet |
| `questions` | questions to all nodes of a job |
| `session` | what the agent sees of all this |
| `token_proof` | the proof that one end of a connection knows the job's token |
"""
