"""Which script the nodes of each role run: they must agree, or two jobs have met under one id.

The first node of a role that names its script settles it. A node that names none (a release before this, an agent
written for torch) is taken in. What a script's name is, so that honest nodes agree, says `agent.script_name`.
"""

from __future__ import annotations

from elastic_run.core.codec import register
from elastic_run.records import dataclass

#: Roles whose scripts are remembered.
_REMEMBERED = 64


@register
@dataclass(frozen=True, slots=True)
class RoleScript:
    """The script of a role."""

    role: str
    script: str


def describe_other_script(scripts: tuple[RoleScript, ...], role: str, script: str) -> str:
    """Tell in what a node's script differs from that of the other nodes of its role.

    Args:
        scripts: Of the job.
        role: The node's.
        script: The node's, "" where it names none.

    Returns:
        A clause for the node's user with both, or "" where they agree.
    """
    known = _find(scripts, role)
    if not script or known in ("", script):
        return ""
    return (
        f"the script of role {role!r} is {script!r} here and {known!r} in the job: nodes of one role run the same "
        "script, and each job needs an --rdzv-id of its own"
    )


def settle_script(scripts: tuple[RoleScript, ...], role: str, script: str) -> tuple[RoleScript, ...]:
    """Remember a role's script, instead of a former one.

    Args:
        scripts: Of the job.
        role: The role.
        script: Its script, "" for unknown.

    Returns:
        The job's scripts.
    """
    if not script or _find(scripts, role) == script:
        return scripts
    others = (known for known in scripts if known.role != role)
    return (*others, RoleScript(role, script))[-_REMEMBERED:]


def _find(scripts: tuple[RoleScript, ...], role: str) -> str:
    return next((known.script for known in scripts if known.role == role), "")
