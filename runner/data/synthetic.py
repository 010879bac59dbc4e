"""Images made on the spot: a pattern for each class under noise, so that a run needs no files but has to learn."""

from typing import Literal

import numpy as np
import torch
from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt
from torch import Tensor

from runner.errors import BadInput

_GRID_SIZE = 4
_BYTES_AT_ONCE = 2**24
_STREAMS = {"prototypes": 0, "train": 1, "val": 2}


class SyntheticImages:
    """Class pattern + Gaussian noise, held in memory; each class equally often, give or take one.

    A pattern is a grid of at most 4 x 4 random grey fields a channel. Both splits have the same patterns and their own
    noise, so that what is learned on one holds on the other.

    Args:
        num_samples: in this split.
        num_classes: as many patterns.
        num_channels: 1 for grey, 3 for colour.
        image_size: height and width in pixels.
        seed: of patterns and noise.
        noise: standard deviation in grey levels of 0 to 255; the patterns' own is about 74.
        split: ``train`` or ``val``.
    """

    def __init__(
        self,
        *,
        num_samples: PositiveInt,
        num_classes: PositiveInt,
        num_channels: PositiveInt,
        image_size: PositiveInt,
        seed: NonNegativeInt,
        noise: NonNegativeFloat,
        split: Literal["train", "val"],
    ) -> None:
        sizes = {"num_samples": num_samples, "num_classes": num_classes}
        sizes |= {"num_channels": num_channels, "image_size": image_size}
        for key, size in sizes.items():
            if size < 1:
                raise BadInput(f"{key}={size}: must be 1 or more")
        if seed < 0 or not 0 <= noise < float("inf"):
            raise BadInput(f"seed={seed} noise={noise}: must be 0 or more")
        if split not in ("train", "val"):
            raise BadInput(f"split={split}: must be one of train, val")
        self.classes: list[str] | None = [f"pattern {number}" for number in range(num_classes)]
        shape = (num_classes, num_channels, image_size)
        prototypes = _prototypes(np.random.default_rng([seed, _STREAMS["prototypes"]]), *shape)
        rng = np.random.default_rng([seed, _STREAMS[split]])
        targets = rng.permutation(np.arange(num_samples, dtype=np.int64) % num_classes)
        self._images = torch.from_numpy(_noisy(rng, prototypes, targets, noise))
        self._targets = torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 [C, H, W], and its class."""
        return self._images[index], int(self._targets[index])

    def gather(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images, uint8 [N, C, H, W], and the classes, int64 [N], at indices int64 [N]."""
        places = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self._images[places], self._targets[places]


def _prototypes(rng: np.random.Generator, num_classes: int, num_channels: int, image_size: int) -> np.ndarray:
    """uint8 [classes, C, H, W]: fields, not single pixels, so that convolutions and shifts leave them visible."""
    grid_size = min(_GRID_SIZE, image_size)
    grids = rng.integers(0, 256, (num_classes, num_channels, grid_size, grid_size), dtype=np.uint8)
    fields = np.arange(image_size) * grid_size // image_size
    return grids[:, :, fields[:, None], fields]


def _noisy(rng: np.random.Generator, prototypes: np.ndarray, targets: np.ndarray, noise: float) -> np.ndarray:
    """uint8 [N, C, H, W], made piece by piece: floats of all samples at once would take several times their memory."""
    images = np.empty((len(targets), *prototypes.shape[1:]), dtype=np.uint8)
    piece_size = max(1, _BYTES_AT_ONCE // prototypes[0].size)
    for start in range(0, len(targets), piece_size):
        clean = prototypes[targets[start : start + piece_size]]
        noisy = rng.standard_normal(clean.shape, dtype=np.float32) * np.float32(noise) + clean
        images[start : start + piece_size] = np.rint(noisy).clip(0, 255)
    return images
