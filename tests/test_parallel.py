"""Two ranks against one: the same training, the same metrics, whatever is left over for the last of them."""

import os
import subprocess
import sys
from datetime import timedelta

import pytest
import torch
from conftest import distance, plain_evaluation
from hydra.utils import instantiate
from omegaconf import OmegaConf

from runner import loop, worker
from runner.errors import BadInput, RankFailed
from runner.parallel import Single
from runner.parallel.launch import start_ranks
from runner.record import read_json, read_lines, write_json

CNN = ("model=cnn", "model.width=4", "batch.global_batch_size=20")


def rank_that_keeps_its_weights(directory):
    """The worker's own rank, in a process of its own, which also leaves its weights behind."""

    def train_and_keep(pipe, recorder):
        loop.train(pipe, recorder)
        torch.save(pipe.model.state_dict(), directory / f"weights.{recorder.rank}.pt")

    worker.train = train_and_keep
    worker.run_rank(directory)


def rank_of_which_the_second_fails(directory):
    if os.environ["RANK"] == "1":
        raise BadInput("planted in rank 1")
    worker.run_rank(directory)


def hand_over(cfg, directory):
    """What the launching process leaves for the worker, as far as the worker reads it."""
    directory.mkdir(parents=True, exist_ok=True)
    config = OmegaConf.to_container(cfg, resolve=True)
    write_json(directory / "summary.json", {"schema": 1, "status": "running", "config": config})
    return directory


def on_two_ranks(cfg, directory, work=rank_that_keeps_its_weights):
    start_ranks(work, (hand_over(cfg, directory),), num_ranks=2, timeout=timedelta(seconds=60))
    weights = [torch.load(directory / f"weights.{rank}.pt") for rank in range(2)]
    return weights, [read_lines(directory / f"steps.{rank}.jsonl") for rank in range(2)]


def mean_losses(rows_of_ranks):
    """Each step's loss over all samples, from the ranks' own means."""
    losses = []
    for rows in zip(*rows_of_ranks, strict=True):
        assert len({row["step"] for row in rows}) == 1
        total = sum(row["loss"] * row["samples"] for row in rows if row["samples"])
        losses.append(total / sum(row["samples"] for row in rows))
    return losses


def test_two_ranks_train_and_evaluate_as_one(composed, trained, plain_loop, tmp_path):
    # 101 samples by 20 leave a batch of one: the second rank then reads a filler that must not count.
    overrides = (*CNN, "data.last_batch=short", "steps=8", "max_grad_norm=0.5")
    cfg = composed(*overrides, "parallel.num_ranks=2", "batch.accumulation_steps=2", parallel="ddp")
    weights, rows = on_two_ranks(cfg, tmp_path / "two")
    single, single_rows = trained(composed(*overrides), tmp_path / "one")
    plain, history = plain_loop(cfg, num_steps=8, max_grad_norm=0.5)

    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert distance(weights[0], plain.state_dict()) < 1e-6
    assert distance(weights[0], single.model.state_dict()) < 1e-6
    assert [row["samples"] for row in rows[0]] == [10] * 5 + [1] + [10] * 2
    assert [row["samples"] for row in rows[1]] == [10] * 5 + [0] + [10] * 2
    assert mean_losses(rows) == pytest.approx([loss for loss, _, _ in history], rel=1e-5)
    for ours in (*rows, single_rows):
        assert [row["grad_norm"] for row in ours] == pytest.approx([norm for _, _, norm in history], rel=1e-4)

    (evaluation,) = read_lines(tmp_path / "two" / "evaluations.jsonl")
    assert evaluation["num_samples"] == 101
    assert evaluation["metrics"] == pytest.approx(plain_evaluation(cfg, plain), rel=1e-5)
    (evaluation_of_one,) = read_lines(tmp_path / "one" / "evaluations.jsonl")
    assert evaluation_of_one["num_samples"] == 101
    assert evaluation_of_one["metrics"] == pytest.approx(evaluation["metrics"], rel=1e-5)


def test_a_validation_set_of_one_sample_is_enough_for_two_ranks(composed, tmp_path):
    cfg = composed(*CNN, "data.val.num_samples=1", "steps=2", "parallel.num_ranks=2", parallel="ddp")
    weights, _ = on_two_ranks(cfg, tmp_path)
    model = instantiate(cfg.model)
    model.load_state_dict(weights[0])
    (evaluation,) = read_lines(tmp_path / "evaluations.jsonl")
    assert evaluation["num_samples"] == 1
    assert evaluation["metrics"] == pytest.approx(plain_evaluation(cfg, model), rel=1e-5)
    assert [read_json(tmp_path / f"rank.{rank}.json")["evaluation"]["num_samples"] for rank in range(2)] == [1, 1]


def test_the_worker_process_starts_its_ranks_and_ends_well(composed, plain_loop, tmp_path):
    cfg = composed(*CNN, "steps=2", "parallel.num_ranks=2", parallel="ddp")
    directory = hand_over(cfg, tmp_path)
    command = [sys.executable, "-c", "from runner.worker import entry; entry()", str(directory)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    rows = [read_lines(directory / f"steps.{rank}.jsonl") for rank in range(2)]
    assert mean_losses(rows) == pytest.approx([loss for loss, _, _ in plain_loop(cfg, num_steps=2)[1]], rel=1e-5)
    assert {read_json(directory / f"rank.{rank}.json")["status"] for rank in range(2)} == {"ok"}


def test_the_rank_that_failed_is_named_with_its_own_words(composed, tmp_path):
    cfg = composed(*CNN, "steps=2", "parallel.num_ranks=2", parallel="ddp")
    with pytest.raises(RankFailed, match=r"rank 1: .*planted in rank 1"):
        on_two_ranks(cfg, tmp_path, rank_of_which_the_second_fails)


def test_one_process_alone_agrees_with_itself():
    single = Single(device="cpu", num_threads=1)
    assert single.union(["b", "a"]) == {"a", "b"}
    assert [single.agree(flag) for flag in (True, False)] == [True, False]
    assert single.sum(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]


@pytest.mark.parametrize("device", ["abacus", "cuda:99"])
def test_a_device_that_is_not_there_is_refused(device):
    with pytest.raises(BadInput, match=rf"parallel\.device={device}"):
        Single(device=device, num_threads=1)
