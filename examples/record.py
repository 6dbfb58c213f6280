"""A function under @record leaves its exception in a file that programs can read.

    elastic-run --standalone --nproc-per-node=2 --log-dir=logs examples/record.py

The closing report shows the exception with and without @record. The decorator adds error.json in the worker's log
directory; a program that starts elastic-run gets the same in the file that it names in TORCHELASTIC_ERROR_FILE. torch's
own decorator works as well.
"""

import os

from elastic_run.multiprocessing.errors import record


@record
def main() -> None:
    """Fail on rank 1."""
    if os.environ["RANK"] == "1":
        message = "the learning rate must be positive, not -0.1"
        raise ValueError(message)


if __name__ == "__main__":
    main()
