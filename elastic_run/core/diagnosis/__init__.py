"""What workers do when nothing seems to happen: their stacks as records, and equal ones together.

| module | what it holds |
|---|---|
| `hang` | whether a job hangs, and for how long each rank has been still |
| `job_stillness` | how long the ranks of all nodes of a job have been still |
| `quiet` | whether nothing happens in a round |
| `stack_groups` | ranks that are at the same place of the user's program |
| `stack_text` | reads what faulthandler has written |
"""
