"""The same job under torchrun and under elastic-run."""
