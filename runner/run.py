"""The launching process: composes a config, checks it, settles what is ``auto``, and hands it over as a job."""

import os
import secrets
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from runner.check import Config, check, check_batch, settle
from runner.errors import EXIT_CODES, BadInput, Interrupted
from runner.explain import explain, is_config_error
from runner.machine import cores_granted

_HERE = Path(__file__).resolve().parent
_LEVER_GROUPS = (
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

_exit_codes: list[int] = []  # of this process's jobs, in order
_refusals: list[str] = []  # kept here and said at the end: Hydra adds lines of its own to what is raised through it
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
        _refuse_null_groups(arguments, conf)
        hydra.main(version_base="1.3", config_path=str(conf), config_name="config")(_compose_and_run)()
        for refusal in _refusals:
            print(refusal, file=sys.stderr)
    except KeyboardInterrupt:
        _exit_codes.append(130)
    except Interrupted as stop:
        _exit_codes.append(128 + stop.signal_number)
    except Exception as error:
        if wants_traceback or not (isinstance(error, BadInput | OSError) or is_config_error(error)):
            raise
        print(explain(error) if is_config_error(error) else error, file=sys.stderr)
        _exit_codes.append(EXIT_CODES["bad_input"])
    return _close_sweep() if _sweep_directory else (_exit_codes or [0])[-1]


def _compose_and_run(cfg: DictConfig) -> float | None:
    """One job, under Hydra; for a sweeper it returns the median step time in ms."""
    state = HydraConfig.get()
    directory = Path(state.runtime.output_dir)
    is_sweep = state.mode == RunMode.MULTIRUN
    if is_sweep and not _sweep_directory:
        _sweep_directory.append(Path(state.sweep.dir).absolute())
    # As they were typed: iterating them would put the values of environment variables in their place.
    overrides = [str(word) for word in OmegaConf.to_container(state.overrides.task, resolve=False) or []]
    sweep = _sweep_directory[0].name if is_sweep else None
    try:
        prepared = _prepare(cfg, overrides, state.runtime.choices)
    except Exception as error:
        if not (isinstance(error, BadInput) or is_config_error(error)):
            raise
        reason = explain(error) if is_config_error(error) else str(error)
        _exit_codes.append(EXIT_CODES["bad_input"])
        if is_sweep:
            from runner.job import refuse

            groups = {group: state.runtime.choices[group] for group in _LEVER_GROUPS if group in state.runtime.choices}
            refuse(directory, overrides, reason, levers=groups, sweep=sweep)
        else:
            _discard(directory)
            _refusals.append(reason)
        return None
    # Imported when a job really starts: a config error should not wait for the terminal's and W&B's modules.
    from runner.job import Job

    job = Job(directory, overrides=overrides, sweep=sweep, **prepared)
    _exit_codes.append(job.run())
    return job.median_step_ms


def _prepare(cfg: DictConfig, overrides: Sequence[str], choices: Mapping[str, str]) -> dict[str, Any]:
    """Check a composed config, settle what is ``auto``, and derive what the record keeps of it.

    Raises:
        BadInput, or an error of Hydra or OmegaConf: a config that cannot run; nothing has been started.
    """
    _couple_length(cfg, overrides)
    config = _plain(cfg)
    check(config)
    for key, value in _settled_by_launcher(config, settle(config)).items():
        OmegaConf.update(cfg, key, value)
    config = _plain(cfg)
    world_size = int(os.environ.get("WORLD_SIZE") or config["parallel"].get("num_ranks", 1))
    recorded = _plain(cfg, hide_environment=True)
    levers = _levers(config, recorded, choices, world_size=world_size)
    return {"config": config, "recorded_config": recorded, "levers": levers, "world_size": world_size}


def _levers(config: Config, recorded: Config, choices: Mapping[str, str], *, world_size: int) -> Config:
    """The composed values that decide speed and outcome, flat and dotted, as they became.

    They are part of the record, so an environment variable stands in them as it is written.
    """
    levers: Config = {group: choices[group] for group in _LEVER_GROUPS if group in choices}
    for group in ("data", "model", "optimizer", "schedule", "precision", "compile", "parallel", "memory"):
        levers |= {f"{group}.{key}": value for key, value in _flat(recorded[group]) if "_partial_" not in key}
    levers |= {key: config[key] for key in ("seed", "steps", "epochs", "max_grad_norm")}
    levers |= {"world_size": world_size, "lr": config["optimizer"].get("lr")}
    batch = check_batch(config, world_size=world_size)
    if batch is not None:
        sizes = ("global_batch_size", "micro_batch_size", "accumulation_steps", "lr_scaling")
        levers |= {key: getattr(batch, key) for key in sizes}
        levers["lr"] = batch.scale_lr(config["optimizer"]["lr"])
    return levers


def _refuse_null_groups(arguments: Sequence[str], conf: Path) -> None:
    """Hydra answers GROUP=null with an assertion of its own; no group but experiment can be left out."""
    for word in arguments:
        group, is_stated, option = word.partition("=")
        if is_stated and option == "null" and group != "experiment" and (conf / group).is_dir():
            options = sorted(path.stem for path in (conf / group).glob("*.yaml"))
            raise BadInput(f"{word}: a run needs one; choose one of {', '.join(options)}")


def _couple_length(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Of steps and epochs, the one stated on the command line makes the other null."""
    stated = {override.lstrip("+").split("=", 1)[0] for override in overrides} & {"steps", "epochs"}
    if len(stated) == 1 and cfg.steps is not None and cfg.epochs is not None:
        cfg["epochs" if "steps" in stated else "steps"] = None


def _settled_by_launcher(config: Config, settled: Config) -> Config:
    """Where a launcher has started the ranks, their number is its, not ours."""
    local = os.environ.get("LOCAL_WORLD_SIZE")
    if local is None or int(os.environ.get("WORLD_SIZE", "1")) == 1:
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


def _plain(cfg: DictConfig, *, hide_environment: bool = False) -> Config:
    """The resolved config as plain containers; with ``hide_environment``, ``${oc.env:X}`` stays as it is written."""
    from omegaconf.resolvers import oc

    if hide_environment:
        as_written = lambda *names: f"${{oc.env:{','.join(map(str, names))}}}"  # noqa: E731
        OmegaConf.register_new_resolver("oc.env", as_written, replace=True)
    try:
        plain = OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True)
    finally:
        OmegaConf.register_new_resolver("oc.env", oc.env, replace=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "experiment"}


def _stop(signal_number: int, frame: FrameType | None) -> None:
    del frame
    raise Interrupted(signal_number)


def _close_sweep() -> int:
    """The sweep's table and exit code."""
    from runner.compare import console, find_runs, table

    directory = _sweep_directory[0]
    console().print(table(find_runs(directory), directory))
    interrupted = [code for code in _exit_codes if code >= 128]
    return interrupted[-1] if interrupted else int(any(_exit_codes))


def _register_resolvers() -> None:
    # Two runs started in the same second differ by this token; cached, so that one config sees one token.
    OmegaConf.register_new_resolver("uid", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("package", lambda path: str(_HERE / path), replace=True)


def _agreed_directory(arguments: Sequence[str]) -> list[str]:
    """Under torchrun each rank composes for itself: the directory's name comes from what all of them are given."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or any(word.startswith("hydra.run.dir=") for word in arguments):
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
