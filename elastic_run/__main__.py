"""`python -m elastic_run` is the command `elastic-run`."""

from __future__ import annotations

from elastic_run.run import main

if __name__ == "__main__":
    main()
