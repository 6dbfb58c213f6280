"""Finds the causes of broken jobs: before a job starts, while it runs, and after it has failed.

Pure decisions about the workers of a running job are in `core.diagnosis`.

| module | what it holds |
|---|---|
| `altered_collectives` | in a worker: lets a rank call another collective than its peers |
| `collectives` | the collectives of a rank, as its flight recorder has recorded them |
| `doctor` | the checks of `elastic-run doctor`: this machine, and the network between the nodes |
| `dump_files` | finds the dumps of a job in files and directories, and the rank of each |
| `dump_format` | a dump's bytes to collectives: the pickle and the JSON of torch, read without running anything |
| `fault_thread` | in a worker: makes a fault of --inject-fault in the process itself |
| `full_disk` | in a worker: all disks look full |
| `group_order` | ranks that wait for each other in different groups: which of them has left the order |
| `kernel_view` | a process as the kernel shows it: state, signals, where its threads sleep |
| `native_stacks` | the frames of C and C++ of workers, by py-spy |
| `operation_match` | whether the ranks of a group call the same operation with the same sizes and types |
| `other_sizes` | ranks that gloo has ended because a peer sent more bytes than their collective takes |
| `recorder_hook` | in a worker: waits for the import of torch.distributed |
| `recorder_server` | in a worker: writes the dump of its flight recorder, on request and at its end |
| `stack_files` | the file with all stacks of one moment |
| `stack_requests` | asks the workers of one round for their stacks |
| `trace_analysis` | dumps to findings: the rank that did not join, the ranks that differ |
| `trace_findings` | records of that analysis: process groups, findings and their kinds |
| `trace_text` | the words for findings |
| `unmatched_p2p` | sends and recvs without a partner |
| `worker_sockets` | the sockets on which workers take requests: names, and the user at the other end |
"""
