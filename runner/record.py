"""The record of a run: its files and keys, written so that a kill at any moment leaves them readable."""

import json
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

SCHEMA = 1
SUMMARY = "summary.json"
EVALUATIONS = "evaluations.jsonl"
# A step's time is cut by these; what no mark claims is `other`.
PHASES = ("data", "transfer", "forward", "backward", "compute", "optimizer", "communication", "other")
STATUSES = ("running", "ok", "failed", "oom", "diverged", "interrupted")
NUM_BLOCKS = 10
# Student's t, two-sided 95 %, by degrees of freedom: few blocks make the normal's 1.96 too narrow.
_T95 = (math.nan, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)

Row = dict[str, Any]
Summary = dict[str, Any]


class JsonLines:
    """A file of one JSON object a line, each write whole lines handed to the system at once."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("ab", buffering=0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._file.close()

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append the rows; after this a kill of the process loses none of them."""
        self._file.write("".join(json.dumps(_finite(row)) + "\n" for row in rows).encode())


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a whole file or none: under another name first, then renamed."""
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_text(json.dumps(_finite(content), indent=1) + "\n")
    unfinished.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """A file written by `write_json`.

    Raises:
        OSError, ValueError: there is none, or it is not one.
    """
    content = json.loads(path.read_text())
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold one JSON object")
    return content


def read_lines(path: Path) -> list[Row]:
    """The rows of a JSON-lines file; a last line cut short by a kill is left out, a missing file has none."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(errors="replace").split("\n"):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def read_summary(directory: Path) -> Summary:
    """A run's summary.

    Raises:
        FileNotFoundError, ValueError: there is none, or it is not one.
    """
    path = directory / SUMMARY if directory.is_dir() else directory
    summary = read_json(path)
    if "schema" not in summary or "status" not in summary:
        raise ValueError(f"{path} is not a run's summary")
    return summary


