"""Batch arithmetic: how one optimizer step is cut into micro-batches over ranks, and the LR that goes with its size."""

from dataclasses import dataclass
from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from runner.errors import BadInput

_KEYS = ("global_batch_size", "micro_batch_size", "accumulation_steps")


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Two of the three sizes are stated, the third is derived, so that three numbers can never disagree.

    ``global_batch_size == micro_batch_size * data_parallel_size * accumulation_steps``

    Args:
        global_batch_size: samples an optimizer step, over all ranks; None: derive it.
        micro_batch_size: samples a forward and backward pass, on one rank; None: derive it.
        accumulation_steps: passes an optimizer step, on one rank; None: derive it.
        lr_scaling: how the LR follows the global batch: not at all, ``linear`` [1] or ``sqrt`` [2].
        reference_batch_size: the global batch that ``optimizer.lr`` was chosen for.
        data_parallel_size: ranks that see different samples; known when the strategy is.

    Raises:
        BadInput: not exactly one of the three is None, or they do not divide.

    [1] Goyal et al., Accurate, Large Minibatch SGD, 2017, arXiv:1706.02677.
    [2] Krizhevsky, One weird trick for parallelizing convolutional neural networks, 2014, arXiv:1404.5997.
    """

    global_batch_size: PositiveInt | None
    micro_batch_size: PositiveInt | None
    accumulation_steps: PositiveInt | None
    lr_scaling: Literal["none", "linear", "sqrt"]
    reference_batch_size: PositiveInt
    data_parallel_size: NonNegativeInt = 1

    def __post_init__(self) -> None:
        stated = {key: getattr(self, key) for key in _KEYS if getattr(self, key) is not None}
        if len(stated) != 2:
            shown = " ".join(f"batch.{key}={getattr(self, key)}" for key in _KEYS).replace("None", "null")
            raise BadInput(f"{shown}: state exactly two and set the third to null, it is derived from them")
        for key, size in stated.items():
            if size < 1:
                raise BadInput(f"batch.{key}={size}: must be 1 or more")
        derived = next(key for key in _KEYS if key not in stated)
        object.__setattr__(self, derived, self._derive(derived))

    def _derive(self, key: str) -> int:
        if key == "global_batch_size":
            assert self.micro_batch_size is not None
            assert self.accumulation_steps is not None
            return self.micro_batch_size * self.data_parallel_size * self.accumulation_steps
        assert self.global_batch_size is not None
        other = "accumulation_steps" if key == "micro_batch_size" else "micro_batch_size"
        divisor = getattr(self, other) * self.data_parallel_size
        quotient, remainder = divmod(self.global_batch_size, divisor)
        if remainder or not quotient:
            below = self.global_batch_size // divisor * divisor
            fits = " or ".join(str(size) for size in (below, below + divisor) if size)
            ranks = f" x {self.data_parallel_size} ranks" if self.data_parallel_size > 1 else ""
            raise BadInput(
                f"batch.global_batch_size={self.global_batch_size}: not a multiple of {divisor} "
                f"(batch.{other}={getattr(self, other)}{ranks}); batch.global_batch_size={fits} would fit"
            )
        return quotient

    def scale_lr(self, lr: float) -> float:
        """The LR for this global batch, from the one stated for the reference batch."""
        assert self.global_batch_size is not None
        ratio = self.global_batch_size / self.reference_batch_size
        return lr * {"none": 1.0, "linear": ratio, "sqrt": ratio**0.5}[self.lr_scaling]
