"""LR schedules over optimizer steps: each is a factor of the base LR, as a function of steps taken."""

import math
from collections.abc import Callable

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from runner.errors import BadInput


def constant(optimizer: Optimizer, *, num_steps: int, num_warmup_steps: NonNegativeInt) -> LambdaLR:
    """The base LR throughout, after a linear rise over ``num_warmup_steps``."""
    return _after_warmup(optimizer, num_steps, num_warmup_steps, lambda progress: 1.0)


def linear(
    optimizer: Optimizer, *, num_steps: int, num_warmup_steps: NonNegativeInt, min_lr_ratio: NonNegativeFloat
) -> LambdaLR:
    """A straight line from the base LR to ``min_lr_ratio`` of it at the last step."""
    return _after_warmup(optimizer, num_steps, num_warmup_steps, lambda p: min_lr_ratio + (1 - min_lr_ratio) * (1 - p))


def cosine(
    optimizer: Optimizer, *, num_steps: int, num_warmup_steps: NonNegativeInt, min_lr_ratio: NonNegativeFloat
) -> LambdaLR:
    """Half a cosine from the base LR to ``min_lr_ratio`` of it (Loshchilov and Hutter, 2017, arXiv:1608.03983)."""

    def factor(progress: float) -> float:
        return min_lr_ratio + (1 - min_lr_ratio) * (1 + math.cos(math.pi * progress)) / 2

    return _after_warmup(optimizer, num_steps, num_warmup_steps, factor)


def step(
    optimizer: Optimizer,
    *,
    num_steps: int,
    num_warmup_steps: NonNegativeInt,
    num_stages: PositiveInt,
    gamma: PositiveFloat,
) -> LambdaLR:
    """The LR falls to ``gamma`` of itself at ``num_stages - 1`` evenly spaced steps."""
    return _after_warmup(
        optimizer, num_steps, num_warmup_steps, lambda p: gamma ** min(int(p * num_stages), num_stages - 1)
    )


def _after_warmup(
    optimizer: Optimizer, num_steps: int, num_warmup_steps: int, factor: Callable[[float], float]
) -> LambdaLR:
    """A linear rise to the base LR, then ``factor(progress)`` with progress from 0 at its end to 1 at the last step."""
    if num_warmup_steps and num_warmup_steps >= num_steps:
        raise BadInput(
            f"schedule.num_warmup_steps={num_warmup_steps}: the run has {num_steps} steps, so the LR would never reach "
            f"its base; schedule.num_warmup_steps={num_steps // 10} would fit"
        )

    def multiplier(steps_taken: int) -> float:
        if steps_taken < num_warmup_steps:
            return (steps_taken + 1) / (num_warmup_steps + 1)
        return factor(min(1.0, (steps_taken - num_warmup_steps) / max(1, num_steps - num_warmup_steps)))

    return LambdaLR(optimizer, multiplier)
