"""One job from its checked config to its closed record: the child's environment, its start, and its end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.utils import instantiate
from rich.console import Console

from runner import record
from runner.check import Config
from runner.diagnose import diagnose
from runner.errors import EXIT_CODES, Interrupted
from runner.machine import accelerators, cores_granted, environment, has_native_bf16
from runner.report import panel
from runner.trackers import Tracker
from runner.utilisation import UtilisationSampler
from runner.watch import watch

SAMPLE_PERIOD_S = 0.5
GRACE_S = 20.0  # for a child to write its record after a signal


class Job:
    """One job of this launching process.

    Args:
        config: resolved, as plain containers; what the child's environment is made of.
        recorded_config: the same with environment values left as they are written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        config: Config,
        recorded_config: Config,
        levers: Config,
        overrides: Sequence[str],
        sweep: str | None,
        world_size: int,
    ) -> None:
        self.directory, self.config, self.world_size = directory.absolute(), config, world_size
        self.started_at = time.monotonic()
        self.console = Console()
        self.keeps_record = int(os.environ.get("RANK", "0")) == 0
        self.tracker: Tracker = instantiate(config["tracker"])
        self.summary: record.Summary = {}
        if self.keeps_record:
            self.summary = record.start(
                self.directory,
                config=recorded_config,
                levers=levers,
                run=_facts(self.directory, overrides, sweep),
                environment=environment() | {"has_native_bf16": _has_native_bf16(config)},
            )

    @property
    def median_step_ms(self) -> float | None:
        """The run's headline figure, once it has run."""
        return self.summary["speed"]["step_ms"]["median"] if self.keeps_record else None

    def run(self) -> int:
        """Start the child, follow it, close the record and show it.

        Returns:
            The exit code.

        Raises:
            Interrupted: the run was stopped by a signal; its record is closed.
        """
        if not self.keeps_record:  # started by torchrun: rank 0's launching process keeps the record
            return self._follow_quietly()
        where = self.tracker.start(
            directory=self.directory,
            run=self.summary["run"],
            levers=self.summary["levers"],
            config=self.summary["config"],
        )
        for line in filter(None, (f"recording in {_short(self.directory)}", where)):
            self._say(line)
        code, utilisation = self._follow()
        status, reason, exit_code = self._ending(code)
        self.summary = record.summarise(
            self.directory,
            status=status,
            reason=reason,
            started_at=self.started_at,
            ended_at=time.monotonic(),
            utilisation=utilisation,
        )
        self.summary["diagnosis"] = diagnose(self.summary)
        record.write_json(self.directory / record.SUMMARY, self.summary)
        if exit_code == EXIT_CODES["bad_input"]:
            print(reason, file=sys.stderr)
        else:
            self.console.print(panel(self.summary, self.directory))
        closing = self.tracker.finish(self.summary)
        if closing:
            self._say(closing)
        if exit_code >= 128:
            raise Interrupted(exit_code - 128)
        return exit_code

    def _say(self, line: str) -> None:
        self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def _follow(self) -> tuple[int, Mapping[str, Any]]:
        child = self._start_child(stdout=subprocess.PIPE)
        is_on_cpu = self.config["parallel"].get("device") == "cpu"
        devices = [] if is_on_cpu else [device.uuid or device.index for device in accelerators()][: self.world_size]
        sampler = UtilisationSampler(
            pid=child.pid, period_s=SAMPLE_PERIOD_S, device_indices=devices, cores_granted=cores_granted()
        )
        with sampler:
            try:
                code = watch(
                    child, self.directory, tracker=self.tracker, world_size=self.world_size, console=self.console
                )
            except (KeyboardInterrupt, Interrupted) as stop:
                code = _end(child, _signal_of(stop))
        try:
            totals = record.read_json(self.directory / "rank.0.json")
        except (OSError, ValueError):
            totals = {}
        return code, sampler.summary(begin=totals.get("first_step_at"), end=totals.get("last_step_at"))

    def _follow_quietly(self) -> int:
        for _ in range(600):
            if (self.directory / record.SUMMARY).exists():
                break
            time.sleep(0.1)
        child = self._start_child(stdout=None)
        try:
            return child.wait()
        except (KeyboardInterrupt, Interrupted) as stop:
            return _end(child, _signal_of(stop))

    def _start_child(self, *, stdout: int | None) -> subprocess.Popen[bytes]:
        """One fresh process whose whole environment is settled before it imports torch."""
        return subprocess.Popen(
            [sys.executable, "-u", "-c", "from runner.worker import entry; entry()", str(self.directory)],
            env=child_environment(self.config),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=subprocess.STDOUT if stdout else None,
            start_new_session=True,  # a Ctrl-C reaches it once, from here, not twice
        )

    def _ending(self, code: int) -> tuple[str, str | None, int]:
        """Status, reason and exit code, from the child's own words where it left some."""
        if code == 0:
            return "ok", None, 0
        path = self.directory / "error.json"
        if path.exists():
            words = record.read_json(path)
            path.unlink()
            return words["status"], words["reason"], words["exit_code"]
        if code > 128:
            return "interrupted", f"stopped by signal {code - 128}", code
        if code < 0:
            hint = "; most often the kernel, out of memory" if code == -signal.SIGKILL else ""
            return "failed", f"the job's process was killed by signal {-code}{hint}", EXIT_CODES["failed"]
        return "failed", f"the job's process ended with exit code {code}; run.log may say why", EXIT_CODES["failed"]


