"""A module that uses the GPU when it is imported."""

import torch

torch.ones(1, device="cuda")
