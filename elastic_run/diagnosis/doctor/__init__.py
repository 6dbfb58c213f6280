"""The checks of `elastic-run doctor`, before a job runs on a machine; without torch.

A module holds one family of checks: it reads facts from the system, and pure functions make findings of them. Nothing
is changed on the machine, apart from a file that is written and removed at once. A check can hang, on a dead network
file system for one; so each family runs in a thread, and a family that does not end in time is a finding.

| module | what it holds |
|---|---|
| `checks` | the table of the families, and how they are run |
| `clock` | the time of day is a possible one |
| `control_groups` | limits of CPU, memory and processes that a container has |
| `directories` | the directories for logs and temporary files can be written |
| `finding` | the finding of a check, and the subject of all checks |
| `gpus` | the GPUs answer, and no other process holds their memory |
| `interfaces` | the network interfaces that variables name exist |
| `names` | host names have addresses, and name servers answer |
| `network_probe` | connections and datagrams from node to node |
| `node_reports` | findings from the reports of all nodes of a job |
| `ports` | the endpoint's port is free here, or can be reached |
| `probe_worker` | the program that `doctor` starts on each node, to report to the other nodes |
| `python` | interpreter, virtual environment, torch |
| `report` | the findings as text for one screen, or as JSON |
| `resource_limits` | limits of open files, processes and locked memory |
| `scheduler` | variables of Slurm and Kubernetes agree |
| `shared_memory` | /dev/shm has room |
| `variables` | variables that break jobs |
"""
