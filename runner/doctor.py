"""What this machine lacks for which lever, and the cure: `python -m runner doctor`."""

import json
import math
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from runner import machine

Facts = Mapping[str, Any]

_USAGE = """usage: python -m runner doctor [--json]

Shows what this machine grants (devices, cores, memory, shared memory, files, compiler, W&B login, versions) and what
is missing for which lever, each with its cure. Starts no run, changes nothing, and exits 0 whatever it finds.

  --json  the same as JSON: {"machine": {...}, "missing": [{"lever", "lacks", "cure"}, ...]}"""

_REQUIRED = ("torch", "torchvision", "hydra-core", "omegaconf", "numpy")
# What a worker keeps in flight: two batches (torch's own prefetch_factor) of 32 float32 images of 224 x 224.
_WORKER_MIB = 2 * 32 * 3 * 224 * 224 * 4 / 2**20
_MIN_OPEN_FILES = 1024  # each tensor that comes from a worker holds one file while it lives
_RESERVE = 2  # half of the shared memory is left to collectives and to larger batches


@dataclass(frozen=True)
class Gap:
    """One lever that this machine cannot carry, or not at full speed: why, and what to type or change."""

    lever: str
    lacks: str
    cure: str


def main(arguments: list[str]) -> int:
    """Print the findings; exit code 0, or 2 for an argument that does not exist."""
    if {"-h", "--help"} & set(arguments):
        print(_USAGE)
        return 0
    for argument in arguments:
        if argument != "--json":
            print(f"doctor: {argument!r} is not an option here, only --json and --help are", file=sys.stderr)
            return 2
    facts = examine()
    gaps = list(missing(facts))
    if arguments:
        print(json.dumps({"machine": facts, "missing": [asdict(gap) for gap in gaps]}, indent=2))
    else:
        _show(facts, gaps)
    return 0


def examine() -> dict[str, Any]:
    """The record's ``environment`` and what else the levers depend on; no keys, and no variable's value."""
    devices = [asdict(device) for device in machine.accelerators()]
    for device in devices:
        del device["uuid"]  # names one piece of hardware in the world, and no lever needs it
    return machine.environment() | {
        "system": platform.system(),
        "accelerators": devices,
        "is_device_choice_stated": "CUDA_VISIBLE_DEVICES" in os.environ,
        "cores_by_affinity": machine.cores_by_affinity(),
        "cores_by_quota": machine.cores_by_quota(),
        "memory_available_mib": machine.memory_available_mib(),
        "shm_free_mib": machine.shm_free_mib(),
        "open_files_limit": machine.open_files_limit(),
        "has_native_bf16": machine.has_native_bf16(),
        "cpp_compiler": machine.has_cpp_compiler(),
        "is_cpp_compiler_stated": "CXX" in os.environ,
        "other_cpp_compiler": shutil.which("g++") or shutil.which("clang++"),
        "has_c_compiler": any(map(shutil.which, ("cc", "gcc", "clang"))),
        "has_python_headers": (Path(sysconfig.get_path("include")) / "Python.h").exists(),
        "triton": machine.package_version("triton"),
        "is_wandb_logged_in": machine.is_wandb_logged_in(),
    }


def missing(facts: Facts) -> Iterator[Gap]:
    """What the facts of `examine` lack, the most general lever first."""
    for name in _REQUIRED:
        if name not in facts["packages"]:
            yield Gap("every run", f"{name} is not installed", f"pip install {name}")
    yield from _device_gaps(facts)
    yield from _precision_gaps(facts)
    yield from _compile_gaps(facts)
    yield from _parallel_gaps(facts)
    yield from _loader_gaps(facts)
    if "timm" not in facts["packages"]:
        yield Gap("model=timm", "timm is not installed", "pip install 'runner[timm]'")
    if "wandb" not in facts["packages"]:
        yield Gap("tracker=wandb", "wandb is not installed", "pip install wandb")
    elif not facts["is_wandb_logged_in"]:
        yield Gap("tracker=wandb", "nobody is logged in, so runs are recorded offline", "wandb login")


def _device_gaps(facts: Facts) -> Iterator[Gap]:
    lever = "parallel.device=cuda"
    if facts["accelerators"]:
        if (facts["torch"] or "").endswith("+cpu"):
            cure = "install a CUDA build as https://pytorch.org/get-started/locally tells"
            yield Gap(lever, f"torch {facts['torch']} is built for the CPU only", cure)
    elif facts["driver"] is None:
        if facts["system"] != "Darwin":
            cure = "install NVIDIA's driver; in a container: docker run --gpus all (NVIDIA Container Toolkit)"
            yield Gap(lever, "no NVIDIA driver answers, so runs use the CPU", cure)
    elif facts["is_device_choice_stated"]:
        cure = "unset CUDA_VISIBLE_DEVICES, or set it to indices that nvidia-smi lists"
        yield Gap(lever, "CUDA_VISIBLE_DEVICES leaves no device to this process", cure)
    else:
        yield Gap(lever, "the driver shows this process no device", "see nvidia-smi; in a container: --gpus all")


def _precision_gaps(facts: Facts) -> Iterator[Gap]:
    devices = facts["accelerators"]
    if not devices:
        fastest = "bf16" if facts["has_native_bf16"] else "fp32"
        if not facts["has_native_bf16"]:
            yield Gap("precision=bf16", "this CPU has no bfloat16 instructions, it may be slower", "precision=fp32")
        yield Gap("precision=fp16", "a CPU emulates float16, tens of times slower", f"precision={fastest}")
        yield Gap("precision=tf32", "a CPU has no TF32, it computes as fp32 does", f"precision={fastest}")
    elif any(device["has_native_bf16"] is False for device in devices):
        yield Gap("precision=bf16", "a device here is older than Ampere and emulates bfloat16", "precision=fp16")
        yield Gap("precision=tf32", "a device here is older than Ampere, it computes as fp32 does", "precision=fp16")


