"""The page of a job's history, made of its event logs: one HTML file without anything from the network.

| module | what it holds |
|---|---|
| `files` | finds and reads event logs and stacks below a directory |
| `timeline` | the rounds of each node on one scale of time |
| `silences` | how long each rank was silent, as curves |
| `resources` | what each rank used, as curves |
| `failures` | the failures, with equal ones grouped |
| `page` | the page: its data, filled into `page.html` |
"""
