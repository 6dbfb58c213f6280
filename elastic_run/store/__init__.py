"""The key-value store where workers meet: torch's TCPStore, served and spoken without torch.

One page each: the wire format (`wire`), the data (`memory`), one client's socket (`connection`), the server (`server`),
a client (`client`), the port (`listener`), and what an agent puts before its workers in each round (`worker_store`).
What the agents of one job share is a job store (`job_store`): over that protocol (`c10d`), in etcd (`etcd_v2`,
`etcd_v3`), in a shared directory (`file`) or in memory, and signed where strangers may write (`sealed`).
Nothing is imported here: the launcher's start is measured in milliseconds, and it needs only a part.
"""
