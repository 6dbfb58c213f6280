"""A flag, and one value of it: from text to a value that later code trusts.

Every function here takes the text and returns the value, or raises `ValueError` with the end of a sentence that begins
with the value: "is not a port (1 to 65535)". The caller knows the flag or variable and puts it in front. Where torch
keeps the text, we check it and keep the text too, so that a namespace means the same to both.
"""

from __future__ import annotations

from elastic_run import contract
from elastic_run.contract import LARGEST_NUMBER, LONGEST_TIME, WORKER_COUNT_WORDS
from elastic_run.core.job.config import JobConfig, NodeConfig, Window
from elastic_run.records import fields

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

#: The group of the flags that print a text and start no job.
ABOUT = "About"
#: Defaults of the settings of several nodes, which stand in these two records.
_CONFIGURED = {field.name: field.default for config in (JobConfig, NodeConfig) for field in fields(config)}

WORKER_COUNTS = "a number from 1 up, nor auto, cpu, gpu or xpu"

_MAX_PORT = 65535
_MAX_EXIT_CODE = 255
#: Bytes of a list of modules: it is sent in one message, which holds a few times that.
_MOST_PRELOADED = 1 << 14
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
#: No process can handle the first two; the launcher needs SIGCHLD for itself.
_UNHANDLED_SIGNALS = {
    "SIGKILL": "no process can handle",
    "SIGSTOP": "no process can handle",
    "SIGCHLD": "the launcher itself needs",
}


class Flag:
    """One flag.

    Args:
        names: Its spellings with hyphens, the long one last; the one with underscores is added.
        group: Heading under which the help shows it.
        text: Its meaning.
        values: Form of its value in the help; empty for a switch. TIME is a number of seconds, or a number with
            one of the units s, m, h and d.
        default: Its value when neither flag nor variable is given; not for a field of `JobConfig` or `NodeConfig`.
        default_text: Description of the default, if it depends on something else.
        parse: From the text to the value; raises ValueError.
        has_variable: Whether the variable PET_<NAME> sets it too.
        is_ours: Whether torchrun does not have it.
        other_variable: A variable without that prefix whose value is taken if neither flag nor PET_ variable is given.
        implied: Text of its value if none is given. The next word is its value only if it has digits alone.
    """

    def __init__(  # noqa: PLR0913 - the columns of a table
        self,
        *names: str,
        group: str,
        text: str,
        values: str = "",
        default: object = None,
        default_text: str = "",
        parse: Callable[[str], Any] = str,
        has_variable: bool = True,
        is_ours: bool = False,
        other_variable: str = "",
        implied: str = "",
    ) -> None:
        self.name = name = names[-1]
        self.dest = name[2:].replace("-", "_")
        underscored = "--" + self.dest
        self.spellings = names if underscored == name else (*names, underscored)
        self.group = group
        self.text = text
        self.values = values
        self.is_switch = not values
        self.default = False if self.is_switch else _CONFIGURED.get(self.dest, default)
        self.default_text = default_text
        self.parse = switch if self.is_switch else parse
        self.variable = contract.ENV_FLAG_PREFIX + self.dest.upper() if has_variable else ""
        self.is_ours = is_ours
        self.other_variable = other_variable
        self.implied = implied
        #: Whether it prints a text and starts no job.
        self.prints_text = group == ABOUT


def node_range(text: str) -> tuple[int, int]:
    """Read ``MIN[:MAX]``: the fewest and the most nodes."""
    parts = text.split(":")
    try:
        least, most = int(parts[0]), int(parts[-1])
    except ValueError:
        least, most = 0, 0
    if len(parts) > 2 or not 1 <= least <= most <= LARGEST_NUMBER:  # noqa: PLR2004 - MIN and MAX
        message = "is not MIN[:MAX] with 1 <= MIN <= MAX"
        raise ValueError(message)
    return least, most


def nodes(text: str) -> str:
    """Check ``MIN[:MAX]``."""
    node_range(text)
    return text


def short_name(text: str) -> str:
    """Check a name that is a part of the job's messages, and of keys in its store."""
    length = len(text.encode(errors="surrogateescape"))
    if length > contract.LONGEST_NAME:
        message = f"has {length} bytes, and {contract.LONGEST_NAME} are allowed"
        raise ValueError(message)
    return text


def job_id(text: str) -> str:
    """Check the id of a job, which is also a line of texts that launchers write into the store."""
    try:
        text.encode()
    except UnicodeEncodeError:
        message = "is not UTF-8"
        raise ValueError(message) from None
    if "\n" in text:
        message = "has a line break"
        raise ValueError(message)
    return short_name(text)


#: Most workers of a node; a larger number is a typing error.
MOST_WORKERS = 65536


