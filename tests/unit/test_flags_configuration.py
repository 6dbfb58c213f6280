"""What a command line, a namespace or a program's call becomes: the configuration, and what is told beside it."""

from __future__ import annotations

import os
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

from elastic_run import contract
from elastic_run.cli import make_config as config
from elastic_run.cli.checks import check_master, find_notices
from elastic_run.cli.flags import FLAGS
from elastic_run.cli.parser import LauncherArgumentParser
from elastic_run.cli.request import read_request
from elastic_run.cluster import devices, limits
from elastic_run.core.config import Window
from elastic_run.multiprocessing import DefaultLogsSpecs, Std
from elastic_run.notices import UsageError
from elastic_run.run import (
    config_from_args,
    determine_local_world_size,
    get_args_parser,
    parse_args,
    parse_min_max_nnodes,
)

if TYPE_CHECKING:
    from collections.abc import Callable


pytestmark = pytest.mark.usefixtures("place")


CONFIG = "--nproc-per-node 2 --max-restarts 3 --restart-window 5/1h --min-uptime 1m --no-restart-exit-codes 3,64-65"
CONFIG += " --max-backoff 0 --forward-signals SIGUSR1 --worker-store torch --no-capture --role r --shutdown-timeout 7"
CONFIG += " --no-fold"
CONFIG += " --rdzv-conf timeout=5,a=b --master-port 29999 --log-line-prefix-template [${rank}] --local-addr h"
CONFIG += " --tee 0:3 --redirects 1 --local-ranks-filter 0,1 --duplicate-stdout-filters a,b --virtual-local-rank"
CONFIG += " --fence-after lease"


def test_a_command_line_becomes_a_configuration() -> None:
    """Every flag reaches its field, torch's and ours."""
    config, program, args = config_from_args(parse_args([*CONFIG.split(), "train.py", "x"]))
    assert (program, args) == (sys.executable, ["-u", "train.py", "x"])
    assert (config.min_nodes, config.max_nodes, config.nproc_per_node, config.max_restarts) == (1, 1, 2, 3)
    assert (config.rdzv_backend, config.rdzv_endpoint) == ("static", "127.0.0.1:29999")
    assert config.rdzv_configs == {"timeout": "5", "a": "b", "rank": 0}
    assert (config.role, config.shutdown_timeout, config.local_addr, config.run_id) == ("r", 7, "h", "none")
    assert (config.log_line_prefix_template, config.virtual_local_rank) == ("[${rank}]", True)
    assert (config.duplicate_stdout_filters, config.duplicate_stderr_filters) == (["a", "b"], [])
    assert (config.agent_config.capture, config.agent_config.folds) == (False, False)
    assert (config.forward_signals, config.agent_config.worker_store) == ("SIGUSR1", "torch")
    assert config.node_config.fence_after == "lease"
    job = config.job_config
    assert (job.max_restarts, job.restart_window, job.min_uptime) == (3, Window(5, 3600.0), 60.0)
    assert (job.no_restart_exit_codes, job.max_backoff) == ((3, 64, 65), 0.0)


def test_workers_get_an_ipv6_address_without_brackets() -> None:
    """Brackets tell an address from its port; MASTER_ADDR stands alone."""
    assert config_from_args(parse_args(["--local-addr", "[fd00::1]", "s"]))[0].local_addr == "fd00::1"
    assert config_from_args(parse_args(["s"]))[0].local_addr is None


def test_the_prefix_template_may_come_from_torchs_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The flag wins over TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE."""
    monkeypatch.setenv("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[${rank}]")
    assert config_from_args(parse_args(["s"]))[0].log_line_prefix_template == "[${rank}]"
    args = parse_args(["--log-line-prefix-template", ">", "s"])
    assert config_from_args(args)[0].log_line_prefix_template == ">"


def test_an_empty_variable_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """Variables of torch's with times count as unset where they are empty."""
    monkeypatch.setenv(contract.ENV_SHUTDOWN_TIMEOUT, "")
    monkeypatch.setenv(contract.ENV_EXIT_BARRIER_TIMEOUT, "")
    config = config_from_args(parse_args(["s"]))[0]
    assert config.shutdown_timeout == contract.DEFAULT_SHUTDOWN_TIMEOUT
    assert config.node_config.exit_barrier_timeout == contract.DEFAULT_EXIT_BARRIER_TIMEOUT


