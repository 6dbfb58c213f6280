"""Finds the causes of what goes wrong with a job, before it starts and after it has failed.

| module | what it holds |
|---|---|
| `collectives` | the collectives of a rank, as its flight recorder has recorded them |
| `doctor` | the checks of `elastic-run doctor`: this machine, and the network between the nodes |
| `dump_files` | finds the dumps of a job in files and directories, and the rank of each |
| `dump_format` | a dump's bytes to collectives: the pickle and the JSON of torch, read without running anything |
| `operation_match` | whether the ranks of a group call the same operation with the same sizes and types |
| `trace_analysis` | dumps to findings: the rank that did not join, the ranks that differ |
| `trace_text` | the words for findings |
"""
