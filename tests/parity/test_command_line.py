"""The same words and variables through torch's parser and through ours: the namespaces must be equal.

Where ours differs on purpose, the case stands in `DIFFERENCES` with the reason.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import os
import shlex
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.distributed.launch import parse_args as torch_launch_parse_args
from torch.distributed.run import get_args_parser as torch_get_args_parser

from elastic_run import launch as legacy
from elastic_run.cli.flags import CONFIGURATION, FLAGS, LEGACY_FLAGS
from elastic_run.cli.parser import match_abbreviation
from elastic_run.run import get_args_parser, parse_args

if TYPE_CHECKING:
    from collections.abc import Callable

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


#: What a parser makes of a command line that it doesn't take.
REFUSED = "refused"

#: Words as a shell reads them, and variables as NAME=VALUE in front of them.
CASES = """
train.py
train.py a b c
train.py --epochs 3 -x --not-ours
train.py --nnodes 7
train.py --nnodes=3:1 --standalone
train.py -- a b
train.py a -- b
train.py -- -- b
-- train.py a
-- train.py -- a
-- -- train.py
-- --train.py
-
- -a
-1 -2
train.py ${local_rank} --rank=${local_rank}
train_${local_rank}.py
--nnodes 2 train.py
--nnodes=1:4 train.py
--nnodes 1:1 train.py
--nproc-per-node 2 train.py
--nproc_per_node 2 train.py
--nproc-per-node=auto train.py
--nproc_per_node=gpu train.py
--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j train.py
--rdzv_backend c10d --rdzv_endpoint h:1 --rdzv_id j train.py
--rdzv-conf a=1,b=2 train.py
--rdzv_conf=timeout=5,read_timeout=6 train.py
--rdzv-endpoint= train.py
--standalone train.py
--standalone --standalone train.py
--max-restarts 3 --monitor-interval 5 train.py
--max_restarts=3 --monitor_interval=0.25 train.py
--start-method fork train.py
--start_method forkserver train.py
--event-log-handler console --role trainer train.py
--event_log_handler=console --role= train.py
--role=a=b train.py
-m package.module --x
--module package.module --x
--no-python ./tool -x
--no_python ./tool -x
--run-path /a/train.py
--run_path /a/train.py
-m --no-python x
--log-dir logs -r 3 -t 0:1,1:2 train.py
--log_dir logs --redirects 3 --tee 1 train.py
-r3 -t2 train.py
-r=3 -t=2 train.py
-mr3 package.module
-mr 3 package.module
-mt3 package.module
-mm package.module
--local-ranks-filter 0,1 train.py
--local_ranks_filter=0 train.py
--duplicate-stdout-filters a,b,,c --duplicate-stderr-filters d train.py
--duplicate_stdout_filters=a --duplicate_stderr_filters=,, train.py
--node-rank 1 --master-addr h --master-port 29501 train.py
--node_rank=1 --master_addr=h --master_port=29501 train.py
--local-addr 10.0.0.1 train.py
--local_addr=fe80::1 train.py
--local-addr= train.py
--logs-specs mine train.py
--logs_specs mine train.py
--numa-binding node train.py
--numa_binding core-complex train.py
--signals-to-handle SIGTERM,SIGUSR1 train.py
--signals_to_handle=SIGINT train.py
--shutdown-timeout 5 train.py
--shutdown_timeout=0 train.py
--virtual-local-rank train.py
--virtual_local_rank train.py
--tee 1 --tee 2 train.py
--nno 2 train.py
--nproc-per 2 train.py
--nproc_p 2 train.py
--red=3 train.py
--st train.py
--stan train.py
--monitor-i 1 train.py
--max-r 1 train.py
--master-p 1 train.py
--virtual-l train.py
--node-r 1 train.py
--no-p ./tool
--nod
--r 3 train.py
--m train.py
--l x train.py
--log x train.py
--nnodes
--nnodes --standalone train.py
--role -x train.py
-r -- train.py
--standalone=1 train.py
-mx train.py
-m=1 train.py
--
--standalone
--unknown train.py
--unknown=3 train.py
-x train.py
--max-restarts x train.py
--monitor-interval x train.py
--master-port x train.py
--node-rank 1.5 train.py
--shutdown-timeout 1.5 train.py
--start-method thread train.py
--numa-binding other train.py
PET_NNODES=1:2 train.py
PET_NNODES=1:2 --nnodes 3 train.py
PET_NPROC_PER_NODE=4 train.py
PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=h:1 PET_RDZV_ID=j PET_RDZV_CONF=a=1 train.py
PET_STANDALONE=1 train.py
PET_STANDALONE=0 train.py
PET_STANDALONE=0 --standalone train.py
PET_MODULE=1 PET_NO_PYTHON=1 PET_RUN_PATH=1 PET_VIRTUAL_LOCAL_RANK=1 train.py
PET_MAX_RESTARTS=3 PET_MONITOR_INTERVAL=2 PET_START_METHOD=fork train.py
PET_LOG_DIR=x PET_REDIRECTS=1 PET_TEE=2 PET_LOCAL_RANKS_FILTER=0 train.py
PET_DUPLICATE_STDOUT_FILTERS=a,b PET_DUPLICATE_STDERR_FILTERS=c train.py
PET_NODE_RANK=2 PET_MASTER_ADDR=h PET_MASTER_PORT=3 PET_LOCAL_ADDR=l train.py
PET_SIGNALS_TO_HANDLE=SIGINT PET_SHUTDOWN_TIMEOUT=4 PET_ROLE=r PET_EVENT_LOG_HANDLER=console train.py
PET_LOGS_SPECS=x PET_NUMA_BINDING=node train.py
--node-rank 3 train.py
--standalone --rdzv-backend xx train.py
--tee 0:1,1:1 --local-ranks-filter 0,1 train.py
--master-addr [::1] train.py
--node-rank -1 train.py
--rdzv-backend c10d --rdzv-endpoint h:1 --rdzv-id j --node-rank=-1 train.py
--master-addr= train.py
PET_MASTER_ADDR= train.py
--nproc-per-node npu train.py
PET_MAX_RESTARTS=x train.py
PET_MAX_RESTARTS=x --max-restarts 2 train.py
PET_MASTER_PORT= train.py
PET_STANDALONE=x train.py
PET_STANDALONE=2 train.py
''
'' a
'--my script' --x
--role '' train.py
--role '-a b' train.py
--role='a b' train.py
train.py --help
train.py -h --version
-h
--help
--he
-mh package.module
--nnodes 2 --help
-m
--module
--no-python
--run-path
-m --
--no-python --standalone
--unknown
--unknown 3
--unknown 3 train.py
--unknown=3 --nnodes 2 train.py
--nnodes 2 --unknown train.py --nnodes 3
-x -m package.module
-xm package.module
-nnodes=2 train.py
-m= train.py
-m=package.module
--standalone= train.py
--stan=1 train.py
--r=3 train.py
--master train.py
-r train.py
-r
-t 3
--tee=1,2 --
-1
-1.5 --role -1 train.py
--local-addr -1 train.py
--max-restarts=-0 train.py
--max-restarts ' 3 ' train.py
--max-restarts 1_0 train.py
--standalone -- --standalone
--standalone -- -- -- x
train.py --nnodes
train.py - -- -
--start-method=spawn --start-method=fork train.py
--duplicate-stdout-filters a --duplicate-stdout-filters b train.py
PET_STANDALONE= train.py
PET_MAX_RESTARTS=x --help
PET_MAX_RESTARTS=x --max-restarts=x train.py
PET_ROLE= train.py
PET_ROLE=-x train.py
""".strip().splitlines()
CASES += NEW_COMMAND_LINES

#: Ours is a line for what torch passes on into a traceback later, or ignores.
_CHECKED = "a value is checked when it is read, not after half of the launch"
_VARIABLE = "torch forgets to check the choices of variables"
_SPELLINGS = "to argparse two spellings of one flag can be ambiguous; to us never"
_UNNEEDED = "a variable is not checked where its flag is given"
_UNREAD = "words of the script are not ours to read; argparse can find them ambiguous"
DIFFERENCES = {
    "--nnodes 3:1 train.py": _CHECKED,
    "--nnodes 0 train.py": _CHECKED,
    "--nproc-per-node 8x train.py": _CHECKED,
    "--nproc-per-node 0 train.py": _CHECKED,
    "--max-restarts -1 train.py": _CHECKED,
    "--monitor-interval nan train.py": _CHECKED,
    "--shutdown-timeout -5 train.py": _CHECKED,
    "--master-port 70000 train.py": _CHECKED,
    "--node-rank -2 train.py": _CHECKED,
    "--rdzv-conf a train.py": _CHECKED,
    "--redirects 7 train.py": _CHECKED,
    "-tr3 package.module": _CHECKED,
    "--local-ranks-filter x train.py": _CHECKED,
    "--local-ranks-filter -1 train.py": _CHECKED,
    "--local-addr 999.1.1.1 train.py": _CHECKED,
    "--master-addr a/b train.py": _CHECKED,
    "--signals-to-handle SIGFOO train.py": _CHECKED,
    "--signals-to-handle= train.py": _CHECKED,
    "--signals-to-handle SIGTERM, train.py": _CHECKED,
    "PET_NNODES= train.py": _CHECKED,
    "PET_START_METHOD=thread train.py": _VARIABLE,
    "--max 1 train.py": _SPELLINGS,
    "--mon 1 train.py": _SPELLINGS,
    "--nproc 2 train.py": _SPELLINGS,
    "--nod 1 train.py": _SPELLINGS,
    "--v train.py": _SPELLINGS,
    "train.py --r --max --no": _UNREAD,
    "PET_MODULE=x -m package.module": _UNNEEDED,
}
#: What those of them that we understand mean, in words that torch understands too.
MEANINGS = {
    "--max 1 train.py": "--max-restarts 1 train.py",
    "--mon 1 train.py": "--monitor-interval 1 train.py",
    "--nproc 2 train.py": "--nproc-per-node 2 train.py",
    "--nod 1 train.py": "--node-rank 1 train.py",
    "--v train.py": "--virtual-local-rank train.py",
    "PET_MODULE=x -m package.module": "-m package.module",
    "train.py --r --max --no": "-- train.py --r --max --no",
}


def parse_with_torch(environ: dict[str, str], words: list[str]) -> object:
    """Return torch's namespace as a dictionary, or REFUSED."""
    return outcome(lambda: make_torchs_parser(not environ).parse_args(words), environ)


