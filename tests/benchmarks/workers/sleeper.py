"""Say one's pid and sleep."""

import os
import signal

os.write(1, b"%d\n" % os.getpid())
signal.pause()
