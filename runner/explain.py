"""Hydra's and OmegaConf's errors as one sentence each: key, value, what is allowed, nearest match."""

from difflib import get_close_matches
from typing import Any

from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from runner.check import unknown_key


def is_config_error(error: BaseException) -> bool:
    """Whether an error says that a config could not be composed or resolved."""
    return isinstance(error, HydraException | OmegaConfBaseException)


def explain(error: Exception) -> str:
    """One sentence."""
    if isinstance(error, MissingConfigException):
        return _missing_option(error)
    inner = _omegaconf(error)
    if isinstance(inner, MissingMandatoryValue):
        return f"{inner.full_key}: must be stated; add {inner.full_key}=VALUE"
    if isinstance(error, OverrideParseException):
        return f"{error.override}: cannot be read as KEY=VALUE; quote values that hold spaces, commas or brackets"
    if isinstance(error, ConfigCompositionException) and inner is not None and inner.key is not None:
        return _unknown(inner)
    return " ".join(str(error).split())


def _missing_option(error: MissingConfigException) -> str:
    group, _, option = (error.missing_cfg_file or "").rpartition("/")
    options = [str(option) for option in error.options or []]
    if not options:
        return " ".join(str(error).split())
    near = get_close_matches(option, options, n=1)
    hint = f"did you mean {group}={near[0]}? " if near else ""
    return f"{group}={option}: no such option; {hint}choose one of {', '.join(sorted(options))}"


def _omegaconf(error: BaseException | None) -> OmegaConfBaseException | None:
    while error is not None and not isinstance(error, OmegaConfBaseException):
        error = error.__cause__ or error.__context__
    return error


def _unknown(error: OmegaConfBaseException) -> str:
    parent: Any = error.parent_node
    known = [str(key) for key in parent] if parent is not None and hasattr(parent, "keys") else []
    if str(error.key) in known:
        return f"{error.full_key}: {' '.join(str(error.msg).split())}"
    full_key = str(error.full_key)
    prefix = f"{full_key.rpartition('.')[0]}." if "." in full_key else ""
    return unknown_key(str(error.key), known, prefix=prefix)
