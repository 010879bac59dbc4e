"""Which images of Fashion-MNIST the subset beside this file holds, and how its four files are made from the full set.

Usage: python runner/data/fashion_mnist_subset/build.py /usr/share/datasets/fashion-mnist
"""

import argparse
import gzip
import hashlib
from pathlib import Path

_NUM_CLASSES = 10
_IMAGE_BYTES = 28 * 28
_NUM_PER_CLASS = {"train": 1000, "t10k": 200}


def first_of_each_class(labels: bytes, number: int) -> list[int]:
    """The places of the first ``number`` samples of each class, in the set's own order."""
    seen = [0] * _NUM_CLASSES
    chosen = []
    for place, label in enumerate(labels):
        if seen[label] < number:
            seen[label] += 1
            chosen.append(place)
    if min(seen) < number:
        raise SystemExit(f"class {seen.index(min(seen))} has {min(seen)} images, {number} are needed")
    return chosen


def build(source: Path, target: Path, num_per_class: dict[str, int]) -> None:
    """Write the subset's four files into the target and print the sha256 of each, gzipped and not."""
    for stem, number in num_per_class.items():
        images_name, labels_name = f"{stem}-images-idx3-ubyte.gz", f"{stem}-labels-idx1-ubyte.gz"
        pixels = gzip.decompress((source / images_name).read_bytes())[16:]
        labels = gzip.decompress((source / labels_name).read_bytes())[8:]
        chosen = first_of_each_class(labels, number)
        images = [pixels[place * _IMAGE_BYTES : (place + 1) * _IMAGE_BYTES] for place in chosen]
        _write(target / images_name, [0x00000803, len(chosen), 28, 28], b"".join(images))
        _write(target / labels_name, [0x00000801, len(chosen)], bytes(labels[place] for place in chosen))


def _write(file: Path, header: list[int], body: bytes) -> None:
    content = b"".join(number.to_bytes(4, "big") for number in header) + body
    # Neither name nor time in the gzip header: the same content gives the same bytes, as far as zlib does.
    with file.open("wb") as raw, gzip.GzipFile("", "wb", compresslevel=9, fileobj=raw, mtime=0) as packed:
        packed.write(content)
    print(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}")
    print(f"{hashlib.sha256(content).hexdigest()}  {file.stem}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Cut the subset from the full Fashion-MNIST.")
    parser.add_argument("source", type=Path, help="folder of the full set's four .gz files")
    build(parser.parse_args().source, Path(__file__).resolve().parent, _NUM_PER_CLASS)
