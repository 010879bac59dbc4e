"""The real command line, in processes of its own: what a run leaves, how it ends, and that nothing outlives it."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from runner.record import PHASES, read_lines

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = json.loads((ROOT / "tests" / "golden" / "record_schema_1.json").read_text())
QUICK = ["experiment=quick", "data.train.num_samples=640", "data.val.num_samples=64", "parallel.device=cpu"]
PATIENCE_S = 150

MY_MODELS = """\
import os
import time

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self, *, num_features: int, num_classes: int, fails_at: int | None, failing_rank: int, sleep_s: float):
        super().__init__()
        self.linear = nn.Linear(num_features, num_classes)
        self.fails_at, self.failing_rank, self.sleep_s, self.calls = fails_at, failing_rank, sleep_s, 0

    def forward(self, inputs):
        if self.training:
            if self.calls == self.fails_at and int(os.environ.get("RANK", "0")) == self.failing_rank:
                raise RuntimeError("the moon is in the wrong house")
            self.calls += 1
            time.sleep(self.sleep_s)
        return self.linear(inputs.flatten(1))


class NotANumber(nn.Module):
    def __init__(self, *, label_smoothing: float):
        super().__init__()
        self.calls = 0

    def forward(self, logits, targets):
        self.calls += 1
        loss = nn.functional.cross_entropy(logits, targets)
        return loss * float("nan") if self.calls > 3 else loss
"""
MINE = """\
_target_: my_models.Net
num_features: 3072
num_classes: ${data.num_classes}
fails_at: null
failing_rank: 0
sleep_s: 0.0
"""
OWN = ["--config-dir", "conf", *QUICK, "model=mine"]


def environment(**more):
    kept = {key: value for key, value in os.environ.items() if key not in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE")}
    return kept | {"PYTHONPATH": str(ROOT), "COLUMNS": "200"} | more


def start(folder, *arguments, **more):
    return subprocess.Popen(
        [sys.executable, "-m", "runner", *arguments],
        cwd=folder,
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Exit code, stdout and stderr."""
    try:
        out, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, out, err


def call(folder, *arguments, **more):
    return finish(start(folder, *arguments, **more))


def summaries(folder):
    paths = sorted((folder / "outputs").rglob("summary.json"))
    return [(path.parent, json.loads(path.read_text())) for path in paths]


def the_run(folder):
    [found] = summaries(folder)
    return found


def paths_of(node, prefix=""):
    if isinstance(node, list):
        return {path for item in node if isinstance(item, dict) for path in paths_of(item, f"{prefix}[]")} | {prefix}
    if not isinstance(node, dict):
        return {prefix}
    below = {path for key, item in node.items() for path in paths_of(item, f"{prefix}.{key}" if prefix else key)}
    return below | {prefix}


def assert_identities(summary, samples_a_step):
    speed, levers = summary["speed"], summary["levers"]
    assert speed["samples_per_s"] * speed["step_ms"]["mean"] / 1000 == pytest.approx(samples_a_step)
    assert set(summary["phases_ms"]) == set(PHASES)
    phases = [value for value in summary["phases_ms"].values() if value is not None]
    assert sum(phases) == pytest.approx(speed["step_ms"]["mean"], abs=1e-6)
    assert 0 <= summary["phases_ms"]["other"] <= 0.02 * speed["step_ms"]["mean"]
    parts = levers["micro_batch_size"] * levers["world_size"] * levers["accumulation_steps"]
    assert levers["global_batch_size"] == parts == samples_a_step
    wall = summary["wall_s"]
    assert sum(value for key, value in wall.items() if key != "total" and value is not None) == pytest.approx(
        wall["total"]
    )
    assert wall["total"] == pytest.approx(summary["run"]["wall_s"])


@pytest.fixture
def project(tmp_path):
    """A user's own folder: a module and a config directory."""
    (tmp_path / "my_models.py").write_text(MY_MODELS)
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text(MINE)
    return tmp_path


