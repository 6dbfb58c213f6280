"""Warm workers: a template process imports modules once, and each worker is a fork of it (`--preload`).

A template is started with the command line and environment of the workers, so it is a worker up to the moment at which
Python would open the script. At that moment it stops (`template`), imports the modules that the user named, and forks.
A fork goes on from there by itself (`fork_setup`): Python runs the script, module, directory or zip file as it always
does. So this package imitates no part of Python, and no frame of ours is on the stack.

| module | what it holds | where it runs |
|---|---|---|
| `worker_pool` | all templates of an agent, and the forks that wait for the next round | agent |
| `template_client` | one template and its forks | agent |
| `memory_sharing` | how much memory the workers share | agent |
| `subreaper` | makes the forks the agent's children | agent |
| `obstacles` | why a command can't have warm workers | agent |
| `template` | imports modules, and forks on demand | template |
| `fork_safety` | checks after each import whether the process can still be forked | template |
| `environment_watch` | which variables are read while modules are imported | template |
| `startup_replay` | repeats the part of Python's start before the watch | template, a process of its own |
| `automatic_preload` | `--preload auto`: the script's own imports | template |
| `fork_setup` | turns a waiting fork into a worker | worker |
| `messages` | messages between agent, template and forks | all |
"""
