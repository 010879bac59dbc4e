"""Loader back ends: who runs the fetcher ahead of the loop, and how finished batches come back in order."""

from collections.abc import Iterable
from typing import Literal

import torch
from pydantic import NonNegativeInt, PositiveInt
from torch.utils.data import DataLoader

from runner.data.fetch import Fetcher, MicroBatch
from runner.data.sampler import MicroBatchIndex


class NativeLoader:
    """torch's DataLoader under our sampler.

    Args:
        num_workers: processes; 0 fetches in the training process. ``auto`` is settled before launch.
        prefetch_factor, persistent_workers, multiprocessing_context, in_order: as DataLoader has them; all but the
            last mean nothing with 0 workers and are then left out, where DataLoader would refuse them.
        pin_memory: page-locked host memory, from which an accelerator copies without waiting; ``auto``: where there
            is an accelerator.
    """

    def __init__(
        self,
        *,
        num_workers: NonNegativeInt | Literal["auto"],
        prefetch_factor: PositiveInt,
        persistent_workers: bool,
        pin_memory: bool | Literal["auto"],
        multiprocessing_context: Literal["fork", "spawn", "forkserver"] | None,
        in_order: bool,
    ) -> None:
        assert num_workers != "auto", "settled before launch"
        self.num_workers, self.pin_memory, self.in_order = num_workers, pin_memory, in_order
        self.worker_options = {
            "prefetch_factor": prefetch_factor,
            "persistent_workers": persistent_workers,
            "multiprocessing_context": multiprocessing_context,
        }

    def open(
        self, fetcher: Fetcher, indices: Iterable[MicroBatchIndex], *, device: torch.device
    ) -> Iterable[MicroBatch]:
        """Batches of ``fetcher`` in the order of ``indices``; each ``iter`` of the result is one pass."""
        pin_memory = device.type != "cpu" if self.pin_memory == "auto" else self.pin_memory and device.type != "cpu"
        return DataLoader(
            fetcher,
            batch_sampler=indices,  # type: ignore[arg-type]  # the fetcher takes our index where a list is usual
            num_workers=self.num_workers,
            pin_memory=pin_memory,
            collate_fn=_as_it_is,  # type: ignore[arg-type]
            in_order=self.in_order,
            # A generator of its own: each pass draws a seed for its workers, and from the process's generator that
            # draw would move the dropout masks that follow, so that evaluating more often would train differently.
            generator=torch.Generator().manual_seed(fetcher.seed),
            **(self.worker_options if self.num_workers else {}),  # type: ignore[arg-type]
        )


def _as_it_is(batch: MicroBatch) -> MicroBatch:
    """The fetcher has collated already; a lambda here would not reach a spawned worker."""
    return batch