@functools.cache
def _make_parser_once(make: Callable[[], argparse.ArgumentParser]) -> argparse.ArgumentParser:
    return make()


def make_torchs_parser(is_plain: bool) -> argparse.ArgumentParser:
    """Return torch's parser; without variables, which are read when it is made, always the same."""
    return _make_parser_once(torch_get_args_parser) if is_plain else torch_get_args_parser()


def outcome(parse: Callable[[], Any], environ: dict[str, str]) -> object:
    """Parse with variables set and with nothing printed."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stderr(io.StringIO()):
        for name in [name for name in os.environ if name.startswith("PET_")]:
            patch.delenv(name)
        for name, value in environ.items():
            patch.setenv(name, value)
        try:
            parsed = parse()
            return {**vars(parsed[0]), "unknown": parsed[1]} if isinstance(parsed, tuple) else vars(parsed)
        except (SystemExit, ValueError):
            return REFUSED


def split(case: str) -> tuple[dict[str, str], list[str]]:
    """Separate the variables in front from the words."""
    words = shlex.split(case)
    variables = [word for word in words if word.startswith("PET_")]
    return dict(word.split("=", 1) for word in variables), words[len(variables) :]


def without_ours(namespace: object) -> object:
    """Leave out what the installed torchrun hasn't got, which must have its default."""
    if not isinstance(namespace, dict):
        return namespace
    flags = LEGACY_FLAGS if "use_env" in namespace else FLAGS
    # The parser for programs has none of this group.
    own = [flag for flag in flags if flag.group != CONFIGURATION or flag.dest in namespace]
    ours = {
        flag.dest: flag.default for flag in own if (flag.is_ours and not flag.prints_text) or flag.dest in LACKING_FLAGS
    }
    assert {name: namespace[name] for name in ours} == ours
    return {name: value for name, value in namespace.items() if name not in ours}


