"""Our store's server alone, for whoever speaks its protocol: ``python -m tests.benchmarks.crowd.server``.

It says ``listening PORT``, and answers every line with what it was asked so far, as JSON. It ends with its input.
"""

from __future__ import annotations

import json
import os
import sys

from elastic_run.rendezvous.elastic.backend.hosting import HostedStore
from elastic_run.store.tcpstore.listener import open_public_listener, raise_descriptor_limit
from tests.benchmarks.crowd.counting import count_traffic, say


def main() -> None:
    """Do what the file says."""
    raise_descriptor_limit()
    traffic = count_traffic()
    store = HostedStore(open_public_listener(0))
    say(f"listening {store.port}")
    for _ in sys.stdin:
        say(json.dumps(traffic.document()))
    os._exit(0)


if __name__ == "__main__":
    main()
