"""Proofs that a node's agent is dead, so that other nodes need not wait for its lease.

| module | what it holds |
|---|---|
| `notice` | what a guardian tells the job when its agent has died |
| `proofs` | dead agents of this machine, which the next agent there finds and tells the job |
| `record_directory` | the directory of seat records on a machine, and the locks that show which agents live |
| `seat_record` | one agent's record: which seat of which round it has |
"""
