"""The CPUs, GPUs and schedulers of this machine, found without torch.

Every function takes the root of the file system (and the environment where it matters) as an argument, so that tests
can show it other machines.

| module | what it holds |
|---|---|
| `cpus` | how many CPUs, and how many cores, this process may use |
| `denied_paths` | which part of a path denies access to it |
| `devices` | which GPUs a worker will see |
| `gpu_use` | how much of the GPUs each process takes, through nvidia-ml-py |
| `gpu_processes` | which processes hold GPU memory |
| `host_files` | the hosts of a job of PBS, LSF or Grid Engine |
| `kernel_log` | the newest lines of the kernel's log |
| `kubernetes` | the indexed Job of Kubernetes of this pod: its index, the other pods' names |
| `machine` | the scheduler's name of this machine, and how it is taken out of use |
| `memory_limit` | the memory limit of the control groups |
| `numa` | which CPUs each worker is bound to, near its GPU |
| `oom_counters` | the kills that the kernel's OOM killer has counted |
| `programs` | finds a program as the system does, and the directory that denies access to it |
| `requeue` | asks Slurm to run a stopped job again |
| `slurm` | the Slurm step of this launcher: nodes, launchers, addresses |
| `torch_devices` | devices that only torch knows, such as `npu` of torch_npu |
| `torch_version` | the version of torch, without importing it |
"""
