"""The launching process: composes a config, checks it, starts one fresh child for each job, and closes its record."""

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from runner import record
from runner.check import check, check_batch, settle
from runner.errors import EXIT_CODES, BadInput, Interrupted
from runner.explain import explain, is_config_error
from runner.machine import accelerators, cores_granted, environment
from runner.trackers import Tracker
from runner.utilisation import UtilisationSampler
from runner.watch import watch

HERE = Path(__file__).resolve().parent
SAMPLE_PERIOD_S = 0.5
SWEEP_GRACE_S = 20.0  # for a child to write its record after a signal

_exit_codes: list[int] = []  # of this process's jobs, in order
_sweep_directory: list[Path] = []


def main(arguments: Sequence[str], *, conf: Path) -> int:
    """Run what the arguments say, one job or a sweep.

    Returns:
        The exit code (see errors.EXIT_CODES; a sweep's is 1 if any job failed).
    """
    _register_resolvers()
    sys.path.insert(0, os.getcwd())
    sys.argv = ["runner", *arguments, *_agreed_directory(arguments)]
    # Hydra prints and exits with 1 by itself unless told to let its errors through.
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    os.environ["HYDRA_FULL_ERROR"] = "1"
    signal.signal(signal.SIGTERM, _stop)
    try:
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(_compose_and_run)()
    except KeyboardInterrupt:
        _exit_codes.append(130)
    except Interrupted as stop:
        _exit_codes.append(128 + stop.signal_number)
    except Exception as error:
        if wants_traceback or not (isinstance(error, BadInput) or is_config_error(error)):
            raise
        print(error if isinstance(error, BadInput) else explain(error), file=sys.stderr)
        _exit_codes.append(EXIT_CODES["bad_input"])
    return _close_sweep() if _sweep_directory else (_exit_codes or [0])[-1]


def _compose_and_run(cfg: DictConfig) -> float | None:
    """One job; for a Hydra sweeper it returns the median step time in ms."""
    state = HydraConfig.get()
    directory = Path(state.runtime.output_dir)
    is_sweep = state.mode == RunMode.MULTIRUN
    if is_sweep and not _sweep_directory:
        _sweep_directory.append(Path(state.sweep.dir).absolute())
    job = _Job(cfg, directory, state)
    try:
        job.prepare()
    except Exception as error:
        if not (isinstance(error, BadInput) or is_config_error(error)):
            raise
        if not is_sweep:
            _discard(directory)
            raise
        job.refuse(str(error) if isinstance(error, BadInput) else explain(error))
        return None
    _exit_codes.append(job.run())
    return job.summary["speed"]["step_ms"]["median"]


