"""The IDX format of MNIST and its kin: where its files lie, how they are read, and what can be wrong with them."""

import gzip
import zlib
from math import prod
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from pydantic import DirectoryPath
from torch import Tensor

from runner.errors import BadInput

_STEMS = {"train": "train", "test": "t10k"}
_FOLDERS = (".", "raw", "FashionMNIST/raw", "MNIST/raw")
_GZIP_MAGIC = b"\x1f\x8b"
_UINT8 = 0x08
_HOW_TO_GET = (
    "Fashion-MNIST comes with `apt-get install dataset-fashion-mnist` (root: /usr/share/datasets/fashion-mnist) "
    "or with torchvision.datasets.FashionMNIST(root, download=True)"
)


class IdxImages:
    """Labelled grey images from a pair of IDX files, held in memory.

    The files are ``train-images-idx3-ubyte`` and ``train-labels-idx1-ubyte`` (``t10k-`` for the test split), plain or
    gzipped as ``.gz``, in ``root`` or where torchvision puts them below it. Nothing is ever downloaded.
    Format: Y. LeCun, C. Cortes, C. Burges, The MNIST database of handwritten digits, "the IDX file format".

    Args:
        root: the folder with the files, or torchvision's ``root``.
        split: which pair of files.

    Raises:
        BadInput: a file is missing, found in several places, truncated, corrupt or not IDX, or the two do not match.
    """

    classes: list[str] | None = None

    def __init__(self, *, root: DirectoryPath, split: Literal["train", "test"]) -> None:
        if split not in _STEMS:
            raise BadInput(f"split={split}: must be one of {', '.join(_STEMS)}")
        images_file, labels_file = _locate(Path(root), _STEMS[split])
        images = _read(images_file, num_dims=3)
        labels = _read(labels_file, num_dims=1)
        if len(images) != len(labels):
            raise BadInput(
                f"{images_file} has {len(images)} images but {labels_file} has {len(labels)} labels: "
                f"they are not of one set; {_HOW_TO_GET}"
            )
        # Tensors, not arrays: sent to a worker that does not fork, they go through shared memory once, not once each.
        self._images = images.unsqueeze(1)
        self._targets = labels.to(torch.int64)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        """The image, uint8 [1, H, W], and its class."""
        return self._images[index], int(self._targets[index])

    def gather(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        """The images, uint8 [N, 1, H, W], and the classes, int64 [N], at indices int64 [N]."""
        places = torch.from_numpy(np.asarray(indices, dtype=np.int64))
        return self._images[places], self._targets[places]


def _locate(root: Path, stem: str) -> tuple[Path, Path]:
    """The images' and the labels' file, from the one folder that has either."""
    names = (f"{stem}-images-idx3-ubyte", f"{stem}-labels-idx1-ubyte")
    if not root.is_dir():
        raise BadInput(f"root={root}: is no folder; {_HOW_TO_GET}")
    found = {folder: [_plain_or_gzipped(root / folder / name) for name in names] for folder in _FOLDERS}
    holding = {folder: files for folder, files in found.items() if any(files)}
    if not holding:
        below = ", ".join(_FOLDERS[1:])
        raise BadInput(f"root={root}: no {names[0]}[.gz] there nor in {below} below it; {_HOW_TO_GET}")
    if len(holding) > 1:
        folders = ", ".join(str(root / folder) for folder in holding)
        raise BadInput(f"root={root}: {names[0]}[.gz] lies in several folders ({folders}); name one of them as root")
    [(folder, (images, labels))] = holding.items()
    if images is None or labels is None:
        missing = root / folder / names[0 if images is None else 1]
        raise BadInput(f"{missing}[.gz] is missing beside its other half; {_HOW_TO_GET}")
    return images, labels


def _plain_or_gzipped(path: Path) -> Path | None:
    # torchvision leaves the plain file beside the gzipped one: the plain one is read faster.
    return next((file for file in (path, path.with_name(f"{path.name}.gz")) if file.is_file()), None)


def _read(file: Path, *, num_dims: int) -> Tensor:
    """The file's bytes as uint8 in the shape that its header states.

    Header: two zero bytes, the type's code, the number of dimensions, then each dimension as a big-endian uint32.
    """
    try:
        data = file.read_bytes()
        if data.startswith(_GZIP_MAGIC):
            data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
        raise BadInput(f"{file} cannot be read ({error}): fetch it again; {_HOW_TO_GET}") from error
    header_size = 4 + 4 * num_dims
    if data[:4] != bytes([0, 0, _UINT8, num_dims]) or len(data) < header_size:
        raise BadInput(
            f"{file} is not IDX of bytes in {num_dims} dimensions: it starts with {data[:4].hex() or 'nothing'}, "
            f"not {_UINT8:06x}{num_dims:02x}; {_HOW_TO_GET}"
        )
    shape = [int(size) for size in np.frombuffer(data, dtype=">u4", count=num_dims, offset=4)]
    if len(data) != header_size + prod(shape) or 0 in shape:
        raise BadInput(
            f"{file} is truncated or damaged: its header states {' x '.join(map(str, shape))} bytes, "
            f"{len(data) - header_size} follow; {_HOW_TO_GET}"
        )
    return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=header_size).view(shape)
