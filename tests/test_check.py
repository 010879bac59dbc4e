"""Refusals before launch: one sentence with the key, the value and what would work, and nothing left behind."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from runner import job, run
from runner.__main__ import dispatch

ROOT = Path(__file__).resolve().parents[1]

# The arguments, then words that the one line must hold.
REFUSED = [
    ("precison=bf16", "precison", "did you mean precision"),
    ("precision=bf17", "precision=bf17", "precision=bf16", "fp32"),
    ("+model.widht=3", "model.widht", "did you mean model.width"),
    ("model.widht=3", "model.widht", "did you mean model.width"),
    ("steps=abc", "steps=abc", "integer"),
    ("steps=0", "steps=0"),
    ("steps=true", "steps=true", "integer"),
    ("steps=3 epochs=2", "steps=3", "epochs=2", "null"),
    ("steps=null epochs=null", "steps=null", "epochs=null"),
    ("batch.micro_batch_size=24 batch.accumulation_steps=null", "global_batch_size=64", "24", "48", "72"),
    ("batch.micro_batch_size=32 batch.accumulation_steps=2", "micro_batch_size=32", "accumulation_steps=2", "null"),
    ("parallel=ddp parallel.device=cpu parallel.num_ranks=4096", "parallel.num_ranks=4096", "at most"),
    ("data.loader.num_workers=-3", "data.loader.num_workers=-3", "0 or more"),
    ("data=fashion_mnist data.root=/nope", "data.root=/nope", "directory"),
    ("data=mnist", "data.root", "must be stated"),
    ("model._target_=my_modelz.Net", "model._target_=my_modelz.Net", "my_modelz"),
    ("model._target_=runner.models.SmalCNN", "model._target_=runner.models.SmalCNN", "SmallCNN"),
    ("optimizer.lr=fast", "optimizer.lr=fast", "number"),
    ("optimizer.lr=-1", "optimizer.lr=-1"),
    ("+foo=1", "foo", "no such key"),
    ("seed=-1", "seed=-1"),
    ("max_grad_norm=-1", "max_grad_norm=-1"),
    ("warmup_steps=-2", "warmup_steps=-2"),
    ("eval_every_steps=0", "eval_every_steps=0"),
    ("warmup_steps=5 steps=5", "warmup_steps=5", "steps=5", "auto"),
    ("a=[", "a=["),
    ("model=null", "model"),
    ("steps=${oc.env:SURELY_NOT_SET}", "SURELY_NOT_SET"),
    ("experiment=quik", "experiment=quik", "experiment=quick"),
]


class NeverStarted:
    """In place of a job: what should have been refused is seen, and costs nothing."""

    median_step_ms = None

    def __init__(self, directory, **facts):
        del directory, facts

    def run(self):
        return 0


@pytest.fixture
def command(tmp_path, monkeypatch, capfd):
    """Runs a command line in this process and returns exit code, stdout and stderr; nothing of it stays behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "0")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(job, "Job", NeverStarted)
    for name in ("_exit_codes", "_refusals", "_sweep_directory"):
        monkeypatch.setattr(run, name, [])
    handler = signal.getsignal(signal.SIGTERM)

    def call(*arguments):
        code = dispatch(list(arguments))
        return code, *capfd.readouterr()

    yield call
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize(("arguments", "words"), [(case[0], case[1:]) for case in REFUSED], ids=[c[0] for c in REFUSED])
def test_a_mistake_is_one_sentence_and_exit_code_2(arguments, words, command, tmp_path):
    code, out, err = command(*arguments.split())
    assert code == 2, err
    assert out == ""
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert list(tmp_path.glob("outputs/*/*")) == []


@pytest.mark.parametrize(
    "arguments",
    [
        "steps=3",
        "epochs=2",
        "warmup_steps=0 steps=3",
        "max_grad_norm=1",
        "batch.micro_batch_size=32 batch.accumulation_steps=null",
        "optimizer.lr=0",
        "compile=default parallel=ddp precision=bf16",
    ],
)
def test_what_can_run_is_not_refused(arguments, command):
    code, _, err = command(*arguments.split())
    assert (code, err) == (0, "")


@pytest.mark.parametrize("arguments", [["precison=bf16"], ["model.widht=3"]])
def test_a_refusal_comes_before_torch_is_imported(arguments, tmp_path):
    code = "import sys; from runner.__main__ import dispatch; c = dispatch(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules and 'wandb' not in sys.modules; sys.exit(c)"
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        check=False,
        cwd=tmp_path,
        env=dict(os.environ) | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1


def test_a_users_own_word_for_full_errors_is_heard(command, monkeypatch):
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(Exception, match="precison"):
        command("precison=bf16")
