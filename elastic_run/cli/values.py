"""One value of a flag: from text to a value that later code trusts.

Every function here takes the text and returns the value, or raises `ValueError` with the end of a sentence that begins
with the value: "is not a port (1 to 65535)". The caller knows the flag or variable and puts it in front. Where torch
keeps the text, we check it and keep the text too, so that a namespace means the same to both.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.contract import LARGEST_NUMBER, LONGEST_TIME, WORKER_COUNT_WORDS
from elastic_run.core.config import Window

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import NoReturn

    from elastic_run.hosts.protocol import Host

WORKER_COUNTS = "a number from 1 up, nor auto, cpu, gpu or xpu"
#: Most workers of a node; a larger number is a typing error.
MOST_WORKERS = 65536
_MAX_PORT = 65535
_MAX_EXIT_CODE = 255
#: Bytes of a list of modules: it is sent in one message, which holds a few times that.
_MOST_PRELOADED = 1 << 14
_LONGEST_HOST_LIST = 1 << 20
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: No process can handle the first two; the launcher needs SIGCHLD for itself.
_UNHANDLED_SIGNALS = {
    "SIGKILL": "no process can handle",
    "SIGSTOP": "no process can handle",
    "SIGCHLD": "the launcher itself needs",
}


def refuse(reason: str) -> NoReturn:
    """Raise a ValueError."""
    raise ValueError(reason) from None


# --- numbers and times -----------------------------------------------------------------------------------------------


def whole_number(text: str, *, least: int, allowed: str, most: float = LARGEST_NUMBER) -> int:
    """Read a whole number that is not below `least`; `allowed` says what it has to be."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        refuse(f"is not {allowed}")
    if value > most:
        refuse(f"is above {most}")
    return value


def _whole(least: int, allowed: str, *, most: float = LARGEST_NUMBER) -> Callable[[str], int]:
    return lambda text: whole_number(text, least=least, allowed=allowed, most=most)


count = _whole(0, "a whole number from 0 up")
zero_or_one = _whole(0, "0 or 1", most=1)
#: -1 is what other tools give for no rank.
node_rank = _whole(-1, "a whole number from 0 up, nor -1 for none")
_whole_seconds = _whole(0, "a whole number of seconds from 0 up", most=float("inf"))


def threads(text: str) -> int | str:
    """Read a number of threads, or the word auto."""
    return text if text == "auto" else whole_number(text, least=1, allowed="a whole number from 1 up, nor auto")


def port(text: str) -> int:
    """Read a TCP port; 0 lets the system choose."""
    allowed = f"a port from 0 to {_MAX_PORT}"
    value = whole_number(text, least=0, allowed=allowed, most=float("inf"))
    return value if value <= _MAX_PORT else refuse(f"is not {allowed}")


def whole_seconds(text: str) -> int:
    """Read a whole number of seconds; one above `LONGEST_TIME` becomes that."""
    return min(_whole_seconds(text), int(LONGEST_TIME))


def seconds(text: str) -> float:
    """Read a number of seconds; one above `LONGEST_TIME` becomes that."""
    value = _float(text)
    return min(value, LONGEST_TIME) if 0 <= value < float("inf") else refuse("is not a number of seconds from 0 up")


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    value = _float(text)
    return min(value, LONGEST_TIME) if 0 < value < float("inf") else refuse("is not a number of seconds above 0")


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return -1.0


def duration(text: str) -> float:
    """Read seconds, or a number with one of the units s, m, h, d."""
    factor = _UNITS.get(text[-1:], 0.0)
    value = _float(text[:-1]) * factor if factor else _float(text)
    if not 0 <= value < float("inf"):
        refuse("is not a number of seconds from 0 up, nor a number with s, m, h or d")
    return min(value, LONGEST_TIME)


def positive_duration(text: str) -> float:
    """Read a duration above 0."""
    return duration(text) or refuse("is not a time above 0")


def hang_timeout(text: str) -> float:
    """Read the time without progress that is a hang: 0 for `auto`."""
    if text == "auto":
        return 0.0
    try:
        value = duration(text)
    except ValueError:
        value = 0.0
    return value if value >= 1 else refuse("is neither auto nor a time of at least 1 second, such as 60 or 10m")


def window(text: str) -> Window:
    """Read ``N/PERIOD``, as in ``5/1h``, ``5/h`` or ``3/600``."""
    number, _, period = text.partition("/")
    try:
        return Window(
            whole_number(number, least=1, allowed=""), positive_duration(f"1{period}" if period in _UNITS else period)
        )
    except ValueError:
        refuse("is not N/PERIOD, as in 5/1h: a number N from 1 up, in a PERIOD with s, m, h or d")


