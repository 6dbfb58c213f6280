"""Start a grandchild in this session and one in a session of its own, say all three pids, and sleep."""

import os
import signal

same = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ)
own = os.posix_spawn("/bin/sleep", ["sleep", "600"], os.environ, setsid=True)
os.write(1, b"%d %d %d\n" % (os.getpid(), same, own))
signal.pause()