def start(
    directory: Path,
    *,
    config: Mapping[str, Any],
    levers: Mapping[str, Any],
    run: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> Summary:
    """Write the summary of a run that has not begun: every key is there, and what is not measured yet is null."""
    summary = {
        "schema": SCHEMA,
        "status": "running",
        "reason": None,
        "config": config,
        "run": dict(run) | {"wall_s": None},
        "levers": dict(levers),
        **_measured([], {}),
        "wall_s": dict.fromkeys((*_WALL, "other", "total")),
        "blocks": [],
        "utilisation": dict.fromkeys(_UTILISATION),
        "quality": dict.fromkeys(("loss", "skipped_steps", "loss_scale")),
        "compile": {},
        "remarks": [],
        "ranks": [],
        "diagnosis": {"verdict": None, "confidence": None, "evidence": [], "next": []},
        "environment": dict(environment),
    }
    write_json(directory / SUMMARY, summary)
    return summary


def summarise(
    directory: Path,
    *,
    status: str,
    reason: str | None,
    started_at: float,
    ended_at: float,
    utilisation: Mapping[str, Any],
) -> Summary:
    """Close a run's summary from what its ranks wrote, and write it; works on whatever a crash has left.

    Times at the top are rank 0's, samples are summed over the ranks, memory is the largest rank's.

    Args:
        started_at, ended_at: of the launching process, on the monotonic clock that all processes share.
    """
    summary = read_summary(directory)
    totals = [read_json(path) for path in sorted(directory.glob("rank.*.json"))]
    totals.sort(key=lambda rank: rank["rank"])
    steps = {rank["rank"]: read_lines(directory / f"steps.{rank['rank']}.jsonl") for rank in totals}
    first = totals[0] if totals else {}
    rows = steps.get(first.get("rank"), [])
    summary |= {"status": status, "reason": reason}
    summary["run"] |= {"wall_s": ended_at - started_at}
    summary |= _measured(_over_ranks(rows, steps), first)
    summary["ranks"] = [
        {"rank": rank["rank"], "device": rank["device"], **_measured(steps[rank["rank"]], rank)} for rank in totals
    ]
    summary["memory"] |= _largest([rank["memory"] for rank in totals])
    summary["blocks"] = blocks([row["step_ms"] for row in measured_rows(rows)])
    summary["wall_s"] = _wall(first, rows, started_at, ended_at)
    summary["utilisation"] |= {key: utilisation[key] for key in _UTILISATION if key in utilisation}
    summary["quality"] |= _quality(_over_ranks(rows, steps), first)
    summary |= {"compile": first.get("compile", {}), "remarks": first.get("remarks", [])}
    summary["environment"] |= first.get("environment", {})
    summary["levers"] |= first.get("levers", {})
    write_json(directory / SUMMARY, summary)
    return summary


def measured_rows(rows: Sequence[Row]) -> list[Row]:
    """The steps that figures are made of: not warm-up, and nothing was compiled in them."""
    return [row for row in rows if not row["is_warmup"] and not row["compile_ms"]]


def blocks(step_ms: Sequence[float]) -> list[float]:
    """Mean step time over up to ten consecutive blocks of equal size; a last part that fills none is left out."""
    size = max(1, len(step_ms) // NUM_BLOCKS)
    return [statistics.fmean(step_ms[i : i + size]) for i in range(0, len(step_ms) - size + 1, size)][:NUM_BLOCKS]


_WALL = ("startup", "compile", "steps", "evaluation", "checkpoint", "logging")
_UTILISATION = ("gpu_util_pct", "device_busy_pct", "cpu_util_pct", "mfu_pct", "power_w", "throttled")
_MEMORY = ("peak_allocated_mib", "peak_reserved_mib", "device_total_mib", "peak_rss_mib", "allocator_retries")


def _measured(rows: Sequence[Row], totals: Mapping[str, Any]) -> dict[str, Any]:
    """The blocks `speed`, `phases_ms` and `memory` for one rank, or for the run by rows that cover all ranks."""
    kept = measured_rows(rows)
    step_ms = [row["step_ms"] for row in kept]
    total_s = sum(step_ms) / 1e3
    wall_s = totals.get("wall_s", {})
    speed = {
        "warmup_steps": sum(row["is_warmup"] for row in rows),
        "steps": len(kept),
        "step_ms": _spread(step_ms),
        "samples_per_s": sum(row["samples"] for row in kept) / total_s if total_s else None,
        "tokens_per_s": _sum_known((row["tokens"] for row in kept), total_s),
        "first_step_ms": rows[0]["step_ms"] if rows else None,
        "steady_from_step": steady_from([row["step_ms"] for row in rows]),
        "delay_pct": _sum_known((row["delay_ms"] for row in kept), sum(step_ms) / 100),
        "compile_s": sum(row["compile_ms"] for row in rows) / 1e3 if rows else None,
        "eval_s": wall_s.get("evaluation"),
        "checkpoint_s": wall_s.get("checkpoint"),
    }
    phases = {phase: _mean_known([row[f"{phase}_ms"] for row in kept]) for phase in PHASES}
    memory = dict.fromkeys(_MEMORY) | {key: totals.get("memory", {}).get(key) for key in _MEMORY}
    return {"speed": speed, "phases_ms": phases, "memory": memory}


def _over_ranks(rows: Sequence[Row], steps: Mapping[int, Sequence[Row]]) -> list[Row]:
    """Rank 0's rows with samples, tokens and loss taken over all ranks that recorded the step."""
    if len(steps) < 2:
        return list(rows)
    by_step: dict[int, list[Row]] = {}
    for others in steps.values():
        for row in others:
            by_step.setdefault(row["step"], []).append(row)
    merged = []
    for row in rows:
        peers = by_step[row["step"]]
        samples = sum(peer["samples"] for peer in peers)
        losses = [peer["loss"] * peer["samples"] for peer in peers if peer["loss"] is not None]
        tokens = [peer["tokens"] for peer in peers if peer["tokens"] is not None]
        loss = sum(losses) / samples if losses and samples else None
        merged.append(row | {"samples": samples, "loss": loss, "tokens": sum(tokens) if tokens else None})
    return merged


def _spread(values: Sequence[float]) -> dict[str, Any]:
    if not values:
        return dict.fromkeys(("median", "mean", "p05", "p95", "ci95"))
    ordered = sorted(values)
    means = blocks(values)
    mean, ci95 = statistics.fmean(values), None
    if len(means) > 1:  # over blocks: neighbouring steps share their luck, so single steps would claim too much
        half = _T95[len(means) - 1] * statistics.stdev(means) / math.sqrt(len(means))
        ci95 = [mean - half, mean + half]
    return {
        "median": statistics.median(ordered),
        "mean": mean,
        "p05": ordered[int(0.05 * (len(ordered) - 1))],
        "p95": ordered[math.ceil(0.95 * (len(ordered) - 1))],
        "ci95": ci95,
    }


def steady_from(step_ms: Sequence[float]) -> int | None:
    """The first step from which ten steps' median is within 5 % of the last half's; None: not within the first 30 %."""
    if len(step_ms) < 20:
        return None
    target = statistics.median(step_ms[len(step_ms) // 2 :])
    for begin in range(int(0.3 * len(step_ms)) + 1):
        if abs(statistics.median(step_ms[begin : begin + 10]) - target) <= 0.05 * target:
            return begin
    return None


def _wall(first: Mapping[str, Any], rows: Sequence[Row], started_at: float, ended_at: float) -> dict[str, Any]:
    total = ended_at - started_at
    wall: dict[str, Any] = dict.fromkeys(_WALL)
    if "first_step_at" in first:
        spent = first["wall_s"]
        compile_s = sum(row["compile_ms"] for row in rows) / 1e3
        wall |= {"startup": first["first_step_at"] - started_at, "compile": compile_s}
        wall |= {key: spent[key] for key in ("evaluation", "checkpoint", "logging")}
        wall["steps"] = max(0.0, spent["steps"] - compile_s)
    return wall | {"other": total - sum(value for value in wall.values() if value is not None), "total": total}


def _quality(rows: Sequence[Row], first: Mapping[str, Any]) -> dict[str, Any]:
    losses = [row["loss"] for row in rows if row["loss"] is not None]
    evaluation = first.get("evaluation", {})
    scales = [row["loss_scale"] for row in rows if row["loss_scale"] is not None]
    quality = {
        "loss": statistics.fmean(losses[-20:]) if losses else None,
        "skipped_steps": sum(row["skipped"] for row in rows) if rows else None,
        "loss_scale": scales[-1] if scales else None,
    }
    if evaluation:
        quality |= evaluation["metrics"] | {"val/num_samples": evaluation["num_samples"]}
    return quality


def _largest(memories: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    known = {key: [memory[key] for memory in memories if memory.get(key) is not None] for key in _MEMORY}
    return {key: max(values) for key, values in known.items() if values}


def _mean_known(values: Sequence[float | None]) -> float | None:
    """The mean over all steps, where a step without the phase spent nothing in it; None where no step has it."""
    known = [value for value in values if value is not None]
    return sum(known) / len(values) if known else None


def _sum_known(values: Iterable[float | None], divisor: float) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / divisor if known and divisor else None


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null, and the run's reason says what they were."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
