"""Order and augmentation: what a step is made of depends on seed and epoch, never on workers or ranks."""

import random

import numpy as np
import pytest
import torch
from conftest import batches_of, normalised
from hydra.utils import instantiate
from torch.utils.data import Dataset

from runner.data import Data
from runner.data.loader import NativeLoader
from runner.data.sampler import EvaluationSampler, StepSampler
from runner.errors import BadInput

CPU = torch.device("cpu")
AUGMENTED = (
    "data.transforms=[{_target_:runner.data.RandomCrop,padding:2},{_target_:runner.data.RandomHorizontalFlip,p:0.5}]"
)


class Restless(Dataset):
    """A set that draws from every global generator, as many sets of other people do."""

    def __len__(self):
        return 30

    def __getitem__(self, index):
        draws = [torch.rand(()).item(), np.random.rand(), random.random()]
        return torch.tensor([float(index), *draws], dtype=torch.float64), index % 3


def sampler(num_samples=30, *, size=8, micro=4, rank=0, ranks=1, seed=5, last_batch="short", num_steps=8, least=1):
    return StepSampler(
        num_samples=num_samples,
        global_batch_size=size,
        micro_batch_size=micro,
        rank=rank,
        world_size=ranks,
        seed=seed,
        last_batch=last_batch,
        min_samples=least,
        num_steps=num_steps,
    )


def steps_of(parts):
    """Micro-batch indices gathered into steps."""
    steps, step = [], []
    for part in parts:
        step.append(part)
        if part.is_last:
            steps.append(step)
            step = []
    assert step == []
    return steps


def samples_of(step):
    return [int(i) for part in step for i in part.indices[: part.num_samples]]


def loader(num_workers):
    return NativeLoader(
        num_workers=num_workers,
        prefetch_factor=2,
        persistent_workers=True,
        pin_memory="auto",
        multiprocessing_context=None,
        in_order=True,
    )


def restless_batches(num_workers, *, seed=5):
    data = Data(
        train=Restless(), val=None, loader=loader(num_workers), transforms=None, mean=None, std=None,
        last_batch="short", root=None, num_channels=None, num_classes=None, image_size=None,
    )  # fmt: skip
    to_device = data.to_device(CPU, lambda inputs: inputs)
    return list(data.train_batches(sampler(seed=seed), to_device=to_device, seed=seed).batches)


def global_states():
    return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()


