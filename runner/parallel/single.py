"""One process on one device: the strategy that the others refine."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, Protocol, Self

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from runner.errors import BadInput


class Part(Protocol):
    """What a strategy asks of one micro-batch."""

    inputs: Tensor
    targets: Tensor
    num_samples: int
    is_last: bool

    def weigh(self, loss: Tensor) -> Tensor:
        """The micro-batch's part of the step's loss."""
        ...


class Single:
    """One rank that does all the work.

    To add a strategy: subclass this, override what differs, and write ``conf/parallel/<name>.yaml`` whose ``_target_``
    names it. A strategy has a lifetime: `launch` starts its ranks, and on each rank its ``with`` block holds whatever
    they share.

    Args:
        device: ``auto`` is the accelerator torch finds, else the CPU.
        num_threads: CPU threads of each rank; ``auto`` is settled before launch.

    Attributes:
        data_parallel_rank, data_parallel_size: over the ranks that read different samples.

    Raises:
        BadInput: a device that this machine does not have.
    """

    rank = local_rank = data_parallel_rank = 0
    world_size = data_parallel_size = 1

    def __init__(self, *, device: str, num_threads: PositiveInt | Literal["auto"]) -> None:
        self.device = _device(device)
        self.num_threads = None if num_threads == "auto" else num_threads

    def launch(self, work: Callable[..., None], *arguments: Any) -> None:
        """Call ``work(*arguments)`` once on every rank, and return when all are done."""
        work(*arguments)

    def __enter__(self) -> Self:
        if self.num_threads is not None:
            torch.set_num_threads(self.num_threads)
        if self.device.index is not None:
            torch.accelerator.set_device_index(self.device.index)
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model whose backward pass makes gradients agree over the ranks."""
        return model

    def gradient_sync(self, wrapped: nn.Module, *, enabled: bool) -> AbstractContextManager:
        """Held around one micro-batch's forward and backward; ``enabled`` for the last of a step only."""
        del wrapped, enabled
        return nullcontext()

    def forward_backward(
        self, wrapped: nn.Module, parts: Iterable[Part], *, task: Any, precision: Any, scaler: Any, marks: Any
    ) -> Tensor:
        """Run a step's micro-batches forward and backward, so that ``.grad`` holds the global batch's mean gradient.

        Returns:
            The summed loss over this rank's samples, a scalar on the device that holds no graph.
        """
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self.gradient_sync(wrapped, enabled=part.is_last):
                with precision.autocast(self.device):
                    loss = task.loss(wrapped, part.inputs, part.targets)
                marks.mark("forward")
                scaler.scale(part.weigh(loss)).backward()
                marks.mark("backward")
            total += loss.detach() * part.num_samples
        return total

    def clip_grad_norm_(self, wrapped: nn.Module, max_norm: float | None) -> Tensor:
        """Scale gradients down to a total 2-norm of ``max_norm`` where they exceed it; the norm before, a scalar."""
        if max_norm is not None:
            return nn.utils.clip_grad_norm_(wrapped.parameters(), max_norm)
        gradients = [parameter.grad for parameter in wrapped.parameters() if parameter.grad is not None]
        return nn.utils.get_total_norm(gradients)

    def agree(self, flag: bool) -> bool:
        """Whether any rank says so; a collective, so every rank must ask."""
        return flag

    def union(self, names: Iterable[str]) -> set[str]:
        """Names that any rank has; a collective, so every rank must call it."""
        return set(names)

    def sum(self, values: Tensor) -> Tensor:
        """The sum over ranks that read different samples; a collective, so every rank must call it."""
        return values


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"parallel.device={name}: torch knows no such device; auto, cpu or cuda would work") from error
    here = torch.accelerator.current_accelerator(check_available=True)
    if device.type != "cpu" and (here is None or here.type != device.type):
        raise BadInput(
            f"parallel.device={name}: this machine has {here or 'no accelerator'}; parallel.device=auto would work"
        )
    if device.type != "cpu" and (device.index or 0) >= torch.accelerator.device_count():
        raise BadInput(f"parallel.device={name}: this machine has {torch.accelerator.device_count()} device(s)")
    return device