class _Job:
    """One job, from its composed config to its closed record."""

    def __init__(self, cfg: DictConfig, directory: Path, state: Any) -> None:
        self.cfg, self.directory, self.state = cfg, directory, state
        self.started_at, self.started_time = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%S%z")
        self.console = Console()
        self.summary: record.Summary = {}
        self.rank = int(os.environ.get("RANK", 0))

    def prepare(self) -> None:
        """Check the config, settle what is ``auto``, and begin the record.

        Raises:
            BadInput: a config that cannot run; nothing has been started.
        """
        _couple_length(self.cfg, self.state.overrides.task)
        config = _plain(self.cfg)
        check(config)
        for key, value in _settled_by_launcher(config, settle(config)).items():
            OmegaConf.update(self.cfg, key, value)
        self.config = _plain(self.cfg)
        self.world_size = int(os.environ.get("WORLD_SIZE", self.config["parallel"].get("num_ranks", 1)))
        self.batch = check_batch(self.config, world_size=self.world_size)
        self.tracker: Tracker = hydra.utils.instantiate(self.cfg.tracker)
        if self.rank == 0:
            self._start_record(self._levers())

    def _start_record(self, levers: Mapping[str, Any]) -> None:
        run = {
            "id": "-".join(self.directory.absolute().parts[-2:]),
            "directory": str(self.directory.absolute()),
            "command": " ".join(["runner", *self.state.overrides.task]),
            "overrides": list(self.state.overrides.task),
            "sweep": _sweep_directory[0].name if _sweep_directory else None,
            "started_at": self.started_time,
            **_git(),
        }
        self.summary = record.start(
            self.directory, config=_plain(self.cfg, hide_environment=True), levers=levers, run=run,
            environment=environment(),
        )  # fmt: skip

    def refuse(self, reason: str) -> None:
        """Record a sweep's job that cannot run."""
        if not (self.directory / record.SUMMARY).exists():
            self.config, self.world_size, self.batch = OmegaConf.to_container(self.cfg), 1, None  # type: ignore[assignment]
            self._start_record({"overrides": " ".join(self.state.overrides.task)})
        now = time.monotonic()
        record.summarise(
            self.directory, status="failed", reason=reason, started_at=self.started_at, ended_at=now, utilisation={}
        )
        self.console.print(f"job {self.directory.name}: {reason}", style="red", markup=False)
        _exit_codes.append(EXIT_CODES["bad_input"])

    def run(self) -> int:
        """Start the child, follow it, close the record, and show it; returns the exit code."""
        if self.rank:  # under torchrun, rank 0's launching process keeps the record
            return self._follow_quietly()
        where = self.tracker.start(
            directory=self.directory,
            run=self.summary["run"],
            levers=self.summary["levers"],
            config=self.summary["config"],
        )
        for line in filter(None, (f"recording in {_short(self.directory)}", where)):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)
        from runner.diagnose import diagnose
        from runner.report import panel

        code, utilisation = self._follow()
        status, reason, exit_code = self._ending(code)
        self.summary = record.summarise(
            self.directory, status=status, reason=reason, started_at=self.started_at, ended_at=time.monotonic(),
            utilisation=utilisation,
        )  # fmt: skip
        self.summary["diagnosis"] = diagnose(self.summary)
        record.write_json(self.directory / record.SUMMARY, self.summary)
        self.console.print(panel(self.summary, self.directory))
        closing = self.tracker.finish(self.summary)
        if closing:
            self.console.print(closing, markup=False, highlight=False, soft_wrap=True)
        if exit_code >= 128:
            raise Interrupted(exit_code - 128)
        return exit_code

    def _follow(self) -> tuple[int, Mapping[str, Any]]:
        child = self._start_child(stdout=subprocess.PIPE)
        devices = [device.uuid or device.index for device in accelerators()][: self.world_size]
        if self.config["parallel"].get("device") == "cpu":
            devices = []
        sampler = UtilisationSampler(
            pid=child.pid, period_s=SAMPLE_PERIOD_S, device_indices=devices, cores_granted=cores_granted()
        )
        with sampler:
            try:
                code = watch(
                    child, self.directory, tracker=self.tracker, world_size=self.world_size, console=self.console
                )
            except (KeyboardInterrupt, Interrupted) as stop:
                number = stop.signal_number if isinstance(stop, Interrupted) else signal.SIGINT
                code = _end(child, number)
        totals = self._totals()
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
            return abs(_end(child, stop.signal_number if isinstance(stop, Interrupted) else signal.SIGINT))

    def _start_child(self, *, stdout: int | None) -> subprocess.Popen[bytes]:
        """One fresh process whose whole environment is settled before it imports torch."""
        command = [sys.executable, "-u", "-m", "runner.worker", str(self.directory.absolute())]
        return subprocess.Popen(
            command, env=_environment(self.config), stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.STDOUT if stdout else None, start_new_session=True,
        )  # fmt: skip

    def _totals(self) -> dict[str, Any]:
        try:
            return dict(record.read_json(self.directory / "rank.0.json"))
        except (OSError, ValueError):
            return {}

    def _ending(self, code: int) -> tuple[str, str | None, int]:
        """Status, reason and exit code, from the child's own words where it left some."""
        if code == 0:
            return "ok", None, 0
        path = self.directory / "error.json"
        if path.exists():
            words = record.read_json(path)
            path.unlink()
            return words["status"], words["reason"], words["exit_code"]
        if code < 0:
            hint = "; most often the kernel, out of memory" if code == -signal.SIGKILL else ""
            return "failed", f"the job's process was killed by signal {-code}{hint}", EXIT_CODES["failed"]
        return "failed", f"the job's process ended with exit code {code}; run.log may say why", EXIT_CODES["failed"]

    def _levers(self) -> dict[str, Any]:
        """The composed values that decide speed, flat and dotted, as they became."""
        choices = self.state.runtime.choices
        groups = (
            "task",
            "data",
            "model",
            "optimizer",
            "schedule",
            "precision",
            "batch",
            "compile",
            "parallel",
            "memory",
        )
        levers: dict[str, Any] = {group: choices[group] for group in groups if group in choices}
        for group in ("data", "parallel", "memory", "compile"):
            levers |= {f"{group}.{key}": value for key, value in _flat(self.config[group]) if "_target_" not in key}
        levers |= {f"optimizer.{key}": value for key, value in _flat(self.config["optimizer"]) if key[0] != "_"}
        levers |= {"world_size": self.world_size, "seed": self.config["seed"], "lr": self.config["optimizer"].get("lr")}
        if self.batch is not None:
            sizes = ("global_batch_size", "micro_batch_size", "accumulation_steps", "lr_scaling")
            levers |= {key: getattr(self.batch, key) for key in sizes}
            levers["lr"] = self.batch.scale_lr(self.config["optimizer"]["lr"])
        return levers


