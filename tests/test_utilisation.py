import os
import subprocess
import sys
import time
import types

import psutil
import pytest

from runner.utilisation import UtilisationSampler

CORES = 4.0
# Seconds of CPU time, not of the clock: on a machine with other load they take longer and are as many.
BURN = "import time\nwhile time.process_time() < {s}: pass"
MIB = 2**20


def sampler(pid, period_s=0.05, device_indices=(), cores_granted=CORES):
    return UtilisationSampler(pid=pid, period_s=period_s, device_indices=device_indices, cores_granted=cores_granted)


def started(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True)


def watched(code, **options):
    """The summary over a whole run of the code, and its wall time."""
    begin = time.monotonic()
    with started(code) as process, sampler(process.pid, **options) as watch:
        process.stdin.close()
        process.wait()
        ended = time.monotonic()
    return watch.summary(end=ended), ended - begin


class NVML:
    """A module like pynvml with devices whose figures a test sets."""

    class NVMLError(Exception):
        pass

    def __init__(self, *devices, has_driver=True):
        self.devices, self.has_driver, self.num_open = devices, has_driver, 0
        self.module = types.ModuleType("pynvml")
        for name in dir(self):
            if name.startswith(("nvml", "NVML")):
                setattr(self.module, name, getattr(self, name))

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError("Driver Not Loaded")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlDeviceGetHandleByIndex(self, index):
        if not 0 <= index < len(self.devices):
            raise self.NVMLError("Invalid Argument")
        return self.devices[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return next(device for device in self.devices if device["uuid"] == uuid)

    def _told(self, device, key):
        if device.get(key) is None:
            raise self.NVMLError("Not Supported")
        value = device[key]
        return (
            value.pop(0)
            if isinstance(value, list) and len(value) > 1
            else value[0]
            if isinstance(value, list)
            else value
        )

    def nvmlDeviceGetUtilizationRates(self, device):
        return types.SimpleNamespace(gpu=self._told(device, "util"), memory=1)

    def nvmlDeviceGetPowerUsage(self, device):
        return self._told(device, "milliwatts")

    def nvmlDeviceGetMemoryInfo(self, device):
        used = self._told(device, "used")
        return types.SimpleNamespace(used=used, total=2 * used, free=used)

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, device):
        return self._told(device, "reasons")


def device(util=50, milliwatts=100_000, used=1024 * MIB, reasons=0, uuid="GPU-0"):
    return {"util": util, "milliwatts": milliwatts, "used": used, "reasons": reasons, "uuid": uuid}


@pytest.fixture
def watched_devices(monkeypatch):
    """The summary and the fake after some samples of this process with the given devices."""

    def watch(*devices, indices=None, has_driver=True):
        nvml = NVML(*devices, has_driver=has_driver)
        monkeypatch.setitem(sys.modules, "pynvml", nvml.module)
        indices = range(len(devices)) if indices is None else indices
        with sampler(os.getpid(), period_s=0.01, device_indices=indices) as watched:
            while watched._thread.is_alive() and len(watched._columns["at"]) < 20:
                time.sleep(0.01)
        return watched.summary(), nvml

    return watch


def test_one_busy_core_is_its_share_of_the_granted_cores():
    summary, wall_s = watched(BURN.format(s=2))
    expected = 100 * 2 / wall_s / CORES
    assert 0.4 * expected <= summary["cpu_util_pct"] <= 1.5 * expected


def test_an_idle_process_uses_about_nothing():
    summary, _ = watched("import time; time.sleep(1.5)", cores_granted=1)
    assert summary["cpu_util_pct"] < 25


def test_a_child_that_ended_keeps_what_it_had_used():
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {BURN.format(s=1)!r}]); time.sleep(1)"
    summary, wall_s = watched(code, cores_granted=1)
    assert 0.8 * 100 / wall_s <= summary["cpu_util_pct"] <= 1.6 * 100 / wall_s


def test_children_that_live_between_two_samples_are_counted():
    burn = BURN.format(s=0.2)
    code = f"import subprocess, sys\nfor _ in range(8): subprocess.run([sys.executable, '-c', {burn!r}])"
    summary, wall_s = watched(code, period_s=0.9, cores_granted=1)
    assert summary["cpu_util_pct"] >= 0.5 * 100 * 8 * 0.2 / wall_s


def test_cpu_time_never_falls_when_a_process_vanishes_with_all_it_had():
    # The middle process ends without its child, which leaves the tree and is in nobody's sum.
    burner = BURN.format(s=1.5)
    middle = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {burner!r}]); time.sleep(0.8)"
    code = f"import subprocess, sys, time; subprocess.run([sys.executable, '-c', {middle!r}]); time.sleep(0.5)"
    with started(code) as process, sampler(process.pid) as watch:
        process.stdin.close()
        process.wait()
    cpu_s = [value for value in watch._columns["cpu_s"] if value == value]
    assert cpu_s == sorted(cpu_s)
    assert cpu_s[-1] > 0.2


