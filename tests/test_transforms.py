"""Random numbers that belong to samples, and the transforms that use them, against plain loops and statistics."""

import warnings

import numpy as np
import pytest
import torch

from runner.data.sample_rng import SampleRng, splitmix64
from runner.data.transforms import RandomCrop, RandomErasing, RandomHorizontalFlip, augment
from runner.errors import BadInput

NUM = 20_000


def rng_of(indices, *, seed=3, epoch=0):
    return SampleRng(seed=seed, epoch=epoch, indices=np.asarray(indices, dtype=np.int64))


def correlation(a, b):
    return abs(float(np.corrcoef(a, b)[0, 1]))


def splitmix64_in_plain_integers(state):
    mask = 2**64 - 1
    mixed = (state + 0x9E3779B97F4A7C15) & mask
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & mask
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & mask
    return mixed ^ (mixed >> 31)


# --- splitmix64 and SampleRng


def test_splitmix64_gives_the_published_stream_of_seed_1234567():
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    states = np.array([(1234567 + k * 0x9E3779B97F4A7C15) % 2**64 for k in range(5)], dtype=np.uint64)
    assert splitmix64(states).tolist() == published
    assert splitmix64(np.uint64(1234567)).tolist() == published[:1]


def test_a_draw_is_the_documented_chain_over_seed_epoch_index_and_count():
    seed, epoch, index = 17, 5, 123_456
    stream = splitmix64_in_plain_integers(
        splitmix64_in_plain_integers(splitmix64_in_plain_integers(seed) ^ epoch) ^ index
    )
    expected = [splitmix64_in_plain_integers((stream + k * 0x9E3779B97F4A7C15) % 2**64) for k in range(3)]
    rng = rng_of([index], seed=seed, epoch=epoch)
    assert rng.seeds().tolist() == [expected[0] >> 1]
    assert rng.uniform().tolist() == [(expected[1] >> 11) / 2**53]
    assert rng.integers(-5, 95).tolist() == [(expected[2] >> 32) * 100 // 2**32 - 5]


def test_a_sample_draws_the_same_whoever_else_is_in_the_batch():
    indices = np.array([7, 0, 2**40, 3, 99_999])
    together = rng_of(indices)
    columns = [together.uniform(), together.integers(0, 1000), together.seeds(), together.uniform(-1, 1)]
    for row, index in enumerate(indices):
        alone = rng_of([index])
        assert [alone.uniform()[0], alone.integers(0, 1000)[0], alone.seeds()[0], alone.uniform(-1, 1)[0]] == [
            column[row] for column in columns
        ]


def test_seed_epoch_index_and_draw_each_change_the_number():
    base = rng_of([5], seed=1, epoch=1)
    first = base.seeds()[0]
    others = {
        base.seeds()[0],
        *(rng_of([i], seed=s, epoch=e).seeds()[0] for s, e, i in [(2, 1, 5), (1, 2, 5), (1, 1, 6)]),
    }
    assert len(others) == 4
    assert first not in others
    # Swapping the roles of two inputs must not give the same stream either.
    assert rng_of([2], seed=1, epoch=3).seeds()[0] != rng_of([3], seed=1, epoch=2).seeds()[0]
    assert rng_of([1], seed=2, epoch=3).seeds()[0] != rng_of([1], seed=3, epoch=2).seeds()[0]


def test_uniform_has_the_mean_variance_and_range_of_a_uniform_number():
    numbers = rng_of(range(NUM)).uniform()
    assert numbers.dtype == np.float64
    assert numbers.min() >= 0
    assert numbers.max() < 1
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / NUM)
    assert abs(numbers.var() - 1 / 12) < 5 * np.sqrt(1 / 180 / NUM)
    shifted = rng_of(range(NUM)).uniform(-3, 5)
    assert np.allclose(shifted, -3 + 8 * numbers)


@pytest.mark.parametrize("lag", [1, 2, 64])
def test_neighbouring_indices_are_not_correlated(lag):
    numbers = rng_of(range(NUM)).uniform()
    assert correlation(numbers[:-lag], numbers[lag:]) < 5 / np.sqrt(NUM)


def test_neighbouring_epochs_seeds_and_draws_are_not_correlated():
    rng = rng_of(range(NUM))
    first, second = rng.uniform(), rng.uniform()
    next_epoch = rng_of(range(NUM), epoch=1).uniform()
    next_seed = rng_of(range(NUM), seed=4).uniform()
    for other in (second, next_epoch, next_seed):
        assert correlation(first, other) < 5 / np.sqrt(NUM)
        assert correlation(first[1:], other[:-1]) < 5 / np.sqrt(NUM)


