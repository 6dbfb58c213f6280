"""The machine of a job, run by the node that coordinates it; its driver is in `elastic_run.rendezvous.elastic`.

| module | what it holds |
|---|---|
| `apply_facts` | facts into the job's state: which nodes are there, what became of the round on each |
| `config` | the job's settings: which of them all nodes must agree on, which the first node decides |
| `coordination` | the small coordination, which no session uses yet: what nodes are goes in, their orders come out |
| `coordination_state` | what its coordinator knows and has decided |
| `coordinator` | the coordinator's side of the log: facts in, decisions out, one slot at a time |
| `coordinator_decision` | what the coordinator decides next: the policy's decision, or what a log without round needs |
| `coordinator_slots` | how a decision gets its slot and its state document; which keys are deleted then |
| `coordinator_state` | what the coordinator knows in its term |
| `discovery` | which agent coordinates it: what an agent asks, whom it follows, when it coordinates itself |
| `documents` | what its nodes and its coordinator send each other |
| `exclusion` | which machines the job goes on without, since failures keep beginning on them |
| `formation` | when a round is formed, and of which nodes |
| `host_lists` | lists of host names in lines for the user, such as `node[01-03,7]` |
| `job_document` | the job's state as a document, with relative times |
| `machine` | the policy of the job: `decide` gives the next decision, such as to end a round for new nodes |
| `majority` | which nodes of the last round are needed, so that no other store's log can form a round |
| `membership` | one node's part in it |
| `memory` | what its next coordinator goes on with |
| `node_changes` | changes of its nodes into the job's state |
| `node_versions` | whether the nodes of a round have different versions of torch |
| `rank_claims` | two nodes with one fixed rank |
| `ranks` | which node and which worker gets which rank |
| `refusals` | the nodes that the job has refused, and the clauses about them that waiting nodes show |
| `reported_failure` | the failure in a node's report, which may be garbage |
| `role_scripts` | which script the nodes of a role run |
| `round_outcome` | what follows a round that has ended: a restart, a change of membership, the end of the job |
| `round_steps` | from one of its rounds to the next |
| `snapshot` | the document of the job's state beside each decision, for the next coordinator |
| `state` | the job's state |
| `store_change` | the state after the job has moved to another store |
| `succession` | which of its coordinators may form a round |
| `view_change` | how the log of a new store goes on from the copies that the nodes keep |
"""
