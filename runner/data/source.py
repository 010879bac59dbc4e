"""One data group put together: sets, loader, transforms and normalisation, as batches on the device."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, Protocol

import torch
from pydantic import DirectoryPath, PositiveInt
from torch import Tensor

from runner.data.fetch import Fetcher, MicroBatch
from runner.data.loader import NativeLoader
from runner.data.sampler import EvaluationSampler, StepSampler
from runner.data.transforms import Transform
from runner.errors import BadInput


class Marks(Protocol):
    """What a clock of the step must do for this file: end a phase."""

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to ``phase``."""
        ...


class Data:
    """What every file of conf/data/ describes.

    Args:
        train, val: map-style sets of (input, target); ``val`` None: no evaluation.
        loader: the back end.
        transforms: random, for training only; before normalisation, on uint8 images.
        mean, std: one number a channel, for images in 0..1; applied on the device to uint8 inputs. None: leave
            inputs as they are.
        last_batch: what becomes of samples that fill no global batch (see `StepSampler`).
        root: the folder that the sets name by interpolation, stated once.
        num_channels: channels the model sees; grey images are repeated to it on the device.
        num_classes, image_size: facts of the set that models ask for by interpolation.
    """

    def __init__(
        self,
        *,
        train: Any,
        val: Any | None,
        loader: NativeLoader,
        transforms: Sequence[Transform] | None,
        mean: list[float] | None,
        std: list[float] | None,
        last_batch: Literal["drop", "short"],
        root: DirectoryPath | None,
        num_channels: PositiveInt | None,
        num_classes: PositiveInt | None,
        image_size: PositiveInt | None,
    ) -> None:
        if (mean is None) != (std is None):
            raise BadInput(f"data.mean={mean} data.std={std}: state both, or neither to leave inputs as they are")
        self.train, self.val, self.loader = train, val, loader
        self.transforms, self.mean, self.std = tuple(transforms or ()), mean, std
        self.last_batch: Literal["drop", "short"] = last_batch
        self.num_channels = num_channels

    def to_device(self, device: torch.device, lay_out: Callable[[Tensor], Tensor]) -> "ToDevice":
        """The step from a host batch to what the model is given."""
        return ToDevice(device, mean=self.mean, std=self.std, num_channels=self.num_channels, lay_out=lay_out)

    def train_batches(self, sampler: StepSampler, *, to_device: "ToDevice", seed: int) -> "TrainBatches":
        """This rank's micro-batches, step after step."""
        fetcher = Fetcher(self.train, transforms=self.transforms, seed=seed)
        loader = self.loader.open(fetcher, sampler, device=to_device.device)
        return TrainBatches(iter(loader), to_device)

    def evaluation_batches(
        self, *, batch_size: int, rank: int, world_size: int, to_device: "ToDevice", seed: int
    ) -> "EvaluationBatches | None":
        """This rank's share of the validation set, or None where there is none."""
        if self.val is None:
            return None
        sampler = EvaluationSampler(num_samples=len(self.val), batch_size=batch_size, rank=rank, world_size=world_size)
        fetcher = Fetcher(self.val, transforms=(), seed=seed)
        return EvaluationBatches(self.loader.open(fetcher, sampler, device=to_device.device), to_device)


class ToDevice:
    """Copies a batch to the device, normalises images there, and lays them out.

    uint8 crosses the bus and the process boundary at a quarter of float32's size. The arithmetic is that of
    torchvision's ToTensor and Normalize, in their order: ``(x / 255 - mean) / std``.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        mean: list[float] | None,
        std: list[float] | None,
        num_channels: int | None,
        lay_out: Callable[[Tensor], Tensor],
    ) -> None:
        self.device, self.num_channels, self.lay_out = device, num_channels, lay_out
        self.mean = self.std = None
        if mean is not None and std is not None:
            self.mean = torch.tensor(mean, device=device).view(1, -1, 1, 1)
            self.std = torch.tensor(std, device=device).view(1, -1, 1, 1)

    def __call__(self, batch: MicroBatch) -> MicroBatch:
        """The same batch on the device."""
        inputs = batch.inputs.to(self.device, non_blocking=True)
        targets = batch.targets.to(self.device, non_blocking=True)
        if inputs.dtype == torch.uint8 and self.mean is not None and self.std is not None:
            inputs = inputs.float().div_(255).sub_(self.mean).div_(self.std)
            if self.num_channels is not None and inputs.shape[1] == 1:
                inputs = inputs.expand(-1, self.num_channels, -1, -1)
        return replace(batch, inputs=self.lay_out(inputs), targets=targets)


class TrainBatches:
    """The micro-batches of each step in turn, with the wait for them and their way to the device timed apart."""

    def __init__(self, batches: Iterator[MicroBatch], to_device: ToDevice) -> None:
        self.batches, self.to_device = batches, to_device

    def step(self, marks: Marks) -> Iterator[MicroBatch]:
        """This step's micro-batches on the device."""
        while True:
            batch = next(self.batches)
            marks.mark("data")
            batch = self.to_device(batch)
            marks.mark("transfer")
            yield batch
            if batch.is_last:
                return


class EvaluationBatches:
    """One pass over this rank's share of the validation set, each time it is iterated."""

    def __init__(self, loader: Any, to_device: ToDevice) -> None:
        self.loader, self.to_device = loader, to_device

    def __iter__(self) -> Iterator[MicroBatch]:
        return map(self.to_device, self.loader)
