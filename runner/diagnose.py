"""Where a run's time went, told from its summary alone; and how a summary that somebody else wrote is read safely."""

import argparse
import json
import math
import re
import sys
import unicodedata
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from runner import record
from runner.errors import BadInput

MIN_STEPS = 30
CONTENDED_PCT = 10.0
INPUT_PCT = 40.0
INPUT_MENTION_PCT = 15.0
OPTIMIZER_PCT = 35.0
COMPUTE_PCT = 60.0
WALL_PCT = 50.0
MEMORY_PCT = 92.0

_MAX_DEPTH = 20
_MAX_TEXT = 2000
_MAX_BYTES = 64 * 2**20
_MAX_NUMBER = 1e15
_ESCAPE = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]")

# Verdict (None: a remark only), sentence, overrides.
_Finding = tuple[str | None, str, list[str]]


def load(path: Path) -> dict[str, Any]:
    """The summary of a run's directory or of a summary file, as `clean` leaves it.

    Raises:
        BadInput: there is none, or it cannot be read as one.
    """
    file = path / record.SUMMARY if path.is_dir() else path
    try:
        # A pipe would wait for ever, and a file of this size is no summary.
        if file.exists() and (not file.is_file() or file.stat().st_size > _MAX_BYTES):
            raise ValueError("not an ordinary file of a summary's size")
        cleaned = clean(record.read_summary(file))
    except FileNotFoundError:
        raise BadInput(f"{text(str(path))}: no run here; name a run's directory or its {record.SUMMARY}") from None
    except (OSError, ValueError, RecursionError) as error:
        why = "it is nested too deep" if isinstance(error, RecursionError) else text(str(error))
        raise BadInput(f"{text(str(file))}: cannot be read as a run's summary ({why})") from None
    return dict(cleaned)


