"""Real processes, pipes, terminals and signals."""
