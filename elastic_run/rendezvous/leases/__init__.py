"""The lease of a job: who coordinates it, where etcd or a shared file decides that. Nothing else of a job is there."""