def _couple_length(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Of steps and epochs, the one stated on the command line makes the other null."""
    stated = {override.lstrip("+").split("=", 1)[0] for override in overrides} & {"steps", "epochs"}
    if len(stated) == 1 and cfg.steps is not None and cfg.epochs is not None:
        cfg["epochs" if "steps" in stated else "steps"] = None


def _settled_by_launcher(config: dict[str, Any], settled: dict[str, Any]) -> dict[str, Any]:
    """Where a launcher has started the ranks, their number is its, not ours."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return settled
    if "num_ranks" not in config["parallel"]:
        raise BadInput(
            f"parallel: {os.environ['WORLD_SIZE']} ranks were started from outside and this strategy uses one; "
            "parallel=ddp would use them"
        )
    settled["parallel.num_ranks"] = int(local)
    if "parallel.num_threads" in settled:
        settled["parallel.num_threads"] = max(1, cores_granted() // int(local))
    return settled


def _plain(cfg: DictConfig, *, hide_environment: bool = False) -> dict[str, Any]:
    """The resolved config as plain containers; with ``hide_environment``, ``${oc.env:X}`` stays as it is written."""
    from omegaconf.resolvers import oc

    if hide_environment:
        OmegaConf.register_new_resolver(
            "oc.env", lambda *names: f"${{oc.env:{','.join(map(str, names))}}}", replace=True
        )
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "experiment"}


def _environment(config: Mapping[str, Any]) -> dict[str, str]:
    """The child's environment: threads, allocator, hash seed, and the working directory's own modules."""
    child = dict(os.environ)
    child["OMP_NUM_THREADS"] = child["MKL_NUM_THREADS"] = str(config["parallel"].get("num_threads", 1))
    # Idle OpenMP threads that spin take the core that another rank or a loader worker needs.
    child.setdefault("OMP_WAIT_POLICY", "passive")
    child["PYTHONHASHSEED"] = str(config["seed"] % 2**32)
    child["PYTHONPATH"] = os.pathsep.join(filter(None, (os.getcwd(), os.environ.get("PYTHONPATH"))))
    memory = config["memory"]
    allocator = [
        f"{key}:{memory[key]}" for key in ("expandable_segments", "max_split_size_mb") if memory.get(key) is not None
    ]
    if allocator:
        child["PYTORCH_ALLOC_CONF"] = ",".join(allocator)
        # Read first where it is set, so that an old one in the shell would win over the config.
        child.pop("PYTORCH_CUDA_ALLOC_CONF", None)
    return child


def _end(child: subprocess.Popen[bytes], number: int) -> int:
    """Pass a signal on and give the child time to write; a second Ctrl-C ends it at once."""
    child.send_signal(number)
    try:
        return child.wait(timeout=SWEEP_GRACE_S)
    except (KeyboardInterrupt, Interrupted, subprocess.TimeoutExpired):
        child.kill()
        child.wait()
        return 128 + number


def _stop(signal_number: int, frame: FrameType | None) -> None:
    del frame
    raise Interrupted(signal_number)


def _close_sweep() -> int:
    """The sweep's table and exit code."""
    from runner.compare import find_runs, table

    directory = _sweep_directory[0]
    Console().print(table(find_runs(directory), directory))
    interrupted = [code for code in _exit_codes if code >= 128]
    return interrupted[-1] if interrupted else int(any(_exit_codes))


def _register_resolvers() -> None:
    # Two runs started in the same second differ by this token; cached, so that one config sees one token.
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("package", lambda path: str(HERE / path), replace=True)


def _agreed_directory(arguments: Sequence[str]) -> list[str]:
    """Under torchrun each rank composes for itself: the directory's name comes from what all of them are given."""
    if int(os.environ.get("WORLD_SIZE", 1)) == 1 or any(word.startswith("hydra.run.dir=") for word in arguments):
        return []
    shared = [os.environ.get(key, "") for key in ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_PORT")]
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        shared.append(str(os.getppid()))  # one launcher on one machine: its ranks share it, and no later run does
    return [f"hydra.run.dir=outputs/launched/{'-'.join(part for part in shared if part and part != 'none')}"]


def _discard(directory: Path) -> None:
    """Take back the directory that Hydra made for a run that never began."""
    for path in sorted(directory.glob(".hydra/*")):
        path.unlink()
    for folder in (directory / ".hydra", directory, directory.parent):
        try:
            folder.rmdir()
        except OSError:
            return


def _flat(node: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(node, Mapping):
        return [(prefix, node)]
    return [item for key, value in node.items() for item in _flat(value, f"{prefix}.{key}" if prefix else str(key))]


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
        return str(path.absolute().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
