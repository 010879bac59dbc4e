"""Samples utilisation, power and memory of a process tree from outside, so that the tree itself is not disturbed."""

import math
import statistics
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import psutil

_MIB = 2**20
# NVML's reasons for lower clocks that cost speed: power cap, hardware slowdown, heat (software, hardware), power brake.
_THROTTLING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80
_COLUMNS = ("at", "cpu_s", "memory_mib", "gpu_util_pct", "power_w", "gpu_memory_mib", "throttled")
_MAX_MEMORY_SHARE = 0.01  # of the time: the kernel walks all pages of a process to tell its share
_ATTEMPTS = 3


class UtilisationSampler:
    """Context manager with a thread that samples a process tree and its devices until the block or the process ends.

    Args:
        pid: the tree's root, usually the one child of the launching process.
        period_s: seconds between samples.
        device_indices: the tree's devices as NVML indices or UUIDs (NVML does not see ``CUDA_VISIBLE_DEVICES``).
        cores_granted: what 100 % of ``cpu_util_pct`` is.
    """

    def __init__(self, *, pid: int, period_s: float, device_indices: Sequence[int | str], cores_granted: float) -> None:
        self.period_s, self.cores_granted = period_s, cores_granted
        self._pid, self._device_indices = pid, device_indices
        self._columns = {name: array("d") for name in _COLUMNS}  # nan: not measured; eight bytes, as runs last days
        self._lock, self._stop = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="utilisation", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join(timeout=self.period_s + 5)  # a call into a hung driver must not hold up the run's end

    def summary(self, *, begin: float | None = None, end: float | None = None) -> dict[str, Any]:
        """Figures over the samples between two times on the monotonic clock; None: not measured.

        Returns:
            gpu_util_pct, gpu_util_p05_pct: mean and 5th percentile of the devices' mean.
            power_w: mean of the devices' sum.
            throttled: whether any device ran at lower clocks in any sample for power or heat.
            cpu_util_pct: CPU time of the tree, ended children included, over time and ``cores_granted``.
            peak_rss_mib: largest sum over the tree of proportional set sizes (PSS: pages that workers share count once)
                or of resident set sizes where the kernel tells no PSS.
            gpu_memory_used_mib: largest sum over the devices, of all processes on them.
        """
        with self._lock:
            rows = list(zip(*self._columns.values(), strict=True))
        kept = [row for row in rows if (begin is None or row[0] >= begin) and (end is None or row[0] <= end)]
        known = {
            name: [row[column] for row in kept if not math.isnan(row[column])] for column, name in enumerate(_COLUMNS)
        }
        utils = sorted(known["gpu_util_pct"])
        return {
            "gpu_util_pct": _mean(utils),
            "gpu_util_p05_pct": utils[int(0.05 * (len(utils) - 1))] if utils else None,
            "power_w": _mean(known["power_w"]),
            "throttled": any(known["throttled"]) if known["throttled"] else None,
            "cpu_util_pct": self._cpu_util_pct([(row[0], row[1]) for row in kept if not math.isnan(row[1])]),
            "peak_rss_mib": max(known["memory_mib"], default=None),
            "gpu_memory_used_mib": max(known["gpu_memory_mib"], default=None),
        }

    def _cpu_util_pct(self, points: Sequence[tuple[float, float]]) -> float | None:
        if len(points) < 2:
            return None
        (began, cpu_began), (ended, cpu_ended) = points[0], points[-1]
        return 100 * (cpu_ended - cpu_began) / (ended - began) / self.cores_granted

    def _sample_until_stopped(self) -> None:
        try:
            tree = _Tree(psutil.Process(self._pid))
        except psutil.Error:
            return
        with _Devices(self._device_indices) as devices:
            is_last = False
            while not is_last:
                has_ended = tree.has_ended()
                is_last = has_ended or self._stop.is_set()  # then once more: for what was used since the last sample
                now = time.monotonic()
                self._keep({"at": now} | tree.read(now) | ({} if has_ended else devices.read()))
                self._stop.wait(0 if is_last else self.period_s)

    def _keep(self, sample: Mapping[str, float | None]) -> None:
        with self._lock:
            for name, values in self._columns.items():
                value = sample.get(name)
                values.append(math.nan if value is None else value)


