"""The driver of a node's member wakes the thread that follows the log."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from elastic_run.core.node import machine
from elastic_run.core.node.messages import HeadRead
from elastic_run.core.protocol.messages import NodeInfo, StoreAddress
from elastic_run.rendezvous.elastic.member_driver import MemberDriver
from elastic_run.rendezvous.elastic.state_copy import StateCopy
from tests.support.configs import plain_config
from tests.support.noting_store import NotingBackend
from tests.support.wait import DEADLINE, wait_until

if TYPE_CHECKING:
    from threading import Condition


def test_the_log_reader_is_woken_when_the_next_slot_is_known() -> None:
    """It does not wait for its time."""
    begun = machine.begin(
        "n", node_info=NodeInfo("h", 1, 1), config=plain_config(), store_address=StoreAddress("h", 1), now=0.0
    )
    driver = MemberDriver(
        begun,
        perform=lambda _: None,
        on_facts=lambda: None,
        copy=StateCopy(NotingBackend()),
        renew_worker_store=lambda: None,
    )
    slots: list[int | None] = []
    reader = threading.Thread(target=lambda: slots.append(driver.wait_slot(10 * DEADLINE)), daemon=True)
    reader.start()
    changed: Condition = driver._changed
    wait_until(lambda: changed._waiters)  # type: ignore[attr-defined] # the threads that wait
    driver.take_head(HeadRead(None, None))
    reader.join(DEADLINE)
    assert slots == [0]
