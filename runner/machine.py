"""What this machine grants this process: cores, memory, devices, compiler, login; asked of the system, not of torch."""

import math
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

_MIB = 2**20
_ROOT = Path("/")
_PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "numpy", "wandb", "timm")
# A cgroup's limit, use, and the line of its statistics that tells the page cache to be dropped first: v2, then v1.
_MEMORY_FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)


@dataclass(frozen=True)
class Accelerator:
    """A device that CUDA would show this process.

    Args:
        index: NVML's, which ``CUDA_VISIBLE_DEVICES`` does not renumber.
        memory_mib: in all, not what is free.
        has_native_bf16: whether its arithmetic units know bfloat16; None: the driver does not tell.
        uuid: as ``CUDA_VISIBLE_DEVICES`` and NVML take it.
    """

    index: int
    name: str
    memory_mib: float
    has_native_bf16: bool | None
    uuid: str


def cores_by_affinity() -> int:
    """Cores that the scheduler may put this process on; all there are where the system knows no affinity."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cores_by_quota(*, root: Path = _ROOT) -> float | None:
    """Cores' worth of time that the tightest cgroup on the way up grants, fractions included; None: no limit."""
    quotas = (_quota(folder) for folder in _cgroup_folders("cpu", root=root))
    return min((quota for quota in quotas if quota is not None), default=None)


def cores_granted(*, root: Path = _ROOT) -> int:
    """Threads that can run at once: the lesser of affinity and quota, a fraction of a core rounded up."""
    quota = cores_by_quota(root=root)
    return cores_by_affinity() if quota is None else min(cores_by_affinity(), math.ceil(quota))


def memory_granted_mib(*, root: Path = _ROOT) -> float:
    """The lesser of physical memory and the cgroups' limits."""
    total_mib = _meminfo_mib("MemTotal", root=root)
    if total_mib is None:
        total_mib = _psutil_memory_mib("total")
    return min([total_mib, *(limit / _MIB for limit, _ in _memory_limits(root=root))])


def memory_available_mib(*, root: Path = _ROOT) -> float:
    """What can be allocated now without swapping or being killed; page cache that is dropped first counts as free."""
    available_mib = _meminfo_mib("MemAvailable", root=root)
    if available_mib is None:
        available_mib = _psutil_memory_mib("available")
    return min([available_mib, *(max(0, limit - used) / _MIB for limit, used in _memory_limits(root=root))])


def shm_free_mib(*, root: Path = _ROOT) -> float | None:
    """Free shared memory, through which loader workers hand over batches; None: the system has no /dev/shm."""
    try:
        return shutil.disk_usage(root / "dev" / "shm").free / _MIB
    except OSError:
        return None


def open_files_limit() -> int:
    """File descriptors that this process may hold, by its soft limit."""
    try:
        import resource
    except ImportError:  # not a POSIX system
        return sys.maxsize
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit


def cpu_model(*, root: Path = _ROOT) -> str:
    """The CPU's name as the kernel gives it, else its architecture (Arm kernels give no name)."""
    return _cpuinfo("model name", root=root) or platform.processor() or platform.machine() or "unknown"


def has_native_bf16(*, root: Path = _ROOT) -> bool:
    """Whether the CPU has bfloat16 instructions: AVX512-BF16 or AMX on x86, BF16 on Arm; False where nobody tells."""
    flags = f"{_cpuinfo('flags', root=root) or ''} {_cpuinfo('Features', root=root) or ''}"
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(flags.split())


def has_cpp_compiler() -> str | None:
    """The compiler that torch.compile would call for a CPU; None: there is none.

    As torch chooses it: ``$CXX`` (a command, maybe with arguments) or, unset, g++ (clang++ on macOS), and no other.
    """
    command = os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++")
    try:
        return shutil.which(shlex.split(command)[0])
    except (ValueError, IndexError):  # quotes left open; empty
        return None


def accelerators() -> list[Accelerator]:
    """The NVIDIA devices that ``CUDA_VISIBLE_DEVICES`` leaves to this process, in its order; [] without a driver.

    Indices there are taken in PCI order, which is CUDA's own unless the machine mixes models of GPU.
    """
    with _nvml() as nvml:
        if nvml is None:
            return []
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if visible is not None and visible.startswith("MIG-"):
            return _describe_mig(nvml, visible.split(",")[0])  # CUDA gives a process one slice at most
        devices: dict[int, Accelerator] = {}
        with suppress(nvml.NVMLError):
            for index in range(nvml.nvmlDeviceGetCount()):
                with suppress(nvml.NVMLError):  # a device that has fallen off the bus: CUDA leaves it out, too
                    devices[index] = _describe(nvml, nvml.nvmlDeviceGetHandleByIndex(index), index=index)
        order = list(devices) if visible is None else _visible_indices(visible, devices)
        return [devices[index] for index in order]


def driver_version() -> str | None:
    """Of the NVIDIA driver; None: there is none."""
    with _nvml() as nvml:
        if nvml is not None:
            with suppress(nvml.NVMLError):
                return nvml.nvmlSystemGetDriverVersion()
        return None


