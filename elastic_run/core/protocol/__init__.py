"""What the nodes of a job write into its store.

| module | what it holds |
|---|---|
| `codec` | records to JSON and back, with every value checked |
| `decisions` | the coordinator's decisions: the entries of the log |
| `documents` | what the coordinator writes beside the log: assignments, where the log stands, which nodes are there |
| `facts` | what nodes tell the coordinator |
| `job_keys` | the keys of the store |
| `liveness` | which nodes still write heartbeats, as one observer sees it |
| `log_start` | where the log begins: a slot that was trimmed is never decided again |
| `messages` | writing and reading of facts, decisions and documents; the protocol's number |
| `node_status` | the document of a node's state, and whether a document of another node is one |
| `outcomes` | what became of a round on a node, and why a node leaves |
"""
