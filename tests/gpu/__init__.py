"""Jobs on one NVIDIA GPU: `make test-gpu`. CI has no GPU, so these tests are not among those of `make test`."""