def _compile_gaps(facts: Facts) -> Iterator[Gap]:
    is_mac = facts["system"] == "Darwin"
    if facts["cpp_compiler"] is None:
        lever = "compile=default on a CPU"
        other = facts["other_cpp_compiler"]
        if facts["is_cpp_compiler_stated"]:
            cure = f"export CXX={other}" if other else "unset CXX; apt-get install g++"
            yield Gap(lever, "CXX names a compiler that is not on the PATH", cure)
        elif other:  # torch looks for one name only
            yield Gap(lever, "torch calls g++ unless CXX says otherwise, and there is none", f"export CXX={other}")
        else:
            cure = "xcode-select --install" if is_mac else "apt-get install g++"
            yield Gap(lever, f"it needs {'clang++' if is_mac else 'g++'}", cure)
    if not facts["has_python_headers"]:
        cure = "apt-get install python3-dev (or the -dev package of this Python)"
        yield Gap("compile=default", "it compiles against Python.h, which is not here", cure)
    if facts["accelerators"]:
        if facts["triton"] is None:
            yield Gap("compile=default on a GPU", "triton is not installed", "pip install triton")
        if not facts["has_c_compiler"]:
            yield Gap("compile=default on a GPU", "triton needs a C compiler", "apt-get install gcc")


def _parallel_gaps(facts: Facts) -> Iterator[Gap]:
    if len(facts["accelerators"]) == 1:
        lacks = "there is one device, and each rank needs its own"
        yield Gap("parallel=ddp", lacks, "parallel=single; or show this process more devices")
    elif not facts["accelerators"] and facts["cores_granted"] == 1:
        cure = "parallel=single; or grant a second core: docker run --cpus=2, Slurm --cpus-per-task=2"
        yield Gap("parallel=ddp", "its ranks would share the only core, so it can be tried but gains nothing", cure)


def _loader_gaps(facts: Facts) -> Iterator[Gap]:
    if facts["cores_granted"] == 1:
        lacks = "workers would take the training process's only core"
        yield Gap("data.loader.num_workers", lacks, "data.loader.num_workers=0; or grant more cores")
    needed_mib = _RESERVE * facts["cores_granted"] * _WORKER_MIB
    free_mib = facts["shm_free_mib"]
    if free_mib is not None and free_mib < needed_mib:
        lacks = f"/dev/shm has {free_mib:.0f} MiB free, one worker a core may need {needed_mib:.0f} MiB"
        cure = f"docker run --shm-size={math.ceil(needed_mib / 1024)}g (or --ipc=host); or data.loader.num_workers=0"
        yield Gap("data.loader.num_workers", lacks, cure)
    if facts["open_files_limit"] < _MIN_OPEN_FILES:
        lacks = f"{facts['open_files_limit']} open files are few: each batch from a worker holds some"
        yield Gap("data.loader.num_workers", lacks, "ulimit -n 4096 in the shell that starts the run")


def _show(facts: Facts, gaps: list[Gap]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table.grid(padding=(0, 2))
    for label, value in _rows(facts):
        table.add_row(Text(label, style="bold"), Text(value))
    console = Console(highlight=False)
    console.print(table)
    console.print()
    if not gaps:
        console.print("Nothing is missing for any lever.")
        return
    console.print(Text("What is missing for which lever", style="bold"))
    for gap in gaps:  # whole lines and no table: a cure is there to be copied
        lines = (Text(f"{gap.lever}: ", style="yellow"), f"{gap.lacks}\n    ", Text(gap.cure, style="green"))
        console.print(Text.assemble(*lines), soft_wrap=True)


def _rows(facts: Facts) -> Iterator[tuple[str, str]]:
    for device in facts["accelerators"]:
        bf16 = {True: "native", False: "emulated", None: "unknown"}[device["has_native_bf16"]]
        yield f"device {device['index']}", f"{device['name']}, {_gib(device['memory_mib'])}, bfloat16 {bf16}"
    if not facts["accelerators"]:
        yield "devices", "no NVIDIA device"
    yield "CPU", f"{facts['cpu_model']}, bfloat16 {'native' if facts['has_native_bf16'] else 'not native'}"
    quota = "none" if facts["cores_by_quota"] is None else f"{facts['cores_by_quota']:g}"
    yield "cores", f"{facts['cores_granted']} granted (affinity {facts['cores_by_affinity']}, quota {quota})"
    yield "memory", f"{_gib(facts['memory_granted_mib'])} granted, {_gib(facts['memory_available_mib'])} available"
    yield "/dev/shm", "none" if facts["shm_free_mib"] is None else f"{_gib(facts['shm_free_mib'])} free"
    files = facts["open_files_limit"]
    yield "open files", "no limit" if files == sys.maxsize else f"{files} at most"
    yield "C++ compiler", facts["cpp_compiler"] or "none"
    yield "W&B", "logged in" if facts["is_wandb_logged_in"] else "not logged in: runs are recorded offline"
    yield "system", facts["platform"]
    yield "versions", ", ".join(f"{name} {version}" for name, version in _versions(facts).items())


def _versions(facts: Facts) -> dict[str, str]:
    driver = {} if facts["driver"] is None else {"driver": facts["driver"]}
    return {"python": facts["python"]} | driver | facts["packages"]


def _gib(mib: float) -> str:
    return f"{mib / 1024:.1f} GiB"
