"""The programs that are run as workers."""
