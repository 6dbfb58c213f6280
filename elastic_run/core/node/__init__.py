"""The machine of one node of a job (a member); its driver is in `elastic_run.rendezvous.elastic`.

| module | what it holds |
|---|---|
| `apply_log` | what a decision in the log, or a document of the store, means for this node |
| `config` | the settings in which nodes may differ, with the command line for the other nodes |
| `machine` | the state machine of a member: `decide` |
| `messages` | the machine's events and commands |
| `reports` | the agent's events as facts for the coordinator |
| `state` | the member's state |
"""