def exit_codes(text: str) -> tuple[int, ...]:
    """Read exit codes and ranges of them, as in ``3,64-78``; in ascending order."""
    codes: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        try:
            low, high = int(first), int(last if dash else first)
        except ValueError:
            low, high = 0, 0
        if not 1 <= low <= high <= _MAX_EXIT_CODE:
            refuse("is not a list of exit codes from 1 to 255 or ranges of them (3,64-78)")
        codes.update(range(low, high + 1))
    return tuple(sorted(codes))


# --- nodes and workers -----------------------------------------------------------------------------------------------


def node_range(text: str) -> tuple[int, int]:
    """Read ``MIN[:MAX]``: the fewest and the most nodes."""
    least, colon, most = text.partition(":")
    try:
        found = int(least), int(most if colon else least)
    except ValueError:
        found = 0, 0
    return found if 1 <= found[0] <= found[1] <= LARGEST_NUMBER else refuse("is not MIN[:MAX] with 1 <= MIN <= MAX")


def nodes(text: str) -> str:
    """Check ``MIN[:MAX]``."""
    node_range(text)
    return text


def worker_count(text: str) -> str:
    """Check a number of workers, or a word such as auto or the name of a device, which a package may add to torch."""
    # A device of torch may have any name; a known word in another case is a typing error.
    is_slip = text not in WORKER_COUNT_WORDS and text.lower() in WORKER_COUNT_WORDS
    if is_slip or not (text.isidentifier() and text.isascii()):
        value = whole_number(text, least=1, allowed=WORKER_COUNTS)
        if value > MOST_WORKERS:
            refuse(f"is above the limit of {MOST_WORKERS} workers on a node")
    return text


def output_choice(text: str) -> str:
    """Check ``0``, ``1``, ``2``, ``3`` or a map ``RANK:0-3,...``."""
    choices = ("0", "1", "2", "3")
    entries = [entry.partition(":") for entry in text.split(",")]
    if text not in choices and not all(_is_number(rank) and choice in choices for rank, _, choice in entries):
        refuse("is not 0, 1, 2 or 3 (none, stdout, stderr, both), nor a map of local ranks to these (0:3,1:1)")
    return text


def rank_list(text: str) -> str:
    """Check ``RANK,RANK,...``; empty for all."""
    if text and not all(_is_number(part.strip()) for part in text.split(",")):
        refuse("is not a list of local ranks (0,1,2)")
    return text


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal()


# --- texts and names -------------------------------------------------------------------------------------------------


def short_name(text: str) -> str:
    """Check a name that is a part of the job's messages, and of keys in its store."""
    length = len(text.encode(errors="surrogateescape"))
    if length > contract.LONGEST_NAME:
        refuse(f"has {length} bytes, and {contract.LONGEST_NAME} are allowed")
    return text


def job_id(text: str) -> str:
    """Check the id of a job, which is also a line of texts that launchers write into the store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        refuse("is not UTF-8")
    return short_name(text) if "\n" not in text else refuse("has a line break")


def memory_size(text: str) -> str:
    """Check a size of --keep-state or its copies' bandwidth; the text stays as it is."""
    if text:
        from elastic_run.core.kept_generations import read_size

        read_size(text)
    return text


def command(text: str) -> str:
    """Check that a command's quotes are closed, and that it names a program; the text stays as it is."""
    if text:
        import shlex

        try:
            words = shlex.split(text)
        except ValueError as error:
            refuse(f"is not a command: {str(error).lower()}")
        if not words or not words[0]:
            refuse("names no program")
    return text


def one_of(*names: str) -> Callable[[str], str]:
    """Return a function that checks that a text is one of these."""

    def check(text: str) -> str:
        return text if text in names else refuse(f"is none of {', '.join(names)}")

    return check


def key_values(text: str) -> str:
    """Check ``KEY=VALUE,KEY=VALUE``; empty for none."""
    if not text.strip():
        return text
    from elastic_run.rendezvous.utils import parse_rendezvous_config

    key = ""
    try:
        for key, value in parse_rendezvous_config(text).items():
            if key == "timeout" or key.endswith("_timeout"):
                seconds(value)
    except ValueError as error:
        refuse(f"is wrong: {key} {error}" if key else f"is wrong: {error}")
    return text


