"""Stores of keys and values: torch's TCPStore, where workers meet; and how any server is reached.

Nothing is imported here: the launcher's start is measured in milliseconds, and it needs only a part.
"""
