"""The driver of one agent: it brings events to the pure state machine of `core`, and performs its commands.

| module | what it holds |
|---|---|
| `check_process` | one run of a command beside the workers, with a timeout |
| `context` | the agent's options; the parts that all rounds share: guardian, token, descriptors; the removal of files |
| `control` | opens the control socket, for `elastic-run status` and other commands |
| `d_state` | watches for workers in uninterruptible sleep (state D) |
| `early_start` | starts the first round's workers before the supervisor is imported |
| `environment` | the workers' environment variables |
| `event_recorder` | makes the events of the event log |
| `failed_ranks` | ranks whose main thread an exception has ended, and whose process lives |
| `flight_recorder` | torch's flight recorder in the workers: its variables, its dumps |
| `gpu_memory` | waits until the GPUs have taken back the old workers' memory |
| `fault_injection` | injects the faults of --inject-fault |
| `fault_sockets` | the sockets on which workers take requests for faults |
| `hang_detection` | watches a round for a hang |
| `hang_reaction` | tells that the job hangs, and performs --hang-action |
| `hang_signs` | reads the workers' signs of progress for the hang detection |
| `held_round` | a formed round that waits for its warm workers |
| `job` | this node's part in a job of several nodes |
| `job_exit_code` | chooses the launcher's exit code from the verdict and the root cause |
| `job_reports` | tells a job of several nodes what became of this node's rounds |
| `joining` | joins a round, through the job or through a rendezvous handler |
| `last_output` | time and text of a worker's last output |
| `last_words` | exceptions that are the last output of a rank |
| `late_imports` | the modules that only the end or a restart of a job needs |
| `machine_driver` | feeds the state machine, one event at a time |
| `observation` | passes events to the event log and the metrics, once the workers run |
| `parts` | the parts of one agent that several of these modules need |
| `process_counters` | a worker's bytes written and processor time, read at each tick of the hang detection |
| `quiet_watch` | finds out that nothing happens in a round any more |
| `resource_readings` | reads the workers' processor time and memory for the event log and for `elastic-run status` |
| `round` | one round: its workers, their output, and how each ended |
| `round_checks` | the checks before a round: free GPU memory, the health check |
| `round_driver` | the workers of the rounds: starts, watches and stops them |
| `round_join` | offers this node's worker store, and takes part in the rendezvous |
| `session_setup` | the description of this node for the rendezvous |
| `signal_watch` | answers the launcher's signals |
| `stack_reports` | shows the workers' stacks, on SIGQUIT and before SIGKILL |
| `start_errors` | why the workers' program could not be started, in words |
| `step` | one step of the state machine, for the event log |
| `supervisor` | the loop: events to the state machine, commands to the parts |
| `template_start` | starts the templates of warm workers, and chooses their environment variables |
| `time_limit` | tells that the scheduler will end the job soon, and stops the workers; `context` gives the time |
| `timers` | the pipe and the expiry of the workers' timers |
| `waiting_nodes` | asks a foreign rendezvous whether nodes wait |
| `watches` | starts and ends the watches of a round: state D, timers, waiting nodes, failures, hangs, resources |
| `worker_launch` | starts the workers of a round |
| `worker_ranks` | the ranks of this node's workers in a round |
"""