def refuse(directory: Path, overrides: Sequence[str], reason: str, *, levers: Config, sweep: str | None) -> None:
    """Record a sweep's job whose config cannot run, so that it is a row of the table."""
    now = time.monotonic()
    record.start(
        directory,
        config={},
        levers=levers,
        run=_facts(directory.absolute(), overrides, sweep),
        environment=environment(),
    )
    record.summarise(directory, status="failed", reason=reason, started_at=now, ended_at=now, utilisation={})
    Console(stderr=True).print(f"job {directory.name}: {reason}", markup=False, highlight=False, soft_wrap=True)


def child_environment(config: Config) -> dict[str, str]:
    """The child's environment: threads, allocator, hash seed, and the working directory's own modules."""
    child = dict(os.environ)
    child["OMP_NUM_THREADS"] = child["MKL_NUM_THREADS"] = str(config["parallel"].get("num_threads", 1))
    # Idle OpenMP threads that spin take the core that another rank or a loader worker needs.
    child.setdefault("OMP_WAIT_POLICY", "passive")
    child["PYTHONHASHSEED"] = str(config["seed"] % 2**32)
    child["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    settings = ("expandable_segments", "max_split_size_mb")
    allocator = [f"{key}:{config['memory'][key]}" for key in settings if config["memory"].get(key) is not None]
    if allocator:
        child["PYTORCH_ALLOC_CONF"] = ",".join(allocator)
        # Read first where it is set, so that an old one in the shell would win over the config.
        child.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    return child


def _signal_of(stop: BaseException) -> int:
    return stop.signal_number if isinstance(stop, Interrupted) else int(signal.SIGINT)


def _end(child: subprocess.Popen[bytes], number: int) -> int:
    """Pass a signal on and give the child time to write; a second Ctrl-C ends it at once."""
    child.send_signal(number)
    try:
        return child.wait(timeout=GRACE_S)
    except (KeyboardInterrupt, Interrupted, subprocess.TimeoutExpired):
        child.kill()
        child.wait()
        return 128 + number


def _has_native_bf16(config: Config) -> bool | None:
    devices = [] if config["parallel"].get("device") == "cpu" else accelerators()
    return devices[0].has_native_bf16 if devices else has_native_bf16()


def _facts(directory: Path, overrides: Sequence[str], sweep: str | None) -> dict[str, Any]:
    return {
        "id": "-".join(directory.parts[-2:]),
        "directory": str(directory),
        "command": " ".join(["runner", *overrides]),
        "overrides": list(overrides),
        "sweep": sweep,
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **_git(),
    }


def _git() -> dict[str, Any]:
    """The commit of the working directory, where it is one."""

    def ask(*words: str) -> str | None:
        try:
            answer = subprocess.run(["git", *words], capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return answer.stdout.strip() if answer.returncode == 0 else None

    changes = ask("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": ask("rev-parse", "HEAD"), "git_dirty": None if changes is None else bool(changes)}


def _short(path: Path) -> str:
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