def assert_same(batches, others):
    assert len(batches) == len(others) > 0
    for one, other in zip(batches, others, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
        assert (one.epoch, one.is_last, one.loss_divisor) == (other.epoch, other.is_last, other.loss_divisor)


def test_augmented_batches_are_the_same_for_any_number_of_workers(composed):
    by_workers = {}
    for num_workers in (0, 1, 3):
        data = instantiate(composed(AUGMENTED, "data.train.num_samples=30").data)
        data.loader = loader(num_workers)
        to_device = data.to_device(CPU, lambda inputs: inputs)
        host = data.train_batches(sampler(), to_device=to_device, seed=5).batches
        by_workers[num_workers] = [to_device(batch) for batch in host]
    assert_same(by_workers[0], by_workers[1])
    assert_same(by_workers[0], by_workers[3])
    images, _ = data.train.gather(np.arange(30))
    plain = [normalised(images[indices]) for indices in batches_of(num_samples=30, size=8, num_steps=1, seed=5)]
    assert not torch.equal(torch.cat([batch.inputs for batch in by_workers[0][:2]]), plain[0]), "nothing was augmented"


def test_a_set_that_draws_from_the_global_generators_is_the_same_for_any_number_of_workers():
    alone = restless_batches(0)
    assert_same(alone, restless_batches(1))
    assert_same(alone, restless_batches(3))
    draws = torch.cat([batch.inputs for batch in alone])[:, 1:]
    assert len(draws.unique(dim=0)) == len(draws) == 60, "each sample in each epoch has draws of its own"
    assert not torch.equal(alone[0].inputs, restless_batches(0, seed=6)[0].inputs)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_reading_data_leaves_the_global_generators_untouched(num_workers):
    before = global_states()
    restless_batches(num_workers)
    assert global_states() == before


def test_the_order_is_that_of_numpys_permutation_by_seed_and_epoch():
    steps = [samples_of(step) for step in steps_of(sampler())]
    assert steps == [
        batch.tolist() for batch in batches_of(num_samples=30, size=8, num_steps=8, seed=5, last_batch="short")
    ]


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(("num_samples", "size", "micro"), [(30, 12, 2), (25, 12, 4), (101, 24, 4)])
def test_the_ranks_together_read_what_one_rank_would(num_samples, size, micro, ranks):
    num_steps = 2 * -(-num_samples // size)
    alone = steps_of(sampler(num_samples, size=size, micro=micro, num_steps=num_steps))
    shares = [
        steps_of(sampler(num_samples, size=size, micro=micro, rank=rank, ranks=ranks, num_steps=num_steps))
        for rank in range(ranks)
    ]
    assert len(alone) == num_steps
    for whole, *parts in zip(alone, *shares, strict=True):
        assert [i for part in parts for i in samples_of(part)] == samples_of(whole)
        assert len({len(part) for part in parts}) == 1, "ranks meet at the end of a step's last micro-batch"
        assert max(len(micro_batch.indices) for part in parts for micro_batch in part) <= micro
        weights = [m.num_samples / m.num_samples / m.loss_divisor for part in parts for m in part if m.num_samples]
        assert sum(weights) / ranks == pytest.approx(1.0), "the weights of a step's means add up to one"
        for micro_batch in (m for part in parts for m in part):
            assert len(micro_batch.indices) == max(1, micro_batch.num_samples)
            expected = micro_batch.num_samples * ranks / len(samples_of(whole))
            assert 1 / micro_batch.loss_divisor == pytest.approx(expected)


def test_each_sample_is_read_once_an_epoch_and_no_two_epochs_or_seeds_agree():
    steps = steps_of(sampler())
    epochs = [[i for step in steps for i in samples_of(step) if step[0].epoch == epoch] for epoch in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(30))
    assert epochs[0] != epochs[1]
    other = [i for step in steps_of(sampler(seed=6, num_steps=4)) for i in samples_of(step)]
    assert sorted(other) == list(range(30))
    assert other not in epochs


def test_what_fills_no_batch_is_dropped_or_makes_a_short_one():
    assert [len(samples_of(step)) for step in steps_of(sampler(last_batch="short"))] == [8, 8, 8, 6] * 2
    assert [len(samples_of(step)) for step in steps_of(sampler(last_batch="drop", num_steps=6))] == [8] * 6
    assert sampler(last_batch="drop").steps_per_epoch == 3
    assert sampler(32, last_batch="short").steps_per_epoch == 4


@pytest.mark.parametrize("last_batch", ["drop", "short"])
def test_a_set_smaller_than_a_batch_is_one_batch_and_says_so(last_batch):
    small = sampler(5, last_batch=last_batch, num_steps=2)
    assert [sorted(samples_of(step)) for step in steps_of(small)] == [list(range(5))] * 2
    assert "fewer than batch.global_batch_size=8" in small.remarks[0]


def test_a_set_too_small_for_batch_statistics_or_empty_is_refused():
    with pytest.raises(BadInput, match="batch statistics need 2"):
        sampler(1, least=2)
    with pytest.raises(BadInput, match="no sample"):
        sampler(0)


@pytest.mark.parametrize("num_samples", [0, 1, 2, 101])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_evaluation_reads_each_sample_once_over_all_ranks_in_order(num_samples, ranks):
    parts = [
        part
        for rank in range(ranks)
        for part in EvaluationSampler(num_samples=num_samples, batch_size=16, rank=rank, world_size=ranks)
    ]
    assert [i for part in parts for i in part.indices.tolist()] == list(range(num_samples))
    assert all(part.num_samples == len(part.indices) <= 16 for part in parts)
