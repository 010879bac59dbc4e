"""Images in folders, one folder a class: which files count, how their paths are kept, and how one becomes a square."""

import os
import struct
import zlib
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pydantic import DirectoryPath, PositiveInt
from torch import Tensor

from runner.errors import BadInput

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
# What PIL raises for damaged files: its plugins parse with struct and zlib and let their errors through.
_DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, struct.error, zlib.error, Image.DecompressionBombError)


class ImageFolder:
    """``root/<split>/<class>/*.jpg|jpeg|png|webp|bmp``; classes are numbered in the order of their sorted names.

    Files and folders whose names start with a dot are passed over; orientation tags are not followed.

    Args:
        root: the folder of the splits.
        split: the name of one of them.
        image_size: height and width of what is given out.

    Raises:
        BadInput: the split is missing, has no classes, or one of them has no images.
    """

    def __init__(self, *, root: DirectoryPath, split: str, image_size: PositiveInt) -> None:
        if image_size < 1:
            raise BadInput(f"image_size={image_size}: must be 1 or more pixels")
        self._folder = _split_folder(Path(root), split)
        self._image_size = image_size
        self.classes: list[str] | None = _visible_folders(self._folder)
        if not self.classes:
            raise BadInput(f"{self._folder} has no folders: images must lie in one folder a class below it")
        names_by_class = [_image_names(self._folder / name) for name in self.classes]
        # One buffer, not a list of strings: reading a string counts its references, which copies the page it lies on
        # into every forked worker's own memory (1.5 million paths: 213 MB more over two workers, against 0).
        by_class = zip(self.classes, names_by_class, strict=True)
        paths = [os.fsencode(f"{folder}/{name}") for folder, names in by_class for name in names]
        self._paths = torch.frombuffer(bytearray(b"".join(paths)), dtype=torch.uint8)
        self._ends = torch.from_numpy(np.cumsum([len(path) for path in paths], dtype=np.int64))
        counts = torch.tensor([len(names) for names in names_by_class])
        self._targets = torch.repeat_interleave(torch.arange(len(counts)), counts)

    def __len__(self) -> int:
        return len(self._targets)

    def path(self, index: int) -> Path:
        """Where the image lies."""
        index = range(len(self))[index]
        start = int(self._ends[index - 1]) if index else 0
        return self._folder / os.fsdecode(self._paths[start : int(self._ends[index])].numpy().tobytes())

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 [3, image_size, image_size], and its class.

        Raises:
            BadInput: the file cannot be decoded.
        """
        file = self.path(index)
        try:
            with Image.open(file) as image:
                if image.mode.startswith(("I", "F")):
                    # PIL would cut these to 255, so that almost all of the image turned white in silence.
                    raise ValueError(f"mode {image.mode}: more than 8 bits a channel")
                pixels = np.array(_square(image.convert("RGB"), self._image_size))
        except _DECODE_ERRORS as error:
            raise BadInput(f"{file} cannot be decoded to 8-bit RGB ({error}): convert, replace or delete it") from error
        return torch.from_numpy(pixels).permute(2, 0, 1).contiguous(), int(self._targets[index])


def _square(image: Image.Image, size: int) -> Image.Image:
    """The shorter side resized to size (bilinear, antialiased), then its centre: as torchvision resizes and crops."""
    shorter = min(image.size)
    width, height = (int(size * side / shorter) for side in image.size)
    resized = image.resize((width, height), Image.Resampling.BILINEAR)
    left, top = round((width - size) / 2), round((height - size) / 2)
    return resized.crop((left, top, left + size, top + size))


def _split_folder(root: Path, split: str) -> Path:
    if not root.is_dir():
        raise BadInput(f"root={root}: is no folder")
    folders = _visible_folders(root)
    if split not in folders:
        raise BadInput(f"split={split}: no such folder in {root}; there are {', '.join(folders) or 'none'}")
    return root / split


def _visible_folders(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))


def _image_names(folder: Path) -> list[str]:
    with os.scandir(folder) as entries:
        names = sorted(
            entry.name
            for entry in entries
            if entry.name.lower().endswith(_SUFFIXES) and not entry.name.startswith(".") and entry.is_file()
        )
    if not names:
        raise BadInput(f"{folder} has no images ({', '.join(_SUFFIXES)}): add some or delete the folder")
    return names
