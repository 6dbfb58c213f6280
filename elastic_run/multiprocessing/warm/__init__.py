"""Warm workers: a template process imports modules once, and each worker is a fork of it (`--preload`).

A template is started with the very command line and environment of the workers, so it is a worker, up to the moment in
which Python would open the script. There it stops (`template`), imports what was asked for, and forks. A fork goes on
from that point by itself (`arrival`): Python runs the script, module, directory or zip file as it always does. So
nothing of what Python does with a program is imitated here, and no frame of ours is on its stack.

| part | what it is | where it runs |
|---|---|---|
| `engagement` | all templates of an agent, and the generation of workers that waits | agent |
| `handle` | one template and its forks | agent |
| `sharing` | how much memory that saves | agent |
| `subreaper` | makes the forks children of the agent | agent |
| `obstacles` | why a command can't have warm workers | agent |
| `template` | imports, and forks on demand | template |
| `safety` | what a process that is going to be forked must not have | template |
| `environment` | which variables are read before there are workers | template |
| `rehearsal` | what was read before that could be seen | template, a process of its own |
| `choice` | `--preload auto`: the script's own imports | template |
| `arrival` | from a fork that waits to a worker | worker |
| `title` | what `ps` shows of it | template, worker |
| `messages` | what they say to each other | all |
"""
