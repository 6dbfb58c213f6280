"""The coordination of a job of several nodes: one agent coordinates, and each node has one connection to it.

| module | what it holds |
|---|---|
| `frames` | the messages of a connection |
| `link` | a connection on a loop |
| `opening` | what both sides say before the first document |
| `token_proof` | how they prove the job's token |
| `listener` | an agent's port, and what strangers can do there |
| `coordinator` | the coordinator of a job |
| `coordinator_thread` | the coordinator's thread |
| `questions` | `status`, `stacks` and drains across nodes |
| `left_out_nodes` | the nodes that the job goes on without, for `status` |
| `node_thread` | a node's side: it obeys the coordinator, and tells the agent |
| `round_entry` | the way into a round: is rank 0's store reachable? |
| `coordinator_search` | how an agent finds the coordinator, or becomes it |
| `places` | where the nodes of a job meet |
| `lease_place` | the same if a lease says who coordinates |
| `outage` | what the user is told while there is no coordinator |
| `session` | what the agent sees of all this |
| `step_check` | refuses launchers of one step of Slurm that contradict each other |
| `handler` | torch's interface on top of it |
"""
