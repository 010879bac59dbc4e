"""Measuring a run without disturbing it."""

from runner.measure.clock import DeviceClock, HostClock, choose_clock
from runner.measure.recorder import Recorder, Step

__all__ = ["DeviceClock", "HostClock", "Recorder", "Step", "choose_clock"]
