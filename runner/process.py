"""What ties a process to the one that started it."""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends, so that a killed run leaves no rank behind.

    Linux only; elsewhere a rank whose peers are gone ends by its group's timeout.
    """
    if not sys.platform.startswith("linux"):
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the request took effect
        os._exit(1)


def die_with_launcher() -> None:
    """End this process when the one that asked a fork server for it ends.

    The kernel's signal would not do: this process's parent is the fork server, and that lives as long as any process
    it has made. A thread waits on the pipe that closes with the launcher; it costs nothing while it waits.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None, "not a process that multiprocessing started"

    def follow() -> None:
        wait([launcher.sentinel])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, daemon=True, name="die with launcher").start()
