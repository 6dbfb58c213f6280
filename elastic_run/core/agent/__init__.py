"""The machine of one agent; its driver is `elastic_run.agent.driver`.

| module | what it holds |
|---|---|
| `faults` | faults that a user asks for: which one, in which worker, when |
| `machine` | the state machine of an agent: its table `TRANSITIONS`, `decide` |
| `messages` | the machine's events and commands |
| `shutdown` | how a worker is stopped: which process gets which signal, and when |
"""
