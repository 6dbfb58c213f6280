"""The job store: the log, keys and heartbeats that the agents of one job share.

| module | what it holds |
|---|---|
| `api` | the interface, and the rules that each store keeps |
| `c10d` | over torch's TCPStore protocol |
| `compression` | large values, compressed as etcd needs it |
| `etcd` | how the stores in etcd read: one watch for each directory |
| `etcd_v2` | over etcd's version 2 API |
| `etcd_v2_client` | requests and watches of etcd's version 2 API |
| `etcd_v3` | over etcd's version 3 API |
| `etcd_v3_client` | requests and watches of etcd's version 3 API |
| `file` | in a directory that all nodes share |
| `http_client` | requests to one of several servers of a cluster |
| `http_connection` | one connection: requests and answers, written and read by urllib3 |
| `memory` | in this process's memory, for tests |
| `revisions` | the number of etcd's last change, which only grows |
| `signed` | values that the members of the job sign |
"""
