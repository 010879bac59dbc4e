"""The recorder: a line a step in steps.<rank>.jsonl, written between steps and never waiting for the device."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from pydantic import PositiveFloat, PositiveInt
from torch import Tensor

from runner.errors import Diverged
from runner.measure.clock import Clock
from runner.measure.host import CollectorClock, MemoryClock, ThreadClock
from runner.record import PHASES, JsonLines, write_json

_MIB = 2**20


@dataclass(kw_only=True)
class Step:
    """What one step tells of itself while it runs; device values stay on the device until the recorder reads them."""

    row: dict[str, Any]
    clock: Clock
    shapes: set[tuple[int, ...]]  # of every input so far, shared by the run's steps
    stamps: list[tuple[str, Any]] = field(default_factory=list)
    loss: Tensor | None = None  # summed over this rank's samples
    grad_norm: Tensor | None = None

    def mark(self, phase: str) -> None:
        """The time since the last mark belongs to ``phase``, one of `runner.record.PHASES`."""
        self.stamps.append((phase, self.clock.now()))

    def note(self, **columns: Any) -> None:
        """Set columns of this step's line, host values only."""
        self.row.update(columns)

    def count(self, batch: Any) -> Any:
        """Add a micro-batch's samples and its worker's times to this step; returns it.

        A shape that no step before had is noted: such steps compile, tune or allocate, and are slow for that.
        """
        shape = tuple(batch.inputs.shape)
        if shape not in self.shapes:
            self.shapes.add(shape)
            self.row["shape_is_new"] = True
        self.row["samples"] += batch.num_samples
        self.row["fetch_ms"] += batch.fetch_ms
        self.row["fetch_cpu_ms"] += batch.fetch_cpu_ms
        return batch


