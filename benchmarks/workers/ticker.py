"""Write the time, fifty times, with a pause between: how long does a line take to the console?"""

import os
import time

for _ in range(50):
    os.write(1, b"%d\n" % time.monotonic_ns())
    time.sleep(0.02)