def test_memory_counts_what_the_whole_tree_holds():
    child = "block = bytearray(60 * 2**20); print('held', flush=True); input()"
    code = f"import subprocess, sys; block = bytearray(30 * 2**20); subprocess.run([sys.executable, '-c', {child!r}])"
    with started(code) as process:
        assert process.stdout.readline() == "held\n"
        with sampler(process.pid, period_s=0.02) as watch:
            time.sleep(0.2)
        process.communicate("\n")
    assert 90 <= watch.summary()["peak_rss_mib"] < 200


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps_rollup"), reason="the kernel tells no proportional set size")
def test_pages_that_children_share_count_once():
    code = """
import os, sys, time
block = bytearray(b"x" * (80 * 2**20))
for _ in range(3):
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
print("forked", flush=True)
input()
os.killpg(0, 9)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stdin=subprocess.PIPE, text=True, start_new_session=True
    )
    with process:
        assert process.stdout.readline() == "forked\n"
        with sampler(process.pid, period_s=0.02) as watch:
            time.sleep(0.2)
        process.communicate("\n")
    assert 80 <= watch.summary()["peak_rss_mib"] < 160


def test_bounds_select_the_samples_between_them():
    code = BURN.format(s=1) + "\nprint('idle now', flush=True); input()"
    with started(code) as process, sampler(process.pid, cores_granted=1) as watch:
        began = time.monotonic()
        assert process.stdout.readline() == "idle now\n"
        idle_from = time.monotonic()
        time.sleep(1)
        ended = time.monotonic()
        process.communicate("\n")
    busy = watch.summary(begin=began, end=idle_from)["cpu_util_pct"]
    idle = watch.summary(begin=idle_from, end=ended)["cpu_util_pct"]
    assert busy >= 0.5 * 100 / (idle_from - began)
    assert idle <= 10
    assert set(watch.summary(begin=ended + 60).values()) == {None}
    assert set(watch.summary(end=began - 60).values()) == {None}


def test_a_process_that_has_ended_gives_none_and_raises_nothing():
    process = started("pass")
    process.communicate()
    with sampler(process.pid) as watch:
        watch._thread.join(timeout=10)
    assert not watch._thread.is_alive()
    assert set(watch.summary().values()) == {None}


def test_sampling_ends_by_itself_when_the_process_does():
    with started("import time; time.sleep(0.3)") as process, sampler(process.pid) as watch:
        process.stdin.close()
        watch._thread.join(timeout=30)  # nobody has waited for the process: it is a zombie until then
        assert not watch._thread.is_alive()
        assert watch.summary()["peak_rss_mib"] > 1


def test_a_process_that_vanishes_between_listing_and_reading_raises_nothing(monkeypatch):
    gone = psutil.Process(os.getpid())
    monkeypatch.setattr(gone, "cpu_times", lambda: (_ for _ in ()).throw(psutil.NoSuchProcess(1)))
    monkeypatch.setattr(psutil.Process, "children", lambda self, recursive: [gone])
    with sampler(os.getpid(), period_s=0.01) as watch:
        time.sleep(0.1)
        assert watch._thread.is_alive()
    assert watch.summary()["cpu_util_pct"] is None


def test_without_a_driver_device_figures_are_none(watched_devices):
    summary, _ = watched_devices(device(), has_driver=False)
    for key in ("gpu_util_pct", "gpu_util_p05_pct", "power_w", "throttled", "gpu_memory_used_mib"):
        assert summary[key] is None
    assert summary["peak_rss_mib"] > 1


def test_without_devices_no_driver_is_asked(watched_devices):
    summary, nvml = watched_devices(indices=[])
    assert summary["gpu_util_pct"] is None
    assert nvml.num_open == 0


def test_two_devices_give_mean_use_and_summed_power_and_memory(watched_devices):
    summary, nvml = watched_devices(
        device(util=40, milliwatts=300_000, used=1000 * MIB), device(util=80, milliwatts=400_000, used=3000 * MIB)
    )
    assert summary["gpu_util_pct"] == pytest.approx(60)
    assert summary["gpu_util_p05_pct"] == pytest.approx(60)
    assert summary["power_w"] == pytest.approx(700)
    assert summary["gpu_memory_used_mib"] == pytest.approx(4000)
    assert summary["throttled"] is False
    assert nvml.num_open == 0


def test_only_the_named_devices_count(watched_devices):
    devices = device(util=10, uuid="GPU-a"), device(util=70, uuid="GPU-b"), device(util=90, uuid="GPU-c")
    assert watched_devices(*devices, indices=["GPU-b"])[0]["gpu_util_pct"] == pytest.approx(70)
    assert watched_devices(*devices, indices=[2])[0]["gpu_util_pct"] == pytest.approx(90)
    assert watched_devices(*devices, indices=["0"])[0]["gpu_util_pct"] == pytest.approx(10)


def test_a_device_that_is_not_there_gives_none(watched_devices):
    assert watched_devices(device(), indices=[0, 7])[0]["gpu_util_pct"] is None


def test_low_use_shows_in_the_fifth_percentile_and_the_peak_in_memory(watched_devices):
    used = [500 * MIB, 900 * MIB, 600 * MIB]
    summary, _ = watched_devices(device(util=[0, 0, 100], used=used))
    assert summary["gpu_util_p05_pct"] == 0
    assert summary["gpu_util_pct"] > 50
    assert summary["gpu_memory_used_mib"] == pytest.approx(900)


@pytest.mark.parametrize("reason", [0x4, 0x8, 0x20, 0x40, 0x80])
def test_each_reason_that_costs_speed_is_throttling(watched_devices, reason):
    assert watched_devices(device(), device(reasons=[0, reason, 0]))[0]["throttled"] is True


@pytest.mark.parametrize("reason", [0x1, 0x2, 0x10, 0x100])
def test_idle_and_set_clocks_are_no_throttling(watched_devices, reason):
    assert watched_devices(device(reasons=reason))[0]["throttled"] is False


def test_what_one_device_does_not_tell_is_none_and_the_rest_stays(watched_devices):
    summary, _ = watched_devices(device(), device(milliwatts=None, reasons=None))
    assert summary["power_w"] is None
    assert summary["throttled"] is None
    assert summary["gpu_util_pct"] == pytest.approx(50)


def test_importing_the_module_imports_no_torch():
    subprocess.run(
        [sys.executable, "-c", "import runner.utilisation, sys; assert 'torch' not in sys.modules"], check=True
    )
