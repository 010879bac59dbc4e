import os
import shutil
import subprocess
import sys
import types
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from runner import machine
from runner.machine import Accelerator

KEY = "5ec2e7" * 6 + "beef"
UNLIMITED_V1 = 9223372036854771712
GIB = 2**30


def plant(root, files):
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


@pytest.fixture
def eight_cores(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)


@pytest.fixture
def home(tmp_path, monkeypatch):
    """An empty home, and no word about W&B in the environment."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_cores_are_those_of_the_affinity_where_there_is_no_quota(tmp_path, eight_cores):
    assert machine.cores_granted(root=tmp_path) == 8
    assert machine.cores_by_quota(root=tmp_path) is None


@pytest.mark.parametrize(
    ("cpu_max", "quota", "granted"),
    [
        ("250000 100000", 2.5, 3),
        ("300000 100000", 3.0, 3),
        ("10000 100000", 0.1, 1),
        ("1600000 100000", 16.0, 8),
        ("100000 50000", 2.0, 2),
        ("max 100000", None, 8),
    ],
)
def test_a_quota_is_rounded_up_to_whole_cores_and_never_above_the_affinity(
    tmp_path, eight_cores, cpu_max, quota, granted
):
    plant(tmp_path, {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": cpu_max})
    assert machine.cores_by_quota(root=tmp_path) == quota
    assert machine.cores_granted(root=tmp_path) == granted


@pytest.mark.parametrize("tightest", ["", "/job", "/job/step"])
def test_the_tightest_cgroup_on_the_way_up_counts_wherever_it_is(tmp_path, eight_cores, tightest):
    files = {f"sys/fs/cgroup{folder}/cpu.max": "600000 100000" for folder in ("", "/job", "/job/step")}
    files |= {f"sys/fs/cgroup{tightest}/cpu.max": "200000 100000", "proc/self/cgroup": "0::/job/step"}
    files |= {"sys/fs/cgroup/neighbour/cpu.max": "100000 100000"}
    plant(tmp_path, files)
    assert machine.cores_granted(root=tmp_path) == 2


def test_a_quota_of_cgroup_v1_is_found_among_the_other_controllers(tmp_path, eight_cores):
    folder = "sys/fs/cgroup/cpu,cpuacct"
    cgroup = "5:memory:/other\n4:cpu,cpuacct:/docker/abc\n2:cpuset:/\n0::/"
    plant(tmp_path, {"proc/self/cgroup": cgroup, f"{folder}/cpu.cfs_quota_us": "-1"})
    plant(tmp_path, {f"{folder}/cpu.cfs_period_us": "100000", f"{folder}/docker/abc/cpu.cfs_quota_us": "350000"})
    plant(tmp_path, {f"{folder}/docker/abc/cpu.cfs_period_us": "100000"})
    plant(tmp_path, {"sys/fs/cgroup/cpu/other/cpu.cfs_quota_us": "100000"})  # a neighbour in our memory cgroup's name
    plant(tmp_path, {"sys/fs/cgroup/cpu/other/cpu.cfs_period_us": "100000"})
    assert machine.cores_by_quota(root=tmp_path) == 3.5
    assert machine.cores_granted(root=tmp_path) == 4


def test_a_cgroup_path_that_leads_out_of_the_container_ends_at_the_mount(tmp_path, eight_cores):
    plant(tmp_path, {"proc/self/cgroup": "0::/../elsewhere", "sys/fs/cgroup/cpu.max": "200000 100000"})
    plant(tmp_path, {"sys/fs/elsewhere/cpu.max": "100000 100000"})
    assert machine.cores_granted(root=tmp_path) == 2


def test_a_container_whose_own_path_is_not_visible_still_finds_its_limit_at_the_mount(tmp_path, eight_cores):
    plant(tmp_path, {"proc/self/cgroup": "3:cpu:/docker/abc", "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "200000"})
    plant(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000"})
    assert machine.cores_granted(root=tmp_path) == 2


def test_cores_without_an_affinity_call_are_all_cores(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert machine.cores_granted(root=tmp_path) == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.cores_granted(root=tmp_path) == 1


def meminfo(total_kib, available_kib):
    return f"MemTotal:       {total_kib} kB\nMemFree:        1 kB\nMemAvailable:   {available_kib} kB"


def test_memory_without_a_limit_is_the_machines(tmp_path):
    plant(tmp_path, {"proc/meminfo": meminfo(4 * 2**20, 3 * 2**20), "proc/self/cgroup": "0::/"})
    plant(tmp_path, {"sys/fs/cgroup/memory.max": "max", "sys/fs/cgroup/memory.current": GIB})
    assert machine.memory_granted_mib(root=tmp_path) == 4096
    assert machine.memory_available_mib(root=tmp_path) == 3072


def test_memory_is_the_tightest_limit_on_the_way_up_and_its_page_cache_counts_as_free(tmp_path):
    plant(tmp_path, {"proc/meminfo": meminfo(16 * 2**20, 12 * 2**20), "proc/self/cgroup": "0::/job/step"})
    plant(tmp_path, {"sys/fs/cgroup/job/memory.max": 2 * GIB, "sys/fs/cgroup/job/step/memory.max": "max"})
    plant(tmp_path, {"sys/fs/cgroup/job/memory.current": GIB, "sys/fs/cgroup/memory.max": 4 * GIB})
    plant(tmp_path, {"sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {GIB // 4}\nactive_file 7"})
    assert machine.memory_granted_mib(root=tmp_path) == 2048
    assert machine.memory_available_mib(root=tmp_path) == 1024 + 256


def test_memory_limits_of_cgroup_v1_count_too(tmp_path):
    folder = "sys/fs/cgroup/memory"
    plant(tmp_path, {"proc/meminfo": meminfo(16 * 2**20, 12 * 2**20), "proc/self/cgroup": "8:memory:/job"})
    plant(tmp_path, {f"{folder}/memory.limit_in_bytes": UNLIMITED_V1, f"{folder}/memory.usage_in_bytes": GIB})
    plant(tmp_path, {f"{folder}/job/memory.limit_in_bytes": GIB, f"{folder}/job/memory.usage_in_bytes": GIB // 2})
    plant(tmp_path, {f"{folder}/job/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 8}"})
    assert machine.memory_granted_mib(root=tmp_path) == 1024
    assert machine.memory_available_mib(root=tmp_path) == 512 + 128


def test_memory_over_its_limit_is_none_left_and_not_less(tmp_path):
    plant(tmp_path, {"proc/meminfo": meminfo(2**20, 2**20), "proc/self/cgroup": "0::/"})
    plant(tmp_path, {"sys/fs/cgroup/memory.max": GIB, "sys/fs/cgroup/memory.current": GIB + 4096})
    assert machine.memory_available_mib(root=tmp_path) == 0


def test_memory_is_told_where_there_is_no_proc_folder(tmp_path):
    assert machine.memory_granted_mib(root=tmp_path) == psutil.virtual_memory().total / 2**20
    assert 0 < machine.memory_available_mib(root=tmp_path) < machine.memory_granted_mib(root=tmp_path)


def test_shared_memory_is_what_its_file_system_has_free(tmp_path):
    assert machine.shm_free_mib(root=tmp_path) is None
    (tmp_path / "dev" / "shm").mkdir(parents=True)
    assert machine.shm_free_mib(root=tmp_path) == pytest.approx(shutil.disk_usage(tmp_path).free / 2**20, rel=0.05)


def test_the_open_files_limit_is_the_soft_one(monkeypatch):
    import resource

    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: (256, 4096)}.__getitem__)
    assert machine.open_files_limit() == 256
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", {resource.RLIMIT_NOFILE: unlimited}.__getitem__)
    assert machine.open_files_limit() > 2**30


@pytest.mark.parametrize(
    ("cpuinfo", "is_native"),
    [
        ("flags\t\t: fpu avx512f avx512_bf16 sse", True),
        ("flags\t\t: fpu amx_bf16", True),
        ("Features\t: fp asimd bf16 i8mm", True),
        ("flags\t\t: fpu avx512f avx512_fp16", False),
        ("bugs\t\t: amx_bf16", False),
        ("vmx flags\t: amx_bf16", False),
        ("processor\t: 0", False),
    ],
)
def test_bf16_is_native_where_the_cpus_flags_say_so(tmp_path, cpuinfo, is_native):
    plant(tmp_path, {"proc/cpuinfo": f"processor\t: 0\n{cpuinfo}\n\nprocessor\t: 1"})
    assert machine.has_native_bf16(root=tmp_path) is is_native


def test_a_machine_without_cpuinfo_has_a_name_and_no_native_bf16(tmp_path):
    assert machine.cpu_model(root=tmp_path)
    assert machine.has_native_bf16(root=tmp_path) is False
    plant(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: Fast: 9000 @ 3 GHz\nflags\t: fpu"})
    assert machine.cpu_model(root=tmp_path) == "Fast: 9000 @ 3 GHz"


@pytest.mark.parametrize(
    ("stated", "found"),
    [(None, "g++"), ("c++13 -pipe", "c++13"), ("missing-c++", None), ("", None), ("'open", None)],
)
def test_the_compiler_is_the_stated_one_or_gpp_and_never_another(tmp_path, monkeypatch, stated, found):
    for name in ("g++", "c++13", "clang++"):
        plant(tmp_path, {name: "#!/bin/sh"})
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    if stated is not None:
        monkeypatch.setenv("CXX", stated)
    assert machine.has_cpp_compiler() == (found and str(tmp_path / found))


def test_there_is_no_compiler_where_torch_would_find_none(tmp_path, monkeypatch):
    plant(tmp_path, {"clang++": "#!/bin/sh"})
    (tmp_path / "clang++").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert machine.has_cpp_compiler() is None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert machine.has_cpp_compiler() == str(tmp_path / "clang++")


GPUS = {  # name, MiB, compute capability
    "GPU-aa11": ("H200", 143771, (9, 0)),
    "GPU-aa22": ("A100", 81920, (8, 0)),
    "GPU-bb33": ("V100", 32768, (7, 0)),
}


class FakeNvml(types.ModuleType):
    """NVML with two GPUs of one UUID prefix, an old one, and a slice of the first."""

    class NVMLError(Exception):
        pass

    def __init__(self):
        super().__init__("pynvml")
        self.num_open, self.broken, self.has_driver, self.gpus = 0, set(), True, dict(GPUS)

    def nvmlInit(self):
        if not self.has_driver:
            raise self.NVMLError("library not found")
        self.num_open += 1

    def nvmlShutdown(self):
        self.num_open -= 1

    def nvmlSystemGetDriverVersion(self):
        return "580.65.06"

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        if index in self.broken:
            raise self.NVMLError("GPU is lost")
        return list(self.gpus)[index]

    def nvmlDeviceGetHandleByUUID(self, uuid):
        if uuid != "MIG-cc44":
            raise self.NVMLError("not found")
        return uuid

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle):
        assert handle == "MIG-cc44"
        return "GPU-aa22"

    def nvmlDeviceGetIndex(self, handle):
        return list(self.gpus).index(handle)

    def nvmlDeviceGetName(self, handle):
        return "A100 MIG 1g.10gb" if handle == "MIG-cc44" else self.gpus[handle][0]

    def nvmlDeviceGetUUID(self, handle):
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle):
        if "memory" in self.broken:
            raise self.NVMLError("not supported")
        mib = 9728 if handle == "MIG-cc44" else self.gpus[handle][1]
        return types.SimpleNamespace(total=mib * 2**20, free=1, used=2)

    def nvmlDeviceGetCudaComputeCapability(self, handle):
        if "capability" in self.broken:
            raise self.NVMLError("not supported")
        return self.gpus[handle][2]


@pytest.fixture
def nvml(monkeypatch):
    fake = FakeNvml()
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    yield fake
    assert fake.num_open == 0


def test_each_device_tells_its_name_memory_and_bf16(nvml):
    assert machine.accelerators() == [
        Accelerator(index=0, name="H200", memory_mib=143771.0, has_native_bf16=True, uuid="GPU-aa11"),
        Accelerator(index=1, name="A100", memory_mib=81920.0, has_native_bf16=True, uuid="GPU-aa22"),
        Accelerator(index=2, name="V100", memory_mib=32768.0, has_native_bf16=False, uuid="GPU-bb33"),
    ]
    assert machine.driver_version() == "580.65.06"


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        ("2,0", [2, 0]),
        ("1", [1]),
        (" 1 , 2 ", [1, 2]),
        ("", []),
        ("-1", []),
        ("0,-1,1", [0]),
        ("0,3,1", [0]),
        ("0,gpu,1", [0]),
        ("0,,1", [0]),
        ("0,1,0", []),
        ("1gpu,2x", [1, 2]),
        ("NoDevFiles", []),
        ("GPU-bb33,GPU-aa11", [2, 0]),
        ("GPU-b,GPU-aa2", [2, 1]),
        ("GPU-bb33,GPU-aa", [2]),
        ("GPU-bb33,GPU-zz,GPU-aa11", [2]),
        ("GPU-bb33,GPU-b", []),
        ("GPU-bb33,,GPU-aa11", [2]),
    ],
)
def test_the_visible_devices_are_read_as_cuda_reads_them(nvml, monkeypatch, visible, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [device.index for device in machine.accelerators()] == indices


def test_an_empty_entry_after_a_uuid_ends_the_list_even_where_there_is_one_device(nvml, monkeypatch):
    del nvml.gpus["GPU-aa22"], nvml.gpus["GPU-bb33"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-aa11,")
    assert [device.index for device in machine.accelerators()] == [0]


def test_a_slice_of_a_device_has_its_own_memory_and_the_whole_ones_bf16(nvml, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-cc44,MIG-dd55")
    slice_ = Accelerator(index=1, name="A100 MIG 1g.10gb", memory_mib=9728.0, has_native_bf16=True, uuid="MIG-cc44")
    assert machine.accelerators() == [slice_]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-dd55")
    assert machine.accelerators() == []


def test_a_device_that_is_lost_is_left_out_and_the_others_keep_their_index(nvml):
    nvml.broken.add(1)
    assert [device.index for device in machine.accelerators()] == [0, 2]


def test_what_a_device_does_not_tell_is_unknown_and_shared_memory_is_the_hosts(nvml):
    nvml.broken |= {"capability", "memory"}
    device = machine.accelerators()[0]
    assert device.has_native_bf16 is None
    assert device.memory_mib == machine.memory_granted_mib()


def test_there_are_no_devices_without_a_driver_or_its_bindings(nvml, monkeypatch):
    nvml.has_driver = False
    assert machine.accelerators() == []
    assert machine.driver_version() is None
    monkeypatch.setitem(sys.modules, "pynvml", None)  # then importing it raises ImportError
    assert machine.accelerators() == []
    assert machine.driver_version() is None


def test_nobody_is_logged_in_to_wandb_without_a_key(home):
    assert machine.is_wandb_logged_in() is False


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE"])
def test_a_key_in_the_environment_is_a_login_and_an_empty_one_is_not(home, monkeypatch, name):
    monkeypatch.setenv(name, KEY)
    assert machine.is_wandb_logged_in() is True
    monkeypatch.setenv(name, "")
    assert machine.is_wandb_logged_in() is False


@pytest.mark.parametrize(
    ("base_url", "host", "is_logged_in"),
    [
        (None, "api.wandb.ai", True),
        ("https://api.wandb.ai", "api.wandb.ai", True),
        ("https://api.wandb.ai", "wandb.example.com", False),
        (None, "wandb.example.com", False),
        ("https://wandb.example.com/", "wandb.example.com", True),
        ("https://wandb.example.com", "api.wandb.ai", False),
        ("http://localhost:8080", "localhost:8080", True),
        ("http://localhost:8080", "localhost", False),
        ("http://[broken", "api.wandb.ai", False),
    ],
)
def test_a_netrc_entry_is_a_login_for_its_own_server_only(home, monkeypatch, base_url, host, is_logged_in):
    plant(home, {".netrc": f"machine {host}\n  login user\n  password {KEY}"})
    if base_url is not None:
        monkeypatch.setenv("WANDB_BASE_URL", base_url)
    assert machine.is_wandb_logged_in() is is_logged_in


def test_a_login_to_the_default_server_of_the_installed_wandb_counts(home):
    import wandb

    plant(home, {".netrc": f"machine {urlsplit(wandb.Settings().base_url).netloc} login user password {KEY}"})
    assert machine.is_wandb_logged_in() is True


def test_the_netrc_file_may_be_elsewhere(home, monkeypatch):
    plant(home, {"keys/netrc": f"machine api.wandb.ai login user password {KEY}"})
    monkeypatch.setenv("NETRC", "~/keys/netrc")
    assert machine.is_wandb_logged_in() is True
    monkeypatch.setenv("NETRC", "~/keys/none")
    assert machine.is_wandb_logged_in() is False


@pytest.mark.parametrize("content", [b"machine api.wandb.ai login", b"nonsense", b"\xff\xfe\x00", b'machine "open'])
def test_a_malformed_netrc_is_no_login_and_says_nothing(home, capfd, content):
    (home / ".netrc").write_bytes(content)
    assert machine.is_wandb_logged_in() is False
    assert capfd.readouterr() == ("", "")


def test_a_netrc_that_cannot_be_read_or_has_an_empty_password_is_no_login(home):
    plant(home, {".netrc": 'machine api.wandb.ai login user password ""'})
    assert machine.is_wandb_logged_in() is False
    (home / ".netrc").unlink()
    (home / ".netrc").mkdir()
    assert machine.is_wandb_logged_in() is False


def test_the_version_of_a_package_is_told_without_importing_it(tmp_path, monkeypatch):
    plant(
        tmp_path, {"planted_thing-3.1.dist-info/METADATA": "Metadata-Version: 2.1\nName: planted-thing\nVersion: 3.1"}
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert machine.package_version("planted-thing") == "3.1"
    assert machine.package_version("no-such-thing") is None


def test_the_environment_has_the_records_keys_and_names_installed_packages_only(nvml, monkeypatch):
    versions = {"torch": "9.8", "hydra-core": "1.3.8"}
    monkeypatch.setattr(machine, "package_version", versions.get)
    environment = machine.environment()
    expected = "python torch cuda driver devices cpu_model cores_granted memory_granted_mib platform packages"
    assert list(environment) == expected.split()
    assert environment["packages"] == versions
    assert environment["torch"] == "9.8"
    assert environment["cuda"] is None
    assert environment["driver"] == "580.65.06"
    assert environment["devices"] == ["H200", "A100", "V100"]
    assert environment["cores_granted"] == machine.cores_granted()
    assert environment["memory_granted_mib"] == machine.memory_granted_mib()
    assert environment["python"] == ".".join(map(str, sys.version_info[:3]))


def test_asking_the_machine_imports_neither_torch_nor_wandb_and_importing_it_no_bindings():
    code = """
import sys
import runner.machine
assert not {"torch", "wandb", "psutil", "pynvml", "numpy"} & set(sys.modules), sorted(sys.modules)
runner.machine.environment(), runner.machine.is_wandb_logged_in(), runner.machine.memory_available_mib()
assert not {"torch", "wandb", "numpy"} & set(sys.modules), sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[1])
