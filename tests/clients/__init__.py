"""Programs that call torchrun, unchanged, on elastic-run: `make test-clients`.

They are heavy, and none of our dependencies: they live in an environment of their own (tools/setup-clients.sh), and
`make test` leaves them out. Their versions stand in requirements.txt.
"""
