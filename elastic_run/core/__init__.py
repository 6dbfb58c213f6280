"""Every decision, as pure functions: no I/O, clock, thread, logging or randomness (law 3).

A machine is a function `decide(state, event, now) -> (state, commands)`; a driver elsewhere performs the commands.

| module | what it holds |
|---|---|
| `agent` | the machine of one agent: start workers, watch them, stop them, restart the round |
| `failure` | which failure is the root cause, the exception in a worker's stderr, and whether the job hangs |
| `job` | a job of several nodes: who coordinates it, its rounds, restarts and end, and the documents of its nodes |
"""
