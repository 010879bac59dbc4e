"""What the system says of this thread and process: CPU time, run-queue delay, memory, pauses of the collector."""

import gc
import os
import time
from pathlib import Path
from typing import Any, Self

_PAGE_MIB = os.sysconf("SC_PAGE_SIZE") / 2**20


class ThreadClock:
    """CPU time and run-queue delay of the thread that opens it.

    Linux counts for each thread how long it ran and how long it was ready to run but had no core: the second is what a
    neighbour's load costs, and looks like slow code on any other clock. One pread on a kept descriptor, about 1 us.
    """

    def __init__(self) -> None:
        try:
            self._file: int | None = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
        except OSError:
            self._file = None

    def read_ms(self) -> tuple[float, float | None]:
        """CPU time and run-queue delay so far; the delay is None where the kernel does not tell."""
        if self._file is None:
            return 1e3 * time.thread_time(), None
        ran, waited, _ = os.pread(self._file, 64, 0).split()
        return int(ran) / 1e6, int(waited) / 1e6

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class CollectorClock:
    """Time spent in Python's garbage collector while its block is open."""

    def __init__(self) -> None:
        self.ms = 0.0
        self._began = 0.0

    def __enter__(self) -> Self:
        gc.callbacks.append(self._on_collection)
        return self

    def __exit__(self, *exc_info: object) -> None:
        gc.callbacks.remove(self._on_collection)

    def _on_collection(self, phase: str, info: dict[str, Any]) -> None:
        del info
        if phase == "start":
            self._began = time.perf_counter()
        else:
            self.ms += 1e3 * (time.perf_counter() - self._began)


class MemoryClock:
    """Resident memory of this process, now and at its peak."""

    def __init__(self) -> None:
        # A child's peak starts at its parent's: 5 resets it to what this process holds itself.
        try:
            Path("/proc/self/clear_refs").write_text("5")
            self._file: int | None = os.open("/proc/self/statm", os.O_RDONLY)
        except OSError:
            self._file = None

    def rss_mib(self) -> float | None:
        """Resident set size; None where the kernel does not tell."""
        return None if self._file is None else int(os.pread(self._file, 64, 0).split()[1]) * _PAGE_MIB

    @staticmethod
    def peak_rss_mib() -> float | None:
        """Largest resident set size since this object was made."""
        try:
            status = Path("/proc/self/status").read_text()
        except OSError:
            return None
        return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), None)

    def close(self) -> None:
        """Give the descriptor back."""
        if self._file is not None:
            os.close(self._file)
            self._file = None
