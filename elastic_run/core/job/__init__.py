"""The decisions about a job of several nodes; the threads that act on them are in `rendezvous.coordination`.

| module | what it holds |
|---|---|
| `assignment` | a node's place in a round |
| `config` | the job's settings: which of them all nodes must agree on, which the first node decides |
| `coordination` | its coordinator: what the nodes are goes in, their orders come out |
| `coordination_state` | what the coordinator knows and has decided |
| `discovery` | which agent coordinates: what an agent asks, whom it follows, when it coordinates itself |
| `documents` | what nodes and coordinator send each other |
| `exclusion` | which machines the job goes on without, since failures keep beginning on them |
| `formation` | of which nodes a round is formed, and the assignment of each |
| `host_lists` | lists of host names in lines for the user, such as `node[01-03,7]` |
| `membership` | one node's part in the job |
| `memory` | what the next coordinator goes on with |
| `node_changes` | changes of the nodes into the job's state |
| `node_config` | the settings in which nodes may differ, with the command line for the other nodes |
| `node_events` | what an agent tells of its workers, and what it is told |
| `node_versions` | whether the nodes of a round have different versions of torch |
| `rank_claims` | two nodes with one fixed rank |
| `ranks` | which node and which worker gets which rank |
| `refusals` | the nodes that the job has refused, and the clauses about them that waiting nodes show |
| `reported_failure` | the failure in a node's report, which may be garbage |
| `restart_policy` | whether a failed round is restarted: budget, window, early failures, backoff |
| `role_scripts` | whether the nodes of a role run one script |
| `round_outcome` | what follows a round that has ended: a restart, a change of membership, the end of the job |
| `round_policy` | when a running round is halted, and why; when the job waits no longer |
| `round_steps` | from one round to the next: gather, propose, start, settle |
| `state` | the job's state |
| `succession` | which coordinator may form a round |
| `wait_status` | which nodes are there, for the lines of nodes that wait |
"""
