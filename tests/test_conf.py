"""The config groups: each option composes with the defaults and passes the checks before launch."""

import os
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from runner.__main__ import CONF
from runner.check import check
from runner.run import _register_resolvers

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = sorted(path.relative_to(CONF).with_suffix("").as_posix() for path in CONF.rglob("*.yaml"))
OPTIONS.remove("config")
NUM_OPTIONS = 43

# What an option leaves for the user to state; DIR is a folder that exists.
NEEDS = {
    "data/fashion_mnist": ["data.root=DIR"],
    "data/idx": ["data.root=DIR"],
    "data/mnist": ["data.root=DIR"],
    "data/image_folder": ["data.root=DIR", "data.num_classes=3"],
    "data/map_style": [
        "data.train._target_=torchvision.datasets.FakeData",
        "data.val._target_=torchvision.datasets.FakeData",
        "data.num_channels=1",
        "data.num_classes=10",
        "data.image_size=28",
    ],
    "model/torchvision": ["data.num_channels=3"],
}


def composed(overrides):
    """As the launching process sees it: resolved, plain, without the experiment."""
    _register_resolvers()
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = OmegaConf.to_container(compose("config", overrides=overrides), resolve=True, throw_on_missing=True)
    config.pop("experiment", None)
    return config


def test_every_yaml_is_found():
    walked = sum(name.endswith((".yaml", ".yml")) for _, _, names in os.walk(CONF) for name in names)
    assert len(OPTIONS) + 1 == walked
    assert len(OPTIONS) == NUM_OPTIONS


@pytest.mark.parametrize("option", OPTIONS)
def test_an_option_composes_and_passes_the_checks(option, tmp_path):
    group, _, name = option.rpartition("/")
    if option == "model/timm":
        pytest.importorskip("timm", reason="timm is an extra")
    needs = [override.replace("DIR", str(tmp_path)) for override in NEEDS.get(option, [])]
    config = composed([f"{group}={name}", *needs])
    if (config["steps"] is None) == (config["epochs"] is None):
        pytest.fail(f"{option} leaves steps={config['steps']} epochs={config['epochs']}")
    check(config)


@pytest.mark.parametrize("option", sorted(set(NEEDS) - {"data/fashion_mnist", "model/torchvision"}))
def test_an_option_that_leaves_something_open_is_refused_without_it(option):
    group, _, name = option.rpartition("/")
    with pytest.raises(Exception, match=r"(?s)mandatory|needs"):
        check(composed([f"{group}={name}"]))


def test_no_option_has_a_name_that_yaml_reads_as_a_truth_value():
    words = {"on", "off", "yes", "no", "true", "false", "y", "n", "null"}
    assert {part for option in OPTIONS for part in option.split("/")} & (words - {"null"}) == set()


def test_no_two_options_of_a_group_differ_in_case_only():
    assert len({option.lower() for option in OPTIONS}) == len(OPTIONS)


def test_every_default_stands_in_yaml():
    found = [
        f"{path.name}:{number}"
        for path in (ROOT / "runner").rglob("*.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bcfg\.get\(|\bcfg\[[^]]+\]\.get\(", line)
    ]
    assert found == []


def test_every_group_of_the_entry_config_has_its_default():
    chosen = {
        key.removeprefix("override "): value
        for entry in OmegaConf.load(CONF / "config.yaml").defaults
        if not isinstance(entry, str)
        for key, value in entry.items()
    }
    groups = {option.split("/")[0] for option in OPTIONS}
    assert groups <= set(chosen)
    for group in groups - {"experiment"}:
        assert f"{group}/{chosen[group]}" in OPTIONS
