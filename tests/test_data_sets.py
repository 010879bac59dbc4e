"""The sets that come with the runner, against files written by hand, known counts and torchvision."""

import gzip
import hashlib
import importlib.util
import pickle
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import transforms as torchvision_transforms

from runner.data.folder import ImageFolder
from runner.data.idx import IdxImages
from runner.data.synthetic import SyntheticImages
from runner.errors import BadInput

SUBSET = Path(__file__).parents[1] / "runner" / "data" / "fashion_mnist_subset"
FULL = Path("/usr/share/datasets/fashion-mnist")
needs_full_set = pytest.mark.skipif(not FULL.is_dir(), reason="needs Debian's package dataset-fashion-mnist")

PIXELS = [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]], [[13, 14, 15], [16, 17, 255]]]
LABELS = [7, 0, 255]


def images_bytes():
    return bytes.fromhex("00000803 00000003 00000002 00000003") + bytes(np.array(PIXELS, dtype=np.uint8).ravel())


def labels_bytes():
    return bytes.fromhex("00000801 00000003") + bytes(LABELS)


def write_pair(folder, *, images=None, labels=None, stem="train", suffix=""):
    folder.mkdir(parents=True, exist_ok=True)
    pack = gzip.compress if suffix else bytes
    (folder / f"{stem}-images-idx3-ubyte{suffix}").write_bytes(pack(images_bytes() if images is None else images))
    (folder / f"{stem}-labels-idx1-ubyte{suffix}").write_bytes(pack(labels_bytes() if labels is None else labels))


def assert_is_the_written_set(data):
    assert len(data) == 3
    images, targets = data.gather(np.arange(3))
    assert images.dtype == torch.uint8
    assert images[:, 0].tolist() == PIXELS
    assert targets.dtype == torch.int64
    assert targets.tolist() == LABELS


def gather_matches_items(data, indices):
    images, targets = data.gather(np.array(indices, dtype=np.int64))
    assert images.dtype == torch.uint8
    assert targets.dtype == torch.int64
    for row, index in enumerate(indices):
        image, target = data[index]
        assert torch.equal(images[row], image)
        assert targets[row] == target
        assert isinstance(target, int)


# --- IDX


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("below", [".", "raw", "FashionMNIST/raw", "MNIST/raw"])
def test_idx_reads_hand_written_files_wherever_debian_or_torchvision_put_them(tmp_path, below, suffix):
    write_pair(tmp_path / below, suffix=suffix)
    assert_is_the_written_set(IdxImages(root=tmp_path, split="train"))


def test_idx_test_split_reads_the_t10k_files(tmp_path):
    write_pair(tmp_path, stem="t10k")
    write_pair(tmp_path, images=b"broken")
    assert_is_the_written_set(IdxImages(root=str(tmp_path), split="test"))


def test_idx_reads_a_gzipped_file_that_lost_its_suffix(tmp_path):
    write_pair(tmp_path, images=gzip.compress(images_bytes()))
    assert_is_the_written_set(IdxImages(root=tmp_path, split="train"))


def test_idx_takes_the_plain_file_where_the_gzipped_one_lies_beside_it(tmp_path):
    write_pair(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"never read")
    assert_is_the_written_set(IdxImages(root=tmp_path, split="train"))


def test_idx_gather_gives_the_items_in_the_order_asked_for(tmp_path):
    write_pair(tmp_path)
    data = IdxImages(root=tmp_path, split="train")
    gather_matches_items(data, [2, 0, 2, 1])
    gather_matches_items(data, [])
    assert data[0][0].shape == (1, 2, 3)
    assert data.classes is None


def test_idx_gives_out_copies_so_that_no_batch_can_change_the_set(tmp_path):
    write_pair(tmp_path)
    data = IdxImages(root=tmp_path, split="train")
    data.gather(np.arange(3))[0].zero_()
    assert_is_the_written_set(data)


