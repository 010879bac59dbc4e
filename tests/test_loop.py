"""The loop against PyTorch's own: the same weights to the last bit, and a record that says what happened."""

import pytest
import torch
from conftest import batches_of, distance, plain_evaluation

from runner.record import PHASES, read_json, read_lines

LARGEST_ROUNDING = 1e-6  # relative, over a model's weights after a few steps in float32


@pytest.mark.parametrize(
    ("model", "num_steps", "batch_size"), [("cnn", 8, 20), ("resnet18", 2, 6)], ids=["cnn", "resnet18"]
)
def test_training_equals_a_plain_loop_to_the_last_bit(
    composed, trained, plain_loop, tmp_path, model, num_steps, batch_size
):
    cfg = composed(
        f"model={model}", f"batch.global_batch_size={batch_size}", f"steps={num_steps}", "max_grad_norm=0.5", "seed=3"
    )
    pipe, rows = trained(cfg, tmp_path)
    expected, history = plain_loop(cfg, num_steps=num_steps, max_grad_norm=0.5)
    state, expected_state = pipe.model.state_dict(), expected.state_dict()
    assert state.keys() == expected_state.keys()
    assert [name for name in state if not torch.equal(state[name], expected_state[name])] == []
    assert any(norm > 0.5 for _, _, norm in history), "clipping must have had something to do"
    assert [row["lr"] for row in rows] == [lr for _, lr, _ in history]
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _, _ in history], rel=1e-6)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, _, norm in history], rel=1e-6)


def test_without_clipping_the_norm_is_measured_and_the_gradient_left_alone(composed, trained, plain_loop, tmp_path):
    cfg = composed("model=mlp", "model.width=8", "batch.global_batch_size=20", "steps=3")
    pipe, rows = trained(cfg, tmp_path)
    expected, history = plain_loop(cfg, num_steps=3)
    assert all(torch.equal(a, b) for a, b in zip(pipe.model.parameters(), expected.parameters(), strict=True))
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, _, norm in history], rel=1e-6)


@pytest.mark.parametrize("num_parts", [1, 2, 4])
@pytest.mark.parametrize(("last_batch", "num_samples"), [("drop", 101), ("short", 103)])
def test_accumulation_equals_the_large_batch(
    composed, trained, plain_loop, tmp_path, num_parts, last_batch, num_samples
):
    # 103 samples end in a batch of 23: over micro-batches of 10 at most, 8 + 8 + 7.
    cfg = composed(
        "model=cnn",
        "batch.global_batch_size=40",
        f"batch.accumulation_steps={num_parts}",
        f"data.last_batch={last_batch}",
        f"data.train.num_samples={num_samples}",
        "steps=5",
    )
    pipe, rows = trained(cfg, tmp_path)
    expected, history = plain_loop(cfg, num_steps=5)
    assert distance(pipe.model.state_dict(), expected.state_dict()) < LARGEST_ROUNDING
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _, _ in history], rel=1e-5)
    assert [row["samples"] for row in rows] == ([40, 40, 23, 40, 40] if last_batch == "short" else [40] * 5)
    assert [row["epoch"] for row in rows] == ([0, 0, 0, 1, 1] if last_batch == "short" else [0, 0, 1, 1, 2])


def test_batch_statistics_that_a_short_batch_could_not_give_leave_it_out(composed, trained, tmp_path):
    cfg = composed("model=resnet18", "batch.global_batch_size=4", "data.last_batch=short", "steps=2")
    cfg.data.train.num_samples = 5
    _, rows = trained(cfg, tmp_path)
    assert [row["samples"] for row in rows] == [4, 4]
    assert [row["epoch"] for row in rows] == [0, 1]
    assert any("left out" in remark for remark in read_json(tmp_path / "rank.0.json")["remarks"])


def test_evaluation_counts_each_sample_once_and_equals_a_plain_sum(composed, trained, tmp_path):
    cfg = composed("model=cnn", "batch.global_batch_size=16", "steps=4", "eval_every_steps=3")
    pipe, _ = trained(cfg, tmp_path)
    evaluations = read_lines(tmp_path / "evaluations.jsonl")
    assert [line["step"] for line in evaluations] == [2, 3]
    assert [line["num_samples"] for line in evaluations] == [101, 101]
    assert evaluations[-1]["metrics"] == pytest.approx(plain_evaluation(cfg, pipe.model), rel=1e-5)


def test_evaluation_leaves_training_where_it_was(composed, trained, tmp_path):
    # ViT has dropout: a draw more or less from the process's generator would show in the weights.
    overrides = (
        "model=vit", "model.patch_size=4", "model.width=12", "model.depth=1", "model.num_heads=2", "model.dropout=0.5",
        "batch.global_batch_size=10", "steps=4",
    )  # fmt: skip
    often, _ = trained(composed(*overrides, "eval_every_steps=1"), tmp_path / "often")
    once, _ = trained(composed(*overrides), tmp_path / "once")
    assert all(torch.equal(a, b) for a, b in zip(often.model.parameters(), once.model.parameters(), strict=True))


@pytest.mark.parametrize(("model", "num_parts"), [("cnn", 2), ("mlp", 1)])
def test_the_phases_of_each_step_add_up_to_it(composed, trained, tmp_path, model, num_parts):
    _, rows = trained(
        composed(f"model={model}", f"batch.accumulation_steps={num_parts}", "batch.global_batch_size=16", "steps=6"),
        tmp_path,
    )
    assert len(rows) == 6
    for row in rows:
        phases = {phase: row[f"{phase}_ms"] for phase in PHASES if row[f"{phase}_ms"] is not None}
        assert sum(phases.values()) == pytest.approx(row["step_ms"], rel=1e-6)
        assert phases.keys() == {"data", "transfer", "forward", "backward", "optimizer", "other"}
        assert min(phases.values()) >= 0


def test_each_step_is_recorded_once_with_its_warm_up(composed, trained, tmp_path):
    _, rows = trained(composed("model=mlp", "batch.global_batch_size=20", "steps=8"), tmp_path)
    assert [row["step"] for row in rows] == list(range(8))
    assert [row["is_warmup"] for row in rows] == [True] * 2 + [False] * 6
    assert [row["shape_is_new"] for row in rows] == [True] + [False] * 7
    assert {row["skipped"] for row in rows} == {False}


def test_two_seeds_take_two_orders_and_one_seed_repeats_its_run(composed, trained, tmp_path):
    losses = []
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        overrides = ("model=mlp", "batch.global_batch_size=20", "steps=3", f"seed={seed}")
        losses.append([row["loss"] for row in trained(composed(*overrides), tmp_path / name)[1]])
    assert losses[0] == losses[1] != losses[2]


def test_the_oracle_takes_each_sample_once_an_epoch():
    first, second = (batches_of(num_samples=10, size=5, num_steps=4, seed=0)[i : i + 2] for i in (0, 2))
    assert (
        sorted(i for batch in first for i in batch) == sorted(i for batch in second for i in batch) == list(range(10))
    )
