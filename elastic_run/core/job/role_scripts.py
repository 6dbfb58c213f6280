"""Which script the nodes of each role run: they must agree, or two jobs have met under one id.

The first node of a role that names its script settles it. A node that names none (a release before this, an agent
written for torch) is taken in. What a script's name is, so that honest nodes agree, says `agent.script_name`.

Two files of one name are one script where they have one path, since a file may be changed while a job runs, or one
content, since nodes may have it in different directories. Else they are two: every other project has a `train.py`.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from elastic_run.core.protocol.facts import RoleScript

#: Roles whose scripts are remembered.
_REMEMBERED = 64


def describe_other_script(scripts: tuple[RoleScript, ...], own: RoleScript, *, here: str = "here") -> str:
    """Tell in what a node's script differs from that of the other nodes of its role.

    Args:
        scripts: The scripts of all roles.
        own: The node's.
        here: The node's place for the reader, who may be another node's user.

    Returns:
        A sentence with both scripts, or "" where they agree.
    """
    known = _find(scripts, own.role)
    if not own.script or known is None or _are_one(known, own):
        return ""
    script, other = own.script, known.script
    if script == other and own.file is not None and known.file is not None:
        script, other = own.file.path, known.file.path
    return (
        f"the script of role {own.role!r} is {script!r} {here} and {other!r} in the job: nodes of one role run the "
        "same script, and each job needs an --rdzv-id of its own"
    )


def settle_script(scripts: tuple[RoleScript, ...], own: RoleScript) -> tuple[RoleScript, ...]:
    """Remember a role's script, instead of a former one that is another."""
    known = _find(scripts, own.role)
    if not own.script or (known is not None and _are_one(known, own)):
        return scripts
    others = (other for other in scripts if other.role != own.role)
    return (*others, own)[-_REMEMBERED:]


def _are_one(one: RoleScript, other: RoleScript) -> bool:
    if one.script != other.script or one.file is None or other.file is None:
        return one.script == other.script
    return one.file.path == other.file.path or one.file.digest == other.file.digest


def _find(scripts: tuple[RoleScript, ...], role: str) -> RoleScript | None:
    return next((known for known in scripts if known.role == role), None)
