"""Parallel strategies: which processes and devices a run uses, and how their gradients meet."""

from runner.parallel.ddp import DDP
from runner.parallel.single import Single

__all__ = ["DDP", "Single"]
