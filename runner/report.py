"""The panel of one run: its summary as a person reads it."""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from runner import record
from runner.compare import console, gather, show, table
from runner.diagnose import clean, load, never_crash_on_print, number, section, sentences, shares_pct, text
from runner.errors import BadInput

BAR_WIDTH = 30
NOT_MEASURED = "not measured"
_STYLES = {"ok": "green", "running": "yellow", "interrupted": "yellow"}
_UTILISATION = {
    "gpu_util_pct": ("GPU", "%"),
    "device_busy_pct": ("device busy", "%"),
    "cpu_util_pct": ("CPU", "%"),
    "mfu_pct": ("MFU", "%"),
    "power_w": ("power", "W"),
}


def panel(summary: Mapping[str, Any], directory: Path) -> RenderableType:
    """The panel at a run's end; figures that a record lacks are said to be not measured.

    Every string of the record goes through `Text`, so that no markup in it is obeyed.
    """
    summary = clean(summary)
    status = show(summary.get("status"))
    style = _STYLES.get(status, "red")
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    reason = summary.get("reason")
    grid.add_row("status", Text(status if reason is None else f"{status}: {text(reason)}", style=style))
    for name, content in _lines(summary):
        grid.add_row(name, Text(content) if isinstance(content, str) else content)
    grid.add_row("files", Text(text(_shorter(directory))))
    ranks = _ranks(summary)
    body = Group(grid, ranks) if ranks is not None else grid
    title = summary["run"].get("id") if isinstance(summary.get("run"), Mapping) else None
    return Panel(body, title=Text("run" if title is None else text(title)), border_style=style, title_align="left")


def _lines(summary: Any) -> Iterator[tuple[str, RenderableType]]:
    yield "speed", "\n".join(_speed(summary))
    phases = _phases(summary)
    yield "a step's time", phases if phases is not None else NOT_MEASURED
    yield "memory", _memory(section(summary, "memory"))
    yield "utilisation", _utilisation(section(summary, "utilisation"))
    yield "quality", _quality(section(summary, "quality"))
    yield "levers", _levers(section(summary, "levers"))
    remarks = sentences(summary, "remarks")
    if remarks:
        yield "remarks", "\n".join(remarks)
    diagnosis = section(summary, "diagnosis")
    if isinstance(diagnosis.get("verdict"), str):
        yield "diagnosis", "\n".join(_diagnosis(diagnosis))


def _speed(summary: Any) -> Iterator[str]:
    speed = section(summary, "speed")
    step_ms = section(speed, "step_ms")
    median, mean = number(step_ms, "median"), number(step_ms, "mean")
    ci95 = step_ms.get("ci95")
    low, high = (number({"": end}, "") for end in ci95) if isinstance(ci95, list) and len(ci95) == 2 else (None, None)
    interval = f" (95 % interval {low:,.2f} to {high:,.2f})" if low is not None and high is not None else ""
    median_shown, mean_shown = (_figure(value, "ms", 2) for value in (median, mean))
    if median is None and mean is None:
        yield f"step {NOT_MEASURED}"
    else:
        yield f"step {median_shown} median, {mean_shown} mean{interval}"
    rates = [(number(speed, f"{unit}_per_s"), unit) for unit in ("samples", "tokens")]
    shown = ", ".join(f"{rate:,.0f} {unit}/s" for rate, unit in rates if rate is not None)
    if shown:
        yield shown
    counts = (number(speed, "steps"), number(speed, "warmup_steps"))
    yield (
        ", ".join(
            f"{NOT_MEASURED if count is None else f'{count:,.0f}'} {what}"
            for count, what in zip(counts, ("steps measured", "warm-up steps left out"), strict=True)
            if count is not None
        )
        or "no step was measured"
    )
    first, compile_s = number(speed, "first_step_ms"), number(speed, "compile_s")
    if first is not None or compile_s is not None:
        yield f"first step {_figure(first, 'ms', 1)}, compilation {_figure(compile_s, 's', 1)}"


def _phases(summary: Any) -> Table | None:
    shares = shares_pct(summary)
    if not shares:
        return None
    grid = Table.grid(padding=(0, 2))
    for justify in ("left", "left", "right", "right"):
        grid.add_column(justify=justify, no_wrap=True)
    for phase, pct in shares.items():
        ms = number(section(summary, "phases_ms"), phase)
        grid.add_row(phase, ProgressBar(completed=pct, width=BAR_WIDTH), _figure(ms, "ms", 2), f"{pct:.1f} %")
    return grid


