"""What a guardian says when its agent died: this node is gone. So the others needn't wait for its lease to run out.

The agent writes the document beforehand (`Session.farewell`); the guardian is another process, which may import this
module when there is nothing left to hurry for.
"""

from __future__ import annotations

from elastic_run.core import job_keys, messages
from elastic_run.rendezvous.elastic.kinds import make_backend
from elastic_run.rendezvous.elastic.settings import read_settings

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

__all__ = ["say_farewell"]

#: Seconds to reach the store. The lease runs out soon anyway.
_PATIENCE = 2.0


def say_farewell(document: Mapping[str, Any]) -> None:
    """Tell a job that one of its nodes died.

    Args:
        document: What `Session.farewell` returned.

    Raises:
        StoreError: The store can't be reached.
        ValueError: The document is not one of `Session.farewell`'s.
    """
    settings = read_settings(document["backend"], document["conf"])
    secret = document["secret"]
    backend = make_backend(
        document["backend"],
        document["endpoint"],
        document["run_id"],
        settings,
        is_host=False,
        secret=None if secret is None else bytes.fromhex(secret),
    )
    leave = messages.Leave(document["node"], messages.LAST_SEQUENCE, messages.DIED)
    with backend.open(_PATIENCE) as store:
        store.append(job_keys.FACTS, messages.to_json(leave))
