"""Runs side by side: what differs among them, and what it did."""

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from runner import record
from runner.diagnose import clean, load, never_crash_on_print, number, section, shares_pct, text
from runner.errors import BadInput

MAX_LEVERS = 8
PIPED_WIDTH = 200

Runs = Sequence[tuple[Path, Mapping[str, Any]]]


def find_runs(root: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Every run at or below a directory with its summary, in numeric order of the directories' names.

    How many summaries could not be read is said on stderr.
    """
    # os.walk follows no links, so a loop of them ends, and passes over what it may not read.
    folders = [Path(folder) for folder, _, files in os.walk(root) if record.SUMMARY in files]
    found, unreadable = [], []
    for folder in sorted(folders, key=_in_numeric_order):
        try:
            found.append((folder, load(folder)))
        except BadInput as error:
            unreadable.append(str(error))
    if unreadable:
        print(f"{len(unreadable)} left out; the first: {unreadable[0]}", file=sys.stderr)
    return found


def table(runs: Runs, root: Path) -> Table:
    """One row a run, failed ones too; a column for each lever that differs, `MAX_LEVERS` at most."""
    rows = _rows(runs, root)
    names = differing_levers(runs)
    shown = names[:MAX_LEVERS]
    is_any_failed = any(row["reason"] for row in rows)
    grid = Table(caption=Text(_caption(names)) if len(names) > 1 else None, caption_justify="left")
    for name in ("run", "status", *shown):
        grid.add_column(Text(name), overflow="fold")
    for name in ("step ms", "samples/s", "data %", "peak MiB", "quality"):
        grid.add_column(Text(name), justify="right")
    if is_any_failed:
        grid.add_column(Text("reason"), overflow="fold")
    for row in rows:
        cells = [row["run"], row["status"], *(show(row["levers"].get(name)) for name in shown)]
        cells += [_figure(row["step_ms"], 2), _figure(row["samples_per_s"], 0), _figure(row["data_pct"], 0)]
        cells += [_figure(row["peak_mib"], 0), _quality(row)]
        cells += [row["reason"] or ""] if is_any_failed else []
        grid.add_row(*map(Text, cells))
    return grid


# These follow from other levers: rank count and sizes derived from it.
_FOLLOWS = {
    "parallel": ("world_size", "micro_batch_size", "accumulation_steps"),
    "world_size": ("micro_batch_size", "accumulation_steps", "parallel.num_ranks", "parallel.num_threads"),
    "batch": ("global_batch_size", "micro_batch_size", "accumulation_steps", "lr_scaling", "lr"),
    "optimizer.lr": ("lr",),
}


def differing_levers(runs: Runs) -> list[str]:
    """The levers that do not have one value in all runs, less those that follow from another that differs.

    A group that differs (parallel=single, parallel=ddp) stands for the keys below it. A run that records no lever
    tells nothing.
    """
    names = _all_differing(runs)
    implied = {name for name in names for group in names if name.startswith(f"{group}.")}
    implied |= {follower for name in names for follower in _FOLLOWS.get(name, ())}
    return [name for name in names if name not in implied]


def _all_differing(runs: Runs) -> list[str]:
    values = [levers for _, summary in runs if (levers := section(clean(summary), "levers"))]
    names = dict.fromkeys(name for levers in values for name in levers)
    return [name for name in names if len({show(levers.get(name)) for levers in values}) > 1]


def show(value: Any) -> str:
    """A lever's value as it is typed on the command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return text(value)


def _rows(runs: Runs, root: Path) -> list[dict[str, Any]]:
    rows = []
    for directory, raw in runs:
        summary = clean(raw)
        memory = section(summary, "memory")
        allocated = number(memory, "peak_allocated_mib")
        status = show(summary.get("status"))
        row = {
            "run": text(_name(directory, root)),
            "status": status,
            "reason": text(summary["reason"]) if status != "ok" and summary.get("reason") is not None else None,
            "levers": section(summary, "levers"),
            "step_ms": number(section(summary, "speed"), "step_ms", "median"),
            "samples_per_s": number(summary, "speed", "samples_per_s"),
            "data_pct": shares_pct(summary).get("data"),
            "peak_mib": number(memory, "peak_rss_mib") if allocated is None else allocated,
            "accuracy": number(section(summary, "quality"), "val/accuracy"),
            "loss": number(section(summary, "quality"), "loss"),
        }
        rows.append(row)
    return rows


def _name(directory: Path, root: Path) -> str:
    try:
        name = str(directory.relative_to(root))
    except ValueError:
        return str(directory)
    return directory.name if name == "." else name


def _caption(names: Sequence[str]) -> str:
    caption = f"The runs differ in {len(names)} levers: no figure here is the effect of one of them alone."
    hidden = names[MAX_LEVERS:]
    return f"{caption} Not shown: {', '.join(hidden)}." if hidden else caption


def _figure(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:,.{digits}f}"


def _quality(row: Mapping[str, Any]) -> str:
    if row["accuracy"] is not None:
        return f"accuracy {100 * row['accuracy']:.1f} %"
    return "-" if row["loss"] is None else f"loss {row['loss']:.4g}"


def _in_numeric_order(path: Path) -> list[list[tuple[int, int, str]]]:
    """Runs 2 and 10 of a sweep in that order; a digits' length is bounded, for Python refuses to read endless ones."""
    return [
        [
            (1, 0, piece) if not piece.isdecimal() else (0, int(piece), piece)
            for piece in re.findall(r"\d{1,18}|\D+", part)
        ]
        for part in path.parts
    ]


def gather(paths: Sequence[Path]) -> tuple[list[tuple[Path, dict[str, Any]]], Path]:
    """The runs at or below the paths, each once, and the directory that their names are relative to.

    Raises:
        BadInput: a path holds none.
    """
    runs: dict[Path, tuple[Path, dict[str, Any]]] = {}
    for path in paths:
        directory = path.parent if path.name == record.SUMMARY else path
        found = find_runs(directory)
        if not found:
            raise BadInput(f"{text(path)}: no run here or below; outputs/ is where runs are recorded")
        runs |= {folder.resolve(): (folder, summary) for folder, summary in found}
        root = directory
    return list(runs.values()), root if len(paths) == 1 else Path()


def console() -> Console:
    """Where tables go: a pipe has no width, so it gets one that cuts little."""
    return Console() if sys.stdout.isatty() or "COLUMNS" in os.environ else Console(width=PIPED_WIDTH)


def main(arguments: Sequence[str]) -> int:
    """`compare DIR...`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runner compare", description="Runs side by side.")
    parser.add_argument("directories", type=Path, nargs="+", metavar="DIR", help="runs, or directories that hold them")
    parser.add_argument("--json", action="store_true", help="print a list of one JSON object a run, with all levers")
    never_crash_on_print()
    try:
        stated = parser.parse_args(arguments)
        runs, root = gather(stated.directories)
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    if stated.json:
        print(json.dumps(_rows(runs, root), indent=1))
    else:
        console().print(table(runs, root))
    return 0