class _Tree:
    """CPU time and memory of a process and its descendants."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._cpu_s = 0.0
        self._last_cpu_s: float | None = None
        self._next_memory_at = -math.inf

    def has_ended(self) -> bool:
        try:
            return not self._root.is_running() or self._root.status() == psutil.STATUS_ZOMBIE
        except psutil.Error:
            return True

    def read(self, now: float) -> dict[str, float | None]:
        sample = {"cpu_s": self._read_cpu_s()}
        if now >= self._next_memory_at:
            sample["memory_mib"] = _sum_known(_memory_mib(process) for process in self._processes())
            self._next_memory_at = now + (time.monotonic() - now) / _MAX_MEMORY_SHARE
        return sample

    def _processes(self) -> list[psutil.Process]:
        """The tree, parents before their children."""
        try:
            return [self._root, *self._root.children(recursive=True)]
        except (psutil.Error, OSError):
            return [self._root]

    def _read_cpu_s(self) -> float | None:
        """CPU time since the first reading; it never falls: what a vanished process had used stays counted."""
        for _ in range(_ATTEMPTS):
            now = self._sum_cpu_s()
            if now is not None:
                self._cpu_s += max(0.0, now - (now if self._last_cpu_s is None else self._last_cpu_s))
                self._last_cpu_s = now
                return self._cpu_s
        return None

    def _sum_cpu_s(self) -> float | None:
        """Own and reaped children's time of each live process; None: one ended meanwhile, in nobody's sum or in two."""
        total = 0.0
        for process in self._processes():
            try:
                times = process.cpu_times()
            except psutil.AccessDenied:
                continue
            except (psutil.Error, OSError):
                return None
            total += times.user + times.system + times.children_user + times.children_system
        return total


def _memory_mib(process: psutil.Process) -> float | None:
    try:
        rollup = Path(f"/proc/{process.pid}/smaps_rollup").read_text()
        return next(int(line.split()[1]) / 1024 for line in rollup.splitlines() if line.startswith("Pss:"))
    except (OSError, StopIteration):
        pass
    try:
        return process.memory_info().rss / _MIB or None  # a process that has ended holds nothing
    except (psutil.Error, OSError):
        return None


class _Devices:
    """NVML's figures over some devices; none without a driver, and None for what one of the devices does not tell."""

    def __init__(self, indices: Sequence[int | str]) -> None:
        self._indices = indices
        self._nvml: Any = None
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        if self._indices:
            try:
                import pynvml

                pynvml.nvmlInit()
            except Exception:  # no package, no library, no driver, no permission: there is nothing to measure with
                return self
            self._nvml = pynvml
            try:
                self._handles = [self._handle(index) for index in self._indices]
            except pynvml.NVMLError:
                self._handles = []
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._nvml is not None:
            with suppress(self._nvml.NVMLError):
                self._nvml.nvmlShutdown()

    def read(self) -> dict[str, float | None]:
        nvml = self._nvml
        if not self._handles:
            return {}
        reasons = self._over_devices(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, list)
        return {
            "gpu_util_pct": self._over_devices(lambda h: nvml.nvmlDeviceGetUtilizationRates(h).gpu, statistics.fmean),
            "power_w": self._over_devices(lambda h: nvml.nvmlDeviceGetPowerUsage(h) / 1e3, sum),
            "gpu_memory_mib": self._over_devices(lambda h: nvml.nvmlDeviceGetMemoryInfo(h).used / _MIB, sum),
            "throttled": None if reasons is None else any(reason & _THROTTLING for reason in reasons),
        }

    def _handle(self, index: int | str) -> Any:
        if isinstance(index, int) or index.isdecimal():
            return self._nvml.nvmlDeviceGetHandleByIndex(int(index))
        return self._nvml.nvmlDeviceGetHandleByUUID(index)

    def _over_devices(self, read: Callable[[Any], Any], combine: Callable[[list[Any]], Any]) -> Any:
        try:
            return combine([read(handle) for handle in self._handles])
        except self._nvml.NVMLError:
            return None


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _sum_known(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
