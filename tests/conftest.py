"""What all tests share."""

import torch

# Two busy processes fill a small machine: tests use one thread each, as workers do.
torch.set_num_threads(1)