def assert_equal(ours: object, torchs: object, case: str = "") -> None:
    """Compare values and their types."""
    assert ours == torchs, case
    if isinstance(ours, dict) and isinstance(torchs, dict):
        types = {name: type(value) for name, value in torchs.items()}
        assert {name: type(value) for name, value in ours.items()} == types, case


def takes_known(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parse as a program that leaves unknown flags to others."""
    return parser.parse_known_args(words)


def takes_all(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    """Parse with a parser of a program's own that takes its actions from another."""
    return argparse.ArgumentParser(parents=[parser], add_help=False).parse_args(words)


def test_command_lines_mean_the_same() -> None:
    """Torch's parser and ours make the same of each command line and its variables."""
    for case in CASES:
        environ, words = split(case)
        ours = outcome(functools.partial(parse_args, words), environ)
        assert_equal(without_ours(ours), parse_with_torch(environ, words), case)


@pytest.mark.parametrize("parse", [takes_known, takes_all])
def test_programs_read_the_same(parse: Callable[[argparse.ArgumentParser, list[str]], Any]) -> None:
    """Programs that leave unknown flags to others, or take all actions into a parser of their own, read the same."""
    for case in CASES:
        environ, words = split(case)
        theirs, ours = (
            outcome(lambda make=make, words=words: parse(make(), words), environ)  # type: ignore[misc]
            for make in (functools.partial(make_torchs_parser, not environ), get_args_parser)
        )
        assert_equal(without_ours(ours), theirs, case)


def test_accelerates_words_mean_the_same() -> None:
    """Accelerate gives the parser names of positionals as flags, and a list among the words."""
    words: Any = ["--training_script", "train.py", "--training_script_args", ["--epochs", "3"]]
    expected = outcome(lambda: torch_get_args_parser().parse_known_args(words), {})
    assert_equal(without_ours(outcome(lambda: get_args_parser().parse_known_args(words), {})), expected)


def test_differences_are_those_that_we_want() -> None:
    """What is listed as different is different: bad values are refused, and some refused words are understood."""
    for case, reason in DIFFERENCES.items():
        environ, words = split(case)
        torchs = parse_with_torch(environ, words)
        ours = outcome(functools.partial(parse_args, words), environ)
        if reason in {_CHECKED, _VARIABLE}:
            assert (torchs != REFUSED, ours == REFUSED) == (True, True), case
        else:
            assert without_ours(ours) == parse_with_torch(*split(MEANINGS[case])), case


BEGINNINGS = sorted(
    {
        option[:length]
        for option in torch_get_args_parser()._option_string_actions
        if option.startswith("--")
        for length in range(3, len(option) + 1)
    }
)


def test_every_abbreviation_means_the_same() -> None:
    """For each beginning of each of torchrun's flags ours finds the same flags, and those of newer releases."""
    parser = torch_get_args_parser()
    ours = get_args_parser()
    assert len(BEGINNINGS) > 250
    for prefix in BEGINNINGS:
        expected = {match[0].dest for match in parser._get_option_tuples(prefix)}
        found = {flag.dest for flag in match_abbreviation(prefix, FLAGS)}
        assert found - LACKING_FLAGS == expected, prefix
        if len(found) == 1:
            assert {match[0].dest for match in ours._get_option_tuples(prefix)} == expected, prefix
        else:
            assert outcome(functools.partial(ours.parse_args, [prefix, "x", "s"]), {}) == REFUSED, prefix


def test_torch_has_no_flag_that_we_lack() -> None:
    """Every spelling of torch's is one of ours and means the same flag."""
    ours = {spelling: flag for flag in FLAGS for spelling in flag.spellings}
    for option, action in torch_get_args_parser()._option_string_actions.items():
        assert ours[option].dest == action.dest
        assert not ours[option].is_ours
        assert action.dest == "help" or ours[option].default == action.default


def test_the_legacy_front_door_reads_the_same() -> None:
    """torch.distributed.launch's parser and ours make the same of a command line."""
    for case in (
        "train.py --x",
        "--use-env train.py",
        "--use_env -m x y",
        "--use-e train.py",
        "-r 3 x",
        "--local-r 1 x",
    ):
        theirs = outcome(functools.partial(torch_launch_parse_args, case.split()), {})
        assert_equal(without_ours(outcome(functools.partial(legacy.parse_args, case.split()), {})), theirs, case)
