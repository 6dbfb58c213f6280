"""Every decision, as pure functions: no I/O, clock, thread, logging or randomness (law 3).

Each of the three machines is a function `decide(state, event, now) -> (state, commands)`; a driver elsewhere performs
the commands.

| module | what it holds |
|---|---|
| `agent` | the machine of one agent: start workers, watch them, stop them, restart the round |
| `diagnosis` | what workers do: equal stacks together, and whether the job hangs |
| `failure` | which failure is the root cause, and the exception in a worker's stderr |
| `job` | the machine of a job, which its coordinator runs: form rounds, halt them, restart or end the job |
| `node` | the machine of one node of a job: its facts go out, the coordinator's decisions come in |
| `protocol` | what nodes write into the job's store: facts, decisions, documents, heartbeats |
"""
