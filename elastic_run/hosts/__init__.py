"""--hosts: one command starts a job on several hosts by ssh. `connections` is its side, `remote` that of a host."""
