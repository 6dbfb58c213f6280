"""A module that asks for the GPUs when it is imported, as many do."""

import torch

AVAILABLE, COUNT = torch.cuda.is_available(), torch.cuda.device_count()