def is_wandb_logged_in() -> bool:
    """Whether W&B would find a key for its server in the environment or in netrc; the key itself is not kept."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    import netrc

    stated = os.environ.get("NETRC")
    paths = map(os.path.expanduser, [stated] if stated else ["~/.netrc", "~/_netrc"])
    found = next((path for path in paths if os.path.exists(path)), None)
    if found is None:
        return False
    try:
        keys = netrc.netrc(found)
        entries = [keys.authenticators(host) for host in _wandb_hosts()]
    except (netrc.NetrcParseError, OSError, ValueError):
        return False
    return any(entry is not None and entry[2] for entry in entries)


def _wandb_hosts() -> tuple[str, ...]:
    """Hosts whose keys W&B takes for its server, with the port where one is stated.

    Since wandb 0.31 the default server is the first of the two, which passes on to the second, where older logins are.
    """
    from urllib.parse import urlsplit

    host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).netloc
    is_default = host in ("", "forge.coreweave.com", "api.forge.coreweave.com")
    return ("api.forge.coreweave.com", "api.wandb.ai") if is_default else (host,)


def package_version(name: str) -> str | None:
    """Of an installed distribution, which is not imported; None: not installed."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def environment() -> dict[str, Any]:
    """The record's ``environment``; ``cuda`` is left for the process that has torch to fill in."""
    versions = {name: package_version(name) for name in _PACKAGES}
    return {
        "python": platform.python_version(),
        "torch": versions["torch"],
        "cuda": None,
        "driver": driver_version(),
        "devices": [device.name for device in accelerators()],
        "cpu_model": cpu_model(),
        "cores_granted": cores_granted(),
        "memory_granted_mib": memory_granted_mib(),
        "platform": platform.platform(),
        "packages": {name: version for name, version in versions.items() if version is not None},
    }


def _cgroup_folders(controller: str, *, root: Path) -> list[Path]:
    """Folders of the cgroups that bind this process, from its own up; those not visible from here do not exist."""
    folders = []
    for line in (_read(root / "proc" / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mounts = (controllers, controller) if controllers else (".", "unified")
        own = PurePosixPath(path.lstrip("/"))
        # ".." leads out of what this container can see: then the mount itself is the innermost it has.
        visible = [PurePosixPath()] if ".." in own.parts else [own, *own.parents]
        folders += [root / "sys/fs/cgroup" / mount / below for mount in mounts for below in visible]
    return folders


def _quota(folder: Path) -> float | None:
    v2 = _read(folder / "cpu.max")
    v1 = f"{_read(folder / 'cpu.cfs_quota_us')} {_read(folder / 'cpu.cfs_period_us')}"
    try:
        quota, period = map(int, (v2 or v1).split())
    except ValueError:  # "max", or no such file
        return None
    return quota / period if quota > 0 and period > 0 else None


def _memory_limits(*, root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of each cgroup that has a limit, in bytes."""
    for folder in _cgroup_folders("memory", root=root):
        for limit_name, used_name, cache_name in _MEMORY_FILES:
            limit, used = _read(folder / limit_name) or "", _read(folder / used_name) or ""
            if limit.isdecimal():
                cache = _field(_read(folder / "memory.stat") or "", cache_name, separator=" ") or "0"
                yield int(limit), int(used) - int(cache) if used.isdecimal() else 0


def _meminfo_mib(name: str, *, root: Path) -> float | None:
    value = _field(_read(root / "proc" / "meminfo") or "", name)
    return None if value is None else int(value.split()[0]) / 1024


def _psutil_memory_mib(name: str) -> float:
    import psutil

    return getattr(psutil.virtual_memory(), name) / _MIB


def _cpuinfo(name: str, *, root: Path) -> str | None:
    return _field(_read(root / "proc" / "cpuinfo") or "", name)


def _field(text: str, name: str, *, separator: str = ":") -> str | None:
    """The value of the first line that gives ``name`` one."""
    for line in text.splitlines():
        key, found, value = line.partition(separator)
        if found and key.strip() == name:
            return value.strip()
    return None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return None


@contextmanager
def _nvml() -> Iterator[Any]:
    """The driver's library while it is open, or None where there is none."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no library, no driver, no permission: there is nothing to ask
        yield None
        return
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _describe(nvml: Any, handle: Any, *, index: int, gpu: Any = None) -> Accelerator:
    """A device; ``gpu`` is the whole one where ``handle`` is a slice of it."""
    capability = memory_mib = None
    with suppress(nvml.NVMLError):
        capability = nvml.nvmlDeviceGetCudaComputeCapability(handle if gpu is None else gpu)
    try:
        memory_mib = nvml.nvmlDeviceGetMemoryInfo(handle).total / _MIB
    except nvml.NVMLError:  # told by none that has no memory of its own but shares the host's
        memory_mib = memory_granted_mib()
    return Accelerator(
        index=index,
        name=nvml.nvmlDeviceGetName(handle),
        memory_mib=memory_mib,
        has_native_bf16=None if capability is None else capability[0] >= 8,
        uuid=nvml.nvmlDeviceGetUUID(handle),
    )


def _describe_mig(nvml: Any, uuid: str) -> list[Accelerator]:
    with suppress(nvml.NVMLError):
        handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        gpu = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        return [_describe(nvml, handle, index=nvml.nvmlDeviceGetIndex(gpu), gpu=gpu)]
    return []


def _visible_indices(visible: str, devices: dict[int, Accelerator]) -> list[int]:
    """CUDA's reading of the variable: the first invalid entry ends the list, and a device named twice empties it.

    The first entry tells whether all are indices or UUIDs, of which a prefix will do if only one device has it. An
    index ends where its digits do (``1,2gpu`` is ``1,2``).
    """
    order: list[int] = []
    for entry in visible.split(","):
        if visible.startswith("GPU-"):
            matches = [index for index, device in devices.items() if device.uuid.startswith(entry or "none")]
        else:
            number = re.match(r"\s*\+?([0-9]+)", entry)
            matches = [int(number[1])] if number and int(number[1]) in devices else []
        if len(matches) != 1:
            break
        if matches[0] in order:
            return []
        order += matches
    return order
