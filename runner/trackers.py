"""Trackers: how a run's record reaches the place where people look at runs, never at the run's expense."""

import importlib
import math
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from pydantic import PositiveFloat

from runner import machine
from runner.errors import EXIT_CODES, BadInput
from runner.record import PHASES

Facts = Mapping[str, Any]


class Tracker:
    """The tracker that keeps nothing, and the contract of those that do.

    A tracker lives in the launching process and is fed with lines of the record as rank 0 writes them. Once started it
    raises nothing: what goes wrong is said once on stderr, and the run goes on without a tracker.
    """

    def start(self, *, directory: Path, run: Facts, levers: Facts, config: Facts) -> str | None:
        """Begin a run; returns one sentence for the terminal that says where it can be seen, or None.

        Args:
            directory: the run's; a tracker's own files go below it.
            run: as in the summary; its ``id``, and ``sweep`` (may be None or missing) for runs that belong together.
            levers, config: as in the summary.

        Raises:
            BadInput: what this tracker needs is not installed, or the environment asks it for what it cannot do.
        """

    def log_step(self, row: Facts) -> None:
        """Take a line of ``steps.0.jsonl``."""

    def log_evaluation(self, row: Facts) -> None:
        """Take a line of ``evaluations.jsonl``; may come late, after steps that followed it."""

    def finish(self, summary: Facts) -> str | None:
        """End the run with its final summary; returns one closing sentence, or None."""


_SECTIONS = ("speed", "phases_ms", "memory", "utilisation", "quality")  # of the summary, where its figures stand
_CHARTS = ("train", "val", "speed", "phases", "memory")
# What the environment may say, W&B's older and many-writer words included, and what it means for a single writer.
_MODES = {"online": "online", "run": "online", "shared": "online", "offline": "offline", "dryrun": "offline"}
_MODES |= {"disabled": "disabled"}


class Wandb(Tracker):
    """Weights & Biases: online where somebody is logged in and the server answers, else offline, for ``wandb sync``.

    Nothing is sent but the config, the levers and the record's figures: no code, package list, git state, host facts or
    console output.

    Args:
        project, entity, group, name, tags: as W&B has them; None: the default entity, the sweep, the run's id.
        mode: ``auto`` is online when logged in; the variable ``WANDB_MODE`` wins over all of them.
        init_timeout_s: seconds to wait for the server, then the run is offline.
        finish_timeout_s: seconds to wait for the last data to be sent, then it stays on disk.

    Raises:
        BadInput: W&B would refuse the project's name or a tag; an unknown mode; a time that is not positive.
    """

    def __init__(
        self,
        *,
        project: str,
        entity: str | None,
        group: str | None,
        name: str | None,
        tags: list[str],
        mode: Literal["auto", "online", "offline", "disabled"],
        init_timeout_s: PositiveFloat,
        finish_timeout_s: PositiveFloat,
    ) -> None:
        if not re.fullmatch(r"[^/\\#?%:]{1,128}", project):
            raise BadInput(rf"tracker.project={project!r}: must be 1 to 128 characters and none of / \ # ? % :")
        if mode not in ("auto", "online", "offline", "disabled"):
            raise BadInput(f"tracker.mode={mode}: must be auto, online, offline or disabled")
        for tag in tags:
            if not 1 <= len(tag) <= 64:
                raise BadInput(f"tracker.tags: {tag!r} must be 1 to 64 characters")
        for key, seconds in {"init_timeout_s": init_timeout_s, "finish_timeout_s": finish_timeout_s}.items():
            if not 0 < seconds < math.inf:
                raise BadInput(f"tracker.{key}={seconds}: must be a positive number of seconds")
        self.project, self.entity, self.group, self.name, self.tags = project, entity, group, name, list(tags)
        self.mode, self.init_timeout_s, self.finish_timeout_s = mode, init_timeout_s, finish_timeout_s
        self._run: Any = None
        self._is_logging = False

    def start(self, *, directory: Path, run: Facts, levers: Facts, config: Facts) -> str | None:
        """Begin a run, offline where online cannot be had; takes at most about the init timeout."""
        mode = self._asked_mode()
        if mode == "disabled":
            return None
        try:
            identity = self._identity(directory, run)
            identity["config"] = {"levers": dict(levers), "config": dict(config)}
            return self._open(_import_wandb(), mode, identity)
        except BadInput:
            raise
        except Exception as error:
            _warn(f"W&B is off for this run: {_in_one_line(error)}")
            return None

    def log_step(self, row: Facts) -> None:
        """Send a step's figures to the charts train, speed, phases and memory."""
        self._log(row, _step_charts)

    def log_evaluation(self, row: Facts) -> None:
        """Send an evaluation's metrics under their own names."""
        self._log(row, _evaluation_charts)

    def finish(self, summary: Facts) -> str | None:
        """Send the summary's figures and how the run ended; takes at most about the finish timeout."""
        run, self._run = self._run, None
        if run is None:
            return None
        try:
            try:
                run.summary.update(dict(_figures(summary)))
            finally:
                run.finish(exit_code=_exit_code(summary))
            return f"W&B upload: `wandb sync {_path(run)}`" if run.offline else None
        except TimeoutError:
            command = f"wandb sync {'' if run.offline else '--include-online '}{_path(run)}"
            return f"W&B did not take everything within {self.finish_timeout_s:g} s, the rest: `{command}`"
        except Exception as error:
            self._give_up(error)
            return None
        finally:
            self._is_logging = False
            _let_go(sys.modules["wandb"])  # finish leaves the file to be written later, and its process to the next run

    def _asked_mode(self) -> str:
        stated = os.environ.get("WANDB_MODE")
        if not stated:
            return self.mode
        if stated not in _MODES:
            raise BadInput(f"WANDB_MODE={stated} in the environment: must be online, offline or disabled")
        return _MODES[stated]

    def _identity(self, directory: Path, run: Facts) -> dict[str, Any]:
        return {
            "id": re.sub(r"[^A-Za-z0-9_.-]", "-", str(run["id"]))[-128:],  # the end is where long ids differ
            "name": self.name or os.environ.get("WANDB_NAME") or str(run["id"]),
            "group": self.group or run.get("sweep"),
            "dir": str(directory),
        }

    def _open(self, wandb: Any, mode: str, identity: Facts) -> str:
        reason = None
        if mode != "offline" and not machine.is_wandb_logged_in():
            mode, reason = "offline", "not logged in, see `wandb login`"
        if mode != "offline":
            try:
                self._begin(wandb, "online", identity)
                return f"W&B online: {self._run.url}"
            except Exception as error:
                reason = _in_one_line(error)
                _let_go(wandb)  # else the failed start still holds the run's id
        self._begin(wandb, "offline", identity)
        return f"W&B offline{f' ({reason})' if reason else ''}: `wandb sync {_path(self._run)}` uploads it"

    def _begin(self, wandb: Any, mode: str, identity: Facts) -> None:
        # Silent from here on, not from init's own setting on: else it prints first and, on a terminal, asks for a key.
        wandb.setup(wandb.Settings(silent=True))
        settings = wandb.Settings(**self._settings())
        named = {"project": self.project, "entity": self.entity, "tags": self.tags}
        self._run = wandb.init(mode=mode, settings=settings, **named, **identity)
        # W&B's own step must grow and drops what comes late; as an axis of its own `step` may come in any order.
        for chart in _CHARTS:
            is_outcome = chart in ("train", "val")  # the others' last values say nothing: the summary has their means
            self._run.define_metric(f"{chart}/*", step_metric="step", summary=None if is_outcome else "none")
        self._is_logging = True

    def _settings(self) -> dict[str, Any]:
        return {
            "disable_code": True,
            "disable_git": True,
            "disable_job_creation": True,
            "label_disable": True,
            "x_disable_meta": True,
            "x_disable_machine_info": True,
            "x_disable_stats": True,
            "save_code": False,
            "x_save_requirements": False,
            "host": "",
            "console": "off",
            "symlink": False,
            "reinit": "finish_previous",  # the default hands a sweep's second job the run of a first that broke off
            "init_timeout": self.init_timeout_s,
            "finish_timeout": self.finish_timeout_s,
            "finish_timeout_raises": True,
            "x_transaction_log_flush_interval": 2.0,  # 15 by default: what a killed run loses
        }

    def _log(self, row: Facts, charts: Callable[[Facts], Facts]) -> None:
        if not self._is_logging:
            return
        try:
            self._run.log({"step": row["step"], **_finite(charts(row))})
        except Exception as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if self._is_logging:
            self._is_logging = False
            _warn(f"W&B is off for the rest of this run: {_in_one_line(error)}")


