"""Say when the script's first line ran; the clock is the host's, so the parent may subtract."""

import os
import time

os.write(1, b"%d\n" % time.monotonic_ns())
