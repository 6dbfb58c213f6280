"""Every decision, as pure functions: no I/O, clock, thread, logging or randomness (law 3)."""