def _step_charts(row: Facts) -> dict[str, Any]:
    return {f"{_chart(column)}/{column}": value for column, value in row.items() if column != "step"}


def _chart(column: str) -> str:
    if column.removesuffix("_ms") in PHASES:
        return "phases"
    if column.endswith("_ms"):
        return "speed"
    return "memory" if column.endswith("_mib") else "train"


def _evaluation_charts(row: Facts) -> dict[str, Any]:
    return {**row["metrics"], "val/num_samples": row["num_samples"], "val/eval_s": row["eval_s"]}


def _finite(values: Facts) -> dict[str, float]:
    return {key: value for key, value in values.items() if _is_number(value)}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _figures(summary: Facts) -> Iterator[tuple[str, float]]:
    """The summary's numbers by path: ``speed/step_ms/median``, ``quality/val/accuracy``."""
    pending: list[tuple[str, Any]] = [(section, summary.get(section)) for section in _SECTIONS]
    while pending:
        path, value = pending.pop()
        if isinstance(value, Mapping):
            pending += [(f"{path}/{key}", item) for key, item in value.items()]
        elif isinstance(value, Sequence) and not isinstance(value, str):
            pending += [(f"{path}/{index}", item) for index, item in enumerate(value)]
        elif _is_number(value):
            yield path, value


def _exit_code(summary: Facts) -> int:
    return EXIT_CODES.get(summary.get("status", "failed"), EXIT_CODES["failed"])


def _import_wandb() -> Any:
    # W&B posts reports of its own errors, offline too, unless told not to before it is imported.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    try:
        wandb = importlib.import_module("wandb")
    except ModuleNotFoundError as error:
        if error.name != "wandb":
            raise BadInput(f"tracker=wandb: W&B is installed without {error.name}: pip install wandb") from error
        wandb = None
    if not hasattr(wandb, "init"):  # a run's folder `wandb` in the working directory imports as an empty package
        raise BadInput("tracker=wandb: W&B is not installed: pip install wandb, or use tracker=none")
    return wandb


def _let_go(wandb: Any) -> None:
    """End W&B's process, which writes what it still has; as soon as its timeouts allow."""
    with suppress(Exception, SystemExit):  # it passes its process's exit code on as this one's
        wandb.teardown()


def _path(run: Any) -> str:
    return shlex.quote(str(Path(run.dir).parent))


def _in_one_line(error: Exception) -> str:
    words = " ".join(str(error).split())
    return f"{type(error).__name__}: {words[:200]}" if words else type(error).__name__


def _warn(sentence: str) -> None:
    print(sentence, file=sys.stderr)
