"""Start three grandchildren, say all four pids, and sleep.

The first stays in this session, the second has a session of its own. The third has left session and parent;
only its environment is still that of this worker.
"""

import os
import signal

_ESCAPE = "(exec setsid sh -c 'echo $$; exec sleep 600 >/dev/null' &)"

same = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
own = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ, setsid=True)
with os.popen(_ESCAPE) as said:  # noqa: S605 - a constant
    escaped = int(said.readline())
os.write(1, b"%d %d %d %d\n" % (os.getpid(), same, own, escaped))
signal.pause()
