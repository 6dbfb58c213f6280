"""Connects to all other ranks at MASTER_ADDR:MASTER_PORT, and fails unless all of them came.

With an argument the job is to restart that often: rank 0 fails in each round but the last, and one rank, another each
time, comes late: 3 s once, 0.05 to 0.3 s otherwise.
"""

import os
import sys
import time

rank = int(os.environ["RANK"])
size = int(os.environ["WORLD_SIZE"])
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
restarts = int(sys.argv[1]) if len(sys.argv) > 1 else 0
if restarts and rank == attempt % size:
    time.sleep(3.0 if attempt == 1 else 0.05 * (1 + attempt % 6))

from elastic_run.store.client import StoreClient  # noqa: E402 - who is late is late with everything

store = StoreClient(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), timeout=60.0)
store.set(f"came/{attempt}/{rank}", str(attempt))
store.wait([f"came/{attempt}/{other}" for other in range(size)])
if store.add("connected", 1) > size:
    sys.exit("this store is not a fresh one")
os.write(1, b"connected %d\n" % attempt)
if rank == 0 and attempt < restarts:
    os._exit(1)
