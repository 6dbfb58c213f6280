"""The key-value store where workers meet: torch's TCPStore, served and spoken without torch.

One page each: the wire format (`wire`), the data (`memory`), one client's socket (`connection`), the server (`server`),
a client (`client`), the port (`listener`), and what an agent puts before its workers in each round (`worker_store`).
Nothing is imported here: the launcher's start is measured in milliseconds, and it needs only a part.
"""