def test_the_draws_of_one_sample_are_uniform_too():
    rng = rng_of([42])
    numbers = np.array([rng.uniform()[0] for _ in range(2000)])
    assert abs(numbers.mean() - 1 / 2) < 5 * np.sqrt(1 / 12 / 2000)
    assert correlation(numbers[:-1], numbers[1:]) < 5 / np.sqrt(2000)


def test_every_bit_of_the_seeds_is_set_half_of_the_time():
    seeds = rng_of(range(NUM)).seeds()
    assert seeds.dtype == np.int64
    assert seeds.min() >= 0
    bits = (seeds[:, None] >> np.arange(63)) & 1
    chi_square = float((((bits.sum(0) - NUM / 2) ** 2) / (NUM / 4)).sum())
    # 63 degrees of freedom: mean 63, standard deviation sqrt(126).
    assert abs(chi_square - 63) < 5 * np.sqrt(126)
    assert len(np.unique(seeds)) == NUM


def test_a_flipped_input_bit_flips_half_of_the_output_bits():
    indices = np.arange(2000)
    plain = rng_of(indices).seeds()
    for bit in (0, 1, 7, 31, 50):
        differing = plain ^ rng_of(indices ^ (1 << bit)).seeds()
        share = ((differing[:, None] >> np.arange(63)) & 1).mean()
        assert abs(share - 0.5) < 5 * np.sqrt(0.25 / (63 * 2000 / 2))


