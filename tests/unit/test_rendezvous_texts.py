"""What the rendezvous of several nodes tells the user, and the words of a host that goes."""

from __future__ import annotations

import pytest

from elastic_run.rendezvous.elastic.invitation import describe_invitation
from elastic_run.rendezvous.elastic.moving import decode_moving, encode_moving
from elastic_run.rendezvous.elastic.waiting import describe_missing, describe_trouble


def test_missing_nodes() -> None:
    """The line says how many of how many are there, who, and how long is left; not all of a thousand hosts."""
    assert describe_missing(["a", "b"], 2, 3, 590.2) == "waiting: 2/3 nodes (a, b), 9:50 left"
    hosts = list("abcdefghij")
    assert describe_missing(hosts, 10, 16, None) == "waiting: 10/16 nodes (a, b, c, d, e, f, g, h …)"
    assert describe_missing([], 0, 2, -1.0) == "waiting: 0/2 nodes, 0:00 left"


def test_trouble_with_the_store() -> None:
    """The line says which store, for how long and why, and how long is left."""
    line = describe_trouble("a:29400", "refused", 12.4, 61.0)
    assert line == "waiting: the store at a:29400 can't be reached for 12 s: refused, 1:01 left"


@pytest.mark.parametrize(
    ("rest", "expected"),
    [
        (["train.py"], "--rdzv-conf=last_call_timeout=0 train.py"),
        (["--rdzv-conf=join_timeout=9", "t.py"], "--rdzv-conf=join_timeout=9,last_call_timeout=0 t.py"),
        (["--rdzv_conf=last_call_timeout=9", "t.py"], "--rdzv-conf=last_call_timeout=9 t.py"),
    ],
)
def test_an_invitation_is_the_whole_command(rest: list[str], expected: str) -> None:
    """The command for other nodes keeps the user's flags, and all nodes agree on the last call."""
    line = describe_invitation("job", (["elastic-run"], rest))
    start = "other nodes join with: elastic-run --rdzv-backend=c10d --rdzv-endpoint={endpoint} --rdzv-id=job"
    assert line == f"{start} {expected}"


def test_words_of_a_host_that_goes() -> None:
    """They come back as they were; everything else is something else."""
    assert decode_moving(encode_moving("b:1", "told to stop")) == ("b:1", "told to stop")
    for other in (b"", b'{"kind":"join"}', b'"moving"', b'{"kind":"moving","endpoint":1,"detail":""}', b'{"moving"'):
        assert decode_moving(other) is None
