"""The lease of a job: who coordinates it, where etcd or a shared file decides that. Nothing else of a job is there.

| module | what it holds |
|---|---|
| `etcd_servers` | requests over HTTP to the servers of an etcd cluster |
| `etcd_settings` | the TLS and the user of an etcd cluster, from `--rdzv-conf` |
| `etcd_v2` | the lease as a key with a time to live, through python-etcd |
| `etcd_v3` | the lease as a key on a lease of etcd's version 3 |
| `file` | the lease in a directory that all nodes share |
| `lease` | what a lease is, and the proof that a member of the job wrote it |

A job uses one of the stores, so nothing is imported here. `backend_table.open_lease` opens a job's lease.
"""
