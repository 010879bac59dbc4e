"""Precision: what a policy refuses, and a step that float16 overflows, which must leave everything where it was."""

from types import SimpleNamespace

import pytest
import torch
from conftest import distance
from torch import nn
from torch.nn import functional as F

from runner.errors import BadInput
from runner.loop import update
from runner.measure.clock import HostClock
from runner.measure.recorder import Step
from runner.parallel import Single
from runner.precision import Precision

FP16 = ("precision=fp16", "model=mlp", "model.width=8", "batch.global_batch_size=20", "optimizer.lr=0.25")


@pytest.fixture
def scaled():
    """A pipeline's parts that `update` asks for, around one linear layer under a loss scale of 1024."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return SimpleNamespace(
        wrapped=model,
        optimizer=optimizer,
        schedule=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda steps: 0.5**steps),
        scaler=torch.amp.GradScaler("cpu", init_scale=1024.0),
        parallel=Single(device="cpu", num_threads=1),
        max_grad_norm=None,
    )


def backward(pipe):
    """Scaled gradients of a small loss; returns the plain ones."""
    inputs, targets = torch.arange(12.0).view(4, 3) / 12, torch.tensor([0, 1, 1, 0])
    loss = F.cross_entropy(pipe.wrapped(inputs), targets)
    plain = torch.autograd.grad(loss, list(pipe.wrapped.parameters()), retain_graph=True)
    pipe.scaler.scale(loss).backward()
    return plain


def one_update(pipe):
    step = Step(row={}, clock=HostClock(), shapes=set())
    update(pipe, step)
    return step


def test_the_recorded_norm_is_of_unscaled_gradients_and_so_is_the_step(scaled):
    before = [parameter.detach().clone() for parameter in scaled.wrapped.parameters()]
    plain = backward(scaled)
    step = one_update(scaled)
    norm = sum(float((gradient**2).sum()) for gradient in plain) ** 0.5
    assert float(step.grad_norm) == pytest.approx(norm, rel=1e-6)
    for old, gradient, new in zip(before, plain, scaled.wrapped.parameters(), strict=True):
        torch.testing.assert_close(new.detach(), old - 0.1 * gradient)
    assert step.row == {"lr": 0.1, "loss_scale": 1024.0, "skipped": False}
    assert scaled.schedule.get_last_lr() == [0.05]
    assert all(parameter.grad is None for parameter in scaled.wrapped.parameters())


def test_clipping_under_a_loss_scale_bounds_the_unscaled_norm(scaled):
    scaled.max_grad_norm = 0.01
    before = [parameter.detach().clone() for parameter in scaled.wrapped.parameters()]
    backward(scaled)
    one_update(scaled)
    moved = [new.detach() - old for old, new in zip(before, scaled.wrapped.parameters(), strict=True)]
    assert sum(float((part**2).sum()) for part in moved) ** 0.5 == pytest.approx(0.1 * 0.01, rel=1e-3)


def test_a_step_that_overflows_moves_neither_weights_nor_momentum_nor_schedule(scaled):
    backward(scaled)
    one_update(scaled)
    weights = [parameter.detach().clone() for parameter in scaled.wrapped.parameters()]
    momentum = [scaled.optimizer.state[p]["momentum_buffer"].clone() for p in scaled.wrapped.parameters()]
    backward(scaled)
    scaled.wrapped.weight.grad[0, 0] = float("inf")
    step = one_update(scaled)
    assert step.row == {"lr": 0.05, "loss_scale": 1024.0, "skipped": True}
    assert scaled.scaler.get_scale() == 512.0
    assert scaled.schedule.get_last_lr() == [0.05]
    for old, buffer, parameter in zip(weights, momentum, scaled.wrapped.parameters(), strict=True):
        assert torch.equal(parameter, old)
        assert torch.equal(scaled.optimizer.state[parameter]["momentum_buffer"], buffer)
        assert parameter.grad is None, "the overflown gradient must not reach the next step"


def test_a_run_whose_first_scale_overflows_skips_and_keeps_its_lr(composed, trained, tmp_path):
    # A loss scale of 2**40 overflows whatever the gradients are, and three halvings do not help.
    _, rows = trained(composed(*FP16, f"precision.init_scale={2.0**40}", "steps=3"), tmp_path)
    assert [row["skipped"] for row in rows] == [True] * 3
    assert [row["loss_scale"] for row in rows] == [2.0**40, 2.0**39, 2.0**38]
    assert [row["lr"] for row in rows] == [0.25] * 3
    assert all(row["loss"] > 0 for row in rows)


@pytest.mark.parametrize(("name", "rounding"), [("bf16", 2e-2), ("fp16", 2e-3), ("tf32", 1e-6)])
def test_lower_precision_trains_close_to_float32_on_float32_weights(composed, trained, tmp_path, name, rounding):
    overrides = ("model=mlp", "model.width=8", "batch.global_batch_size=20", "steps=3")
    exact, exact_rows = trained(composed(*overrides), tmp_path / "fp32")
    pipe, rows = trained(composed(*overrides, f"precision={name}"), tmp_path / name)
    assert {parameter.dtype for parameter in pipe.model.parameters()} == {torch.float32}
    gap = distance(pipe.model.state_dict(), exact.model.state_dict())
    assert gap < rounding
    assert (gap > 0) == (name != "tf32"), "on a CPU there is no TF32, and the others must have rounded"
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in exact_rows], rel=0.05)


@pytest.mark.parametrize(
    ("compute_dtype", "grad_scaling"),
    [("float16", False), ("bfloat16", True), ("float32", True), ("float8", False)],
)
def test_a_policy_that_does_not_fit_together_is_refused(compute_dtype, grad_scaling):
    with pytest.raises(BadInput, match=r"precision\."):
        Precision(compute_dtype=compute_dtype, matmul_precision="highest", grad_scaling=grad_scaling, init_scale=1024.0)


def test_float16_on_a_cpu_is_remarked_upon():
    policy = Precision(compute_dtype="float16", matmul_precision="high", grad_scaling=True, init_scale=1024.0)
    assert "emulated on a CPU" in policy.remark(torch.device("cpu"))
