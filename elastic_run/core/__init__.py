"""Every decision, as pure functions: no I/O, clock, thread, logging or randomness (law 3).

A machine is a function `decide(state, event, now) -> (state, commands)`; a driver elsewhere performs the commands.

| module | what it holds |
|---|---|
| `agent` | the machine of one agent: start workers, watch them, stop them, restart the round |
| `diagnosis` | what workers do: equal stacks together, and whether the job hangs |
| `failure` | which failure is the root cause, and the exception in a worker's stderr |
| `job` | a job of several nodes: who coordinates it, its rounds, its restarts, its end, and the part of each node |
| `protocol` | the words and records that nodes of a job send each other, and how they become JSON |
"""