def _memory(memory: Mapping[str, Any]) -> str:
    names = {
        "peak_allocated_mib": "allocated",
        "peak_reserved_mib": "reserved",
        "device_total_mib": "on the device",
        "peak_rss_mib": "resident in the host's memory",
    }
    known = [f"{value:,.0f} MiB {name}" for key, name in names.items() if (value := number(memory, key)) is not None]
    retries = number(memory, "allocator_retries")
    known += [f"{retries:,.0f} allocator retries"] if retries else []
    return f"peak {', '.join(known)}" if known else NOT_MEASURED


def _utilisation(utilisation: Mapping[str, Any]) -> str:
    parts = []
    for key, (name, unit) in _UTILISATION.items():
        parts.append(f"{name} {_figure(number(utilisation, key), unit, 0)}")
    throttled = utilisation.get("throttled")
    if throttled not in (None, False, [], ""):
        parts.append("throttled" if throttled is True else f"throttled: {text(throttled)}")
    return ", ".join(parts)


def _quality(quality: Mapping[str, Any]) -> str:
    accuracy, num_samples = number(quality, "val/accuracy"), number(quality, "val/num_samples")
    parts = []
    if accuracy is not None:
        on = "validation samples" if num_samples is None else f"{num_samples:,.0f} validation samples"
        parts.append(f"accuracy {100 * accuracy:.1f} % on {on}")
    shown_elsewhere = ("val/accuracy", "val/num_samples", "loss", "skipped_steps", "loss_scale")
    for key in quality:
        value = number(quality, key)
        if key not in shown_elsewhere and value is not None:
            parts.append(f"{key} {value:.4g}")
    loss = number(quality, "loss")
    parts += [f"training loss {loss:.4g}"] if loss is not None else []
    skipped, scale = number(quality, "skipped_steps"), number(quality, "loss_scale")
    parts += [f"{skipped:,.0f} steps skipped"] if skipped else []
    parts += [f"loss scale {scale:g}"] if scale is not None else []
    return ", ".join(parts) or NOT_MEASURED


def _levers(levers: Mapping[str, Any]) -> str:
    keys = ("global_batch_size", "micro_batch_size", "accumulation_steps", "lr", "precision", "compile")
    parts = [f"{key}={show(levers[key])}" for key in keys if levers.get(key) is not None]
    if levers.get("parallel") is not None:
        parts.append(f"parallel={show(levers['parallel'])} x {show(levers.get('world_size'))}")
    device = levers.get("device", levers.get("parallel.device"))
    parts += [f"device={show(device)}"] if device is not None else []
    return " ".join(parts) or "not recorded"


def _diagnosis(diagnosis: Mapping[str, Any]) -> Iterator[str]:
    confidence = diagnosis.get("confidence")
    yield f"{diagnosis['verdict']}" + (f" (confidence: {text(confidence)})" if confidence is not None else "")
    yield from sentences(diagnosis, "evidence")
    for override in sentences(diagnosis, "next"):
        yield f"next, untested: {override}"


def _ranks(summary: Any) -> Table | None:
    found = summary.get("ranks")
    ranks = [rank for rank in found if isinstance(rank, Mapping)] if isinstance(found, list) else []
    if len(ranks) < 2:
        return None
    grid = Table()
    for name in ("rank", "device", "step", "samples/s", "data", "peak memory"):
        grid.add_column(name, justify="left" if name == "device" else "right")
    for rank in ranks:
        memory = section(rank, "memory")
        allocated = number(memory, "peak_allocated_mib")
        cells = (
            show(rank.get("rank")),
            show(rank.get("device")),
            _figure(number(section(rank, "speed"), "step_ms", "median"), "ms", 2),
            _figure(number(rank, "speed", "samples_per_s"), "", 0),
            _figure(shares_pct(rank).get("data"), "%", 0),
            _figure(number(memory, "peak_rss_mib") if allocated is None else allocated, "MiB", 0),
        )
        grid.add_row(*map(Text, cells))
    return grid


def _figure(value: float | None, unit: str, digits: int) -> str:
    return NOT_MEASURED if value is None else f"{value:,.{digits}f} {unit}".rstrip()


def _shorter(directory: Path) -> str:
    try:
        relative = str(directory.absolute().relative_to(Path.cwd()))
    except (ValueError, OSError):
        return str(directory)
    return min(relative, str(directory), key=len)


def main(arguments: Sequence[str]) -> int:
    """`report RUN...`: a panel a run, or a table for a directory that holds several; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runner report", description="The panel of a run, again.")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN", help="a run's directory, or its summary.json")
    never_crash_on_print()
    try:
        for path in parser.parse_args(arguments).runs:
            _print(path)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    return 0


def _print(path: Path) -> None:
    if not path.is_dir() or (path / record.SUMMARY).exists():
        console().print(panel(load(path), path if path.is_dir() else path.parent))
        return
    runs, root = gather([path])
    if len(runs) == 1:
        console().print(panel(runs[0][1], runs[0][0]))
    else:
        console().print(table(runs, root))