def worker_count(text: str) -> str:
    """Check a number of workers, or a word such as auto or the name of a device, which a package may add to torch."""
    # A device of torch may have any name; a known word in another case is a typing error.
    is_slip = text not in WORKER_COUNT_WORDS and text.lower() in WORKER_COUNT_WORDS
    if is_slip or not (text.isidentifier() and text.isascii()):
        value = whole_number(text, least=1, allowed=WORKER_COUNTS)
        if value > MOST_WORKERS:
            message = f"is above the limit of {MOST_WORKERS} workers on a node"
            raise ValueError(message)
    return text


def whole_number(text: str, *, least: int, allowed: str, most: float = LARGEST_NUMBER) -> int:
    """Read a whole number that is not below `least`; `allowed` says what it has to be."""
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        message = f"is not {allowed}"
        raise ValueError(message)
    if value > most:
        message = f"is above {most}"
        raise ValueError(message)
    return value


def count(text: str) -> int:
    """Read a whole number from 0 up."""
    return whole_number(text, least=0, allowed="a whole number from 0 up")


#: Requeues of a job whose user gives no number: as many as Slurm makes by itself (max_batch_requeue of slurm.conf).
REQUEUES = 5


def requeues(text: str) -> int | None:
    """Read a number of requeues, or `true` for `REQUEUES`, or `false` for no requeues at all, which is None."""
    words = {"true": REQUEUES, "false": None}
    if text in words:
        return words[text]
    return whole_number(text, least=0, allowed="a whole number from 0 up, nor true or false")


def threads(text: str) -> int | str:
    """Read a number of threads, or the word auto."""
    return text if text == "auto" else whole_number(text, least=1, allowed="a whole number from 1 up, nor auto")


def node_rank(text: str) -> int:
    """Read a node's rank from 0, or -1, which other tools give for no rank."""
    return whole_number(text, least=-1, allowed="a whole number from 0 up, nor -1 for none")


def whole_seconds(text: str) -> int:
    """Read a whole number of seconds; one above `LONGEST_TIME` becomes that."""
    value = whole_number(text, least=0, allowed="a whole number of seconds from 0 up", most=float("inf"))
    return min(value, int(LONGEST_TIME))


def port(text: str) -> int:
    """Read a TCP port; 0 lets the system choose."""
    value = whole_number(text, least=0, allowed=f"a port from 0 to {_MAX_PORT}", most=float("inf"))
    if value > _MAX_PORT:
        message = f"is not a port from 0 to {_MAX_PORT}"
        raise ValueError(message)
    return value


