"""Random transforms in two parts: what is drawn for each sample, and what is then done to a batch, the same anywhere.

``draw(rng)`` gives one row a sample and always takes the same number of draws, so that no sample's fate shifts the
draws of the next transform. ``apply(images, parameters)`` draws nothing: it gives the same pixels on any device and
for any cut of the batch.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from pydantic import NonNegativeInt
from torch import Tensor
from torch.nn import functional

from runner.data.sample_rng import SampleRng
from runner.errors import BadInput


class Transform(Protocol):
    """What ``augment`` asks of a transform."""

    def draw(self, rng: SampleRng) -> np.ndarray:
        """The parameters of each of the rng's N samples: an array with N rows."""

    def apply(self, images: Tensor, parameters: np.ndarray) -> Tensor:
        """The transformed images, uint8 [N, C, H, W], from images of that shape and N rows of parameters."""


def augment(images: Tensor, transforms: Sequence[Transform], rng: SampleRng) -> Tensor:
    """Draw for each transform and apply it, one after another.

    Args:
        images: uint8 [N, C, H, W]; left as they are.
        transforms: in the order in which they are applied.
        rng: over the indices of the same N samples.
    """
    if len(images) != len(rng):
        raise BadInput(f"{len(images)} images and random numbers for {len(rng)} samples: must be as many")
    for transform in transforms:
        images = transform.apply(images, transform.draw(rng))
    return images


def _probability(owner: object, p: float) -> float:
    if not 0 <= p <= 1:
        raise BadInput(f"{type(owner).__name__} p={p}: must be a probability between 0 and 1")
    return p


def _on_device_of(images: Tensor, parameters: np.ndarray) -> Tensor:
    if images.dim() != 4 or len(images) != len(parameters):
        shape = list(images.shape)
        raise BadInput(f"images {shape} and {len(parameters)} rows of parameters: must be [N, C, H, W] and N rows")
    return torch.from_numpy(np.ascontiguousarray(parameters)).to(images.device)


class RandomHorizontalFlip:
    """Mirror an image left to right.

    Args:
        p: probability that an image is mirrored.
    """

    def __init__(self, *, p: float) -> None:
        self.p = _probability(self, p)

    def draw(self, rng: SampleRng) -> np.ndarray:
        """bool [N]: mirrored or not."""
        return rng.uniform() < self.p

    def apply(self, images: Tensor, parameters: np.ndarray) -> Tensor:
        """Images uint8 [N, C, H, W], those mirrored whose row is true."""
        is_mirrored = _on_device_of(images, parameters)
        return torch.where(is_mirrored[:, None, None, None], images.flip(-1), images)


class RandomCrop:
    """Shift an image: pad it with zeros on all sides and cut a window of its own size.

    Args:
        padding: pixels on each side, and so the furthest shift.
    """

    def __init__(self, *, padding: NonNegativeInt) -> None:
        if padding < 0:
            raise BadInput(f"RandomCrop padding={padding}: must be 0 or more pixels")
        self.padding = padding

    def draw(self, rng: SampleRng) -> np.ndarray:
        """int64 [N, 2]: the window's top and left in the padded image, each from 0 to 2 x padding."""
        return np.stack([rng.integers(0, 2 * self.padding + 1) for _ in ("top", "left")], axis=1)

    def apply(self, images: Tensor, parameters: np.ndarray) -> Tensor:
        """Images uint8 [N, C, H, W], each cut at its own place."""
        tops, lefts = _on_device_of(images, parameters).unbind(1)
        height, width = images.shape[-2:]
        padded = functional.pad(images, (self.padding,) * 4)
        # A view of all windows, [N, C, top, left, H, W]: one of them is copied for each image.
        windows = padded.unfold(2, height, 1).unfold(3, width, 1)
        return windows[torch.arange(len(images), device=images.device), :, tops, lefts]


class RandomErasing:
    """Set a rectangle of an image to zero.

    Zhong et al., Random erasing data augmentation, 2017, arXiv:1708.04896, whose range of height / width is used, 0.3
    to 1 / 0.3, with an evenly drawn logarithm. A rectangle that is longer than the image is cut to it.

    Args:
        p: probability that an image loses a rectangle.
        scale: [least, most]: the rectangle's share of the image's area.
    """

    _NARROWEST = 0.3

    def __init__(self, *, p: float, scale: list[float]) -> None:
        self.p = _probability(self, p)
        if len(scale) != 2 or not 0 <= scale[0] <= scale[1] <= 1:
            raise BadInput(f"RandomErasing scale={list(scale)}: must be [least, most] with 0 <= least <= most <= 1")
        self.scale = (float(scale[0]), float(scale[1]))

    def draw(self, rng: SampleRng) -> np.ndarray:
        """float64 [N, 5]: erased (1) or not (0), share of the area, height / width, how far down and across (0..1)."""
        is_erased = (rng.uniform() < self.p).astype(np.float64)
        share = rng.uniform(*self.scale)
        ratio = np.exp(rng.uniform(np.log(self._NARROWEST), -np.log(self._NARROWEST)))
        return np.stack([is_erased, share, ratio, rng.uniform(), rng.uniform()], axis=1)

    def apply(self, images: Tensor, parameters: np.ndarray) -> Tensor:
        """Images uint8 [N, C, H, W], with zeros in the rectangles."""
        height, width = images.shape[-2:]
        # In numpy whatever the device: its rounding, and so the rectangle, must not depend on where the images are.
        is_erased, share, ratio, down, across = np.asarray(parameters, dtype=np.float64).T
        rows = np.minimum(height, np.rint(np.sqrt(share * height * width * ratio))) * is_erased
        columns = np.minimum(width, np.rint(np.sqrt(share * height * width / ratio)))
        top, left = np.floor(down * (height - rows + 1)), np.floor(across * (width - columns + 1))
        edges = _on_device_of(images, np.stack([top, top + rows, left, left + columns], axis=1).astype(np.int64))
        inside_rows = _between(edges[:, 0], edges[:, 1], height)
        inside_columns = _between(edges[:, 2], edges[:, 3], width)
        return images.masked_fill((inside_rows[:, :, None] & inside_columns[:, None, :])[:, None], 0)


def _between(starts: Tensor, ends: Tensor, length: int) -> Tensor:
    """bool [N, length]: which places lie from each start up to, not at, each end."""
    places = torch.arange(length, device=starts.device)
    return (places >= starts[:, None]) & (places < ends[:, None])