def text_list(text: str) -> list[str]:
    """Read texts separated by commas; ``,,`` is a comma within a text, as in torch."""
    # No command line can hold a NUL, so it can stand for the doubled comma in between.
    return [part.replace("\0", ",") for part in text.replace(",,", "\0").split(",")]


def signal_names(text: str) -> str:
    """Check names of signals, separated by commas, that a process may handle."""
    import signal

    known = signal.Signals.__members__
    for name in (part.strip() for part in text.split(",")):
        if name in _UNHANDLED_SIGNALS:
            refuse(f"names {name}, which {_UNHANDLED_SIGNALS[name]}")
        if name not in known:
            refuse(f"names {name!r}, which is not a signal{nearest(name.upper(), known)}")
    return text


def forwarded_signals(text: str) -> str:
    """Check names of signals; empty for none."""
    return signal_names(text) if text.strip() else ""


def one_signal(text: str) -> str:
    """Check the name of a signal; empty for none."""
    return forwarded_signals(text) if "," not in text else refuse("is not one signal")


def host_if_given(text: str) -> str:
    """Check the name or address of a machine, without looking it up; an IPv6 address may have brackets."""
    if not text:  # as of a variable that isn't set
        return text
    from elastic_run.rendezvous.utils import is_host

    has_brackets = text.startswith("[") and text.endswith("]")
    if not (":" in text and is_host(text[1:-1]) if has_brackets else is_host(text)):
        refuse("is not a host name, an IPv4 or an IPv6 address")
    return text


def host_list(text: str) -> tuple[Host, ...]:
    """Read ``HOST[:SLOTS],...``, or a file with a host in each line, as in ``node1:8`` or ``node1 slots=8``.

    A text with a slash is a file's name, and so is one that a file has.
    """
    import os

    from elastic_run.files import read_user_file

    entries = [part.strip() for part in text.split(",")] if text else []
    if "/" in text or os.path.isfile(text):
        try:
            lines = read_user_file(text, _LONGEST_HOST_LIST).decode().splitlines()
        except (OSError, UnicodeDecodeError) as error:
            refuse(f"can't be read: {str(getattr(error, 'strerror', None) or error).lower()}")
        blank_free = (" ".join(line.partition("#")[0].split()) for line in lines)
        entries = [line.replace(" slots=", ":") for line in blank_free if line] or refuse("names no host")
    hosts = tuple(map(_read_host, entries))
    names = [host.name for host in hosts]
    if twice := [name for name in names if names.count(name) > 1]:
        refuse(f"names {twice[0]} twice; {twice[0]}:SLOTS is a host with several workers")
    return hosts


def _read_host(entry: str) -> Host:
    import re

    from elastic_run.hosts.protocol import Host

    # No host begins with a hyphen: ssh would take it for an option.
    match = re.fullmatch(r"((?:\w[\w.+-]*@)?)(?:\[([\w:.]+)\]|(\w[\w.+-]*))(?::([0-9]{1,9}))?", entry)
    user, address, name, slots = ("", "", "", "0") if match is None else match.groups("")
    if slots and not 1 <= int(slots) <= MOST_WORKERS:
        form = f"[USER@]HOST[:SLOTS] with 1 to {MOST_WORKERS} workers; an IPv6 address has brackets"
        refuse(f"has {entry!r}, which is not {form}")
    return Host(user + address + name, address + name, int(slots) if slots else None)


def preloaded(text: str) -> str:
    """Check names of modules, separated by commas; empty for none."""
    names = text.split(",") if text else []
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        refuse("is not a list of modules (torch,numpy)")
    return text if len(text.encode()) <= _MOST_PRELOADED else refuse(f"is longer than {_MOST_PRELOADED} bytes")


def switch(text: str) -> bool:
    """Read a switch's environment form: 1 or 0; like torch, any other number than 0 counts as 1."""
    try:
        return bool(int(text))
    except ValueError:
        refuse("is not 1 or 0")


#: Similarity from which one name may be meant by another, as difflib counts it: a typing error in four letters.
_NEAR = 0.75


def nearest(text: str, known: Iterable[str]) -> str:
    """Return ``, did you mean 'x'?`` for the name that a wrong one looks like or alone begins, or nothing."""
    import difflib

    names = list(known)
    found = difflib.get_close_matches(text, names, n=1, cutoff=_NEAR)
    if not found and text:
        begun = [name for name in names if name.startswith(text)]
        found = begun if len(begun) == 1 else []
    return f", did you mean {found[0]!r}?" if found else ""
