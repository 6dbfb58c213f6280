"""Torch's TCPStore, served and spoken without torch: workers meet there.

| module | what it holds |
|---|---|
| `client` | a blocking client with the names of torch's `Store` |
| `connection` | one client's socket on the server's side |
| `groups` | keeps the process groups of a worker apart |
| `integers` | numbers as torch's server reads them |
| `listener` | the port, open before its number is told |
| `memory_store` | the data: keys, values, counters and queues |
| `opening` | how a client opens its connection |
| `request_handler` | what the server answers to each operation, also when a wait ends |
| `server` | the server, on the agent's loop |
| `stream` | a blocking byte stream to a server |
| `torch_child` | the program that runs torch's server in a child process |
| `torch_server` | torch's server in that child process, followed by ours if it dies |
| `waits` | which clients wait for which keys |
| `wire` | the wire format |
| `worker_store` | the store that an agent serves to its workers, a fresh one each round |
"""