def running(project, *arguments):
    """A run in the middle of its steps, and every process below it."""
    process = start(project, *OWN, "steps=100000", "model.sleep_s=0.02", "measure.flush_s=0.1", *arguments)
    deadline = time.monotonic() + PATIENCE_S
    while not any(path.stat().st_size for path in (project / "outputs").rglob("steps.0.jsonl")):
        assert process.poll() is None, finish(process)
        if time.monotonic() > deadline:
            process.kill()
            pytest.fail("the run took no step")
        time.sleep(0.1)
    return process, psutil.Process(process.pid).children(recursive=True)


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """One quick run on one rank, with values planted in its environment."""
    folder = tmp_path_factory.mktemp("quick")
    planted = {"WANDB_API_KEY": "planted-secret-key", "PLANTED": "planted-secret-value"}
    own = ["tracker=wandb", "tracker.mode=disabled", "tracker.project=${oc.env:PLANTED}"]
    code, out, err = call(folder, *QUICK, "steps=12", *own, **planted)
    assert code == 0, out + err
    return folder, out


def test_a_run_on_one_rank_leaves_a_whole_record(quick):
    directory, summary = the_run(quick[0])
    assert summary["status"] == "ok"
    assert summary["reason"] is None
    assert set(GOLDEN["summary"]) - paths_of(summary) == set()
    assert_identities(summary, 64)
    rows = read_lines(directory / "steps.0.jsonl")
    assert [row["step"] for row in rows] == list(range(12))
    assert all(list(row) == GOLDEN["steps"] for row in rows)
    evaluations = read_lines(directory / "evaluations.jsonl")
    assert evaluations[-1]["step"] == 11
    assert all(list(row) == GOLDEN["evaluations"] and row["num_samples"] == 64 for row in evaluations)


def test_a_run_leaves_nothing_but_its_files(quick):
    directory, _ = the_run(quick[0])
    files = {path.relative_to(directory).as_posix() for path in directory.rglob("*") if path.is_file()}
    own = {f".hydra/{name}.yaml" for name in ("config", "hydra", "overrides")}
    assert files == own | {"summary.json", "steps.0.jsonl", "rank.0.json", "evaluations.jsonl", "run.log"}
    assert {path.name for path in quick[0].iterdir()} == {"outputs"}


def test_nothing_of_the_environment_is_written(quick):
    folder, out = quick
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if b"planted-secret" in path.read_bytes()] == []
    assert "planted-secret" not in out


def test_a_run_on_two_ranks_is_one_record_with_a_row_a_rank(tmp_path):
    code, out, err = call(tmp_path, *QUICK, "steps=12", "precision=bf16", "parallel=ddp")
    assert code == 0, out + err
    directory, summary = the_run(tmp_path)
    assert summary["levers"]["world_size"] == 2
    assert summary["levers"]["precision"] == "bf16"
    assert [rank["rank"] for rank in summary["ranks"]] == [0, 1]
    assert sorted(path.name for path in directory.glob("steps.*")) == ["steps.0.jsonl", "steps.1.jsonl"]
    rows = [read_lines(directory / f"steps.{rank}.jsonl") for rank in (0, 1)]
    assert [[row["samples"] for row in of_rank] for of_rank in rows] == [[32] * 12] * 2
    assert_identities(summary, 64)


@pytest.mark.slow
def test_a_sweep_is_one_directory_and_one_table(tmp_path):
    axes = ["parallel=single,ddp", "precision=fp32,bf16"]
    code, out, err = call(tmp_path, "-m", *QUICK, "steps=4", *axes)
    assert code == 0, out + err
    runs = summaries(tmp_path)
    assert len({directory.parent for directory, _ in runs}) == 1
    assert {(run["levers"]["parallel"], run["levers"]["precision"]) for _, run in runs} == {
        ("single", "fp32"),
        ("single", "bf16"),
        ("ddp", "fp32"),
        ("ddp", "bf16"),
    }
    table = out[out.rindex("┏") if "┏" in out else out.rindex("files") :]
    assert len(re.findall(r"\bok\b", table)) == 4


