"""Finds the causes of what goes wrong with a job, before it starts and after it has failed.

| module | what it holds |
|---|---|
| `doctor` | the checks of `elastic-run doctor`: this machine, and the network between the nodes |
"""
