"""Following a running job from outside: its output, its progress, and the feed of the tracker."""

import json
import statistics
import subprocess
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from runner.record import EVALUATIONS, Row
from runner.trackers import Tracker

POLL_S = 0.2
PLAIN_EVERY_S = 5.0  # between progress lines where there is no terminal
RECENT = 20  # steps that the display's figures are taken over


class Tail:
    """The lines a JSON-lines file has gained since the last look; a line still being written waits for the next."""

    def __init__(self, path: Path) -> None:
        self.path, self._position = path, 0

    def read(self) -> list[Row]:
        """New whole lines."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._position += len(whole)
        return [json.loads(line) for line in whole.splitlines()]


def watch(
    child: subprocess.Popen[bytes], directory: Path, *, tracker: Tracker, world_size: int, console: Console
) -> int:
    """Until the child has ended: show it, log it, track it.

    Returns:
        The child's exit code, negative where a signal killed it.
    """
    steps, evaluations = Tail(directory / "steps.0.jsonl"), Tail(directory / EVALUATIONS)
    display = _Live(console, world_size) if console.is_terminal else _Plain(console, world_size)
    talker = threading.Thread(target=_relay, args=(child, directory / "run.log", console), daemon=True)
    talker.start()
    with display:
        while True:
            code = child.poll()
            if code is not None:
                talker.join(timeout=5)
            for row in steps.read():
                tracker.log_step(row)
                display.add(row, _num_steps(directory, display))
            for row in evaluations.read():
                tracker.log_evaluation(row)
                display.evaluated(row)
            if code is not None:
                return code
            display.show()
            time.sleep(POLL_S)


def _num_steps(directory: Path, display: "_Plain") -> int:
    """The run's length, which the ranks know once the data set is open."""
    if display.num_steps:
        return display.num_steps
    return int(json.loads((directory / "rank.0.json").read_text())["num_steps"])


def _relay(child: subprocess.Popen[bytes], log: Path, console: Console) -> None:
    """The child's own output, to the log and above the progress display."""
    assert child.stdout is not None
    with log.open("ab") as file:
        for line in child.stdout:
            file.write(line)
            file.flush()
            console.print(Text.from_ansi(line.decode(errors="replace").rstrip("\n")), soft_wrap=True)


class _Plain:
    """A line now and then, for logs and pipes."""

    def __init__(self, console: Console, world_size: int) -> None:
        self.console, self.world_size = console, world_size
        self.num_steps = 0
        self.rows: deque[Row] = deque(maxlen=RECENT)
        self._shown_at = time.monotonic()

    def __enter__(self) -> "_Plain":
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass

    def add(self, row: Row, num_steps: int) -> None:
        """Take in a step's line."""
        self.rows.append(row)
        self.num_steps = num_steps

    def figures(self) -> str:
        """Loss, step time, throughput and data share of the last steps, as one line."""
        step_ms = [row["step_ms"] for row in self.rows]
        total_ms = sum(step_ms)
        samples = sum(row["samples"] for row in self.rows) * self.world_size
        data_ms = sum(row["data_ms"] or 0.0 for row in self.rows)
        loss = self.rows[-1]["loss"]
        return (
            f"loss {'-' if loss is None else format(loss, '.4f')}  step {statistics.median(step_ms):.1f} ms  "
            f"{1e3 * samples / total_ms:,.0f} samples/s  data wait {100 * data_ms / total_ms:.0f} %"
        )

    def show(self) -> None:
        """Say where the run is, if it is time to."""
        if not self.rows or time.monotonic() - self._shown_at < PLAIN_EVERY_S:
            return
        self._shown_at = time.monotonic()
        left_s = (self.num_steps - self.rows[-1]["step"] - 1) * statistics.fmean(r["step_ms"] for r in self.rows) / 1e3
        done = self.rows[-1]["step"] + 1
        self.console.print(f"step {done}/{self.num_steps}  {self.figures()}  ETA {left_s:.0f} s", highlight=False)

    def evaluated(self, row: Row) -> None:
        """Say what an evaluation found."""
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in row["metrics"].items() if value is not None)
        where = f"step {row['step'] + 1}  epoch {row['epoch']}"
        self.console.print(f"{where}  {metrics}  ({row['num_samples']:,} samples)", highlight=False)


class _Live(_Plain):
    """A bar that is redrawn, for terminals."""

    def __init__(self, console: Console, world_size: int) -> None:
        super().__init__(console, world_size)
        columns: tuple[Any, ...] = (TextColumn("step {task.completed}/{task.total}"), BarColumn(bar_width=20))
        columns += (TextColumn("{task.description}"), TextColumn("ETA"), TimeRemainingColumn())
        self._progress = Progress(*columns, console=console, transient=True)

    def __enter__(self) -> "_Live":
        self._progress.start()
        self._task = self._progress.add_task("starting", total=None)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._progress.stop()

    def show(self) -> None:
        """Redraw with the newest figures."""
        if self.rows:
            done = self.rows[-1]["step"] + 1
            self._progress.update(self._task, total=self.num_steps, completed=done, description=self.figures())
