"""What the releases of torch that we are compared with have, beyond the oldest of them: 2.13.

elastic-run has all of it with each release. A test compares the installed release, and these tables say
what that release lacks.
"""

from __future__ import annotations

import torch

#: The installed release.
RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
_FLAGS = {"log_line_prefix_template": (2, 14), "print_completion": (2, 14)}
_COMMAND_LINES = {
    "--log-line-prefix-template '${hostname}: ' train.py": (2, 14),
    "--log_line_prefix_template=x -t 3 train.py": (2, 14),
    "PET_LOG_LINE_PREFIX_TEMPLATE=x train.py": (2, 14),
    "--log-l x train.py": (2, 14),
    "--log- x train.py": (2, 14),
    "--print-completion bash": (2, 14),
    "--print_completion=nosuch train.py": (2, 14),
    "--print-completion": (2, 14),
    "train.py --print-completion bash": (2, 14),
}

#: Flags of newer releases that the installed one lacks, by their names in the namespace.
LACKING_FLAGS = frozenset(name for name, first in _FLAGS.items() if first > RELEASE)
#: Command lines with flags that the installed release has and an older one lacks.
NEW_COMMAND_LINES = [line for line, first in _COMMAND_LINES.items() if first <= RELEASE]
