"""The page of a job's history, made of its event logs: one HTML file without anything from the network.

| module | what it holds |
|---|---|
| `files` | finds and reads event logs and stacks below a directory |
| `timeline` | the rounds of each node on one scale of time |
| `silences` | how long each rank was silent, as curves |
| `failures` | what failed, equal failures together |
| `page` | the page: what it shows of a job, filled into `page.html` |
"""
