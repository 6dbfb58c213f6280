"""The machine of one node of a job (a member); its driver is in `elastic_run.rendezvous.elastic`.

| module | what it holds |
|---|---|
| `apply_log` | what `head` and each decision in the log mean for this node |
| `config` | the settings in which nodes may differ, with the command line for the other nodes |
| `coordination` | which node coordinates: heartbeats of the coordinator, claims, terms that end |
| `machine` | the state machine of a member: `decide` |
| `messages` | the machine's events and commands |
| `reports` | the agent's events as facts for the coordinator |
| `rounds` | the node's assignment, the warning of a new round, halts |
| `state` | the member's state |
| `store_events` | broken connections, answered heartbeats, another store |
"""
