"""Plants the faults whose names hold a word, and prints the reports of those that were missed.

``python -m tests.benchmarks.diagnosis [-v] WORD...``; with -v all reports are printed.
"""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.diagnosis import plant_all
from tests.benchmarks.diagnosis.cases import all_cases
from tests.benchmarks.installation import install


def main(words: list[str]) -> None:
    """Do what the command line says."""
    is_verbose = "-v" in words
    wanted = [word for word in words if word != "-v"]
    cases = [case for case in all_cases() if all(word in case.name for word in wanted)]
    with TemporaryDirectory(prefix="elastic-run-diagnosis-") as directory:
        for verdict in plant_all(install(Path(directory)), cases):
            seconds = "-" if verdict.seconds is None else f"{verdict.seconds:.1f} s"
            marks = f"rank {verdict.has_rank:d} cause {verdict.has_cause:d} line {verdict.line}"
            late = "" if verdict.late is None else f"  verdict {verdict.late:.2f} s after the timeout"
            print(f"{marks}  {seconds:>7}  {verdict.case.name}{late}", flush=True)
            if is_verbose or not (verdict.has_rank and verdict.is_early):
                print(verdict.text, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
