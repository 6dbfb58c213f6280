"""Processes of the operating system: start a worker, find what is left of it, stop it, guard it.

| module | what it holds |
|---|---|
| `daemon` | makes a process that leaves the launcher behind |
| `descendants` | finds the processes that are left of a worker |
| `descriptors` | inherited descriptors, and descriptors that a child would inherit |
| `fork_exec` | starts one process: session, descriptors, affinity, exec |
| `guardian` | the launcher's side of the guardian process |
| `guardian_keeper` | starts the guardian again when it dies |
| `guardian_process` | the guardian's own process: waits for the launcher's end, then cleans up |
| `held_signals` | holds signals back while processes are started |
| `interpreter` | which program runs Python code in a process of its own |
| `popen_tracer` | lets a tracer that has wrapped `subprocess.Popen` change the commands of workers |
| `process_title` | the name and the command line that `ps` shows |
| `process_table` | what /proc tells of one process; signals to processes |
| `spawn_options` | the options with which one process is started |
| `stack_pipe` | the pipe to which a worker writes its stacks |
| `subreaper` | makes this process the parent of orphaned descendants |
| `workers` | the worker processes of one round: exits, signals, stopping |
"""
