"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it.

| module | what it holds |
|---|---|
| `coordinator` | the coordinator of a job: what the nodes say goes in, each node's order goes out |
| `coordinator_search` | how an agent finds the coordinator, or becomes it |
| `coordinator_thread` | the thread of an agent's port and of its coordinator |
| `frames` | the messages of a connection as bytes |
| `handler` | the rendezvous handler, with torch's interface |
| `lease_place` | where the nodes meet: a lease |
| `left_out_nodes` | the nodes that the job goes on without, for `status` |
| `link` | a connection on a loop |
| `listener` | an agent's port, and what strangers can do there |
| `node_thread` | a node's side: it obeys the coordinator, and tells the agent |
| `opening` | what both sides say before the first document |
| `outage` | what the user is told while there is no coordinator |
| `places` | where the nodes meet: endpoints |
| `questions` | `status`, `stacks` and drains across nodes |
| `round_entry` | the way into a round |
| `session` | what the agent sees of all this |
| `token_proof` | how both sides of a connection prove the job's token |
"""
