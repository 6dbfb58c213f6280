"""The rendezvous of a job on several nodes: one node coordinates, over a store; all nodes follow its decisions.

Every decision is made in `elastic_run.core`; here are the threads, the store connections and the clock that it needs.

| module | what it holds |
|---|---|
| `addresses` | endpoints, this machine's addresses, whether a port can be reached |
| `backend` | where the job's store is, how to open it, how this node serves it |
| `context` | what the threads of one session share, and how many seconds the store may take for an answer |
| `coordinator_thread` | the coordinator thread: reads facts and heartbeats, writes decisions |
| `decision_log` | the log of decisions in the store: reading and creating its slots, raising its start |
| `exit_barrier` | waits at the end: until all is sent, until all nodes know the verdict, until the store has moved |
| `handler` | the rendezvous handler, which makes the session |
| `heartbeats` | writes this node's heartbeats, reads those of others, and knows when each is due |
| `job_session` | the session: starts the threads, performs the member's commands |
| `left_out_nodes` | the nodes that the job goes on without, for `elastic-run status` |
| `log_reader` | the log reader thread: waits for the next decision |
| `member_driver` | drives `core.node.machine`, one event at a time, for all threads |
| `node_death` | proofs that an agent is dead: seat records, the guardian's notice |
| `step_check` | refuses launchers of one step of Slurm that contradict each other |
| `other_jobs` | what a lone node says of the place where it waits, and of launchers of another job there |
| `partition` | a node that is cut off: it stops its workers (`--fence-after`), and finds the other nodes again |
| `retry_deadline` | how long the store is tried while it does not answer, and what the user is told |
| `round_admission` | from a round in the log to the agent: is rank 0's store reachable? |
| `sender` | the sender thread: opens the store, writes facts and heartbeats |
| `state_copy` | this node's copy of the job's state, for a store that knows nothing of the job |
| `status_exchange` | how one node learns the state of all nodes, where somebody asks |
| `store_connection` | one thread's connection to the store; opens it again, after a silence with more time |

Threads of one session, what each owns, and what passes between them::

      agent's loop                      one session                                       the job's store
    ┌──────────────┐  reports   ┌─────────────────────────────┐
    │ agent.driver │ ─────────> │        member driver        │   facts, heartbeats
    │     .job     │            │ core.node.machine, a lock;  │ <──── sender ─────────┬────>  facts, heartbeats/…
    │              │ <───────── │ one event at a time,        │        │ picks the     │
    └──────────────┘   events   │ commands in their order     │        │ endpoint      │ one connection
            ^                   │                             │   decisions           │
            │                   │                             │ <──── log reader ─────┴────>  decision slots
            │                   └─────────────────────────────┘
            │                      │ round formed      │ term begins, ends
            │                      v                   v
            └──────── round admission            coordinator thread ────────────────────────>  facts, slots,
                      (one thread a round)       core.job.coordinator                          heartbeats, state

- The **sender** owns the choice of the endpoint, the store's id, the heartbeats, the retry deadline and the connection.
  When the store has confirmed the node's first facts, it starts the log reader.
- The **log reader** feeds each slot to the member driver. It shares the sender's connection: an operation of the sender
  calls the log reader's wait off, and begins it again (`store.tcpstore.agent_client`). In etcd, in a directory, it
  has a connection of its own to the store that the sender has found.
- The **coordinator thread** runs while this node coordinates; it owns the coordinator's state (`core.job.coordinator`).
- **Round admission** has a thread for each round, until rank 0's store was seen to be reachable.
- The **fence** thread runs with ``--fence-after`` only; it owns nothing and feeds `CutOff`.
- The **closing** thread, the agent's, runs `JobSession.close`: while this node waits for others at the end, the agent's
  loop must answer signals.
- Every other connection belongs to one thread. Another thread may only interrupt it.
- What the threads share is frozen (`context.SessionContext`). What changes has one owner (`SenderState`), is a word
  from one thread to another (`SessionSignals`), or is a queue: the events for the agent, in the order of the decisions
  (`EventQueue`).
"""
