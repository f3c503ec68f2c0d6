"""Results that are equal every time, where an algorithm would otherwise be chosen for its speed alone."""

import os

import torch


def make_deterministic() -> None:
    """For this process, from now on; before anything is computed on a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it starts
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.benchmark = False
