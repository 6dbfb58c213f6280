"""A job that was begun anew while one of its nodes was out of reach: two rounds of one number that must not mix."""

from __future__ import annotations

import signal
from contextlib import ExitStack

from elastic_run.core.job.node_events import Ended, Formed, Halted
from tests.support.sessions import NodeProcess, free_port, tcp_node

_SIZE = (1, 2)


def test_who_runs_round_1_of_before_is_no_member_of_round_1_of_now() -> None:
    """The node's workers are stopped, it waits as any newcomer, and gets a round with a number that it never had."""
    port = free_port()
    with ExitStack() as stack:
        host = stack.enter_context(NodeProcess(port, _SIZE, is_host=True))
        sleeper = stack.enter_context(NodeProcess(port, _SIZE, is_host=False))
        for node in (host, sleeper):
            assert "round=1," in node.wait_line("Formed")
        sleeper.process.send_signal(signal.SIGSTOP)
        host.process.kill()
        host.process.wait()
        others = [stack.enter_context(tcp_node(port, _SIZE, is_host=is_host)) for is_host in (True, False)]
        assert [node.wait_for(Formed).assignment.round for node in others] == [1, 1]
        sleeper.process.send_signal(signal.SIGCONT)
        assert "replaced" in sleeper.wait_line("Halted")
        # Nobody was touched for it; it comes in when there is room.
        assert not [event for node in others for _, event in node.events if isinstance(event, Halted)]
        others[1].session.leave("signal", "told to stop")
        others[1].close()
        # Alone at first, should its workers' end not have been heard of before the other went.
        formed = next(
            formed for _ in range(2) if (formed := others[0].wait_for(Formed).assignment).group_world_size > 1
        )
        assert formed.round > 1
        assert f"round={formed.round}," in sleeper.wait_line("Formed")
        sleeper.say("done")
        others[0].done()
        assert others[0].wait_for(Ended).end.verdict == "success"
        assert "success" in sleeper.wait_line("Ended")
