"""The file of `--config`: TOML whose keys are the flags without dashes, in front or between the words.

Each value is converted to the text of the flag and read like it, so a file can express no more than the command line.
The script and its arguments are not in the file: in `elastic-run --config job.toml --lr=1` it would be unclear whether
--lr belongs to the script. The whole file is checked, also values that a flag overrides, so that a typing error shows
at once.
"""

from __future__ import annotations

import os

from elastic_run.cli.flags import CONFIGURATION
from elastic_run.cli.request import FILE, Origin
from elastic_run.cli.values import job_id, nearest, refuse, short_name, text_list
from elastic_run.files import read_toml

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from elastic_run.cli.flags import Flag


def read_config_file(path: str, flags: Sequence[Flag]) -> dict[str, tuple[Any, Origin]]:
    """Return each value of a file with its origin, by the name of the value in the namespace.

    A ValueError names the file and the key.
    """
    known = {flag.dest: flag for flag in flags if not flag.prints_text}
    values: dict[str, tuple[Any, Origin]] = {}
    try:
        document = read_toml(path)
    except ValueError as error:
        message = f"--config: {error}"
        raise ValueError(message) from None
    for key, value in document.items():
        dest = key.replace("-", "_")
        flag = known.get(dest)
        try:
            if flag is None:
                names = [flag.name[2:] for flag in known.values() if flag.group != CONFIGURATION]
                refuse(f"is not a flag{nearest(dest.replace('_', '-'), names)}")
            if flag.group == CONFIGURATION:
                refuse("is for the command line only")
            if dest in values:
                refuse("is set twice, with a hyphen and with an underscore")
            # As the command line would have it, where the locale knows less than UTF-8.
            text = os.fsdecode(_write(flag, value).encode())
            values[dest] = (_read(flag, text), Origin(FILE, path, "" if flag.is_switch else text))
        except ValueError as error:
            message = f"{path}: {key}: {error}"
            raise ValueError(message) from None
    return values


def _read(flag: Flag, text: str) -> Any:
    try:
        return flag.parse(text)
    except ValueError as error:
        refuse(f"{text!r} {error}")


def _write(flag: Flag, value: object) -> str:
    """Return a value of TOML as the text of a flag."""
    if flag.is_switch:
        return str(int(value)) if isinstance(value, bool) else refuse(f"{_show(value)} is not true or false")
    if isinstance(value, list) and ",..." in flag.values:
        if wrong := [_show(item) for item in value if not _is_plain(item)]:
            refuse(f"{wrong[0]} in the list is not a value of this flag ({flag.values})")
        return ",".join(str(item).replace(",", ",,") if flag.parse is text_list else str(item) for item in value)
    if isinstance(value, dict) and flag.values.startswith("KEY="):
        return ",".join(f"{key}={_write_setting(key, item)}" for key, item in value.items())
    if not _is_plain(value):
        refuse(f"{_show(value)} is not a value of this flag ({flag.values})")
    if not isinstance(value, str) and flag.parse in (str, short_name, job_id):
        refuse(f'{value} is a number, but the value is a text: write "{value}"')
    return str(value)


def _write_setting(key: str, value: object) -> str:
    if not isinstance(value, bool) and not _is_plain(value):
        refuse(f"{key}: {_show(value)} is not a number, a text, true or false")
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if "," not in text else refuse(f"{key}: {value!r} has a comma, which ends a setting")


def _is_plain(value: object) -> bool:
    return isinstance(value, (str, int, float)) and not isinstance(value, bool)


def _show(value: object) -> str:
    """Return a value as it is in the file, or its kind if the value is long."""
    if isinstance(value, bool):
        return str(value).lower()
    kinds = {dict: "a table", list: "a list", str: repr(value), int: str(value), float: str(value)}
    return kinds.get(type(value), "a date or a time")
