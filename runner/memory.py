"""Memory policy: memory format, cuDNN's autotuner, and the allocator's settings."""

from dataclasses import dataclass

import torch
from pydantic import PositiveInt
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Memory:
    """How tensors are laid out and allocated.

    Args:
        channels_last: keep [N, C, H, W] tensors in NHWC order, which convolutions with low precision prefer.
        cudnn_benchmark: let cuDNN time its algorithms for each new input size; pays for fixed sizes only.
        expandable_segments: let the CUDA allocator grow its segments, against fragmentation; None: torch's default.
        max_split_size_mb: blocks above this are never split; None: torch's default.
    """

    channels_last: bool
    cudnn_benchmark: bool
    expandable_segments: bool | None
    max_split_size_mb: PositiveInt | None

    def prepare(self, model: nn.Module) -> nn.Module:
        """Set the process's cuDNN switch and lay the model's weights out."""
        torch.backends.cudnn.benchmark = self.cudnn_benchmark
        return model.to(memory_format=torch.channels_last) if self.channels_last else model

    def lay_out(self, inputs: Tensor) -> Tensor:
        """The inputs in the model's memory format; other than four-dimensional ones as they are."""
        if self.channels_last and inputs.dim() == 4:
            return inputs.contiguous(memory_format=torch.channels_last)
        return inputs
