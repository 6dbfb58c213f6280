"""Functions as workers, and process groups that a program starts and watches itself: `start_processes`, `spawn`.

A process group here is the set of processes of one call; a POSIX process group is called a session's group.
"""