@pytest.mark.parametrize(("low", "high"), [(0, 9), (-4, 5), (10, 11), (0, 2**32)])
def test_integers_fill_their_range_evenly(low, high):
    numbers = rng_of(range(NUM)).integers(low, high)
    assert numbers.dtype == np.int64
    assert numbers.min() >= low
    assert numbers.max() < high
    bins = min(high - low, 9)
    counts = np.bincount((numbers - low) * bins // (high - low), minlength=bins)
    chi_square = float(((counts - NUM / bins) ** 2 / (NUM / bins)).sum())
    assert chi_square <= (bins - 1) + 5 * np.sqrt(2 * (bins - 1))
    assert (counts > 0).all()


@pytest.mark.parametrize(("low", "high"), [(3, 3), (4, 3), (0, 2**32 + 1)])
def test_integers_refuse_a_range_that_they_cannot_fill(low, high):
    with pytest.raises(BadInput, match="between 1 and 2"):
        rng_of([0]).integers(low, high)


def test_large_and_negative_seeds_draw_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for seed in (0, -1, 2**63, 2**64 - 1):
            rng = rng_of([0, 2**62], seed=seed, epoch=2**40)
            assert len({*rng.seeds().tolist(), *rng.seeds().tolist()}) == 4
        assert rng_of([0], seed=-1).seeds() == rng_of([0], seed=2**64 - 1).seeds()


def test_no_samples_draw_no_numbers():
    rng = SampleRng(seed=0, epoch=0, indices=[])
    assert len(rng) == 0
    assert rng.uniform().shape == rng.integers(0, 3).shape == rng.seeds().shape == (0,)


@pytest.mark.parametrize("indices", [np.zeros((2, 2), dtype=np.int64), np.array([0.5]), np.int64(3)])
def test_indices_that_are_no_list_of_integers_are_refused(indices):
    with pytest.raises(BadInput, match="integers"):
        SampleRng(seed=0, epoch=0, indices=indices)


# --- transforms against plain loops


def images_of(num, channels=3, height=9, width=7):
    # From 1 to 255, so that a zero can only come from padding or erasing.
    return torch.from_numpy(np.random.default_rng(0).integers(1, 256, (num, channels, height, width), dtype=np.uint8))


def flip_by_loop(images, parameters):
    flipped = images.clone()
    num, width = len(images), images.shape[-1]
    for n in range(num):
        if parameters[n]:
            for x in range(width):
                flipped[n, :, :, x] = images[n, :, :, width - 1 - x]
    return flipped


def crop_by_loop(images, parameters, padding):
    cropped = torch.zeros_like(images)
    num, _, height, width = images.shape
    for n in range(num):
        for y in range(height):
            for x in range(width):
                from_y, from_x = y + parameters[n, 0] - padding, x + parameters[n, 1] - padding
                if 0 <= from_y < height and 0 <= from_x < width:
                    cropped[n, :, y, x] = images[n, :, from_y, from_x]
    return cropped


def erase_by_loop(images, parameters):
    erased = images.clone()
    num, _, height, width = images.shape
    for n in range(num):
        hit, share, ratio, down, across = parameters[n]
        if not hit:
            continue
        rows = min(height, round((share * height * width * ratio) ** 0.5))
        columns = min(width, round((share * height * width / ratio) ** 0.5))
        top, left = int(down * (height - rows + 1)), int(across * (width - columns + 1))
        erased[n, :, top : top + rows, left : left + columns] = 0
    return erased


def transforms_of_all_kinds():
    return [RandomHorizontalFlip(p=0.5), RandomCrop(padding=3), RandomErasing(p=0.7, scale=[0.05, 0.4])]


def test_flip_matches_a_plain_loop():
    images, flip = images_of(64), RandomHorizontalFlip(p=0.5)
    parameters = flip.draw(rng_of(range(64)))
    assert 10 < parameters.sum() < 54
    assert torch.equal(flip.apply(images, parameters), flip_by_loop(images, parameters))


@pytest.mark.parametrize("padding", [0, 1, 4, 10])
def test_crop_matches_a_plain_loop(padding):
    images, crop = images_of(40), RandomCrop(padding=padding)
    parameters = crop.draw(rng_of(range(40)))
    assert torch.equal(crop.apply(images, parameters), crop_by_loop(images, parameters, padding))


def test_erasing_matches_a_plain_loop():
    images, erasing = images_of(64, height=12, width=10), RandomErasing(p=0.5, scale=[0.05, 0.9])
    parameters = erasing.draw(rng_of(range(64)))
    expected = erase_by_loop(images, parameters)
    assert torch.equal(erasing.apply(images, parameters), expected)
    assert 15 < sum(bool((expected[n] == 0).any()) for n in range(64)) < 49


def test_transforms_leave_the_images_they_are_given_as_they_are():
    images = images_of(16)
    kept = images.clone()
    for transform in transforms_of_all_kinds():
        assert not torch.equal(augment(images, [transform], rng_of(range(16))), kept)
        assert torch.equal(images, kept)


@pytest.mark.parametrize("size", [1, 3, 32])
def test_augmenting_in_pieces_of_any_size_gives_the_whole_bit_for_bit(size):
    indices = np.random.default_rng(1).permutation(1000)[:32]
    images = images_of(32)
    whole = augment(images, transforms_of_all_kinds(), rng_of(indices))
    pieces = [
        augment(images[at : at + size], transforms_of_all_kinds(), rng_of(indices[at : at + size]))
        for at in range(0, 32, size)
    ]
    assert torch.equal(torch.cat(pieces), whole)
    assert not torch.equal(whole, images)


def test_augment_draws_and_applies_each_transform_in_order():
    images, transforms = images_of(24), transforms_of_all_kinds()
    rng = rng_of(range(24))
    flips, offsets, boxes = (transform.draw(rng) for transform in transforms)
    expected = erase_by_loop(crop_by_loop(flip_by_loop(images, flips), offsets, 3), boxes)
    assert torch.equal(augment(images, transforms, rng_of(range(24))), expected)


def test_augment_changes_with_the_epoch_and_comes_back_with_it():
    images = images_of(24)
    first, second, again = (
        augment(images, transforms_of_all_kinds(), rng_of(range(24), epoch=epoch)) for epoch in (0, 1, 0)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, second)


def test_a_transform_takes_as_many_draws_whatever_it_decides():
    for never, always in [
        (RandomHorizontalFlip(p=0), RandomHorizontalFlip(p=1)),
        (RandomCrop(padding=0), RandomCrop(padding=4)),
        (RandomErasing(p=0, scale=[0, 0]), RandomErasing(p=1, scale=[0.1, 1])),
    ]:
        one, other = rng_of(range(8)), rng_of(range(8))
        assert len(never.draw(one)) == len(always.draw(other)) == 8
        assert one.uniform().tolist() == other.uniform().tolist()


def test_probability_0_changes_nothing_and_1_changes_every_image():
    images = images_of(50)
    never = [RandomHorizontalFlip(p=0), RandomCrop(padding=0), RandomErasing(p=0, scale=[0.2, 0.3])]
    assert torch.equal(augment(images, never, rng_of(range(50))), images)
    assert torch.equal(augment(images, [RandomHorizontalFlip(p=1)], rng_of(range(50))), images.flip(-1))
    erased = augment(images, [RandomErasing(p=1, scale=[0.2, 0.3])], rng_of(range(50)))
    assert all((erased[n] == 0).any() for n in range(50))


def test_flips_are_as_frequent_as_stated():
    share = RandomHorizontalFlip(p=0.3).draw(rng_of(range(NUM))).mean()
    assert abs(share - 0.3) < 5 * np.sqrt(0.3 * 0.7 / NUM)


def test_crop_offsets_reach_both_ends_evenly_and_independently():
    offsets = RandomCrop(padding=2).draw(rng_of(range(NUM)))
    assert offsets.shape == (NUM, 2)
    pairs = np.bincount(offsets[:, 0] * 5 + offsets[:, 1], minlength=25)
    assert len(pairs) == 25
    chi_square = float(((pairs - NUM / 25) ** 2 / (NUM / 25)).sum())
    assert chi_square < 24 + 5 * np.sqrt(48)


def test_erased_shares_and_shapes_keep_to_their_ranges():
    erasing = RandomErasing(p=0.4, scale=[0.1, 0.2])
    parameters = erasing.draw(rng_of(range(NUM)))
    hit, share, ratio = parameters[:, 0], parameters[:, 1], parameters[:, 2]
    assert abs(hit.mean() - 0.4) < 5 * np.sqrt(0.4 * 0.6 / NUM)
    assert share.min() >= 0.1
    assert share.max() <= 0.2
    assert 0.3 - 1e-9 <= ratio.min() < 0.31
    assert 3.2 < ratio.max() <= 1 / 0.3 + 1e-9
    assert abs(np.log(ratio).mean()) < 5 * np.log(1 / 0.3) / np.sqrt(3 * NUM)
    images = images_of(500, channels=1, height=40, width=40)
    erased = (
        (erasing.apply(images, parameters[:500]) == 0).float().mean(dim=(1, 2, 3))[torch.from_numpy(hit[:500]) == 1]
    )
    assert float(erased.min()) > 0.08
    assert float(erased.max()) < 0.22


def test_erased_rectangles_reach_every_edge():
    images = images_of(2000, channels=1, height=8, width=6)
    erased = augment(images, [RandomErasing(p=1, scale=[0.1, 0.3])], rng_of(range(2000)))[:, 0] == 0
    assert erased.any(dim=0).all()


def test_no_images_give_no_images():
    assert augment(images_of(0), transforms_of_all_kinds(), rng_of([])).shape == (0, 3, 9, 7)


def test_augmented_images_stay_uint8_in_memory_order():
    augmented = augment(images_of(4), transforms_of_all_kinds(), rng_of(range(4)))
    assert augmented.dtype == torch.uint8
    assert augmented.is_contiguous()


@pytest.mark.parametrize("p", [-0.1, 1.1, float("nan")])
@pytest.mark.parametrize("make", [RandomHorizontalFlip, lambda p: RandomErasing(p=p, scale=[0.1, 0.2])])
def test_a_probability_outside_0_to_1_is_refused(make, p):
    with pytest.raises(BadInput, match=f"p={p}.*between 0 and 1"):
        make(p=p)


@pytest.mark.parametrize("scale", [[0.1], [0.3, 0.2], [-0.1, 0.2], [0.2, 1.1], [0.1, 0.2, 0.3]])
def test_an_erasing_scale_that_is_no_range_of_shares_is_refused(scale):
    with pytest.raises(BadInput, match="scale="):
        RandomErasing(p=0.5, scale=scale)


def test_negative_padding_is_refused():
    with pytest.raises(BadInput, match="padding=-1"):
        RandomCrop(padding=-1)


def test_random_numbers_of_other_samples_than_the_images_are_refused():
    with pytest.raises(BadInput, match="3 images and random numbers for 4 samples"):
        augment(images_of(3), [], rng_of(range(4)))
    for transform in transforms_of_all_kinds():
        with pytest.raises(BadInput, match="rows of parameters"):
            transform.apply(images_of(3), transform.draw(rng_of(range(4))))
        with pytest.raises(BadInput, match="N, C, H, W"):
            transform.apply(images_of(3)[:, 0], transform.draw(rng_of(range(3))))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_the_device_gives_the_pixels_of_the_host():
    images = images_of(64, height=32, width=32)
    on_device = images.to(torch.accelerator.current_accelerator())
    augmented = augment(on_device, transforms_of_all_kinds(), rng_of(range(64)))
    assert augmented.device == on_device.device
    assert torch.equal(augmented.cpu(), augment(images, transforms_of_all_kinds(), rng_of(range(64))))
