"""The command line: from its words and the variables ``PET_*`` to a `LaunchConfig` and the workers' command.

`elastic_run.run` tells the story. These modules know the flags. What they call in `cluster`, `rendezvous` and
`launcher` knows no flag: it raises errors of its own, and the caller here adds the flag.
"""
