"""A directory with a __main__.py, which Python runs as a script."""
