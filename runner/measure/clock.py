"""Clocks for phases: a stamp is taken in the step and read after it."""

import time
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """A clock whose stamps cost little to take and may be read later."""

    def now(self) -> Any:
        """A stamp of this moment on the clock's timeline."""
        ...

    def is_past(self, stamp: Any) -> bool:
        """Whether the stamp can be read without waiting."""
        ...

    def elapsed_ms(self, begin: Any, end: Any) -> float:
        """Milliseconds between two stamps; waits for the later one where it is not past."""
        ...


class HostClock:
    """The host's monotonic clock: right wherever work is done when the call returns, as on a CPU."""

    now = staticmethod(time.perf_counter)

    def is_past(self, stamp: float) -> bool:
        """Always: the host has been there."""
        del stamp
        return True

    def elapsed_ms(self, begin: float, end: float) -> float:
        """Milliseconds between two readings."""
        return 1e3 * (end - begin)


class DeviceClock:
    """Events on the device's current stream: the time at which the device, not the host, came by."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def now(self) -> torch.Event:
        """Enqueue a stamp; the host goes on at once."""
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def is_past(self, stamp: torch.Event) -> bool:
        """Whether the device has come by."""
        return stamp.query()

    def elapsed_ms(self, begin: torch.Event, end: torch.Event) -> float:
        """Milliseconds the device took between two stamps."""
        end.synchronize()
        return begin.elapsed_time(end)


def choose_clock(device: torch.device) -> Clock:
    """Events where the device works apart from the host, the host's clock on a CPU."""
    return HostClock() if device.type == "cpu" else DeviceClock(device)
