"""What went wrong with a worker: how it ended, which end was the cause, and why."""
