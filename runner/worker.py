"""A job's child process: it starts the ranks, and this is one rank's life from its first tensor to its last."""

import faulthandler
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from runner.builder import build, open_recorder
from runner.compile import is_compile_error
from runner.errors import BadInput, Interrupted, RankFailed, ending
from runner.loop import train
from runner.process import die_with_parent
from runner.record import read_summary, write_json

ERROR = "error.json"


def main(directory: Path) -> int:
    """Run the job whose summary lies in ``directory``; its ranks are started here, or are this process.

    Returns:
        The exit code; what went wrong is in error.json, for the launching process to put into the record.
    """
    die_with_parent()
    faulthandler.enable()
    signal.signal(signal.SIGTERM, _stop)
    signal.signal(signal.SIGINT, _stop)
    try:
        parallel = _parts(load_config(directory).parallel)
        parallel.launch(run_rank, directory)
    except BaseException as error:
        return _tell(error, directory)
    return 0


def entry() -> None:
    """Where the process begins. It is started by ``-c``, so that ranks need not import a ``__main__`` of its own."""
    code = main(Path(sys.argv[1]))
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: after a failure, threads of the process group may wait for ranks that are gone.
    os._exit(code)


def load_config(directory: Path) -> DictConfig:
    """The job's config as the launching process recorded it."""
    config = OmegaConf.create(read_summary(directory)["config"])
    assert isinstance(config, DictConfig)
    return config


def run_rank(directory: Path) -> None:
    """One rank; lives in an importable module, so that a started process can unpickle it."""
    signal.signal(signal.SIGTERM, _stop)
    cfg = load_config(directory)
    with _parts(cfg.parallel) as parallel:
        if parallel.rank:
            _log_to(directory / "run.log")
        with open_recorder(cfg, parallel, directory) as recorder:
            try:
                pipe = build(cfg, parallel, recorder)
            except InstantiationException as error:
                _say_whose(error)
            train(pipe, recorder)


def _parts(node: Any) -> Any:
    try:
        return instantiate(node)
    except InstantiationException as error:
        _say_whose(error)


def _say_whose(error: InstantiationException) -> None:
    """Hydra wraps what a part's own constructor raised; its own words are the ones a user can act on."""
    cause = error.__cause__
    if isinstance(cause, BadInput):
        raise cause from None
    key = str(error).rsplit("full_key: ", 1)[-1].strip() if "full_key: " in str(error) else "the config"
    if cause is None:
        raise BadInput(f"{key}: {str(error).splitlines()[0]}") from None
    raise type(error)(f"{key}: {type(cause).__name__}: {cause}") from cause


def _log_to(path: Path) -> None:
    """Only rank 0 prints; what the others say goes to the log."""
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.close(log)


def _stop(signal_number: int, frame: FrameType | None) -> None:
    del frame
    raise Interrupted(signal_number)


def _tell(error: BaseException, directory: Path) -> int:
    """Leave the status, the reason and, for what is not the user's to mend, the traceback."""
    status, exit_code = ending(error)
    is_said = isinstance(error, BadInput | RankFailed | Interrupted)
    reason = str(error) if is_said else f"{type(error).__name__}: {error}"
    if isinstance(error, KeyboardInterrupt):
        reason = "stopped by signal 2"
    if is_compile_error(error):
        reason = f"the model does not compile: {str(error).strip().splitlines()[0]}; compile=eager runs it as it is"
    if exit_code == 1:
        text = error.traceback if isinstance(error, RankFailed) else traceback.format_exc()
        sys.stderr.write(text)
        sys.stderr.flush()
    if directory.is_dir():
        write_json(directory / ERROR, {"status": status, "exit_code": exit_code, "reason": reason})
    return exit_code