def clean(value: Any, *, depth: int = 0) -> Any:
    """A record's value made harmless: no control characters, no NaN or infinity, no endless nesting."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):  # Python refuses to print one of 5,000 digits
        return value if abs(value) < 10**30 else None
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if depth >= _MAX_DEPTH:
        return None
    if isinstance(value, Mapping):
        return {text(key): clean(item, depth=depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [clean(item, depth=depth + 1) for item in value]
    return text(value)


def text(value: Any) -> str:
    """A value as one line that no terminal obeys: without escape sequences, control and direction characters."""
    line = " ".join(_ESCAPE.sub("", str(value)[: 4 * _MAX_TEXT]).split())
    kept = "".join(character for character in line if unicodedata.category(character) not in ("Cc", "Cf", "Cs"))
    return kept if len(kept) <= _MAX_TEXT else f"{kept[:_MAX_TEXT]} ..."


def number(content: Any, *keys: str) -> float | None:
    """The figure under the keys; None where there is none or it is not a finite number of sane size."""
    for key in keys:
        content = content.get(key) if isinstance(content, Mapping) else None
    if isinstance(content, bool) or not isinstance(content, int | float):
        return None
    return float(content) if abs(content) <= _MAX_NUMBER else None  # false for NaN, and no overflow for huge integers


def section(content: Any, key: str) -> Mapping[str, Any]:
    """The mapping under a key; empty where there is none."""
    found = content.get(key) if isinstance(content, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def sentences(content: Any, key: str) -> list[str]:
    """The list of strings under a key; what is not a string is left out."""
    found = content.get(key) if isinstance(content, Mapping) else None
    return [text(item) for item in found if isinstance(item, str)] if isinstance(found, list) else []


def shares_pct(summary: Mapping[str, Any]) -> dict[str, float]:
    """Per cent of a step by phase, over the phases that were measured; {} where none was."""
    phases = section(summary, "phases_ms")
    known = {phase: ms for phase in record.PHASES if (ms := number(phases, phase)) is not None and ms >= 0}
    total = sum(known.values())
    return {phase: 100 * ms / total for phase, ms in known.items()} if total else {}


def diagnose(summary: Mapping[str, Any]) -> dict[str, Any]:
    """What bounded a run.

    Returns:
        verdict (input, optimizer, recompile, evaluation, logging, compute, mixed, unknown); confidence (likely,
        contended, unknown); evidence: sentences with the figures; next: overrides that may help, none of them tested.
    """
    summary = clean(summary)
    steps = number(summary, "speed", "steps") or 0
    shares = shares_pct(summary)
    memory = _memory(summary)
    if steps < MIN_STEPS:
        missing = math.ceil(MIN_STEPS - steps)
        few = f"{max(0, steps):,.0f} steps were measured; {missing:,} more are needed to tell where the time goes"
        return _verdict("unknown", "unknown", [(None, few, []), *memory])
    if not shares:
        return _verdict("unknown", "unknown", [(None, "no phase of a step was measured", []), *memory])
    findings = [*_input(summary, shares), *_optimizer(summary, shares), *_recompile(summary), *_wall(summary), *memory]
    if not any(verdict for verdict, _, _ in findings):
        findings = [_compute_or_mixed(summary, shares), *findings]
    confidence, delay = "likely", number(summary, "speed", "delay_pct")
    if delay is not None and delay >= CONTENDED_PCT:
        confidence = "contended"
        waited = f"the run waited {delay:.0f} % of its step time for a core: busy neighbours, or too many threads"
        findings.append((None, waited, []))
    return _verdict(next(verdict for verdict, _, _ in findings if verdict), confidence, findings)


def _verdict(verdict: str, confidence: str, findings: Sequence[_Finding]) -> dict[str, Any]:
    # The verdict's own evidence and cure come first.
    ordered = sorted(findings, key=lambda finding: finding[0] != verdict)
    overrides = [override for _, _, cures in ordered for override in cures]
    evidence = [sentence for _, sentence, _ in ordered]
    return {"verdict": verdict, "confidence": confidence, "evidence": evidence, "next": list(dict.fromkeys(overrides))}


def _input(summary: Any, shares: Mapping[str, float]) -> list[_Finding]:
    share = shares.get("data", 0.0)
    if share < INPUT_MENTION_PCT:
        return []
    sentence = f"waiting for data took {share:.0f} % of a step"
    if share <= INPUT_PCT:
        return [(None, sentence, [])]
    workers = number(section(summary, "levers"), "data.loader.num_workers")
    cures = [] if workers is None or workers < 0 else [f"data.loader.num_workers={workers + 2:.0f}"]
    return [("input", sentence, cures)]


def _optimizer(summary: Any, shares: Mapping[str, float]) -> list[_Finding]:
    share = shares.get("optimizer", 0.0)
    if share < OPTIMIZER_PCT:
        return []
    is_fused = section(summary, "levers").get("optimizer.fused") is True
    return [("optimizer", f"the optimizer took {share:.0f} % of a step", [] if is_fused else ["optimizer.fused=true"])]


def _recompile(summary: Any) -> list[_Finding]:
    reasons = sentences(section(summary, "compile"), "recompile_reasons")
    if not reasons:
        return []
    is_dynamic = section(summary, "levers").get("compile.dynamic") is True
    sentence = f"the compiler ran again for {len(reasons)} reason{'s' * (len(reasons) > 1)}; the first: {reasons[0]}"
    return [("recompile", sentence, [] if is_dynamic else ["compile=dynamic"])]


def _wall(summary: Any) -> list[_Finding]:
    wall = section(summary, "wall_s")
    total = number(wall, "total")
    spent = {key: max(0.0, number(wall, key) or 0.0) for key in ("evaluation", "checkpoint", "logging")}
    if not total or total <= 0 or sum(spent.values()) <= total * WALL_PCT / 100:
        return []
    shown = ", ".join(f"{key} {seconds:,.1f} s" for key, seconds in spent.items() if seconds)
    verdict = "logging" if spent["logging"] > spent["evaluation"] + spent["checkpoint"] else "evaluation"
    pct = 100 * sum(spent.values()) / total
    return [(verdict, f"{pct:.0f} % of the run's {total:,.1f} s went beside the steps: {shown}", [])]


def _memory(summary: Any) -> list[_Finding]:
    reserved = number(summary, "memory", "peak_reserved_mib")
    total = number(summary, "memory", "device_total_mib")
    if reserved is not None and total is not None and total > 0 and 100 * reserved / total >= MEMORY_PCT:
        pct = 100 * reserved / total
        sentence = f"{pct:.0f} % of the device's memory was reserved ({reserved:,.0f} of {total:,.0f} MiB)"
    elif summary.get("status") == "oom":
        sentence = "the run ended out of memory"
    else:
        return []
    return [(None, sentence, _smaller_batch(summary))]


def _smaller_batch(summary: Any) -> list[str]:
    """Half the micro-batch at the same global batch: two sizes are stated, the third is derived."""
    levers = section(summary, "levers")
    size = number(levers, "micro_batch_size")
    if size is None or size < 2:
        return []
    override = f"batch.micro_batch_size={size // 2:.0f} batch.accumulation_steps=null"
    total = number(levers, "global_batch_size")
    is_stated = number(section(section(summary, "config"), "batch"), "global_batch_size") is not None
    return [override if is_stated or total is None else f"batch.global_batch_size={total:.0f} {override}"]


def _compute_or_mixed(summary: Any, shares: Mapping[str, float]) -> _Finding:
    share = sum(shares.get(phase, 0.0) for phase in ("forward", "backward", "compute"))
    sentence = f"forward and backward took {share:.0f} % of a step"
    if share < COMPUTE_PCT:
        return "mixed", f"{sentence}, and no other phase stands out", []
    levers, environment = section(summary, "levers"), section(summary, "environment")
    is_native = True in (levers.get("has_native_bf16"), environment.get("has_native_bf16"))
    cures = ["precision=bf16"] if levers.get("precision") == "fp32" and is_native else []
    return "compute", sentence, cures + ["compile=default"] * (levers.get("compile") == "eager")


def never_crash_on_print() -> None:
    """A terminal that cannot show a character of a record shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, ValueError):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]


def main(arguments: Sequence[str]) -> int:
    """`diagnose RUN`; returns the exit code."""
    parser = argparse.ArgumentParser(prog="runner diagnose", description="Where a run's time went.")
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's directory or its summary.json")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    never_crash_on_print()
    try:
        found = diagnose(load(parser.parse_args(arguments).run))
    except BadInput as error:
        print(error, file=sys.stderr)
        return 2
    except SystemExit as stop:
        return int(stop.code or 0)
    if "--json" in arguments:
        print(json.dumps(found, indent=1))
        return 0
    print(f"verdict: {found['verdict']} (confidence: {found['confidence']})")
    for sentence in found["evidence"]:
        print(f"  {sentence}")
    for override in found["next"]:
        print(f"try next (untested): {override}")
    return 0
