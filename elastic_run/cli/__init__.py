"""The command line: from its words and the variables ``PET_*`` to a `LaunchConfig` and the workers' command.

| module | what it holds |
|---|---|
| `flags` | the table of all flags: names, values, default, variable, help |
| `parser` | the argparse parser: words and variables to a namespace with a value for each flag |
| `origins` | where each value comes from (flag, variable, file, Slurm), and whether Slurm's variables are left over |
| `values` | one value: text to a checked value |
| `checks` | values against each other and against this machine, before anything is started |
| `flag_notices` | notices on values with which the job can run, such as a flag without effect |
| `program_checks` | the workers' program: is it there, and can it be run |
| `cluster_values` | values that follow from the cluster's scheduler, where no flag names them |
| `slurm_step` | values that follow from the Slurm step of this launcher |
| `indexed_job` | values that follow from the indexed Job of Kubernetes of this pod |
| `endpoint_checks` | refuses an endpoint by which the launchers of a scheduler's job can't find each other |
| `derivation` | the record of such values |
| `node_gpus` | one worker for each GPU of this node; more workers than GPUs |
| `threads` | OpenMP threads of each worker |
| `faults` | the value of ``--inject-fault`` |
| `config` | values that no flag gives; the token; the `LaunchConfig` and the workers' command, from checked values |
| `config_file` | the file of ``--config``: TOML to checked values |
| `explain` | the text of ``--explain``: values with their origins, the job and the workers' command |
| `help` | the texts of ``--help`` and ``--help-all``, and the reference in the docs |
| `completion` | the script of ``--print-completion``, by shtab |
| `stdout` | writes what was asked for, such as a help text or a JSON document |
| `bounded_child` | a child process that reads files of strangers, for ``elastic-run trace`` |
| `log_files` | finds the log files of a run, for ``elastic-run logs`` |
| `commands` | the commands beside the start of a job, such as ``elastic-run help`` |

`elastic_run.run` calls them in this order. These modules know the flags. What they call in `cluster`, `rendezvous` and
`launcher` knows no flag: it raises errors of its own, and the caller here adds the flag.
"""
