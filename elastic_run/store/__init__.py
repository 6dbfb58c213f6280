"""Stores of keys and values: torch's TCPStore, where workers meet, and the stores that the agents of one job share.

| module | what it holds |
|---|---|
| `backoff` | pauses between attempts: longer each time, of random length |
| `connecting` | reaches a server: names, addresses and connections, with one deadline |
| `errors` | what can go wrong between a store and its clients |
| `jobstore` | the store that the agents of one job share, over a TCPStore, etcd or a shared directory |
| `job_path` | where a job lies in a store that other jobs use, too |
| `limits` | the most that a store takes from outside |
| `stream` | a blocking byte stream to a server |
| `tcpstore` | torch's TCPStore, served and spoken without torch |

`jobstore` imports `tcpstore`, never the other way. Nothing is imported here: the launcher's start is measured in
milliseconds, and it needs only a part.
"""
