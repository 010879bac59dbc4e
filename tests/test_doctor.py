import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from runner import doctor, machine
from runner.machine import Accelerator

KEY = "5ec2e7" * 6 + "beef"
GPU = {"index": 0, "name": "H200", "memory_mib": 143771.0, "has_native_bf16": True}
PACKAGES = ("torch", "torchvision", "hydra-core", "omegaconf", "numpy", "wandb", "timm")
WELL = {  # two devices and nothing missing
    "python": "3.11.7",
    "torch": "2.14.1",
    "cuda": None,
    "driver": "580.65.06",
    "devices": ["H200", "H200"],
    "cpu_model": "Fast 9000",
    "cores_granted": 4,
    "memory_granted_mib": 65536.0,
    "platform": "Linux",
    "packages": dict.fromkeys(PACKAGES, "1.2"),
    "system": "Linux",
    "accelerators": [GPU, GPU | {"index": 1}],
    "is_device_choice_stated": False,
    "cores_by_affinity": 8,
    "cores_by_quota": 3.5,
    "memory_available_mib": 32768.0,
    "shm_free_mib": 8192.0,
    "open_files_limit": 65536,
    "has_native_bf16": True,
    "cpp_compiler": "/usr/bin/g++",
    "is_cpp_compiler_stated": False,
    "other_cpp_compiler": "/usr/bin/g++",
    "has_c_compiler": True,
    "has_python_headers": True,
    "triton": "3.8.0",
    "is_wandb_logged_in": True,
}
CPU_ONLY = {"accelerators": [], "devices": [], "driver": None}


def without(*names):
    return {"packages": {name: "1.2" for name in PACKAGES if name not in names}}


def gaps_of(**changes):
    return [(gap.lever, gap.lacks, gap.cure) for gap in doctor.missing(WELL | changes)]


def show(monkeypatch, capsys, **changes):
    monkeypatch.setattr(doctor, "examine", lambda: WELL | changes)
    assert doctor.main([]) == 0
    return capsys.readouterr().out


def test_the_planted_facts_are_those_that_are_examined():
    assert set(doctor.examine()) == set(WELL)


def test_a_machine_that_has_everything_lacks_nothing(monkeypatch, capsys):
    assert gaps_of() == []
    assert "Nothing is missing" in show(monkeypatch, capsys)


@pytest.mark.parametrize(
    ("changes", "lever", "cure"),
    [
        (without("timm"), "model=timm", "pip install 'runner[timm]'"),
        (without("wandb") | {"is_wandb_logged_in": False}, "tracker=wandb", "pip install wandb"),
        (without("torchvision"), "every run", "pip install torchvision"),
        ({"is_wandb_logged_in": False}, "tracker=wandb", "wandb login"),
        ({"torch": "2.14.1+cpu"}, "parallel.device=cuda", "CUDA build"),
        ({"cpp_compiler": None, "other_cpp_compiler": None}, "compile=default on a CPU", "apt-get install g++"),
        (
            {"cpp_compiler": None, "other_cpp_compiler": "/bin/clang++"},
            "compile=default on a CPU",
            "export CXX=/bin/clang++",
        ),
        (
            {"cpp_compiler": None, "is_cpp_compiler_stated": True, "other_cpp_compiler": None},
            "compile=default on a CPU",
            "unset CXX",
        ),
        (
            {"cpp_compiler": None, "other_cpp_compiler": None, "system": "Darwin"},
            "compile=default on a CPU",
            "xcode-select --install",
        ),
        ({"has_python_headers": False}, "compile=default", "python3-dev"),
        ({"triton": None}, "compile=default on a GPU", "pip install triton"),
        ({"has_c_compiler": False}, "compile=default on a GPU", "apt-get install gcc"),
        ({"accelerators": [GPU]}, "parallel=ddp", "parallel=single"),
        ({"open_files_limit": 256}, "data.loader.num_workers", "ulimit -n"),
        ({"shm_free_mib": 64.0}, "data.loader.num_workers", "--shm-size=1g"),
        ({"cores_granted": 1}, "data.loader.num_workers", "data.loader.num_workers=0"),
    ],
)
def test_each_lack_is_told_once_with_its_lever_and_cure(monkeypatch, capsys, changes, lever, cure):
    [(told_lever, lacks, told_cure)] = gaps_of(**changes)
    assert told_lever == lever
    assert cure in told_cure
    output = show(monkeypatch, capsys, **changes)
    assert f"{lever}: {lacks}\n    {told_cure}\n" in output  # whole, to be copied: not wrapped, not taken for markup


def test_shared_memory_must_hold_the_batches_of_one_worker_a_core_twice():
    image_mib = 3 * 224 * 224 * 4 / 2**20
    needed_mib = 4 * 2 * 32 * image_mib * 2  # cores, batches ahead, images a batch, half left free
    assert gaps_of(shm_free_mib=needed_mib + 1) == []
    assert len(gaps_of(shm_free_mib=needed_mib - 1)) == 1
    assert gaps_of(shm_free_mib=None) == []
    [(_, _, cure)] = gaps_of(shm_free_mib=64.0, cores_granted=32)  # eight times 294 MiB are 2.3 GiB
    assert "--shm-size=3g" in cure


def test_a_soft_limit_of_1024_open_files_is_enough():
    assert gaps_of(open_files_limit=1024) == []
    assert len(gaps_of(open_files_limit=1023)) == 1


@pytest.mark.parametrize(
    ("changes", "cure"),
    [
        ({"driver": None}, "install NVIDIA's driver"),
        ({"is_device_choice_stated": True}, "unset CUDA_VISIBLE_DEVICES"),
        ({}, "nvidia-smi"),
    ],
)
def test_the_cure_for_no_device_depends_on_who_hides_it(changes, cure):
    first, *_ = gaps_of(accelerators=[], **changes)
    assert first[0] == "parallel.device=cuda"
    assert cure in first[2]


