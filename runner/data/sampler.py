"""The global order: which samples form each step's global batch, and which part of them a rank reads when."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from runner.errors import BadInput


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatchIndex:
    """What a worker needs to make one micro-batch; the epoch travels here, so that persistent workers see it.

    Attributes:
        indices: [N] int64 sample indices. A rank without a share of a short batch gets one filler sample.
        num_samples: N, or 0 for a filler.
        loss_divisor: what the micro-batch's mean loss is divided by, so that the sum over a step's micro-batches,
            averaged over the ranks, is the mean over the global batch; infinite for a filler, whose gradient is so 0.
        is_last: the last micro-batch of its step, after which gradients are complete.
    """

    epoch: int
    indices: np.ndarray
    num_samples: int
    loss_divisor: float
    is_last: bool


def epoch_order(num_samples: int, *, seed: int, epoch: int) -> np.ndarray:
    """The order of an epoch, [num_samples] int64: a permutation that depends on nothing but seed and epoch."""
    return np.random.default_rng([seed, epoch]).permutation(num_samples)


class StepSampler:
    """Every micro-batch of one rank, step after step through the epochs.

    A global batch is cut contiguously, first over the ranks, then over the accumulation steps. So which samples form
    it depends on (seed, epoch, global_batch_size) alone, and each sample is seen once an epoch over all ranks.

    Args:
        num_samples: samples in the set.
        micro_batch_size, global_batch_size: as in batch.
        rank, world_size: over the ranks that read different data.
        last_batch: what an epoch's last samples do that fill no global batch: ``drop`` leaves them out, ``short``
            makes a smaller batch of them. A set smaller than one global batch is one short batch in both cases.
        min_samples: the smallest micro-batch the model can be given (2 with batch statistics); a short batch that
            would need a smaller one is left out.
        num_steps: where to end; None: never.

    Attributes:
        steps_per_epoch: optimizer steps in an epoch.
        remarks: what a user should know of how this set and batch size went together.

    Raises:
        BadInput: an empty set, or one from which not even one allowed batch can be made.
    """

    def __init__(
        self,
        *,
        num_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        rank: int,
        world_size: int,
        seed: int,
        last_batch: Literal["drop", "short"],
        min_samples: int,
        num_steps: int | None,
    ) -> None:
        if num_samples < 1:
            raise BadInput("data.train: the set holds no sample, so there is nothing to train on")
        self.num_samples, self.global_batch_size, self.micro_batch_size = (
            num_samples,
            global_batch_size,
            micro_batch_size,
        )
        self.rank, self.world_size, self.seed, self.num_steps = rank, world_size, seed, num_steps
        self.remarks: list[str] = []
        num_full, num_left = divmod(num_samples, global_batch_size)
        self.steps_per_epoch = num_full + self._has_short_batch(num_full, num_left, last_batch, min_samples)

    def _has_short_batch(self, num_full: int, num_left: int, last_batch: str, min_samples: int) -> bool:
        if not num_left or (num_full and last_batch == "drop"):
            return False
        per_rank = num_left // self.world_size
        smallest = per_rank // self._num_chunks(num_left)
        if smallest < min_samples and min_samples > 1:
            what = f"a short batch of {num_left} over {self.world_size} rank(s) leaves {smallest} in a micro-batch"
            if not num_full:
                raise BadInput(
                    f"batch.global_batch_size={self.global_batch_size}: the set has {num_left} samples; {what}, "
                    f"and this model's batch statistics need {min_samples}"
                )
            self.remarks.append(f"{what}, too few for this model's batch statistics: it is left out of every epoch")
            return False
        if not num_full:
            self.remarks.append(
                f"the set has {num_left} samples, fewer than batch.global_batch_size={self.global_batch_size}: "
                "each step takes the whole set"
            )
        return True

    def _num_chunks(self, num_samples: int) -> int:
        """Micro-batches of a step: the same on every rank, since ranks meet at the end of the last."""
        largest_share = -(-num_samples // self.world_size)
        return -(-largest_share // self.micro_batch_size)

    def __iter__(self) -> Iterator[MicroBatchIndex]:
        step = 0
        while self.num_steps is None or step < self.num_steps:
            epoch, position = divmod(step, self.steps_per_epoch)
            if position == 0:
                order = epoch_order(self.num_samples, seed=self.seed, epoch=epoch)
            begin = position * self.global_batch_size
            yield from self._cut(order[begin : begin + self.global_batch_size], epoch)
            step += 1

    def _cut(self, global_batch: np.ndarray, epoch: int) -> Iterator[MicroBatchIndex]:
        share = np.array_split(global_batch, self.world_size)[self.rank]
        chunks = np.array_split(share, self._num_chunks(len(global_batch)))
        for position, chunk in enumerate(chunks):
            yield MicroBatchIndex(
                epoch=epoch,
                indices=chunk if len(chunk) else global_batch[:1],
                num_samples=len(chunk),
                loss_divisor=len(global_batch) / (len(chunk) * self.world_size) if len(chunk) else float("inf"),
                is_last=position == len(chunks) - 1,
            )


class EvaluationSampler:
    """Each sample of a set once over all ranks, in order, unpadded: ranks may differ by one in how many they read."""

    def __init__(self, *, num_samples: int, batch_size: int, rank: int, world_size: int) -> None:
        self.share = np.array_split(np.arange(num_samples, dtype=np.int64), world_size)[rank]
        self.batch_size = batch_size

    def __iter__(self) -> Iterator[MicroBatchIndex]:
        for begin in range(0, len(self.share), self.batch_size):
            indices = self.share[begin : begin + self.batch_size]
            yield MicroBatchIndex(epoch=0, indices=indices, num_samples=len(indices), loss_divisor=1.0, is_last=False)
