"""What is refused before anything is started, and what the job is made of when nothing is."""

from __future__ import annotations

import errno
import os
import sys
from typing import TYPE_CHECKING, Any

import pytest

from elastic_run import contract
from elastic_run import launch as legacy
from elastic_run.cli.checks import check_request, find_notices
from elastic_run.cli.make_config import make_config
from elastic_run.cli.request import choose_rendezvous, get_use_env, read_request
from elastic_run.multiprocessing.fork_exec import make_run_path_code
from elastic_run.notices import UsageError
from elastic_run.run import (
    determine_local_world_size,
    get_rdzv_endpoint,
    parse_args,
    run,
    run_command,
)

if TYPE_CHECKING:
    from argparse import Namespace
    from pathlib import Path


pytestmark = pytest.mark.usefixtures("place")


REFUSED: list[tuple[str, dict[str, str], str]] = [
    (
        "--nproc-per-node npu train.py",
        {},
        "--nproc-per-node: 'npu' is not a number from 1 up, nor auto, cpu, gpu or xpu",
    ),
    ("--master-addr= --nnodes=2 --node-rank=0 --master-port=5 train.py", {}, "--master-addr: '' is not a host name"),
    ("--nnodes=2 --master-port=5 train.py", {"PET_MASTER_ADDR": ""}, "PET_MASTER_ADDR: '' is not a host name"),
    ("--node-rank=-1 --nnodes=2 --master-addr=h train.py", {}, "--node-rank: '-1' is not a whole number from 0 up"),
    ("--nproc-per-node gpu train.py", {}, "--nproc-per-node: 'gpu', but "),
    ("train.py", {"PET_NPROC_PER_NODE": "gpu"}, "PET_NPROC_PER_NODE: 'gpu', but "),
    ("--rdzv-backend c10 train.py", {}, "--rdzv-backend: 'c10' is none of static, c10d, etcd, etcd-v2, etcd-v3, local"),
    ("train.py", {"PET_RDZV_BACKEND": "c10"}, "PET_RDZV_BACKEND: 'c10' is none of "),
    (
        "--rdzv-backend c10d --rdzv-endpoint h:99999 train.py",
        {},
        "--rdzv-endpoint: rendezvous endpoint 'h:99999': port",
    ),
    ("--rdzv-endpoint host train.py", {}, "--rdzv-endpoint: 'host' has no port"),
    ("--node-rank 1 --master-port 29500 train.py", {}, "--node-rank: 1 is not below the number of nodes"),
    ("--standalone --nnodes 2 train.py", {}, "--standalone: is for one node, but --nnodes=2 asks for 2 or more"),
    (
        "--redirects 2:1 --nproc-per-node 2 train.py",
        {},
        "--redirects: '2:1' names local rank 2, but this node has only local ranks 0 to 1",
    ),
    ("--tee 1:1 train.py", {}, "--tee: '1:1' names local rank 1, but this node has only local rank 0"),
    ("--local-ranks-filter 0,3 train.py", {}, "--local-ranks-filter: '0,3' names local rank 3"),
    ("train.py", {"PET_TEE": "1:1"}, "PET_TEE: '1:1' names local rank 1"),
    ("--node-rank 2 --nnodes 2 train.py", {}, "--node-rank: 2 is not below the number of nodes (--nnodes=2)"),
    ("train.py", {"PET_MASTER_ADDR": "bad host"}, "PET_MASTER_ADDR: 'bad host' is not a host name"),
    ("--forward-signals SIGHUP train.py", {}, "--forward-signals: SIGHUP is in --signals-to-handle too"),
    (
        "train.py",
        {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "-1"},
        "TORCH_ELASTIC_SHUTDOWN_TIMEOUT: '-1' is not a whole number",
    ),
    ("train.py", {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": "soon"}, "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT:"),
    (
        "train.py",
        {"TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT": "soon"},
        "TORCH_ELASTIC_EXIT_BARRIER_TIMEOUT: 'soon' is not a number of seconds from 0 up",
    ),
    ("--event-log-handler consol train.py", {}, "--event-log-handler: 'consol' is none of null, console"),
    ("--log-dir plain train.py", {}, "--log-dir: 'plain' is not a writable directory"),
    ("--log-dir plain/below train.py", {}, "--log-dir: 'plain/below' is not a writable directory"),
    ("--log-dir /proc/x/y train.py", {}, "--log-dir: '/proc/x/y' is not a writable directory: /proc: "),
    (f"--log-dir {'d' * 300} train.py", {}, f"--log-dir: '{'d' * 99}"),
    ("--log-dir " + "d/" * 2000 + " train.py", {}, "--log-dir: 'd/d/"),
    ("--logs-specs none train.py", {}, "--logs-specs: 'none' is not a plug-in of the group torchrun.logs_specs ("),
    ("--numa-binding node train.py", {"CUDA_VISIBLE_DEVICES": ""}, "--numa-binding: 'node' is impossible here: "),
    ("trian.py", {}, "script 'trian.py' does not exist"),
    ("train", {}, "script 'train' does not exist, did you mean 'train.py'?"),
    ("statu", {}, "script 'statu' does not exist, did you mean 'status'?"),
    (
        "python -u train.py --lr=3",
        {},
        "script 'python' does not exist: leave the word out, since elastic-run starts the interpreter: elastic-run [fl",
    ),
    ("torchrun --nnodes 2 train.py", {}, "script 'torchrun' does not exist: leave the word out, since "),
    ("sh run.sh", {}, "script 'sh' does not exist: elastic-run starts Python itself"),
    ("/bin/sh run.sh", {}, "script '/bin/sh' is a binary program, did you mean --no-python /bin/sh?"),
    ("package.module", {}, "script 'package.module' does not exist, did you mean -m package.module?"),
    ("nowhere/train.py", {}, "script 'nowhere/train.py' does not exist"),
    ("train.py/deeper", {}, "script 'train.py/deeper' does not exist"),
    ("package", {}, "script 'package' is a directory without a __main__.py"),
    ("--run-path package", {}, "script 'package' is a directory without a __main__.py"),
    ("-m ./train.py", {}, "-m: './train.py' is not the name of a module; leave out -m"),
    ("-m --no-python tool", {}, "--no-python: cannot be combined with -m"),
    ("--no-python nothing-of-this-name", {}, "--no-python: program 'nothing-of-this-name' is not on PATH"),
    ("--no-python tool", {}, "--no-python: program 'tool' is not on PATH, did you mean './tool'?"),
    ("--no-python ./plain", {}, "--no-python: program './plain' is not executable (chmod +x)"),
    ("--no-python ./none", {}, "--no-python: program './none' does not exist"),
    ("--no-python ./package", {}, "--no-python: './package' is a directory"),
    ("train.py", {"PYTHON_EXEC": "/nowhere/python"}, "PYTHON_EXEC: '/nowhere/python' is not a program"),
    ("train.py", {"PYTHON_EXEC": "./plain"}, "PYTHON_EXEC: './plain' is not a program"),
    (f"--rdzv-id {'i' * 4097} train.py", {}, "--rdzv-id: 'iii"),
    ("--rdzv-id \udcff train.py", {}, r"--rdzv-id: '\udcff' is not UTF-8"),
    ("train.py", {"PET_RDZV_ID": "a\nb"}, r"PET_RDZV_ID: 'a\nb' has a line break"),
    (f"--role {'i' * 4095}\xe9 train.py", {}, "--role: 'iii"),
]


@pytest.mark.parametrize(("words", "environ", "named"), REFUSED)
def test_what_cannot_be_started_is_answered_in_one_line(
    words: str, environ: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Bad input ends with 2 and one line on stderr that names the flag or variable, the value and what is allowed."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        run_command(words.split())
    out, err = capsys.readouterr()
    assert (ended.value.code, out) == (contract.EXIT_USAGE, "")
    assert err.startswith(f"elastic-run: error: {named}")
    assert err.count("\n") == 1
    assert err.endswith("\n")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("--foo train.py", ""),
        ("--verbose train.py", ""),
        ("--logdir=x train.py", "--log-dir"),
        ("--nproc_per_nodes=2 train.py", "--nproc-per-node"),
        ("--gpus 2 train.py", "--nproc-per-node"),
        ("--ngpus=2 train.py", "--nproc-per-node"),
        ("--num_nodes 2 train.py", "--nnodes"),
        ("--nodes 2 train.py", "--nnodes"),
        ("-np 2 train.py", "--nproc-per-node"),
        ("nosuch.py", ""),
        ("statuss", "status"),
        ("--rdzv-backend=file train.py", ""),
        ("--signals-to-handle=SIGFOO train.py", ""),
        ("--rdzv-backend=c10d --rdzv-conf=read=1 --rdzv-endpoint=h --nnodes=2 --rdzv-id=x train.py", ""),
    ],
)
def test_only_a_near_name_is_suggested(wrong: str, meant: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A suggestion is a name that a typing error could have become, or the name of what another launcher calls so."""
    with pytest.raises(SystemExit):
        run_command(wrong.split())
    err = capsys.readouterr().err
    assert ("did you mean" in err) == bool(meant)
    assert f"did you mean {meant!r}?" in err or not meant


@pytest.mark.parametrize("words", [["private/train.py"], ["--no-python", "private/train.py"]])
def test_what_stands_in_a_directory_that_may_not_be_entered_is_not_said_to_be_missing(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the system refuses to look, the line says so (to root every directory is open, hence the stand-in)."""
    args, stat = parse_args(words), os.stat

    def refuse(path: str, **more: Any) -> os.stat_result:
        if path == args.training_script:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return stat(path, **more)

    monkeypatch.setattr(os, "stat", refuse)
    with pytest.raises(UsageError, match=r"'private/train.py' cannot be accessed: permission denied$"):
        check_request(read_request(args, 1, {}), {})


def test_a_long_value_is_shown_with_both_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """A line about bad input begins with the flag and ends with what is allowed, however long the value is."""
    for value in ("1" * 5000, "1 " * 2500):
        with pytest.raises(SystemExit):
            run_command([f"--nnodes={value}", "train.py"])
        err = capsys.readouterr().err
        assert err.startswith("elastic-run: error: --nnodes: '1")
        assert err.endswith(" is not MIN[:MAX] with 1 <= MIN <= MAX\n")
        assert "..." in err
        assert len(err) < 1100


def test_an_unreadable_script_is_refused(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A script without permission to read is named (to root everything is readable, hence the stand-in)."""
    monkeypatch.setattr(os, "access", lambda path, mode: not (str(path) == "train.py" and mode == os.R_OK))
    with pytest.raises(UsageError, match=r"^script 'train.py' is not readable: no permission$"):
        run(parse_args(["train.py"]))
    assert place.exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--nnodes 2 --rdzv-endpoint h train.py", "--rdzv-endpoint: 'h' has no port, which the static backend needs"),
        ("--rdzv-backend c10d --rdzv-conf join_time=3 train.py", "--rdzv-conf: "),
        ("--nnodes 2 --rdzv-conf bogus=1 train.py", "--rdzv-conf: unknown rendezvous setting 'bogus' for c10d;"),
        ("--rdzv-backend c10d --rdzv-conf is_host=perhaps train.py", "--rdzv-conf: "),
        ("--rdzv-backend c10d --rdzv-conf keep_alive_interval=x train.py", "--rdzv-conf: "),
        ("--rdzv-backend c10d --rdzv-conf is_host=0 train.py", "--rdzv-conf: rendezvous setting is_host=false needs"),
        ("--rdzv-backend etcd-v3 --rdzv-conf protocol=ftp IN", "--rdzv-conf: rendezvous setting protocol='ftp': not"),
        (
            "--rdzv-backend etcd-v3 --rdzv-conf protocol=https,cacert=/nope IN",
            "--rdzv-conf: rendezvous settings for TLS: can't use /nope: No such file",
        ),
        (
            "--nnodes 2 --rdzv-backend c10d --rdzv-id j --rdzv-endpoint a:1,a:1 train.py",
            "--rdzv-endpoint: rendezvous endpoint 'a:1,a:1': a:1 is listed twice",
        ),
        ("--rdzv-token-file nowhere --nnodes 2 train.py", "--rdzv-token-file: 'nowhere' can't be read: no such file"),
    ],
)
def test_what_is_wrong_with_a_job_of_several_nodes(
    words: str, said: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rendezvous that can't work is one line that names the flag, the value and what is allowed, and exit code 2."""
    assert place.exists()
    with pytest.raises(SystemExit) as ended:
        run_command(words.replace(" IN", " --rdzv-endpoint h:1 --rdzv-id j train.py").split())
    err = capsys.readouterr().err
    assert ended.value.code == contract.EXIT_USAGE
    assert f"error: {said}" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "backend", "has_id"),
    [
        ("--nnodes 1:4 train.py", "c10d", True),
        ("--nnodes 2 train.py", "c10d", True),
        ("--nnodes 2 --rdzv-id j train.py", "c10d", True),
        ("--nnodes 2 --node-rank 1 train.py", "static", False),
        ("--nnodes 2 --master-addr h train.py", "static", False),
        ("--nnodes 2 --master-port 29501 train.py", "static", False),
    ],
)
def test_several_nodes_without_a_rendezvous_meet_here(words: str, backend: str, has_id: bool) -> None:
    """Where the user names no place for several nodes to meet, it is this node; a name of torchrun's stays static."""
    args = parse_args(words.split())
    choose_rendezvous(read_request(args, 1, {}))
    assert args.rdzv_backend == backend
    assert (args.rdzv_id != "none") == has_id


@pytest.mark.parametrize(
    "words",
    [
        "train.py",
        "./train.py",
        "-",
        "application",
        "train_${local_rank}.py",
        "-m any.module",
        "--no-python ./tool",
        "--no-python sh -c true",
        "--no-python ./tool_${local_rank}",
        "--run-path --no-python -m train.py",
        "--standalone --nnodes 1:4 train.py",
        "--nnodes 1 --rdzv-backend c10d --rdzv-endpoint localhost:0 train.py",
        "--nnodes 1:1 --master-port 29501 train.py",
        "--rdzv-endpoint localhost:29501 train.py",
        "--log-dir logs/deep/below train.py",
        "--tee 0:3,1:2 --local-ranks-filter 1 --nproc-per-node 2 train.py",
        "--redirects 1:0,7:0 --tee 0:3,7:0 --nproc-per-node 2 train.py",
        "--forward-signals SIGHUP --signals-to-handle SIGTERM train.py",
        "--event-log-handler console train.py",
        "/dev/null",
        "--nnodes 1:4 --rdzv-backend c10d train.py",
        "--nnodes 2 --rdzv-backend etcd-v3 --rdzv-endpoint a:2379,b:2379 --rdzv-id j train.py",
        "--rdzv-backend c10d --rdzv-endpoint shared/file --rdzv-conf store_type=file train.py",
    ],
)
def test_what_can_be_started_passes_and_leaves_nothing_behind(words: str, place: Path) -> None:
    """A good command line is served, and the look at the machine changes nothing on it."""
    before = sorted(place.rglob("*"))
    args = parse_args(words.split())
    request = read_request(args, determine_local_world_size(args.nproc_per_node), {})
    check_request(request, os.environ)
    choose_rendezvous(request)
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    ("words", "backend", "endpoint"),
    [
        ("train.py", "local", ""),
        ("--standalone --rdzv-backend etcd --rdzv-endpoint h:1 --rdzv-id x train.py", "local", ""),
        ("--standalone --master-port 29999 train.py", "local", ""),
        ("--master-port 0 train.py", "local", ""),
        ("--master-port 29999 train.py", "static", "127.0.0.1:29999"),
        ("--master-addr localhost --master-port 29999 train.py", "static", "localhost:29999"),
        ("--rdzv-endpoint localhost:29998 train.py", "static", "localhost:29998"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:0 train.py", "c10d", "localhost:0"),
    ],
)
def test_a_single_node_becomes_a_standalone_job(words: str, backend: str, endpoint: str) -> None:
    """Without an endpoint and a port one node needs no rendezvous; its job gets a unique id."""
    args = parse_args(words.split())
    choose_rendezvous(read_request(args, 1, {}))
    assert (args.rdzv_backend, get_rdzv_endpoint(args)) == (backend, endpoint)
    assert (args.rdzv_id != "none") == (backend == "local")
    assert args.master_port


@pytest.mark.parametrize("words", ["", "--nnodes 1", "--standalone"])
def test_a_job_of_one_node_keeps_the_id_that_the_user_gave(words: str) -> None:
    """The user finds the job by it: in `status`, and in the name of the log directory."""
    args = parse_args([*words.split(), "--rdzv-id", "mine", "train.py"])
    choose_rendezvous(read_request(args, 1, {}))
    assert args.rdzv_id == "mine"
    assert args.rdzv_backend == "local"


def make_command(args: Namespace, environ: dict[str, str]) -> tuple[str, list[str]]:
    """Return the program of the workers and its arguments."""
    _, command, arguments = make_config(read_request(args, 1, {}), environ)
    return command, arguments


COMMANDS: list[tuple[str, list[str]]] = [
    ("train.py --x 1", [sys.executable, "-u", "train.py", "--x", "1"]),
    ("-m a.b --x ${local_rank}", [sys.executable, "-u", "-m", "a.b", "--x", "${local_rank}"]),
    ("--no-python ./tool x", ["./tool", "x"]),
    ("--run-path -m --no-python train.py x", [sys.executable, "-u", "-c", make_run_path_code(), "train.py", "x"]),
]


@pytest.mark.parametrize(("words", "command"), COMMANDS)
def test_the_command_of_the_workers(words: str, command: list[str]) -> None:
    """Workers run the interpreter, the module, the program or the path, with the script's words untouched."""
    program, args = make_command(parse_args(words.split()), {})
    assert [program, *args] == command


def test_python_exec_chooses_the_interpreter_but_not_under_run_path() -> None:
    """PYTHON_EXEC is the workers' interpreter; --run-path promises the launcher's, and a line says so."""
    environ = {"PYTHON_EXEC": "/opt/python"}
    assert make_command(parse_args(["train.py"]), environ)[0] == "/opt/python"
    args = parse_args(["--run-path", "train.py"])
    assert make_command(args, environ)[0] == sys.executable
    assert find_notices(read_request(args, 1, {}), environ) == [
        f"PYTHON_EXEC is not used with --run-path: workers run {sys.executable}"
    ]
    assert make_command(parse_args(["train.py"]), {"PYTHON_EXEC": ""})[0] == sys.executable


def test_the_legacy_front_door_passes_the_local_rank() -> None:
    """Without --use-env the local rank is the script's first argument."""
    args = legacy.parse_args(["train.py", "--x"])
    assert make_command(args, {})[1] == ["-u", "train.py", "--local-rank=${local_rank}", "--x"]
    args = legacy.parse_args(["--use-env", "train.py", "--x"])
    assert make_command(args, {})[1] == ["-u", "train.py", "--x"]
    assert [get_use_env(legacy.parse_args(["s"])), get_use_env(parse_args(["s"]))] == [False, True]


def test_the_legacy_front_door_refuses_programs_without_use_env() -> None:
    """A program that isn't Python can't be expected to take --local-rank."""
    with pytest.raises(UsageError, match=r"^--no-python: needs --use-env with this command"):
        legacy.launch(legacy.parse_args(["--no-python", "./tool"]))


@pytest.mark.parametrize(
    ("words", "environ", "said"),
    [
        ("train.py", {}, None),
        ("train.py", {"VIRTUAL_ENV": sys.prefix, "CONDA_PREFIX": "/opt/conda"}, None),
        ("train.py", {"VIRTUAL_ENV": "/opt/venv"}, f"VIRTUAL_ENV is /opt/venv, but workers run {sys.executable}; "),
        ("train.py", {"CONDA_PREFIX": "/opt/conda"}, "CONDA_PREFIX is /opt/conda, but workers run "),
        ("train.py", {"CONDA_PREFIX": "/opt/conda", "PYTHON_EXEC": "/opt/conda/bin/python"}, None),
        ("--no-python sh", {"VIRTUAL_ENV": "/opt/venv"}, None),
        (
            "--standalone --master-port 5 train.py",
            {},
            "--master-port: 5 is not used: only --rdzv-backend=static uses it",
        ),
        ("--standalone --node-rank 0 train.py", {}, None),
        ("--rdzv-backend c10d --node-rank 1 train.py", {}, None),
        ("--rdzv-backend c10d --master-addr h train.py", {}, "--master-addr: h is not used: "),
        ("--master-addr localhost --master-port 5 train.py", {}, None),
        ("--rdzv-backend c10d --master-addr= --node-rank=-1 train.py", {}, None),
        ("--standalone --master-addr= --node-rank=-1 train.py", {}, None),
        ("--node-rank=-1 train.py", {"PET_MASTER_ADDR": ""}, None),
        (
            "--nnodes 2 train.py",
            {"ELASTIC_RUN_RDZV_TOKEN": "hello"},
            "ELASTIC_RUN_RDZV_TOKEN: a token of 5 bytes can be",
        ),
        ("--nnodes 2 train.py", {"ELASTIC_RUN_RDZV_TOKEN": "0123456789abcdef"}, None),
        ("--nnodes 2 train.py", {"ELASTIC_RUN_RDZV_TOKEN": ""}, None),
        ("train.py", {"ELASTIC_RUN_RDZV_TOKEN": "hello"}, None),
        ("--exclude-after 2/6h train.py", {}, "--exclude-after: has no effect on a job of one node"),
        ("--nnodes 1:2 --exclude-after 2/6h train.py", {}, None),
        ("--exclude-exit-codes 7 train.py", {}, "--exclude-exit-codes: has no effect on a job of one node"),
        ("--hang-action fail train.py", {}, "--hang-action: fail has no effect without --hang-timeout"),
        (
            "--hang-action restart --hang-timeout 60 train.py",
            {},
            "--hang-action: restart ends the job at the first hang, since --max-restarts is 0",
        ),
        ("--hang-action fail --hang-timeout auto train.py", {}, None),
        ("train.py --nproc_per_node=2", {}, "--nproc-per-node: behind the script, so the script gets it: "),
        ("train.py x --nnodes 2 --tee 3", {}, "--nnodes, --tee: behind the script, so the script gets it: "),
        ("--nproc-per-node=2 train.py --nproc-per-node=2 --log-dir=x --master-port=1", {}, None),
    ],
)
def test_what_the_user_should_know_is_one_line(words: str, environ: dict[str, str], said: str | None) -> None:
    """A wrong interpreter and flags without effect are told, nothing else is."""
    notices = find_notices(read_request(parse_args(words.split()), 1, environ), environ)
    assert len(notices) == (said is not None)
    assert said is None or notices[0].startswith(said)