def test_a_mac_is_not_told_to_install_a_driver_that_it_cannot_have():
    assert "parallel.device=cuda" not in [lever for lever, *_ in gaps_of(**CPU_ONLY, system="Darwin")]


@pytest.mark.parametrize(("is_native", "best"), [(True, "precision=bf16"), (False, "precision=fp32")])
def test_a_cpu_is_told_its_best_precision(is_native, best):
    cures = {lever: cure for lever, _, cure in gaps_of(**CPU_ONLY, has_native_bf16=is_native)}
    assert cures["precision=fp16"] == cures["precision=tf32"] == best
    assert ("precision=bf16" in cures) is not is_native


def test_an_old_device_is_told_to_take_fp16_and_an_unknown_one_nothing():
    old = gaps_of(accelerators=[GPU, GPU | {"has_native_bf16": False}])
    assert [(lever, cure) for lever, _, cure in old] == [
        ("precision=bf16", "precision=fp16"),
        ("precision=tf32", "precision=fp16"),
    ]
    assert gaps_of(accelerators=[GPU, GPU | {"has_native_bf16": None}]) == []


def test_ddp_on_a_cpu_needs_a_second_core():
    levers = [lever for lever, *_ in gaps_of(**CPU_ONLY, cores_granted=1)]
    assert {"parallel=ddp", "data.loader.num_workers"} <= set(levers)
    assert "parallel=ddp" not in [lever for lever, *_ in gaps_of(**CPU_ONLY, cores_granted=2)]


def test_a_cpu_needs_neither_triton_nor_a_c_compiler():
    assert not [gap for gap in gaps_of(**CPU_ONLY, triton=None, has_c_compiler=False) if "GPU" in gap[0]]


def test_the_table_shows_what_the_machine_grants(monkeypatch, capsys):
    output = show(monkeypatch, capsys)
    for part in (
        "device 0      H200, 140.4 GiB, bfloat16 native",
        "Fast 9000",
        "4 granted (affinity 8, quota 3.5)",
        "64.0 GiB granted, 32.0 GiB available",
        "8.0 GiB free",
        "65536 at most",
        "/usr/bin/g++",
        "logged in",
        "driver 580.65.06",
        "hydra-core 1.2",
    ):
        assert part in output
    output = show(monkeypatch, capsys, cores_by_quota=None, shm_free_mib=None, open_files_limit=sys.maxsize, **CPU_ONLY)
    for part in ("no NVIDIA device", "quota none", "no limit"):
        assert part in output


def test_json_says_the_same_as_the_table(monkeypatch, capsys):
    changes = without("timm") | {"open_files_limit": 256}
    monkeypatch.setattr(doctor, "examine", lambda: WELL | changes)
    assert doctor.main(["--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["machine"] == WELL | changes
    assert [(gap["lever"], gap["lacks"], gap["cure"]) for gap in told["missing"]] == gaps_of(**changes)
    assert len(told["missing"]) == 2


def test_examining_takes_the_devices_without_what_identifies_them(monkeypatch):
    device = Accelerator(index=3, name="H200", memory_mib=1.5, has_native_bf16=None, uuid="GPU-aa11")
    monkeypatch.setattr(machine, "accelerators", lambda: [device])
    facts = doctor.examine()
    assert facts["accelerators"] == [{"index": 3, "name": "H200", "memory_mib": 1.5, "has_native_bf16": None}]
    assert "GPU-aa11" not in json.dumps(facts)


@pytest.mark.parametrize("argument", ["--jsn", "gpu", "-v", ""])
def test_an_unknown_argument_is_one_sentence_on_stderr_and_exit_code_2(capsys, argument):
    assert doctor.main(["--json", argument]) == 2
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors == f"doctor: {argument!r} is not an option here, only --json and --help are\n"


@pytest.mark.parametrize("argument", ["--help", "-h"])
def test_help_tells_the_usage_and_examines_nothing(monkeypatch, capsys, argument):
    monkeypatch.setattr(doctor, "examine", None)
    assert doctor.main([argument]) == 0
    assert "usage: python -m runner doctor [--json]" in capsys.readouterr().out


def run_doctor(*, arguments, environment=None):
    code = f"""
import sys
from runner import doctor
assert "torch" not in sys.modules
code = doctor.main({arguments!r})
assert not {{"torch", "wandb"}} & set(sys.modules)
sys.exit(code)
"""
    root = Path(__file__).parents[1]
    env = os.environ | (environment or {})
    return subprocess.run([sys.executable, "-c", code], cwd=root, env=env, capture_output=True, text=True, check=True)


@pytest.mark.parametrize("arguments", [[], ["--json"]])
def test_the_doctor_imports_no_torch_and_tells_no_secret(tmp_path, arguments):
    netrc = tmp_path / "netrc"
    netrc.write_text(f"machine api.wandb.ai login user password {KEY}")
    secrets = {"WANDB_API_KEY": KEY[::-1], "NETRC": str(netrc), "CUDA_VISIBLE_DEVICES": "GPU-5ec2e7"}
    done = run_doctor(arguments=arguments, environment=secrets)
    assert done.stderr == ""
    for secret in (KEY, *secrets.values()):
        assert secret not in done.stdout
    assert "logged" in done.stdout


def test_the_output_is_plain_where_nobody_watches():
    output = run_doctor(arguments=[], environment={"NO_COLOR": "", "PYTHONIOENCODING": "ascii"}).stdout
    assert "\x1b" not in output
    assert output.isascii()
