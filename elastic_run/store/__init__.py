"""Stores of keys and values: torch's TCPStore, where workers meet; and how any server is reached.

| module | what it holds |
|---|---|
| `backoff` | pauses between attempts: longer each time, of random length |
| `connecting` | reaches a server: names, addresses and connections, with one deadline |
| `errors` | what can go wrong between a store and its clients |
| `job_path` | where a job lies in a store that other jobs use, too |
| `limits` | the most that a store takes from outside |
| `tcpstore` | torch's TCPStore, served and spoken without torch |

Nothing is imported here: the launcher's start is measured in milliseconds, and it needs only a part.
"""
