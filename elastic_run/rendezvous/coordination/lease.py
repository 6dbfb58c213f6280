"""What a lease is: one key that says which agent coordinates a job, until the agent releases it or its time is over.

Rules
- A value belongs to one holder: it has a nonce. So `acquire` recognises its own, after a write whose answer was lost.
- A term is a number that grows from holder to holder, also after the lease was free. (An etcd that was restored from a
  backup begins again at a lower term. Nodes that have promised to follow a higher one refuse it.)
- The holder counts the time to live from before it called `acquire` or `renew`. Thus the lease ends for the holder
  before it ends for others, and no two agents compare their clocks.
- With a token, each text carries an HMAC over the run id, the name of the key and the text (`Seal`). A text that a
  stranger wrote, or copied from another key or job, is an error. A stranger who reaches the store can delete the lease.
- A store that can't be reached raises `StoreConnectionError`: whether a write took place is unknown, and it may be
  called again. A store that refuses this node raises `StoreAccessError`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from urllib.parse import quote

from elastic_run.records import dataclass
from elastic_run.store.errors import StoreAccessError, StoreTokenError

#: Names of the two keys below the job's path.
COORDINATOR, LAST_ROUND = "coordinator", "last_round"
#: A stored text is the format's number, the proof or `_NO_TOKEN`, and the text itself, separated by single spaces.
_FORMAT = "1"
_NO_TOKEN = "-"  # noqa: S105 - says that there is none


@dataclass(frozen=True, slots=True)
class Holder:
    """The agent that has the lease."""

    value: str  # what the agent wrote, such as its address; with a nonce
    term: int  # grows with each holder
    is_valid: bool = True  # a file keeps the trace of its last holder; etcd forgets it


class LeaseStore(ABC):
    """A job's lease, in a store with a name for messages; calls block, for a timeout that etcd's stores have."""

    def __init__(self, name: str, run_id: str, secret: bytes | None) -> None:
        self.name = name
        self._seal = Seal(run_id, secret, name)

    @abstractmethod
    def read(self) -> Holder | None:
        """Return the holder; None if nobody has the lease and no trace is left."""

    @abstractmethod
    def acquire(self, value: str, ttl: float, *, instead_of: Holder | None = None) -> Holder | None:
        """Take the lease if it is free, and return this agent as the holder; None if another agent has the lease.

        The time to live is in seconds; etcd takes whole seconds and at least two, so it may hold longer. The lease of
        `instead_of`, a holder that is known to be dead, counts as free.
        """

    @abstractmethod
    def renew(self, held: Holder, ttl: float) -> bool:
        """Let the lease begin anew; returns False if it has expired, or another agent has it."""

    @abstractmethod
    def release(self, held: Holder) -> None:
        """End the lease if this agent still has it."""

    @abstractmethod
    def write_last(self, text: str) -> None:
        """Write the text beside the lease, which has no time to live: where the last coordinator listens."""

    def read_last(self) -> str:
        """Return the text beside the lease; "" if there is none, or an earlier job of this id had another token."""
        stored = self._read_last()
        try:
            return self._seal.open(LAST_ROUND, stored) if stored else ""
        except StoreTokenError:
            return ""

    @abstractmethod
    def _read_last(self) -> str:
        """Return the text beside the lease as it is stored, "" if there is none."""

    @abstractmethod
    def remove(self) -> None:
        """Delete the lease and the text: the job is over."""


class Seal:
    """Shows that a text was written by a member of the job; see `LeaseStore` for the arguments."""

    def __init__(self, run_id: str, secret: bytes | None, name: str) -> None:
        self._run_id = run_id
        self._secret = secret
        self._name = name

    def close(self, key: str, text: str) -> str:
        """Return a text as it is stored."""
        return f"{_FORMAT} {self._sign(key, text)} {text}"

    def open(self, key: str, stored: str) -> str:
        """Return a stored text; StoreTokenError if no member of the job wrote it, StoreAccessError if nobody did."""
        version, _, signed = stored.partition(" ")
        proof, _, text = signed.partition(" ")
        if version != _FORMAT:
            message = f"key {key!r} of the job at {self._name} was not written by this release of elastic-run"
            raise StoreAccessError(message)
        expected = self._sign(key, text)
        if proof == expected == _NO_TOKEN:
            return text
        import hmac

        if hmac.compare_digest(proof.encode(), expected.encode()):
            return text
        if proof == _NO_TOKEN:
            message = f"the job at {self._name} has no token, and this node was given one"
        elif self._secret is None:
            message = f"the job at {self._name} has a token, and this node has none: give --rdzv-token-file"
        else:
            message = f"the job at {self._name} has another token than this node"
        raise StoreTokenError(message)

    def _sign(self, key: str, text: str) -> str:
        if self._secret is None:
            return _NO_TOKEN
        import hmac

        # With their lengths: no two different lists of parts give the same bytes.
        parts = b"".join(b"%d:" % len(part) + part for part in (self._run_id.encode(), key.encode(), text.encode()))
        return hmac.new(self._secret, parts, "sha256").hexdigest()


def job_path(run_id: str) -> str:
    """Return `elastic-run/<run id>`, with everything in the id that paths give a meaning to, or forbid, escaped."""
    plain = quote(run_id, safe="")
    return f"elastic-run/{plain if plain.strip('.') else plain.replace('.', '%2E')}"