def seconds(text: str) -> float:
    """Read a number of seconds; one above `LONGEST_TIME` becomes that."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        message = "is not a number of seconds from 0 up"
        raise ValueError(message)
    return min(value, LONGEST_TIME)


def positive_seconds(text: str) -> float:
    """Read a number of seconds above 0."""
    try:
        value = seconds(text)
    except ValueError:
        value = 0.0
    if value <= 0:
        message = "is not a number of seconds above 0"
        raise ValueError(message)
    return value


def duration(text: str) -> float:
    """Read seconds, or a number with one of the units s, m, h, d."""
    factor = _UNITS.get(text[-1:], 0.0)
    try:
        return min(seconds(text[:-1]) * factor, LONGEST_TIME) if factor else seconds(text)
    except ValueError:
        message = "is not a number of seconds from 0 up, nor a number with s, m, h or d"
        raise ValueError(message) from None


def positive_duration(text: str) -> float:
    """Read a duration above 0."""
    value = duration(text)
    if value <= 0:
        message = "is not a time above 0"
        raise ValueError(message)
    return value


def hang_timeout(text: str) -> float:
    """Read the time without progress that is a hang: 0 for `auto`."""
    if text == "auto":
        return 0.0
    try:
        value = duration(text)
    except ValueError:
        value = 0.0
    if value < 1:
        message = "is neither auto nor a time of at least 1 second, such as 60 or 10m"
        raise ValueError(message)
    return value


def memory_size(text: str) -> str:
    """Check the size of --keep-state; the text stays as it is."""
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
            message = f"is not a command: {str(error).lower()}"
            raise ValueError(message) from None
        if not words or not words[0]:
            message = "names no program"
            raise ValueError(message)
    return text


def one_of(*names: str) -> Callable[[str], str]:
    """Return a function that checks that a text is one of these."""

    def check(text: str) -> str:
        if text not in names:
            message = f"is none of {', '.join(names)}{nearest(text, names)}"
            raise ValueError(message)
        return text

    return check


def output_choice(text: str) -> str:
    """Check ``0``, ``1``, ``2``, ``3`` or a map ``RANK:0-3,...``."""
    choices = ("0", "1", "2", "3")
    entries = [entry.partition(":") for entry in text.split(",")]
    if text not in choices and not all(
        rank.isascii() and rank.isdecimal() and choice in choices for rank, _, choice in entries
    ):
        message = "is not 0, 1, 2 or 3 (none, stdout, stderr, both), nor a map of local ranks to these (0:3,1:1)"
        raise ValueError(message)
    return text


def rank_list(text: str) -> str:
    """Check ``RANK,RANK,...``; empty for all."""
    parts = [part.strip() for part in text.split(",")]
    if text and not all(part.isascii() and part.isdecimal() for part in parts):
        message = "is not a list of local ranks (0,1,2)"
        raise ValueError(message)
    return text


def key_values(text: str) -> str:
    """Check ``KEY=VALUE,KEY=VALUE``; empty for none."""
    if not text.strip():
        return text
    from elastic_run.rendezvous.utils import parse_rendezvous_config

    try:
        config = parse_rendezvous_config(text)
    except ValueError as error:
        message = f"is wrong: {error}"
        raise ValueError(message) from None
    for key, value in config.items():
        if key == "timeout" or key.endswith("_timeout"):
            try:
                seconds(value)
            except ValueError as error:
                message = f"is wrong: {key} {error}"
                raise ValueError(message) from None
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
            message = f"names {name}, which {_UNHANDLED_SIGNALS[name]}"
            raise ValueError(message)
        if name not in known:
            message = f"names {name!r}, which is not a signal{nearest(name.upper(), known)}"
            raise ValueError(message)
    return text


def forwarded_signals(text: str) -> str:
    """Check names of signals; empty for none."""
    return signal_names(text) if text.strip() else ""


def one_signal(text: str) -> str:
    """Check the name of a signal; empty for none."""
    if "," in text:
        message = "is not one signal"
        raise ValueError(message)
    return forwarded_signals(text)


def host(text: str) -> str:
    """Check the name or address of a machine, without looking it up; an IPv6 address may have brackets."""
    from elastic_run.rendezvous.utils import is_host

    has_brackets = text.startswith("[") and text.endswith("]")
    if not (":" in text and is_host(text[1:-1]) if has_brackets else is_host(text)):
        message = "is not a host name, an IPv4 or an IPv6 address"
        raise ValueError(message)
    return text


def host_if_given(text: str) -> str:
    """Check a host as `host` does; an empty one, as of a variable that isn't set, is none."""
    return host(text) if text else text


def window(text: str) -> Window:
    """Read ``N/PERIOD``, as in ``5/1h``, ``5/h`` or ``3/600``."""
    number, _, period = text.partition("/")
    try:
        allowed = int(number)
        length = duration("1" + period if period in _UNITS else period)
    except ValueError:
        allowed, length = 0, 0.0
    if not 1 <= allowed <= LARGEST_NUMBER or length <= 0:
        message = "is not N/PERIOD, as in 5/1h: a number N from 1 up, in a PERIOD with s, m, h or d"
        raise ValueError(message)
    return Window(allowed, length)


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
            message = "is not a list of exit codes from 1 to 255 or ranges of them (3,64-78)"
            raise ValueError(message)
        codes.update(range(low, high + 1))
    return tuple(sorted(codes))


def preloaded(text: str) -> str:
    """Check names of modules, separated by commas, one of which may be `auto`; empty for none."""
    names = text.split(",") if text else []
    if not all(part.isidentifier() for name in names for part in name.split(".")):
        message = "is not a list of modules (torch,numpy), nor auto"
        raise ValueError(message)
    if len(text.encode()) > _MOST_PRELOADED:
        message = f"is longer than {_MOST_PRELOADED} bytes"
        raise ValueError(message)
    return text


def switch(text: str) -> bool:
    """Read a switch's environment form: 1 or 0; like torch, any other number than 0 counts as 1."""
    try:
        return bool(int(text))
    except ValueError:
        message = "is not 1 or 0"
        raise ValueError(message) from None


#: Similarity from which one name may be meant by another, as difflib counts it: a typing error in four letters.
_NEAR = 0.75


def nearest(text: str, known: Iterable[str], translate: Mapping[str, str] | None = None) -> str:
    """Return ``, did you mean 'x'?`` for the name that a wrong one looks like or alone begins, or nothing."""
    import difflib

    names = list(known)
    found = difflib.get_close_matches(text, names, n=1, cutoff=_NEAR)
    if not found and text:
        begun = [name for name in names if name.startswith(text)]
        found = begun if len(begun) == 1 else []
    return f", did you mean {(translate or {}).get(found[0], found[0])!r}?" if found else ""
