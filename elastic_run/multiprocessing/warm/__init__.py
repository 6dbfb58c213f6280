"""Warm workers: a template process imports modules once, and each worker is a fork of it (`--preload`).

A template is started with the command line and environment of the workers, so it is a worker up to the moment at which
Python would open the script. At that moment it stops (`template`), imports the modules that the user named, and forks.
A fork goes on from there by itself: Python runs the script, module, directory or zip file as it always
does. So this package imitates no part of Python, and no frame of ours is on the stack.

In the agent runs `worker_pool`; in the template and the worker `template` and `fork_safety`.
"""