def test_several_workers_get_one_thread_each(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OMP_NUM_THREADS becomes 1 for more than one worker unless it is set, and one line says so."""
    monkeypatch.delenv("OMP_NUM_THREADS")
    config_from_args(parse_args(["s"]))
    assert "OMP_NUM_THREADS" not in os.environ
    config_from_args(parse_args(["--nproc-per-node=2", "s"]))
    assert os.environ["OMP_NUM_THREADS"] == "1"
    assert capsys.readouterr().err.count("\n") == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    config_from_args(parse_args(["--nproc-per-node=2", "s"]))
    assert os.environ["OMP_NUM_THREADS"] == "8"


def test_omp_threads_gives_workers_more(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """--omp-threads sets OMP_NUM_THREADS, auto to an equal share of the cores, and a line says so."""
    monkeypatch.setattr(limits, "core_count", lambda: 7)
    for words, value, told in (
        (["--omp-threads=auto", "--nproc-per-node=2"], "3", "(7 cores for 2 workers)"),
        (["--omp-threads=auto", "--nproc-per-node=9"], "1", "(7 cores for 9 workers)"),
        (["--omp-threads=auto"], "7", "(7 cores for 1 worker)"),
        (["--omp-threads=5", "--nproc-per-node=2"], "5", "OMP_NUM_THREADS=5 for each worker"),
    ):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        config_from_args(parse_args([*words, "s"]))
        assert os.environ["OMP_NUM_THREADS"] == value
        err = capsys.readouterr().err
        assert told in err
        assert err.count("\n") == 1


def test_omp_threads_leaves_the_users_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OMP_NUM_THREADS of the user stays, and a line names the flag that is not used."""
    monkeypatch.setenv("OMP_NUM_THREADS", "8")
    config_from_args(parse_args(["--omp-threads=auto", "--nproc-per-node=2", "s"]))
    config_from_args(parse_args(["--omp-threads=8", "--nproc-per-node=2", "s"]))
    assert os.environ["OMP_NUM_THREADS"] == "8"
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "--omp-threads: auto is not used, since OMP_NUM_THREADS=8 is set" in err


def test_a_namespace_of_argparse_is_taken_and_completed() -> None:
    """Programs that parse with a parser, even torch's older one, get the defaults for the flags that it lacks."""
    namespace = get_args_parser().parse_args(["--nproc_per_node=3", "train.py"])
    del namespace.restart_window, namespace.worker_store
    config, _, _ = config_from_args(namespace)
    assert (config.nproc_per_node, config.agent_config.worker_store) == (3, "auto")


class Plugin(DefaultLogsSpecs):
    """A plug-in for the next test."""


def make_entry_points(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that a package with two plug-ins is installed, the second of them broken."""
    rows = (("mine", f"{__name__}:Plugin"), ("broken", "no_module_of_this_name:x"))
    points = metadata.EntryPoints(
        metadata.EntryPoint(name, value, contract.LOGS_SPECS_ENTRY_POINTS) for name, value in rows
    )
    monkeypatch.setattr(metadata, "entry_points", lambda **_: points)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Plugin.__module__])


def test_a_logs_specs_plugin_is_loaded_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """--logs-specs takes the class of an installed plug-in; a broken one and an unknown one are told."""
    make_entry_points(monkeypatch)
    config, _, _ = config_from_args(parse_args(["--logs-specs=mine", "--tee=3", "s"]))
    assert type(config.logs_specs).__name__ == "Plugin"
    with pytest.raises(
        UsageError, match=r"^--logs-specs: plug-in 'broken' \(no_module.*\) can't be loaded: ModuleNotF"
    ):
        config_from_args(parse_args(["--logs-specs=broken", "s"]))
    with pytest.raises(
        UsageError, match=r"^--logs-specs: 'other' is not a plug-in of the group .* \(installed: broken, mine\)$"
    ):
        config_from_args(parse_args(["--logs-specs=other", "s"]))


@pytest.mark.parametrize("text", ["0", "1", "2", "3", "0:1", "0:3,1:0,12:2"])
def test_what_the_command_line_takes_for_output_std_takes_too(text: str) -> None:
    """The check of --tee and --redirects lets pass what Std.from_str reads."""
    Std.from_str(parse_args([f"--tee={text}", "s"]).tee)


@pytest.mark.parametrize(("text", "expected"), [("1", (1, 1)), ("1:4", (1, 4))])
def test_nnodes_are_read(text: str, expected: tuple[int, int]) -> None:
    """MIN[:MAX] becomes two numbers."""
    assert parse_min_max_nnodes(text) == expected


@pytest.mark.parametrize("call", [lambda: parse_min_max_nnodes("1:2:3"), lambda: determine_local_world_size("no")])
def test_programs_get_errors_of_torchs_classes(call: Callable[[], object]) -> None:
    """What torch raises as ValueError or RuntimeError can be caught as both."""
    with pytest.raises(ValueError, match=r"^--n.*: '(1:2:3|no)' is not"):
        call()
    with pytest.raises(RuntimeError, match=r"^--n.*: '(1:2:3|no)' is not"):
        call()


@pytest.mark.parametrize(
    ("words", "environ", "build", "told"),
    [
        (
            "--nproc-per-node=4",
            {"CUDA_VISIBLE_DEVICES": "0,1"},
            "cuda",
            "--nproc-per-node: 4 workers see 2 GPUs (CUDA_VISIBLE_DEVICES=0,1): a script",
        ),
        ("--nproc-per-node=9", {}, "hip", "--nproc-per-node: 9 workers see 8 GPUs: a script"),
        ("--nproc-per-node=8", {}, "cuda", ""),
        ("--nproc-per-node=1", {}, "cuda", "7 GPUs are idle: --nproc-per-node=gpu starts a worker for each GPU"),
        ("--nnodes=2", {"CUDA_VISIBLE_DEVICES": "4,5"}, "cuda", "1 GPU is idle: --nproc-per-node=gpu"),
        ("", {"CUDA_VISIBLE_DEVICES": "3"}, "cuda", ""),
        ("", {}, "cpu", ""),
        ("--nproc-per-node=9", {}, "cpu", ""),  # torch uses none of them
        ("--nproc-per-node=9", {"CUDA_VISIBLE_DEVICES": ""}, "cuda", ""),  # hidden on purpose
        ("--nproc-per-node=cpu", {"CUDA_VISIBLE_DEVICES": "0"}, "cuda", ""),
    ],
)
def test_another_number_of_workers_than_gpus_is_told(
    words: str, environ: dict[str, str], build: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line says so if workers would fail, or one worker leaves GPUs idle; a job that is meant for CPUs goes on."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    monkeypatch.setattr(devices, "torch_build", lambda *_: frozenset({build}))
    monkeypatch.setattr(devices, "find_nvidia", lambda **_: [devices.Device(str(number)) for number in range(8)])
    notices = find_notices(read_request(parse_args([*words.split(), "train.py"]), 1, {}), environ)
    assert [notice.startswith(told) for notice in notices] == [True] * bool(told), notices


def test_a_notice_on_gpus_starts_no_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-smi takes seconds, and so would the start of a node whose driver lists no GPU in a file."""
    monkeypatch.setattr(config, "_DRIVERS", ("/",))
    monkeypatch.setattr(devices, "torch_build", lambda *_: frozenset({"cuda"}))
    monkeypatch.setattr(devices, "list_names", lambda _: [])
    asked: list[str] = []

    def ask() -> list[devices.Device]:
        asked.append("nvidia-smi")
        return [devices.Device()]

    monkeypatch.setattr(devices, "_ask_nvidia_smi", ask)
    assert find_notices(read_request(parse_args(["--nproc-per-node=2", "train.py"]), 2, {}), {}) == []
    assert asked == []
    assert config.count_node_gpus({}) == ("1", [])
    assert asked == ["nvidia-smi"]  # a job on a cluster with no other number of workers


@pytest.mark.parametrize(
    "words",
    [
        f"--nnodes=2 --master-addr={os.uname().nodename} --master-port=1 train.py",
        "--nnodes=2 --master-addr=192.0.2.1 --master-port=1 --node-rank=0 train.py",
        "--nnodes=1 --master-addr=192.0.2.1 --master-port=1 train.py",
    ],
)
def test_rank_0_is_taken_where_the_master_may_be_this_machine(words: str) -> None:
    """Its name is this machine's, the user gave the rank, or there is no other node."""
    parser = LauncherArgumentParser(FLAGS)
    check_master(read_request(parser.parse_args(words.split()), 1, {}, origins=parser.origins))
