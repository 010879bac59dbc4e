"""Starting this machine's ranks from one parent, and telling which of them failed first and why."""

import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

from runner.errors import RankFailed, ending
from runner.process import die_with_launcher

STORE_PORT = "RUNNER_STORE_PORT"
GRACE_S = 10.0  # between asking the other ranks to end and ending them
PATIENCE_S = 3.0  # a rank that lost its peer waits this long for the peer's own words
# What a rank says whose peer is gone; the cause is the peer's.
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "NCCL",
    "ProcessGroup",
    "Gloo",
    "gloo",
)


def start_ranks(work: Callable[..., None], arguments: tuple, *, num_ranks: int, timeout: timedelta) -> None:
    """Call ``work(*arguments)`` in ``num_ranks`` fresh processes and wait for all of them.

    The processes come from a fork server that has imported torch once and run nothing: forking this process instead
    would copy whatever locks its threads hold, and spawning would import torch anew in each. The rendezvous store
    lives here, on a port that the system chose and that is never free in between, so two runs cannot meet on one.

    Raises:
        RankFailed: the first rank that failed of its own; the others have been ended.
    """
    import torch.distributed as dist

    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", work.__module__])
    with tempfile.TemporaryDirectory(prefix="runner-ranks-") as folder:
        ranks = [
            context.Process(
                target=_rank,
                args=(work, arguments),
                kwargs={"rank": rank, "num_ranks": num_ranks, "port": store.port, "folder": folder},
                name=f"rank {rank}",
            )
            for rank in range(num_ranks)
        ]
        try:
            for process in ranks:
                process.start()
            _wait_for(ranks)
        finally:
            _end(ranks)
        failure = _first_failure(ranks, Path(folder))
    if failure is not None:
        raise failure


def _rank(work: Callable[..., None], arguments: tuple, *, rank: int, num_ranks: int, port: int, folder: str) -> None:
    """One rank's process: its place in the environment, as torchrun would put it, then the work."""
    die_with_launcher()
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        STORE_PORT: str(port),
    }
    try:
        work(*arguments)
    except BaseException as error:
        status, code = ending(error)
        words = {
            "rank": rank,
            "status": status,
            "exit_code": code,
            "reason": f"{type(error).__name__}: {error}" if not isinstance(error, KeyboardInterrupt) else "interrupted",
            "is_lost_peer": isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER),
            "traceback": traceback.format_exc(),
            "time": time.time(),
        }
        Path(folder, f"error.{rank}.json").write_text(json.dumps(words))
        sys.stderr.flush()
        # Not sys.exit: its atexit handlers join threads that wait for ranks which are already gone.
        os._exit(code or 1)


def _wait_for(ranks: Sequence[BaseProcess]) -> None:
    """Until all have ended well, or one has not and its peers have had a moment to say what they know."""
    running = {process.sentinel: process for process in ranks}
    while running:
        for sentinel in wait(list(running)):
            process = running.pop(sentinel)  # type: ignore[arg-type]
            process.join()
            if process.exitcode:
                wait_until = time.monotonic() + PATIENCE_S
                while running and time.monotonic() < wait_until:
                    for gone in wait(list(running), timeout=max(0.0, wait_until - time.monotonic())):
                        running.pop(gone).join()  # type: ignore[arg-type]
                return


def _end(ranks: Sequence[BaseProcess]) -> None:
    alive = [process for process in ranks if process.pid is not None and process.is_alive()]
    for process in alive:
        process.terminate()
    deadline = time.monotonic() + GRACE_S
    for process in alive:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def _first_failure(ranks: Sequence[BaseProcess], folder: Path) -> RankFailed | None:
    """The cause: a rank killed from outside, else the earliest error that is not the loss of a peer."""
    if not any(process.exitcode for process in ranks):
        return None
    words = [json.loads(path.read_text()) for path in folder.glob("error.*.json")]
    spoken = {error["rank"] for error in words}
    own = sorted((error for error in words if not error["is_lost_peer"]), key=lambda error: error["time"])
    silent = [rank for rank, process in enumerate(ranks) if (process.exitcode or 0) < 0 and rank not in spoken]
    killed = [rank for rank in silent if ranks[rank].exitcode != -15]  # -15 is what _end sends
    if own:
        first = own[0]
    elif killed:
        number = -(ranks[killed[0]].exitcode or 0)
        hint = "; 9 is most often the kernel out of memory" if number == 9 else ""
        first = {"rank": killed[0], "reason": f"killed by signal {number}{hint}", "traceback": ""}
    else:
        first = min(words, key=lambda error: error["time"]) if words else {"rank": 0, "reason": "ended without a word"}
    return RankFailed(
        f"rank {first['rank']}: {first['reason']}",
        status=first.get("status", "failed"),
        exit_code=first.get("exit_code", 1),
        traceback=first.get("traceback", ""),
    )
