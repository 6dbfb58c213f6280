"""The checks of `elastic-run doctor`, before a job runs on a machine, and between the nodes; without torch.

Nothing is changed on the machine, apart from a file that is written and removed at once.
"""
