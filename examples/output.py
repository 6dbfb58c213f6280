"""Where output goes: to the console with a prefix per rank, to a file per rank, or both.

    elastic-run --standalone --nproc-per-node=2 --log-dir=logs --tee=1 --redirects=2 examples/output.py

1 means stdout, 2 stderr, 3 both; `0:3,1:1` chooses by local rank. --tee writes to both places, --redirects to the file
only. Here stdout shows as `[default0]:...` on the console, and everything is kept in
logs/<run>/attempt_0/<local rank>/{stdout.log,stderr.log}. No attempt's files are ever overwritten.
"""

import os
import sys

rank = os.environ["RANK"]
print(f"rank {rank} says hello")
print(f"rank {rank} has details, for its file only", file=sys.stderr)
