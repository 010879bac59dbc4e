"""Batch arithmetic against a table written by hand."""

import pytest

from runner.batch import BatchPlan
from runner.errors import BadInput


def plan(global_batch_size, micro_batch_size, accumulation_steps, *, ranks=1, lr_scaling="none", reference=64):
    return BatchPlan(
        global_batch_size=global_batch_size,
        micro_batch_size=micro_batch_size,
        accumulation_steps=accumulation_steps,
        lr_scaling=lr_scaling,
        reference_batch_size=reference,
        data_parallel_size=ranks,
    )


@pytest.mark.parametrize(
    ("stated", "ranks", "settled"),
    [
        ((64, None, 1), 1, (64, 64, 1)),
        ((64, None, 4), 1, (64, 16, 4)),
        ((64, None, 1), 2, (64, 32, 1)),
        ((64, None, 4), 2, (64, 8, 4)),
        ((64, 16, None), 1, (64, 16, 4)),
        ((64, 16, None), 4, (64, 16, 1)),
        ((96, 8, None), 3, (96, 8, 4)),
        ((None, 16, 1), 1, (16, 16, 1)),
        ((None, 16, 3), 2, (96, 16, 3)),
        ((1, None, 1), 1, (1, 1, 1)),
    ],
)
def test_the_third_size_is_derived_from_the_other_two(stated, ranks, settled):
    batch = plan(*stated, ranks=ranks)
    assert (batch.global_batch_size, batch.micro_batch_size, batch.accumulation_steps) == settled


@pytest.mark.parametrize(
    "stated", [(64, 16, 4), (64, None, None), (None, 16, None), (None, None, 4), (None, None, None)]
)
def test_exactly_one_size_is_null(stated):
    with pytest.raises(BadInput, match="state exactly two") as refusal:
        plan(*stated)
    assert "None" not in str(refusal.value), "a user writes null"


@pytest.mark.parametrize(
    ("stated", "ranks", "proposals"),
    [
        ((64, None, 3), 1, "=63 or 66"),
        ((64, 24, None), 1, "=48 or 72"),
        ((64, None, 1), 3, "=63 or 66"),
        ((64, None, 5), 2, "=60 or 70"),
        ((2, None, 4), 1, "=4 would"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_sizes_that_do(stated, ranks, proposals):
    with pytest.raises(BadInput, match=rf"batch\.global_batch_size={stated[0]}: not a multiple") as refusal:
        plan(*stated, ranks=ranks)
    assert proposals in str(refusal.value)


@pytest.mark.parametrize("stated", [(0, None, 1), (64, -1, None), (None, 16, 0)])
def test_a_size_below_one_is_refused(stated):
    with pytest.raises(BadInput, match="must be 1 or more"):
        plan(*stated)


@pytest.mark.parametrize(
    ("lr_scaling", "global_batch_size", "lr"),
    [
        ("none", 256, 0.1),
        ("linear", 256, 0.4),
        ("linear", 16, 0.025),
        ("linear", 64, 0.1),
        ("sqrt", 256, 0.2),
        ("sqrt", 16, 0.05),
    ],
)
def test_the_lr_follows_the_global_batch(lr_scaling, global_batch_size, lr):
    assert plan(global_batch_size, None, 1, lr_scaling=lr_scaling).scale_lr(0.1) == pytest.approx(lr)


def test_the_lr_follows_the_batch_over_all_ranks_and_passes():
    assert plan(None, 32, 4, ranks=2, lr_scaling="linear").scale_lr(0.1) == pytest.approx(0.4)
