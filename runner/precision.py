"""Precision policy: which dtype computes, how float32 matmuls are rounded, and whether gradients are scaled."""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import PositiveFloat
from torch import nn

from runner.errors import BadInput
from runner.machine import has_native_bf16

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """A precision policy as a value; every policy the runner has is one yaml of these fields.

    Parameters, gradients and optimizer state stay float32 (master weights) in all of them [1].

    Args:
        compute_dtype: dtype of matmuls and convolutions in forward and backward.
        matmul_precision: ``highest`` keeps float32 matmuls and convolutions in float32, ``high`` allows TF32.
        grad_scaling: scale the loss so that float16 gradients do not underflow [1].
        init_scale: the first loss scale; it halves at each overflow.

    Raises:
        BadInput: an unknown dtype, or gradient scaling without float16, or float16 without it.

    [1] Micikevicius et al., Mixed Precision Training, 2018, arXiv:1710.03740.
    """

    compute_dtype: Literal["float32", "bfloat16", "float16"]
    matmul_precision: Literal["highest", "high"]
    grad_scaling: bool
    init_scale: PositiveFloat

    def __post_init__(self) -> None:
        if self.compute_dtype not in _DTYPES:
            raise BadInput(f"precision.compute_dtype={self.compute_dtype}: choose one of {', '.join(_DTYPES)}")
        if self.grad_scaling != (self.compute_dtype == "float16"):
            raise BadInput(
                f"precision.grad_scaling={str(self.grad_scaling).lower()}: does not fit "
                f"precision.compute_dtype={self.compute_dtype}; float16 needs scaling and the others must not have it"
            )

    def prepare(self, model: nn.Module) -> nn.Module:
        """Set the process's float32 matmul mode; parameters stay float32.

        The older pair of switches is used, not ``fp32_precision``: once that is set, reading the older ones raises, and
        torch.compile reads them.
        """
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.backends.cudnn.allow_tf32 = self.matmul_precision != "highest"
        return model.float()

    def autocast(self, device: torch.device) -> AbstractContextManager:
        """The forward-pass context; does nothing where the compute dtype is float32."""
        dtype = _DTYPES[self.compute_dtype]
        return torch.autocast(device.type, dtype=dtype, enabled=dtype != torch.float32)

    def grad_scaler(self, device: torch.device) -> torch.amp.GradScaler:
        """A scaler that does nothing unless ``grad_scaling``, so the loop needs no branch."""
        return torch.amp.GradScaler(device.type, enabled=self.grad_scaling, init_scale=self.init_scale)

    def remark(self, device: torch.device) -> str | None:
        """What the hardware says to this policy, where it is not carried out natively; None: nothing to say."""
        if self.compute_dtype == "float16" and device.type == "cpu":
            return "float16 is emulated on a CPU and tens of times slower: precision=bf16 or precision=fp32"
        if self.compute_dtype == "bfloat16" and not _is_bf16_native(device):
            better = "precision=fp16" if device.type == "cuda" else "precision=fp32"
            return f"bfloat16 is not native on this {device.type} device and may be slower than float32: try {better}"
        if self.compute_dtype == "float32" and self.matmul_precision == "high" and not _has_tf32(device):
            return f"TF32 does not exist on this {device.type} device: precision=tf32 computes as precision=fp32 does"
        return None


def _is_bf16_native(device: torch.device) -> bool:
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device.type != "cpu" or has_native_bf16()


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
