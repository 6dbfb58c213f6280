"""Scripts of events with their whole expected trace."""