class Recorder:
    """Collects a line a step and writes it when the device has come by, at most ``flush_s`` later.

    Inside a step it takes stamps; it reads them, and the device's values, between steps. A device value is read on a
    stream of its own, which waits for nothing but that value.

    Args:
        directory: where steps.<rank>.jsonl, rank.<rank>.json and evaluations.jsonl (rank 0) go.
        log_every: steps between writes at most; also how late a non-finite loss is noticed.
        flush_s: seconds between writes at most.
        clock: makes the clock for a device.
        compile_ms, num_graphs: read the compiler's counters, where something compiles.
    """

    def __init__(
        self,
        directory: Path,
        *,
        rank: int,
        world_size: int,
        device: torch.device,
        log_every: PositiveInt,
        flush_s: PositiveFloat,
        clock: Callable[[torch.device], Clock],
        compiler: Any,
    ) -> None:
        self.directory, self.rank, self.device, self.compiler = directory, rank, device, compiler
        self.log_every, self.flush_s, self.clock = log_every, flush_s, clock(device)
        self.totals: dict[str, Any] = {
            "rank": rank,
            "world_size": world_size,
            "device": str(device),
            "status": "running",
        }
        self.wall_s = {"steps": 0.0, "evaluation": 0.0, "checkpoint": 0.0, "logging": 0.0}
        self._pending: deque[tuple[Step, Any, Any]] = deque()
        self._shapes: set[tuple[int, ...]] = set()
        self._last_flush = time.monotonic()
        self._side_stream = None if device.type == "cpu" else torch.Stream(device)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._collector = stack.enter_context(CollectorClock())
            self._thread, self._memory = ThreadClock(), MemoryClock()
            stack.callback(self._thread.close)
            stack.callback(self._memory.close)
            self._lines = stack.enter_context(JsonLines(self.directory / f"steps.{self.rank}.jsonl"))
            if self.rank == 0:
                self._evaluations = stack.enter_context(JsonLines(self.directory / "evaluations.jsonl"))
            self._opened = stack.pop_all()
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        try:
            self._flush(wait=exc_type is None)
        finally:
            self._opened.close()
            self.totals["status"] = "ok" if exc_type is None else "failed"
            self._write_totals()

    def begin(self, **facts: Any) -> None:
        """Say what is known before the first step (num_steps, num_parameters ...), for the display and the summary."""
        self.totals |= facts
        self._write_totals()

    @contextmanager
    def step(self, index: int, *, epoch: int, is_warmup: bool) -> Iterator[Step]:
        """Hold around one optimizer step."""
        if index == 0 or "first_step_at" not in self.totals:
            self.totals["first_step_at"] = time.monotonic()
        step = Step(row=_row(index, epoch, is_warmup), clock=self.clock, shapes=self._shapes)
        cpu, delay = self._thread.read_ms()
        collected, compiled = self._collector.ms, self.compiler.ms
        begin, host_begin = self.clock.now(), time.perf_counter()
        yield step
        end, host_end = self.clock.now(), time.perf_counter()
        cpu_end, delay_end = self._thread.read_ms()
        step.note(
            cpu_ms=cpu_end - cpu,
            delay_ms=None if delay is None or delay_end is None else delay_end - delay,
            gc_ms=self._collector.ms - collected,
            compile_ms=self.compiler.ms - compiled,
            num_graphs=self.compiler.num_graphs,
            rss_mib=self._memory.rss_mib(),
            allocated_mib=None if self.device.type == "cpu" else torch.accelerator.memory_allocated() / _MIB,
        )
        self.wall_s["steps"] += host_end - host_begin
        self._pending.append((step, begin, end))
        if len(self._pending) >= self.log_every or time.monotonic() - self._last_flush >= self.flush_s:
            self._flush(wait=False)

    @contextmanager
    def apart(self, what: str) -> Iterator[None]:
        """Hold around work between steps: ``evaluation`` or ``checkpoint``; it counts for the run, not for a step."""
        begin = time.perf_counter()
        yield
        self.wall_s[what] += time.perf_counter() - begin

    def evaluation(self, *, step: int, epoch: int, metrics: dict[str, float], num_samples: int, eval_s: float) -> None:
        """Record one evaluation, the same on every rank; rank 0 writes it."""
        self.totals["evaluation"] = {"metrics": metrics, "num_samples": num_samples}
        if self.rank == 0:
            self._evaluations.write(
                [{"step": step, "epoch": epoch, "metrics": metrics, "num_samples": num_samples, "eval_s": eval_s}]
            )

    def _flush(self, *, wait: bool) -> None:
        """Write the lines of steps that the device has finished; with ``wait`` all of them.

        Raises:
            Diverged: one of them has a non-finite loss.
        """
        begin = time.perf_counter()
        done: list[tuple[Step, Any, Any]] = []
        while self._pending and (wait or self.clock.is_past(self._pending[0][2])):
            done.append(self._pending.popleft())
        values = self._read([step for step, _, _ in done])
        rows = [self._finish(*item, *value) for item, value in zip(done, values, strict=True)]
        self._lines.write(rows)
        self._last_flush = time.monotonic()
        self.wall_s["logging"] += time.perf_counter() - begin
        for row in rows:
            if row["loss"] is not None and not row["loss"] - row["loss"] == 0:  # inf and nan fail this
                raise Diverged(f"the loss of step {row['step']} is {row['loss']}")

    def _read(self, steps: list[Step]) -> list[tuple[float | None, float | None]]:
        """Loss and gradient norm of each step, in one copy."""
        tensors = [value for step in steps for value in (step.loss, step.grad_norm) if value is not None]
        if not tensors:
            return [(None, None)] * len(steps)
        if self._side_stream is None:
            values = iter(torch.stack([tensor.float() for tensor in tensors]).tolist())
        else:
            with self._side_stream:
                values = iter(torch.stack([tensor.float() for tensor in tensors]).tolist())
        return [
            (None if step.loss is None else next(values), None if step.grad_norm is None else next(values))
            for step in steps
        ]

    def _finish(self, step: Step, begin: Any, end: Any, loss_sum: float | None, grad_norm: float | None) -> dict:
        row = step.row
        last = begin
        for phase, stamp in step.stamps:
            row[f"{phase}_ms"] = (row[f"{phase}_ms"] or 0.0) + self.clock.elapsed_ms(last, stamp)
            last = stamp
        row["step_ms"] = self.clock.elapsed_ms(begin, end)
        row["other_ms"] = self.clock.elapsed_ms(last, end)
        if loss_sum is not None and row["samples"]:
            row["loss"] = loss_sum / row["samples"]
        row["grad_norm"] = grad_norm
        return row

    def _write_totals(self) -> None:
        memory = {"peak_rss_mib": MemoryClock.peak_rss_mib()}
        if self.device.type != "cpu":
            stats = torch.accelerator.memory_stats()
            memory |= {
                "peak_allocated_mib": torch.accelerator.max_memory_allocated() / _MIB,
                "peak_reserved_mib": torch.accelerator.max_memory_reserved() / _MIB,
                "device_total_mib": torch.accelerator.get_memory_info()[1] / _MIB,
                "allocator_retries": stats.get("num_alloc_retries"),
            }
        facts = {
            "memory": memory,
            "wall_s": self.wall_s,
            "last_step_at": time.monotonic(),
            "compile": self.compiler.report(),
        }
        write_json(self.directory / f"rank.{self.rank}.json", self.totals | facts)


def _row(index: int, epoch: int, is_warmup: bool) -> dict[str, Any]:
    """A line with every column, in order; null is "not measured"."""
    row: dict[str, Any] = {"step": index, "epoch": epoch, "is_warmup": is_warmup, "samples": 0, "tokens": None}
    row |= dict.fromkeys(("loss", "lr", "grad_norm", "loss_scale"))
    row |= {"skipped": False, "step_ms": None, "delay_ms": None, "cpu_ms": None}
    row |= {f"{phase}_ms": None for phase in PHASES}
    row |= {"gc_ms": None, "compile_ms": 0.0, "num_graphs": None, "shape_is_new": False}
    return row | {"allocated_mib": None, "rss_mib": None, "fetch_ms": 0.0, "fetch_cpu_ms": 0.0}
