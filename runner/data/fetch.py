"""From an index to a micro-batch on the host: the part of the input pipeline that runs in workers."""

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from runner.data.sample_rng import SampleRng
from runner.data.sampler import MicroBatchIndex
from runner.data.transforms import Transform, augment


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, on the host or on the device, and how long a worker took to make it.

    Attributes:
        inputs: [N, ...]; targets: [N, ...].
        num_samples, loss_divisor, is_last, epoch: as in `MicroBatchIndex`.
        fetch_ms, fetch_cpu_ms: wall and CPU time of the worker's thread.
    """

    inputs: Tensor
    targets: Tensor
    epoch: int
    num_samples: int
    loss_divisor: float
    is_last: bool
    fetch_ms: float
    fetch_cpu_ms: float

    def weigh(self, loss: Tensor) -> Tensor:
        """This micro-batch's part of the step's loss."""
        return loss / self.loss_divisor

    def pin_memory(self) -> "MicroBatch":
        """Called by the DataLoader's pinning thread."""
        return replace(self, inputs=self.inputs.pin_memory(), targets=self.targets.pin_memory())


class Fetcher(Dataset):
    """A map-style set as batches: fetch, then augment each sample by random numbers of its own.

    What a sample becomes depends on (seed, epoch, index) alone: not on the worker, the rank or the batch it came in.
    A set with ``gather`` hands over whole arrays. For any other the global generators (torch, numpy, random) are
    seeded by the sample around its ``__getitem__``, so that random transforms inside somebody's own set keep that
    promise too, and are put back afterwards.

    Args:
        dataset: ``__len__`` and either ``gather(indices) -> (inputs, targets)`` or ``__getitem__``.
        transforms: two-part random transforms, for [N, C, H, W] uint8 inputs.
    """

    def __init__(self, dataset: Any, *, transforms: Sequence[Transform], seed: int) -> None:
        self.dataset, self.transforms, self.seed = dataset, transforms, seed

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, index: MicroBatchIndex) -> MicroBatch:
        """The name is the DataLoader's: where a set has it, it gets the batch sampler's item as it is."""
        wall, cpu = time.perf_counter(), time.thread_time()
        rng = SampleRng(seed=self.seed, epoch=index.epoch, indices=index.indices)
        inputs, targets = self._gather(index.indices, rng)
        if self.transforms:
            inputs = augment(inputs, self.transforms, rng)
        return MicroBatch(
            inputs=inputs,
            targets=targets,
            epoch=index.epoch,
            num_samples=index.num_samples,
            loss_divisor=index.loss_divisor,
            is_last=index.is_last,
            fetch_ms=1e3 * (time.perf_counter() - wall),
            fetch_cpu_ms=1e3 * (time.thread_time() - cpu),
        )

    def _gather(self, indices: np.ndarray, rng: SampleRng) -> tuple[Tensor, Tensor]:
        if hasattr(self.dataset, "gather"):
            return self.dataset.gather(indices)
        kept = random.getstate(), np.random.get_state(), torch.get_rng_state()
        try:
            samples = [self._sample(int(i), int(seed)) for i, seed in zip(indices, rng.seeds(), strict=True)]
        finally:
            random.setstate(kept[0])
            np.random.set_state(kept[1])
            torch.set_rng_state(kept[2])
        inputs, targets = default_collate(samples)
        return inputs, targets

    def _sample(self, index: int, seed: int) -> Any:
        random.seed(seed)
        np.random.seed(seed % 2**32)
        # torch.manual_seed would also visit every accelerator: 80 us a call, against one for the CPU's generator.
        torch.default_generator.manual_seed(seed)
        return self.dataset[index]
