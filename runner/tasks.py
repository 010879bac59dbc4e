"""Tasks: what is learned, as a loss over one micro-batch and metrics that can be summed over any split of a set."""

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

Loss = Callable[[Tensor, Tensor], Tensor]


class Task(Protocol):
    """What a task must answer; any class with these two methods is one."""

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The training loss of one micro-batch: a scalar, the mean over its samples."""
        ...

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Sums over the batch's samples, each a scalar; divided by the sample count only when all are added up."""
        ...


class ImageClassification:
    """Single-label classification: logits [N, num_classes] against targets [N] int64.

    Args:
        loss_fn: ``(logits, targets) -> scalar``, a mean over the samples.
    """

    def __init__(self, *, loss_fn: Loss) -> None:
        self.loss_fn = loss_fn

    def loss(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
        """The mean of ``loss_fn`` over the micro-batch."""
        return self.loss_fn(model(inputs), targets)

    def evaluate(self, model: nn.Module, inputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Summed cross entropy, and the number of samples whose largest logit is the target's.

        The reported loss is plain cross entropy whatever ``loss_fn`` trains with, so that runs which differ in it
        (label smoothing, class weights) can still be compared.
        """
        logits = model(inputs).float()
        return {
            "loss": F.cross_entropy(logits, targets, reduction="sum"),
            "accuracy": (logits.argmax(dim=1) == targets).sum(dtype=torch.float32),
        }
