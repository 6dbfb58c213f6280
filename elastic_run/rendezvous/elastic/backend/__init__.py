"""Where a job's store is, how to open it, and how this node serves it.

| module | what it holds |
|---|---|
| `base` | `Backend`: a job's store as one agent reaches it; stores that other programs serve |
| `etcd` | the user's settings for an etcd cluster |
| `hosting` | the store that this node serves, on a thread of its own |
| `tcp` | a store over TCPStore's protocol: which node serves it, which endpoint is next |
"""
