"""Say one's pid and sleep."""

import os
import signal

os.write(1, b"%d\n" % os.getpid())
while True:
    signal.pause()  # returns after each signal, such as that of a look at the stacks
