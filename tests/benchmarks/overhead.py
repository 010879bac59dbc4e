"""`make bench`: what the runner's loop and recorder cost a step, against a plain loop on the same model, data and seed.

The two alternate in one process in blocks of steps; the figure is the median over pairs of blocks of the difference in
CPU time of the main thread, so that a neighbour's load on the machine does not count.
"""

import json
import os
import platform
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from runner.compile import CompileMeter
from runner.data.fetch import MicroBatch
from runner.loop import update
from runner.measure import Recorder, choose_clock
from runner.models import MLP
from runner.parallel import Single
from runner.precision import Precision
from runner.schedule import constant
from runner.tasks import ImageClassification

BLOCK, PAIRS, BATCH = 200, 15, 32  # a tiny model: its own noise must not hide microseconds
TARGET = Path("outputs/bench/overhead.json")


def _parts() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = MLP(in_channels=1, num_classes=10, image_size=8, width=32, depth=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return model, optimizer, constant(optimizer, num_steps=10**9, num_warmup_steps=0)


def plain(model: Any, optimizer: Any, schedule: Any, inputs: torch.Tensor, targets: torch.Tensor) -> None:
    """The loop a reader would write by hand, gradient norm included, since the runner records it."""
    for _ in range(BLOCK):
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)


class Ours:
    """The runner's own step, with all its parts."""

    def __init__(self, recorder: Recorder, batch: MicroBatch) -> None:
        self.recorder, self.batch, self.index = recorder, batch, 0
        self.model, self.optimizer, self.schedule = _parts()
        self.precision = Precision(
            compute_dtype="float32", matmul_precision="highest", grad_scaling=False, init_scale=1.0
        )
        self.parallel = Single(device="cpu", num_threads=1)
        self.scaler = self.precision.grad_scaler(torch.device("cpu"))
        self.task = ImageClassification(loss_fn=torch.nn.CrossEntropyLoss())
        self.max_grad_norm = None
        self.wrapped = self.model

    def block(self) -> None:
        """As many steps as the plain loop's block."""
        for _ in range(BLOCK):
            with self.recorder.step(self.index, epoch=0, is_warmup=False) as step:
                step.mark("data")
                parts = [step.count(self.batch)]
                step.loss = self.parallel.forward_backward(
                    self.model, parts, task=self.task, precision=self.precision, scaler=self.scaler, marks=step
                )
                update(self, step)  # type: ignore[arg-type]
                step.mark("optimizer")
            self.index += 1


def measure() -> list[dict[str, float]]:
    """A row a pair of blocks: ms a step of each, CPU time of the main thread."""
    inputs, targets = torch.randn(BATCH, 1, 8, 8), torch.randint(0, 10, (BATCH,))
    batch = MicroBatch(
        inputs=inputs, targets=targets, epoch=0, num_samples=BATCH, loss_divisor=1.0, is_last=True,
        fetch_ms=0.0, fetch_cpu_ms=0.0,
    )  # fmt: skip
    rows = []
    with TemporaryDirectory() as folder:
        recorder = Recorder(
            Path(folder), rank=0, world_size=1, device=torch.device("cpu"), log_every=20, flush_s=1.0,
            clock=choose_clock, compiler=CompileMeter(enabled=False),
        )  # fmt: skip
        with recorder:
            ours, theirs = Ours(recorder, batch), _parts()
            runs = {"plain": lambda: plain(*theirs, inputs, targets), "runner": ours.block}
            for pair in range(PAIRS + 2):
                row = {}
                for name in ("plain", "runner") if pair % 2 else ("runner", "plain"):
                    begin = time.thread_time()
                    runs[name]()
                    row[f"{name}_ms"] = 1e3 * (time.thread_time() - begin) / BLOCK
                if pair >= 2:
                    rows.append(row)
    return rows


def main() -> int:
    """Measure, print and write; an aim that does not hold is written down as not holding."""
    torch.set_num_threads(1)
    rows = measure()
    extra = [row["runner_ms"] - row["plain_ms"] for row in rows]
    median, plain_ms = statistics.median(extra), statistics.median(row["plain_ms"] for row in rows)
    share = 100 * median / 10.0
    aims = [{"aim": "cost of loop and recorder, % of a 10 ms step", "value": share, "bound": 1.0, "holds": share < 1.0}]
    table = Table(title="What the runner's step costs above a plain loop (CPU time of the main thread)")
    for column in ("plain ms", "runner ms", "difference us, median", "min", "max"):
        table.add_column(column, justify="right")
    runner_ms = statistics.median(row["runner_ms"] for row in rows)
    figures = (f"{1e3 * value:.0f}" for value in (median, min(extra), max(extra)))
    table.add_row(f"{plain_ms:.3f}", f"{runner_ms:.3f}", *figures)
    Console().print(table)
    verdict = "holds" if aims[0]["holds"] else "DOES NOT HOLD"
    Console().print(f"aim: under 1 % of a 10 ms step: {share:.2f} %, {verdict}")
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    content = {
        "name": "overhead",
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": {"cores": os.cpu_count(), "platform": platform.platform()},
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "rows": rows,
        "aims": aims,
    }
    TARGET.write_text(json.dumps(content, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
