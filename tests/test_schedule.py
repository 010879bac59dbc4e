"""LR schedules against values worked out by hand."""

import pytest
import torch

from runner import schedule
from runner.errors import BadInput

BASE_LR = 2.0


def optimizer():
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=BASE_LR)


def lrs(make, **arguments):
    """The LR of each of eight steps, and the one after the last."""
    used = optimizer()
    scheduler = make(used, num_steps=8, **arguments)
    values = []
    for _ in range(9):
        values.append(used.param_groups[0]["lr"])
        used.step()
        scheduler.step()
    return values


def test_constant_stays_at_the_base():
    assert lrs(schedule.constant, num_warmup_steps=0) == [2.0] * 9


def test_linear_falls_by_equal_amounts_to_its_least():
    expected = [2.0, 1.75, 1.5, 1.25, 1.0, 0.75, 0.5, 0.25, 0.0]
    assert lrs(schedule.linear, num_warmup_steps=0, min_lr_ratio=0.0) == pytest.approx(expected)
    assert lrs(schedule.linear, num_warmup_steps=0, min_lr_ratio=0.5)[::4] == pytest.approx([2.0, 1.5, 1.0])


def test_cosine_is_half_a_cosine():
    # cos(pi/4) = 0.70710678
    values = lrs(schedule.cosine, num_warmup_steps=0, min_lr_ratio=0.0)
    assert values[::2] == pytest.approx([2.0, 1.70710678, 1.0, 0.29289322, 0.0])
    assert lrs(schedule.cosine, num_warmup_steps=0, min_lr_ratio=0.1)[::4] == pytest.approx([2.0, 1.1, 0.2])


def test_step_falls_at_evenly_spaced_steps_and_stays_there():
    values = lrs(schedule.step, num_warmup_steps=0, num_stages=4, gamma=0.5)
    assert values == pytest.approx([2.0, 2.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25])


def test_warm_up_rises_in_equal_parts_and_the_rest_follows_it():
    # Three steps at 1/4, 2/4 and 3/4 of the base, then the line over the five that are left.
    expected = [0.5, 1.0, 1.5, 2.0, 1.6, 1.2, 0.8, 0.4, 0.0]
    assert lrs(schedule.linear, num_warmup_steps=3, min_lr_ratio=0.0) == pytest.approx(expected)
    assert lrs(schedule.constant, num_warmup_steps=3) == pytest.approx([0.5, 1.0, 1.5, *[2.0] * 6])
    cosine = lrs(schedule.cosine, num_warmup_steps=4, min_lr_ratio=0.0)
    assert cosine == pytest.approx([0.4, 0.8, 1.2, 1.6, 2.0, 1.70710678, 1.0, 0.29289322, 0.0])


@pytest.mark.parametrize("num_warmup_steps", [8, 9])
def test_a_warm_up_as_long_as_the_run_is_refused(num_warmup_steps):
    with pytest.raises(BadInput, match=rf"schedule\.num_warmup_steps={num_warmup_steps}: the run has 8 steps"):
        schedule.constant(optimizer(), num_steps=8, num_warmup_steps=num_warmup_steps)
