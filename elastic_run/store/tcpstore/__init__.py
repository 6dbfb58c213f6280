"""Torch's TCPStore, served and spoken without torch; workers meet there, and a job store can lie in it.

| module | what it holds |
|---|---|
| `admission` | the server's side of the token: what a connection may do before its proof |
| `agent_client` | several keys in one exchange, for agents |
| `client` | a blocking client with the names of torch's `Store` |
| `connection` | one client's socket on the server's side |
| `groups` | keeps the process groups of a worker apart |
| `integers` | numbers as torch's server reads them |
| `listener` | the port, open before its number is told |
| `memory_store` | the data: keys, values, counters, queues and streams |
| `opening` | how a client opens its connection and proves the token |
| `request_handler` | what the server answers to each operation, also when a wait ends |
| `server` | the server, on the agent's loop |
| `stream_keys` | the keys of a stream of entries |
| `token_proof` | a client proves that it knows the token, and so does the server |
| `torch_child` | the program that runs torch's server in a child process |
| `torch_server` | torch's server in that child process, followed by ours if it dies |
| `waits` | which clients wait for which keys |
| `wire` | the wire format |
| `worker_store` | the store that an agent serves to its workers, a fresh one each round |
"""
