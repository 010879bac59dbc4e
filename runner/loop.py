"""The training loop, and the parts it asks for: every lever in sight, no branch for what is off."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from runner.data import EvaluationBatches, TrainBatches
from runner.measure import Recorder, Step
from runner.parallel import Single
from runner.precision import Precision
from runner.tasks import Task


@dataclass(kw_only=True)
class Pipeline:
    """Everything one rank's run needs, already built and in place on its device."""

    task: Task
    model: nn.Module  # compiled in place; what is evaluated and kept
    wrapped: nn.Module  # the strategy's form of it; what is trained
    optimizer: torch.optim.Optimizer
    schedule: LRScheduler
    scaler: torch.amp.GradScaler
    precision: Precision
    parallel: Single
    train_batches: TrainBatches
    evaluation_batches: EvaluationBatches | None
    num_steps: int
    warmup_steps: int
    steps_per_epoch: int
    eval_every: int | None  # steps; None: after the last only
    max_grad_norm: float | None


def train(pipe: Pipeline, recorder: Recorder) -> None:
    """Run the optimizer steps, recording each, with evaluations between them and one at the end."""
    pipe.model.train()
    for index in range(pipe.num_steps):
        epoch = index // pipe.steps_per_epoch
        with recorder.step(index, epoch=epoch, is_warmup=index < pipe.warmup_steps) as step:
            micro_batches = map(step.count, pipe.train_batches.step(step))
            step.loss = pipe.parallel.forward_backward(
                pipe.wrapped, micro_batches, task=pipe.task, precision=pipe.precision, scaler=pipe.scaler, marks=step
            )
            update(pipe, step)
            step.mark("optimizer")
        if _is_evaluation_due(pipe, index + 1):
            evaluate(pipe, recorder, step=index, epoch=epoch)


def update(pipe: Pipeline, step: Step) -> None:
    """One optimizer step on the gradients that are there: unscale, clip, step, and only then the schedule.

    A step that float16's scaler skips because a gradient overflowed moves neither the optimizer nor the schedule.
    """
    step.note(lr=pipe.schedule.get_last_lr()[0])
    pipe.scaler.unscale_(pipe.optimizer)
    step.grad_norm = pipe.parallel.clip_grad_norm_(pipe.wrapped, pipe.max_grad_norm)
    pipe.scaler.step(pipe.optimizer)
    is_skipped = False
    if pipe.scaler.is_enabled():
        before = pipe.scaler.get_scale()
        pipe.scaler.update()
        # The one read a step that scaling costs: the scale falls exactly when the step was skipped.
        is_skipped = pipe.scaler.get_scale() < before
        step.note(loss_scale=before, skipped=is_skipped)
    if not is_skipped:
        pipe.schedule.step()
    pipe.optimizer.zero_grad(set_to_none=True)


def _is_evaluation_due(pipe: Pipeline, steps_done: int) -> bool:
    if pipe.evaluation_batches is None:
        return False
    return steps_done == pipe.num_steps or (pipe.eval_every is not None and steps_done % pipe.eval_every == 0)


def evaluate(pipe: Pipeline, recorder: Recorder, *, step: int, epoch: int) -> dict[str, float]:
    """Metrics over the whole validation set, each sample counted once whatever the number of ranks.

    The model itself is called, not its wrapped form: ranks may have different numbers of batches, and DDP's forward
    would wait for a peer that has none left. Sums are kept in float64 and meet once, after the last batch.
    """
    assert pipe.evaluation_batches is not None
    begin = time.perf_counter()
    sums: dict[str, Any] = {}
    num_samples = 0
    with recorder.apart("evaluation"):
        pipe.model.eval()
        with torch.no_grad(), pipe.precision.autocast(pipe.parallel.device):
            for batch in pipe.evaluation_batches:
                num_samples += batch.num_samples
                for name, value in pipe.task.evaluate(pipe.model, batch.inputs, batch.targets).items():
                    sums[name] = sums.get(name, 0.0) + value.double()
        pipe.model.train()
        metrics, num_samples = _over_ranks(pipe.parallel, sums, num_samples)
    recorder.evaluation(
        step=step, epoch=epoch, metrics=metrics, num_samples=num_samples, eval_s=time.perf_counter() - begin
    )
    return metrics


def _over_ranks(parallel: Single, sums: dict[str, Any], num_samples: int) -> tuple[dict[str, float], int]:
    """Means over all ranks' samples, in one collective; a rank that had no batch adds nothing."""
    names = sorted(parallel.union(sums))
    zero = torch.zeros((), dtype=torch.float64, device=parallel.device)
    values = [*(sums.get(name, zero) for name in names), zero + num_samples]
    *totals, count = parallel.sum(torch.stack([torch.as_tensor(value) for value in values])).tolist()
    return {f"val/{name}": total / count for name, total in zip(names, totals, strict=True)}, int(count)
