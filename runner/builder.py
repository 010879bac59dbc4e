"""From a composed config to a `Pipeline`: the one place that knows the order of assembly."""

from pathlib import Path
from typing import Any

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch import nn

from runner.compile import CompileMeter, Eager, find_repeated_blocks
from runner.data import Data
from runner.data.sampler import StepSampler
from runner.errors import BadInput
from runner.loop import Pipeline
from runner.measure import Recorder
from runner.parallel import Single
from runner.tasks import Task


def open_recorder(cfg: DictConfig, parallel: Single, directory: Path) -> Recorder:
    """This rank's recorder; it is opened before the rest is built, so that a failure while building is on record."""
    meter = CompileMeter(enabled=not _is_eager(cfg))
    make = instantiate(cfg.measure)
    return make(directory, rank=parallel.rank, world_size=parallel.world_size, device=parallel.device, compiler=meter)


def build(cfg: DictConfig, parallel: Single, recorder: Recorder) -> Pipeline:
    """Assemble one rank's run. Each line reads one config group; their order is the contract.

    The seed comes before the model, whose weights it decides. Memory format and dtype are settled before compilation,
    which specialises on them, and compilation is in place and before wrapping, so that DDP's hooks stay outside the
    graph. The optimizer holds the parameters that all this has left in place. Data comes last: its smallest batch
    depends on the model.

    Raises:
        BadInput: parts that do not fit each other.
    """
    torch.manual_seed(cfg.seed)
    batch = instantiate(cfg.batch, data_parallel_size=parallel.data_parallel_size)
    precision = instantiate(cfg.precision)
    memory = instantiate(cfg.memory)
    task: Task = instantiate(cfg.task)

    model = instantiate(cfg.model).to(parallel.device)
    model = memory.prepare(precision.prepare(model))
    compiler: Eager = instantiate(cfg.compile)
    model = compiler.apply(model, find_repeated_blocks(model))
    wrapped = parallel.wrap(model)
    optimizer = instantiate(cfg.optimizer)(wrapped.parameters(), lr=batch.scale_lr(cfg.optimizer.lr))
    # Same weights everywhere, but other dropout masks on each rank: they see other samples.
    if parallel.rank:
        torch.manual_seed(cfg.seed + parallel.rank)

    data: Data = instantiate(cfg.data)
    where = {"rank": parallel.data_parallel_rank, "world_size": parallel.data_parallel_size}
    sampler = StepSampler(
        num_samples=len(data.train),
        global_batch_size=batch.global_batch_size,
        micro_batch_size=batch.micro_batch_size,
        seed=cfg.seed,
        last_batch=data.last_batch,
        min_samples=2 if has_batch_statistics(model) else 1,
        num_steps=None,
        **where,
    )
    sampler.num_steps = num_steps = cfg.steps or cfg.epochs * sampler.steps_per_epoch
    to_device = data.to_device(parallel.device, memory.lay_out)

    remarks = [remark for remark in (precision.remark(parallel.device), *sampler.remarks) if remark]
    warmup_steps = settle_warmup(cfg.warmup_steps, num_steps)
    recorder.begin(
        num_steps=num_steps,
        steps_per_epoch=sampler.steps_per_epoch,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        remarks=remarks,
        levers={"device": parallel.device.type},
        environment={"cuda": torch.version.cuda},
    )
    return Pipeline(
        task=task,
        model=model,
        wrapped=wrapped,
        optimizer=optimizer,
        schedule=instantiate(cfg.schedule)(optimizer, num_steps=num_steps),
        scaler=precision.grad_scaler(parallel.device),
        precision=precision,
        parallel=parallel,
        train_batches=data.train_batches(sampler, to_device=to_device, seed=cfg.seed),
        evaluation_batches=data.evaluation_batches(
            batch_size=batch.micro_batch_size, to_device=to_device, seed=cfg.seed, **where
        ),
        num_steps=num_steps,
        warmup_steps=warmup_steps,
        steps_per_epoch=sampler.steps_per_epoch,
        eval_every=_eval_every(cfg, sampler.steps_per_epoch),
        max_grad_norm=cfg.max_grad_norm,
    )


def has_batch_statistics(model: nn.Module) -> bool:
    """Whether what the model does to one sample depends on the others in its micro-batch."""
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def settle_warmup(warmup_steps: Any, num_steps: int) -> int:
    """Steps to leave out of the figures.

    Raises:
        BadInput: they would be all there are.
    """
    if warmup_steps == "auto":
        return min(10, num_steps // 4)
    if warmup_steps >= num_steps:
        raise BadInput(
            f"warmup_steps={warmup_steps}: leaves no step to measure of the run's {num_steps}; "
            f"warmup_steps={num_steps // 4} would, or warmup_steps=auto"
        )
    return warmup_steps


def _eval_every(cfg: DictConfig, steps_per_epoch: int) -> int | None:
    if cfg.eval_every_steps is not None:
        return cfg.eval_every_steps
    return None if cfg.eval_every_epochs is None else cfg.eval_every_epochs * steps_per_epoch


def _is_eager(cfg: DictConfig) -> bool:
    return type(instantiate(cfg.compile)) is Eager