def test_a_sweep_goes_on_after_a_job_that_failed(project):
    code, out, err = call(project, "-m", *OWN, "steps=4", "model.fails_at=wrong,1,null")
    assert code == 1, out + err
    runs = [run for _, run in summaries(project)]
    assert [run["status"] for run in runs] == ["failed", "failed", "ok"]
    assert "model.fails_at=wrong" in runs[0]["reason"]
    assert "the moon is in the wrong house" in runs[1]["reason"]
    assert "wrong house" in out
    assert "model.fails_at=wrong" in err


def test_a_model_that_raises_ends_the_run_with_its_own_words(project):
    code, out, err = call(project, *OWN, "steps=8", "model.fails_at=3")
    assert code == 1, out + err
    directory, summary = the_run(project)
    assert summary["status"] == "failed"
    assert "the moon is in the wrong house" in summary["reason"]
    assert [row["step"] for row in read_lines(directory / "steps.0.jsonl")] == [0, 1, 2]


def test_under_ddp_the_rank_that_failed_is_named(project):
    code, out, err = call(project, *OWN, "steps=8", "parallel=ddp", "model.fails_at=3", "model.failing_rank=1")
    assert code == 1, out + err
    _, summary = the_run(project)
    assert summary["status"] == "failed"
    assert "rank 1" in summary["reason"]
    assert "the moon is in the wrong house" in summary["reason"]


def test_a_loss_that_is_no_number_ends_the_run_as_diverged(project):
    code, out, err = call(project, *OWN, "steps=40", "task.loss_fn._target_=my_models.NotANumber")
    assert code == 4, out + err
    directory, summary = the_run(project)
    assert summary["status"] == "diverged"
    assert "step 3" in summary["reason"]
    losses = [row["loss"] for row in read_lines(directory / "steps.0.jsonl")]
    assert None not in losses[:3]
    assert losses[3] is None


def test_a_ctrl_c_closes_the_record_and_leaves_no_process(project):
    process, below = running(project)
    process.send_signal(signal.SIGINT)
    code, out, err = finish(process)
    assert code == 130, out + err
    assert psutil.wait_procs(below, timeout=10)[1] == []
    directory, summary = the_run(project)
    assert summary["status"] == "interrupted"
    rows = read_lines(directory / "steps.0.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert summary["speed"]["steps"] + summary["speed"]["warmup_steps"] == len(rows) > 0


def test_a_killed_launcher_leaves_no_process_and_a_record_that_says_running(project):
    process, below = running(project, "parallel=ddp")
    assert len(below) >= 3  # the child and two ranks
    process.kill()
    finish(process)
    assert psutil.wait_procs(below, timeout=20)[1] == []
    directory, summary = the_run(project)
    assert summary["status"] == "running"
    assert len(read_lines(directory / "steps.0.jsonl")) > 0


def test_two_runs_started_at_once_have_two_directories(tmp_path):
    runs = [start(tmp_path, *QUICK, "steps=1") for _ in range(2)]
    assert [finish(run)[0] for run in runs] == [0, 0]
    directories = [directory for directory, _ in summaries(tmp_path)]
    assert len({directory.name.rsplit("-", 1)[1] for directory in directories}) == 2


@pytest.mark.parametrize("strategy", ["single", "ddp"])
def test_a_users_own_model_trains_by_naming_it(strategy, project):
    code, out, err = call(project, *OWN, "steps=6", f"parallel={strategy}")
    assert code == 0, out + err
    _, summary = the_run(project)
    assert summary["status"] == "ok"
    assert summary["levers"]["model"] == "mine"
    assert summary["levers"]["model._target_"] == "my_models.Net"
