"""A package with a module and a __main__, for -m."""
