"""The driver of one agent: it brings events to the pure state machine of `core.agent`, and performs its commands.

| module | what it holds |
|---|---|
| `supervisor` | makes the parts, feeds the machine, performs its commands, closes all |
| `parts` | what the parts of one agent share; passes events to the event log |
| `context` | the agent's options; what all rounds share: guardian, token, descriptors; the removal of files |
| `round_join` | offers this node's workers' store, takes part in the rendezvous, and takes over the ranks |
| `job` | this node's part in a job of several nodes |
| `worker_launch` | starts the workers of a round; those of the first round before the supervisor is imported |
| `round_driver` | the workers of the rounds: starts, watches and stops them |
| `round` | one round: its workers, their output, and how each ended |
| `round_checks` | the checks before a round: free GPU memory, the health check |
| `warm_start` | starts the templates of warm workers; a formed round waits for its forks |
| `watches` | the watches over a round: state D, waiting nodes, quiet rounds, resources |
| `failed_ranks` | ranks whose main thread an exception has ended, and whose process lives |
| `hang_detection`, `hang_signs` | finds that the job hangs; reads the signs of progress |
| `hang_reaction` | tells that the job hangs, and performs --hang-action |
| `stack_reports` | shows the workers' stacks, on SIGQUIT and before SIGKILL |
| `flight_recorder` | torch's flight recorder in the workers: its variables, its dumps |
| `timers` | the pipe and the expiry of the workers' timers |
| `signal_watch` | answers the launcher's signals |
| `event_recorder` | makes the events of the event log |
| `worker_readings` | what the workers have used and written, for `status` and the event log |
| `fault_injection` | injects the faults of --inject-fault |
"""
