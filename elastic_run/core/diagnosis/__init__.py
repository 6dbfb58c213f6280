"""What workers do when nothing seems to happen: their stacks as records, and whether the job hangs."""
