"""What to say of a `_target_` that is not there: what lacks it, the nearest name, and what would work."""

import ast
import re
import sys
from collections.abc import Iterable
from difflib import get_close_matches

from runner.errors import BadInput
from runner.signature.find import Absent, Definition, body_of, find, linearize
from runner.signature.source import Module, exports, locate, scope_of, submodule, submodules

# Packages that configs often name and that need not be here, and what pip calls them.
_DISTRIBUTIONS = {name: name for name in ("accelerate", "datasets", "lightning", "timm", "torchaudio", "torchvision")}
_DISTRIBUTIONS |= {"transformers": "transformers", "sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow"}


class TargetNotFound(BadInput):
    """A `_target_` that names nothing."""


def explain(absent: Absent) -> TargetNotFound:
    """The error for a name that is not there."""
    name, place = absent.name, absent.place
    if isinstance(place, Module):
        text = f"module {place.name} has no '{name}'"
    elif isinstance(place, Definition):
        text = f"class {place.module.name}.{place.node.name} has no '{name}'"
    elif name in _DISTRIBUTIONS:
        return TargetNotFound(f"package '{name}' is not installed; pip install {_DISTRIBUTIONS[name]}")
    else:
        text = f"no module named '{name}'"
    near = _nearest(name, _names_in(place), cutoff=0.6 if place else 0.75)
    if near:
        return TargetNotFound(f"{text} (did you mean '{near}'?)")
    if place is None:
        text += "; if it is yours, start from the folder it lies in, if it is a package, install it"
    return TargetNotFound(text)


def is_callable(target: str, found: object) -> None:
    """Refuse a target that is a module.

    Raises:
        TargetNotFound: it is one.
    """
    if isinstance(found, Module):
        raise TargetNotFound(f"'{target}' is a module; name a class or function in it")


def suspect(target: str) -> Absent | None:
    """A likely slip in a target that the source cannot settle, because a module on its way adds names while it runs.

    It is told only where all speaks for it: the module's text never mentions the name, a submodule has nearly that
    name, and with it the whole target is found.
    """
    parts = target.split(".")
    for i in range(1, len(parts) - 1):
        package = locate(".".join(parts[:i]))
        if package is None or submodule(package, parts[i]):
            continue
        near = _nearest(parts[i], submodules(package.folders or ()), cutoff=0.75)
        if not near or not package.source or re.search(rf"\b{parts[i]}\b", package.source):
            return None
        try:
            found = find(".".join([*parts[:i], near, *parts[i + 1 :]]))
        except Absent:
            return None
        return Absent(parts[i], package) if isinstance(found, Definition) else None
    return None


def _nearest(name: str, names: Iterable[str], *, cutoff: float) -> str | None:
    """The most similar name, capitals aside."""
    by_lower = {other.lower(): other for other in sorted(names, reverse=True)}
    return next((by_lower[near] for near in get_close_matches(name.lower(), by_lower, n=1, cutoff=cutoff)), None)


def _names_in(place: Module | Definition | None) -> set[str]:
    if place is None:
        return {*submodules(sys.path), *sys.stdlib_module_names, *_DISTRIBUTIONS}
    if isinstance(place, Definition):
        bases = [base for base in linearize(place) if base and isinstance(base.node, ast.ClassDef)]
        return {name for base in bases for name in body_of(base).names}
    scope = scope_of(place)
    names = {*scope.names, *submodules(place.folders or ())}
    for star in scope.stars:
        origin = locate(star)
        if origin:
            names |= exports(origin) or _names_in(origin)
    return names
