"""What several test files share: a composed config, a run trained in this process, and the plain loop it must match."""

import math
from pathlib import Path

import hydra
import numpy as np
import pytest
import torch
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.nn import functional as F

from runner.builder import build, open_recorder
from runner.loop import train
from runner.record import read_lines
from runner.run import _register_resolvers

CONF = Path(__file__).parents[1] / "conf"
TINY = (
    "data=synthetic",
    "data.num_channels=1",
    "data.image_size=8",
    "data.train.num_samples=101",
    "data.val.num_samples=101",
    "epochs=null",
    "eval_every_epochs=null",
)


@pytest.fixture(autouse=True)
def _process_settings():
    """A run sets the process's threads and matmul mode; the next test must not inherit them."""
    num_threads, matmul_precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield
    torch.set_num_threads(num_threads)
    torch.set_float32_matmul_precision(matmul_precision)


@pytest.fixture
def composed():
    """``composed(*overrides)``: a config as the launching process hands it over, on one CPU thread."""

    def compose(*overrides, parallel="single"):
        _register_resolvers()
        settled = (f"parallel={parallel}", "parallel.device=cpu", "parallel.num_threads=1", "data.loader.num_workers=0")
        with hydra.initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
            return hydra.compose("config", overrides=[*TINY, *settled, *overrides])

    return compose


@pytest.fixture
def trained():
    """``trained(cfg, directory)``: the pipeline after its run, and the lines of steps.0.jsonl."""

    def run(cfg, directory):
        directory.mkdir(parents=True, exist_ok=True)
        OmegaConf.resolve(cfg)
        with instantiate(cfg.parallel) as parallel, open_recorder(cfg, parallel, directory) as recorder:
            pipe = build(cfg, parallel, recorder)
            train(pipe, recorder)
        return pipe, read_lines(directory / "steps.0.jsonl")

    return run


def normalised(images):
    """The synthetic set's uint8 images as its yaml's mean 0.5 and std 0.25 make them."""
    return ((images.float() / 255) - 0.5) / 0.25


def batches_of(*, num_samples, size, num_steps, seed, last_batch="drop"):
    """The indices of each step's global batch, from numpy alone."""
    batches, epoch = [], 0
    while len(batches) < num_steps:
        order = np.random.default_rng([seed, epoch]).permutation(num_samples)
        cuts = [order[begin : begin + size] for begin in range(0, num_samples, size)]
        batches += [cut for cut in cuts if last_batch == "short" or len(cut) == size]
        epoch += 1
    return batches[:num_steps]


@pytest.fixture
def plain_loop():
    """``plain_loop(cfg, num_steps=...)``: the same training as PyTorch's own loop, whole batches on one device.

    SGD with momentum on half a cosine; returns the model and each step's (loss, LR, gradient norm).
    """

    def run(cfg, *, num_steps, max_grad_norm=None):
        torch.manual_seed(cfg.seed)
        model = instantiate(cfg.model)
        train_set = instantiate(cfg.data.train)
        images, targets = train_set.gather(np.arange(len(train_set)))
        base_lr = 0.05
        optimizer = torch.optim.SGD(model.parameters(), lr=base_lr, momentum=0.9, weight_decay=5e-4, nesterov=True)
        batches = batches_of(
            num_samples=len(train_set),
            size=cfg.batch.global_batch_size,
            num_steps=num_steps,
            seed=cfg.seed,
            last_batch=cfg.data.last_batch,
        )
        history = []
        for step, indices in enumerate(batches):
            lr = base_lr * ((1 + math.cos(math.pi * (step / num_steps))) / 2)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad()
            loss = F.cross_entropy(model(normalised(images[indices])), targets[indices])
            loss.backward()
            bound = float("inf") if max_grad_norm is None else max_grad_norm
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), bound)
            optimizer.step()
            history.append((loss.item(), lr, norm.item()))
        return model, history

    return run


def distance(model, other):
    """How far two models' parameters lie apart, relative to the second's size."""
    ours, theirs = (torch.cat([value.detach().flatten().double() for value in m.values()]) for m in (model, other))
    return float((ours - theirs).norm() / theirs.norm())


def plain_evaluation(cfg, model):
    """Mean cross entropy and accuracy over the validation set, added up a sample at a time."""
    val_set = instantiate(cfg.data.val)
    images, targets = val_set.gather(np.arange(len(val_set)))
    loss = correct = 0.0
    model.eval()
    with torch.no_grad():
        for image, target in zip(normalised(images), targets, strict=True):
            logits = model(image[None])
            loss += F.cross_entropy(logits, target[None]).item()
            correct += float(logits.argmax() == target)
    return {"val/loss": loss / len(targets), "val/accuracy": correct / len(targets)}
