"""Checks before launch: every key and value of a config that can be judged without importing what it names."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, get_type_hints

from pydantic import NonNegativeInt, PositiveFloat, PositiveInt

from runner.batch import BatchPlan
from runner.errors import BadInput
from runner.machine import Accelerator, accelerators, cores_granted
from runner.signature import Parameter, TargetNotFound, problem, read

_HYDRA_KEYS = {"_target_", "_partial_", "_recursive_", "_convert_", "_args_"}
RANKS_PER_CORE = 4  # without accelerators; more than this only wait for each other

Config = dict[str, Any]


@dataclass
class Root:
    """The top level of a config: no defaults, those stand in config.yaml; groups are checked by their targets."""

    task: Any
    data: Any
    model: Any
    optimizer: Any
    schedule: Any
    precision: Any
    batch: Any
    compile: Any
    parallel: Any
    memory: Any
    measure: Any
    tracker: Any
    seed: NonNegativeInt
    steps: PositiveInt | None
    epochs: PositiveInt | None
    warmup_steps: NonNegativeInt | Literal["auto"]
    max_grad_norm: PositiveFloat | None
    eval_every_steps: PositiveInt | None
    eval_every_epochs: PositiveInt | None


def check(config: Config) -> None:
    """Refuse what cannot run.

    Args:
        config: composed and resolved, as plain containers.

    Raises:
        BadInput: one sentence: key, value, why, what would work.
    """
    hints = get_type_hints(Root, include_extras=True)
    known = [field.name for field in fields(Root)]
    for key, value in config.items():
        if key not in hints:
            raise BadInput(unknown_key(key, known))
        _check_value(key, Parameter(name=key, annotation=hints[key], is_required=True, is_keyword=True), value)
    for key in known:
        if isinstance(config[key], Mapping):
            _check_node(key, config[key])
    _check_length(config)
    _check_lr(config["optimizer"])
    _check_ranks(config["parallel"])


def unknown_key(key: str, known: Iterable[str], *, prefix: str = "") -> str:
    """The sentence for a key that does not exist, with the nearest one that does."""
    known = sorted(known)
    near = get_close_matches(key, known, n=1)
    hint = f"did you mean {prefix}{near[0]}?" if near else f"known here: {', '.join(known) or 'none'}"
    return f"{prefix}{key}: no such key; {hint}"


def _check_node(path: str, node: Any) -> None:
    """A mapping with ``_target_`` against the target's signature, and everything below it."""
    if isinstance(node, Sequence) and not isinstance(node, str):
        for position, item in enumerate(node):
            _check_node(f"{path}.{position}", item)
    if not isinstance(node, Mapping):
        return
    if "_target_" in node:
        _check_target(path, node)
    for key, value in node.items():
        _check_node(f"{path}.{key}", value)


def _check_target(path: str, node: Mapping[str, Any]) -> None:
    try:
        signature = read(node["_target_"])
    except TargetNotFound as error:
        raise BadInput(f"{path}._target_={node['_target_']}: {error}") from None
    if signature is None:
        return
    given = {key: value for key, value in node.items() if key not in _HYDRA_KEYS}
    for key, value in given.items():
        parameter = signature.parameters.get(key)
        if parameter is not None:
            _check_value(f"{path}.{key}", parameter, value)
        elif not signature.takes_any_keyword:
            raise BadInput(unknown_key(key, signature.parameters, prefix=f"{path}."))
    if node.get("_partial_") or "_args_" in node or path in ("batch",):
        return
    for parameter in signature.parameters.values():
        if parameter.is_required and parameter.name not in given:
            raise BadInput(f"{path}.{parameter.name}: {node['_target_']} needs it; state {path}.{parameter.name}=VALUE")


def _check_value(key: str, parameter: Parameter, value: Any) -> None:
    why = problem(parameter, value)
    if why is not None:
        shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else value
        raise BadInput(f"{key}={shown}: {why}")


def _check_length(config: Config) -> None:
    steps, epochs, warmup_steps = config["steps"], config["epochs"], config["warmup_steps"]
    if (steps is None) == (epochs is None):
        shown = f"steps={steps} epochs={epochs}".replace("None", "null")
        raise BadInput(f"{shown}: state one of the two and set the other to null")
    if steps is not None and warmup_steps != "auto" and warmup_steps >= steps:
        raise BadInput(
            f"warmup_steps={warmup_steps}: leaves no step to measure of steps={steps}; "
            f"warmup_steps={steps // 4} would, or warmup_steps=auto"
        )


def _check_lr(optimizer: Mapping[str, Any]) -> None:
    """torch's own annotation of it names Tensor, which nothing here may import."""
    lr = optimizer.get("lr")
    if isinstance(lr, bool) or not isinstance(lr, int | float) or lr < 0:
        raise BadInput(f"optimizer.lr={'null' if lr is None else lr}: must be a number of 0 or more")


def settle(config: Config) -> Config:
    """The values that replace each ``auto`` of a checked config, by dotted key: what they became on this machine."""
    settled: Config = {}
    parallel, cores = config["parallel"], cores_granted()
    if parallel.get("num_ranks") == "auto":
        settled["parallel.num_ranks"] = max(1, len(_devices(parallel))) if _devices(parallel) else 2
    num_ranks = settled.get("parallel.num_ranks", parallel.get("num_ranks", 1))
    if parallel.get("num_threads") == "auto":
        settled["parallel.num_threads"] = max(1, cores // num_ranks)
    loader = config["data"].get("loader") if isinstance(config["data"], Mapping) else None
    if isinstance(loader, Mapping) and loader.get("num_workers") == "auto":
        settled["data.loader.num_workers"] = max(1, cores * 3 // 4 // num_ranks)
    return settled


def check_batch(config: Config, *, world_size: int) -> BatchPlan | None:
    """The batch arithmetic at this world size; None for a plan of somebody else's.

    Raises:
        BadInput: sizes that do not divide.
    """
    batch = {key: value for key, value in config["batch"].items() if key not in _HYDRA_KEYS}
    if config["batch"].get("_target_") != "runner.batch.BatchPlan":
        return None
    return BatchPlan(**batch, data_parallel_size=world_size)


def _check_ranks(parallel: Mapping[str, Any]) -> None:
    num_ranks = parallel.get("num_ranks")
    if not isinstance(num_ranks, int):
        return
    devices, cores = _devices(parallel), cores_granted()
    most = len(devices) if devices else max(2, cores * RANKS_PER_CORE)
    if num_ranks > most:
        has = (
            f"has {most} device(s) and each rank needs its own"
            if devices
            else f"grants {cores} core(s), no accelerator"
        )
        raise BadInput(
            f"parallel.num_ranks={num_ranks}: this machine {has}; at most {most} ranks, "
            f"parallel.num_ranks={most if devices else max(2, cores)} would work"
        )


def _devices(parallel: Mapping[str, Any]) -> list[Accelerator]:
    return [] if parallel.get("device") == "cpu" else accelerators()