def test_sets_refuse_an_index_past_the_end(tmp_path):
    write_pair(tmp_path)
    data = IdxImages(root=tmp_path, split="train")
    with pytest.raises(IndexError):
        data[3]
    with pytest.raises(IndexError):
        data.gather(np.array([0, 3]))


DAMAGES = {
    "a cut body": lambda data: data[:-1],
    "a byte too many": lambda data: data + b"\0",
    "a cut header": lambda data: data[:6],
    "nothing at all": lambda data: b"",
    "another type of number": lambda data: data[:2] + b"\x0d" + data[3:],
    "another number of dimensions": lambda data: data[:3] + b"\x02" + data[4:],
    "a little-endian header": lambda data: data[:4] + data[7:3:-1] + data[8:],
    "a web page": lambda data: b"<!DOCTYPE html><html>not found</html>",
    "no samples": lambda data: data[:4] + bytes(len(data[4:16])),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("half", ["images", "labels"])
def test_idx_names_the_damaged_file_and_where_to_get_it(tmp_path, half, suffix, damage):
    whole = images_bytes() if half == "images" else labels_bytes()
    write_pair(tmp_path, suffix=suffix, **{half: damage(whole)})
    with pytest.raises(BadInput, match=rf"train-{half}-idx.*apt-get install dataset-fashion-mnist"):
        IdxImages(root=tmp_path, split="train")


@pytest.mark.parametrize("damage", ["cut", "flipped", "checksum"])
def test_idx_names_a_gzip_file_that_is_damaged(tmp_path, damage):
    write_pair(tmp_path, suffix=".gz")
    file = tmp_path / "train-images-idx3-ubyte.gz"
    packed = bytearray(file.read_bytes())
    if damage == "cut":
        packed = packed[:-12]
    else:
        packed[14 if damage == "flipped" else -6] ^= 0xFF
    file.write_bytes(packed)
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte.gz cannot be read.*apt-get"):
        IdxImages(root=tmp_path, split="train")


def test_idx_refuses_images_and_labels_of_different_counts(tmp_path):
    write_pair(tmp_path, labels=struct.pack(">II", 0x801, 2) + b"\1\2")
    with pytest.raises(BadInput, match=r"train-images-idx3-ubyte has 3 images but .*train-labels-idx1-ubyte has 2"):
        IdxImages(root=tmp_path, split="train")


def test_idx_refuses_to_choose_between_two_folders(tmp_path):
    write_pair(tmp_path / "MNIST" / "raw")
    write_pair(tmp_path / "FashionMNIST" / "raw")
    with pytest.raises(BadInput, match=r"several folders .*FashionMNIST/raw.*, .*/MNIST/raw"):
        IdxImages(root=tmp_path, split="train")


@pytest.mark.parametrize("half", ["images-idx3", "labels-idx1"])
def test_idx_names_the_missing_half(tmp_path, half):
    write_pair(tmp_path)
    (tmp_path / f"train-{half}-ubyte").unlink()
    with pytest.raises(BadInput, match=f"train-{half}-ubyte.*is missing"):
        IdxImages(root=tmp_path, split="train")


def test_idx_says_where_it_looked_and_how_to_get_the_set(tmp_path):
    with pytest.raises(BadInput, match=r"no train-images-idx3-ubyte.*FashionMNIST/raw.*apt-get.*download=True"):
        IdxImages(root=tmp_path, split="train")
    with pytest.raises(BadInput, match="nowhere: is no folder"):
        IdxImages(root=tmp_path / "nowhere", split="train")
    with pytest.raises(BadInput, match=r"split=val: .*train, test"):
        IdxImages(root=tmp_path, split="val")


# --- the subset of Fashion-MNIST


@pytest.mark.parametrize(("split", "per_class"), [("train", 1000), ("test", 200)])
def test_subset_has_as_many_images_of_each_class_as_its_readme_states(split, per_class):
    data = IdxImages(root=SUBSET, split=split)
    images, targets = data.gather(np.arange(len(data)))
    assert torch.bincount(targets).tolist() == [per_class] * 10
    assert images.shape == (10 * per_class, 1, 28, 28)
    # Published for the full training set: mean 72.94, standard deviation 90.02.
    assert abs(float(images.float().mean()) - 72.94) < 1.5
    assert abs(float(images.float().std()) - 90.02) < 1.5


def test_subset_files_have_the_sums_of_the_readme():
    lines = [line.split() for line in (SUBSET / "README.md").read_text().splitlines() if "ubyte" in line]
    sums = {name: sum_ for sum_, name in lines}
    assert len(sums) == 8
    for name, expected in sums.items():
        file = SUBSET / name
        content = file.read_bytes() if file.suffix else gzip.decompress((SUBSET / f"{name}.gz").read_bytes())
        assert hashlib.sha256(content).hexdigest() == expected


@needs_full_set
@pytest.mark.parametrize(("split", "per_class"), [("train", 1000), ("test", 200)])
def test_subset_images_are_the_first_of_each_class_of_the_full_set_bit_for_bit(split, per_class):
    subset, full = IdxImages(root=SUBSET, split=split), IdxImages(root=FULL, split=split)
    _, all_targets = full.gather(np.arange(len(full)))
    places = [np.flatnonzero(all_targets.numpy() == label)[:per_class] for label in range(10)]
    images, targets = full.gather(np.sort(np.concatenate(places)))
    subset_images, subset_targets = subset.gather(np.arange(len(subset)))
    assert torch.equal(subset_images, images)
    assert torch.equal(subset_targets, targets)


def build_module():
    spec = importlib.util.spec_from_file_location("build", SUBSET / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def small_full_set(folder, num):
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (num, 28, 28), dtype=np.uint8), rng.permutation(np.arange(num) % 10)
    for stem in ("train", "t10k"):
        write_pair(
            folder,
            images=struct.pack(">IIII", 0x803, num, 28, 28) + pixels.tobytes(),
            labels=struct.pack(">II", 0x801, num) + labels.astype(np.uint8).tobytes(),
            stem=stem,
            suffix=".gz",
        )
    return pixels, labels


def test_build_keeps_the_first_of_each_class_in_order_and_the_same_bytes_every_time(tmp_path, capsys):
    pixels, labels = small_full_set(tmp_path / "full", 60)
    seen, chosen = dict.fromkeys(range(10), 0), []
    for place, label in enumerate(labels):
        if seen[label] < 2:
            seen[label] += 1
            chosen.append(place)
    for name in ("once", "again"):
        (tmp_path / name).mkdir()
        build_module().build(tmp_path / "full", tmp_path / name, {"train": 2, "t10k": 1})
    data = IdxImages(root=tmp_path / "once", split="train")
    images, targets = data.gather(np.arange(20))
    assert len(data) == 20
    assert np.array_equal(images[:, 0].numpy(), pixels[chosen])
    assert targets.tolist() == labels[chosen].tolist()
    assert len(IdxImages(root=tmp_path / "once", split="test")) == 10
    files = sorted((tmp_path / "once").iterdir())
    assert len(files) == 4
    for file in files:
        packed = file.read_bytes()
        assert packed == (tmp_path / "again" / file.name).read_bytes()
        # Flags 0: no name. Time 0. Extra flags 2: level 9 (RFC 1952).
        assert packed[3:9] == b"\0\0\0\0\0\2"
    build_module().build(tmp_path / "full", tmp_path / "again", {"t10k": 1})
    assert hashlib.sha256(files[0].read_bytes()).hexdigest() in capsys.readouterr().out


def test_build_refuses_a_set_with_too_few_of_a_class(tmp_path):
    small_full_set(tmp_path, 60)
    with pytest.raises(SystemExit, match=r"class \d has 6 images, 7 are needed"):
        build_module().build(tmp_path, tmp_path, {"train": 7})


@needs_full_set
def test_build_from_debians_package_gives_the_shipped_content(tmp_path):
    module = build_module()
    module.build(FULL, tmp_path, module._NUM_PER_CLASS)
    for file in tmp_path.iterdir():
        assert gzip.decompress(file.read_bytes()) == gzip.decompress((SUBSET / file.name).read_bytes())


# --- image folders


def make_folder(root, *, classes=("cat", "dog", "ant"), num=3, size=(40, 30)):
    """Noise images in several formats; the pixels of each as PIL reads them back."""
    rng = np.random.default_rng(0)
    for name in classes:
        (root / name).mkdir(parents=True)
        for number, suffix in enumerate(("png", "jpg", "JPEG", "webp", "bmp")[:num]):
            pixels = rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{number}.{suffix}")


def test_folder_numbers_sorted_classes_and_finds_every_image(tmp_path):
    make_folder(tmp_path / "train", num=5)
    (tmp_path / "train" / "cat" / "notes.txt").write_text("not an image")
    (tmp_path / "train" / "cat" / "._0.png").write_bytes(b"a resource fork")
    (tmp_path / "train" / "cat" / "folder.png").mkdir()
    (tmp_path / "train" / ".cache").mkdir()
    (tmp_path / "train" / "labels.csv").write_text("")
    data = ImageFolder(root=tmp_path, split="train", image_size=8)
    assert data.classes == ["ant", "cat", "dog"]
    assert len(data) == 15
    paths = [tmp_path / "train" / name / file for name in data.classes for file in
             ("0.png", "1.jpg", "2.JPEG", "3.webp", "4.bmp")]  # fmt: skip
    assert [data.path(index) for index in range(15)] == paths
    assert [data.path(index) for index in (-1, -15)] == [paths[-1], paths[0]]
    assert [data[index][1] for index in range(15)] == [0] * 5 + [1] * 5 + [2] * 5
    with pytest.raises(IndexError):
        data[15]


def test_folder_keeps_names_that_are_not_ascii_or_of_different_lengths(tmp_path):
    folder = tmp_path / "train" / "größe"
    folder.mkdir(parents=True)
    names = ["ä.png", "a rather long name with spaces.png", "日本.png"]
    for level, name in enumerate(names):
        Image.new("RGB", (4, 4), (level, 0, 0)).save(folder / name)
    data = ImageFolder(root=tmp_path, split="train", image_size=4)
    assert sorted(data.path(index).name for index in range(3)) == sorted(names)
    for index in range(3):
        assert data[index][0][0].unique().tolist() == [names.index(data.path(index).name)]


@pytest.mark.parametrize("size", [(40, 30), (30, 40), (33, 50), (16, 16), (10, 13), (101, 7)])
def test_folder_resizes_and_crops_to_the_pixels_of_torchvision(tmp_path, size):
    make_folder(tmp_path / "train", classes=("one",), num=3, size=size)
    data = ImageFolder(root=tmp_path, split="train", image_size=16)
    oracle = torchvision_transforms.Compose(
        [torchvision_transforms.Resize(16), torchvision_transforms.CenterCrop(16), torchvision_transforms.PILToTensor()]
    )
    for index in range(3):
        image, _ = data[index]
        assert image.dtype == torch.uint8
        assert image.is_contiguous()
        assert torch.equal(image, oracle(Image.open(data.path(index)).convert("RGB")))


def test_folder_cuts_the_centre_of_an_image_that_needs_no_resize(tmp_path):
    pixels = np.arange(6 * 10 * 3, dtype=np.uint8).reshape(6, 10, 3)
    (tmp_path / "val" / "one").mkdir(parents=True)
    Image.fromarray(pixels).save(tmp_path / "val" / "one" / "a.png")
    image, _ = ImageFolder(root=tmp_path, split="val", image_size=6)[0]
    assert np.array_equal(image.numpy(), pixels[:, 2:8].transpose(2, 0, 1))


@pytest.mark.parametrize("mode", ["L", "P", "RGBA", "CMYK", "1", "LA"])
def test_folder_gives_three_channels_whatever_the_file_holds(tmp_path, mode):
    (tmp_path / "train" / "one").mkdir(parents=True)
    suffix = "jpg" if mode == "CMYK" else "png"
    Image.new("RGB", (8, 8), (255, 255, 255)).convert(mode).save(tmp_path / "train" / "one" / f"a.{suffix}")
    image, _ = ImageFolder(root=tmp_path, split="train", image_size=4)[0]
    assert image.shape == (3, 4, 4)
    assert image.min() >= 250


def test_folder_survives_the_way_to_a_worker(tmp_path):
    make_folder(tmp_path / "train")
    data = ImageFolder(root=tmp_path, split="train", image_size=8)
    copy = pickle.loads(pickle.dumps(data))
    assert torch.equal(copy[4][0], data[4][0])


def test_folder_holds_its_paths_in_few_objects_whatever_their_number(tmp_path):
    make_folder(tmp_path / "train", num=1)
    few = ImageFolder(root=tmp_path, split="train", image_size=8)
    for number in range(200):
        shutil.copy(tmp_path / "train" / "cat" / "0.png", tmp_path / "train" / "cat" / f"copy{number}.png")
    many = ImageFolder(root=tmp_path, split="train", image_size=8)
    assert len(many) == len(few) + 200

    def num_elements(data):
        return sum(len(held) for held in vars(data).values() if isinstance(held, (list, tuple, dict)))

    assert num_elements(many) == num_elements(few) == 3


def test_folder_names_the_splits_there_are(tmp_path):
    make_folder(tmp_path / "train", num=1)
    make_folder(tmp_path / "val", num=1)
    with pytest.raises(BadInput, match=r"split=test: no such folder in .*; there are train, val"):
        ImageFolder(root=tmp_path, split="test", image_size=8)
    with pytest.raises(BadInput, match="split=: no such folder"):
        ImageFolder(root=tmp_path, split="", image_size=8)
    with pytest.raises(BadInput, match="nowhere: is no folder"):
        ImageFolder(root=tmp_path / "nowhere", split="train", image_size=8)
    with pytest.raises(BadInput, match="image_size=0"):
        ImageFolder(root=tmp_path, split="train", image_size=0)


def test_folder_without_classes_or_with_a_class_without_images_is_refused(tmp_path):
    (tmp_path / "train").mkdir()
    with pytest.raises(BadInput, match=r"train has no folders"):
        ImageFolder(root=tmp_path, split="train", image_size=8)
    make_folder(tmp_path / "val", num=1)
    (tmp_path / "val" / "emu").mkdir()
    (tmp_path / "val" / "emu" / "readme.txt").write_text("soon")
    with pytest.raises(BadInput, match=r"val/emu has no images"):
        ImageFolder(root=tmp_path, split="val", image_size=8)


@pytest.mark.parametrize("damage", ["cut", "text", "empty", "gone", "16 bits"])
def test_folder_names_the_file_that_cannot_be_decoded(tmp_path, damage):
    make_folder(tmp_path / "train", classes=("one",), num=1)
    file = tmp_path / "train" / "one" / "0.png"
    data = ImageFolder(root=tmp_path, split="train", image_size=8)
    whole = file.read_bytes()
    if damage == "gone":
        file.unlink()
    elif damage == "16 bits":
        Image.fromarray(np.full((8, 8), 40_000, dtype=np.uint16)).save(file)
    else:
        file.write_bytes({"cut": whole[: len(whole) // 2], "text": b"not an image", "empty": b""}[damage])
    with pytest.raises(BadInput, match=r"train/one/0.png cannot be decoded"):
        data[0]


# --- synthetic images


def synthetic(**changed):
    options = {"num_samples": 200, "num_classes": 10, "num_channels": 3, "image_size": 12, "seed": 0, "noise": 30.0}
    return SyntheticImages(**{**options, "split": "train", **changed})


def everything(data):
    images, targets = data.gather(np.arange(len(data)))
    return images, targets


def class_means(data):
    images, targets = everything(data)
    return torch.stack([images[targets == label].float().mean(0) for label in range(10)])


def test_synthetic_has_the_shape_asked_for_and_equal_classes():
    data = synthetic(num_samples=203)
    images, targets = everything(data)
    assert images.shape == (203, 3, 12, 12)
    assert len(data) == 203
    assert len(data.classes) == 10
    assert sorted(torch.bincount(targets).tolist()) == [20] * 7 + [21] * 3
    assert targets.tolist() != sorted(targets.tolist())
    gather_matches_items(data, [5, 199, 0, 5])


def test_synthetic_is_the_same_for_a_seed_and_another_for_another():
    images, targets = everything(synthetic(seed=5))
    again, targets_again = everything(synthetic(seed=5))
    other, other_targets = everything(synthetic(seed=6))
    assert torch.equal(images, again)
    assert torch.equal(targets, targets_again)
    assert not torch.equal(images, other)
    assert not torch.equal(targets, other_targets)
    assert (class_means(synthetic(seed=5)) - class_means(synthetic(seed=6))).abs().mean() > 30


def test_synthetic_splits_share_their_patterns_and_nothing_else():
    train, val = synthetic(noise=0.0), synthetic(noise=0.0, split="val")
    assert torch.equal(class_means(train), class_means(val))
    noisy_train, noisy_val = synthetic(), synthetic(split="val")
    assert everything(noisy_train)[1].tolist() != everything(noisy_val)[1].tolist()
    patterns = class_means(train)
    residuals = []
    for data in (noisy_train, noisy_val):
        images, targets = everything(data)
        ordered = images[targets.argsort(stable=True)].float() - patterns[targets.sort().values]
        residuals.append(ordered.flatten().numpy())
    assert abs(np.corrcoef(*residuals)[0, 1]) < 5 / np.sqrt(residuals[0].size)


def test_synthetic_noise_has_the_standard_deviation_stated():
    images, targets = everything(synthetic(num_samples=2000, noise=10.0))
    patterns = class_means(synthetic(noise=0.0))
    inner = (patterns > 60) & (patterns < 195)
    noise = (images.float() - patterns[targets])[inner[targets]]
    assert abs(float(noise.std()) - 10) < 0.1
    assert abs(float(noise.mean())) < 0.05


def test_synthetic_images_clip_instead_of_wrapping_around():
    patterns = class_means(synthetic(noise=0.0))
    images, targets = everything(synthetic(noise=20.0))
    clean = patterns[targets]
    assert images[clean > 250].min() > 120
    assert images[clean < 5].max() < 135


def test_synthetic_patterns_are_fields_of_several_pixels():
    images, _ = everything(synthetic(noise=0.0, num_samples=1, image_size=12))
    blocks = images.view(3, 4, 3, 4, 3)
    assert (blocks == blocks[:, :, :1, :, :1]).all()
    assert len(images.unique()) > 8
    assert synthetic(image_size=1)[0][0].shape == (3, 1, 1)
    assert synthetic(image_size=7, num_channels=1)[0][0].shape == (1, 7, 7)


def test_what_is_learned_on_synthetic_train_holds_on_val():
    means = class_means(synthetic(noise=60.0)).flatten(1)
    images, targets = everything(synthetic(noise=60.0, split="val"))
    nearest = torch.cdist(images.float().flatten(1), means).argmin(1)
    assert float((nearest == targets).float().mean()) > 0.95


def test_synthetic_made_in_pieces_is_the_whole(monkeypatch):
    whole, _ = everything(synthetic())
    monkeypatch.setattr("runner.data.synthetic._BYTES_AT_ONCE", 3 * 12 * 12 * 7)
    pieces, _ = everything(synthetic())
    assert torch.equal(pieces, whole)


@pytest.mark.parametrize("changed", [
    {"num_samples": 0}, {"num_classes": 0}, {"num_channels": -1}, {"image_size": 0}, {"seed": -1}, {"noise": -1.0},
    {"noise": float("nan")}, {"noise": float("inf")}, {"split": "test"},
])  # fmt: skip
def test_synthetic_names_the_option_it_cannot_accept(changed):
    [(key, value)] = changed.items()
    with pytest.raises(BadInput, match=f"{key}={value}"):
        synthetic(**changed)
