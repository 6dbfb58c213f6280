"""What this machine offers, found out without torch: CPUs, GPUs, and which of them are near each other.

Every function takes the root of the file system (and the environment where it matters) as an argument, so that tests
can show it other machines.
"""
