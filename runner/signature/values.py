"""Whether a plain value fits an annotation, and how to say in words what would."""

import json
import types
from collections.abc import Callable
from difflib import get_close_matches
from functools import cache
from pathlib import PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from runner.signature.parameters import Parameter

_WORDS: dict[Any, tuple[str, str]] = {  # one, several
    int: ("an integer", "integers"),
    float: ("a number", "numbers"),
    str: ("text", "texts"),
    bool: ("true or false", "true or false"),
    bytes: ("text", "texts"),
}
_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}


def problem(parameter: Parameter, value: Any) -> str | None:
    """Why a JSON-like value cannot be this parameter's; None: it can, or that cannot be judged.

    An integer is taken for a number, a list for a tuple and text for a path; nothing else is converted. What holds a
    `_target_` is not judged, since only building it shows what it is.
    """
    if parameter.annotation is Any or _holds_target(value):
        return None
    adapter = _adapter(parameter.annotation)
    if adapter is None:
        return None
    from pydantic import ValidationError

    try:
        adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError:
        return f"must be {_allowed(parameter.annotation)}{_hint(parameter.annotation, value)}"
    except TypeError:  # not JSON-like, so it was not stated in a config
        return None
    return None


def _holds_target(value: Any) -> bool:
    if isinstance(value, dict):
        return "_target_" in value or any(_holds_target(item) for item in value.values())
    return isinstance(value, list | tuple) and any(_holds_target(item) for item in value)


@cache
def _adapter(annotation: Any) -> Any:
    """pydantic's validator of a type; None where it has none, or where no JSON value could pass it."""
    if _holds_code(annotation):
        return None
    from pydantic import PydanticUserError, TypeAdapter

    try:
        return TypeAdapter(annotation)
    except (PydanticUserError, TypeError, NameError):
        return None


def _holds_code(annotation: Any) -> bool:
    kind = get_origin(annotation) or annotation
    return kind in (type, Callable) or any(_holds_code(part) for part in get_args(annotation) if kind is not Literal)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, and the values of a Literal as a Literal each."""
    if get_origin(annotation) in (Union, types.UnionType):
        return [member for part in get_args(annotation) for member in _members(part)]
    if get_origin(annotation) is Literal:
        return [Literal[value] for value in get_args(annotation)]
    return [annotation]


def _allowed(annotation: Any) -> str:
    members = _members(annotation)
    if len(members) > 1 and all(get_origin(member) is Literal for member in members):
        return "one of " + ", ".join(_phrase(member) for member in members)
    phrases = list(dict.fromkeys(_phrase(member) for member in members))
    if len(phrases) == 1:
        return phrases[0]
    if "true or false" in phrases:
        i = phrases.index("true or false")
        phrases[i : i + 1] = ["true", "false"]
    comma = "," if len(phrases) > 2 or " or " in phrases[0] or " of " in phrases[0] else ""
    return ", ".join(phrases[:-1]) + f"{comma} or {phrases[-1]}"


def _phrase(member: Any) -> str:
    """One member of a union in words."""
    origin, arguments = get_origin(member), get_args(member)
    if member in (None, type(None)):
        return "null"
    if origin is Literal:
        return _shown(arguments[0])
    if origin is Annotated:
        return _bounded(arguments[0], arguments[1:])
    if member in _WORDS:
        return _WORDS[member][0]
    kind = origin or member
    if isinstance(kind, type) and issubclass(kind, PurePath):
        return "a path"
    if kind is tuple and arguments and ... not in arguments:
        alike = len(set(arguments)) == 1
        return f"a list of {len(arguments)}" + (f" {_several(arguments[0])}" if alike else _each(arguments))
    if isinstance(kind, type) and hasattr(kind, "keys"):
        return "a mapping" + (f" of {_several(arguments[0])} to {_several(arguments[1])}" if arguments else "")
    return f"a list of {_several(arguments[0])}" if arguments and arguments[0] is not Any else "a list"


def _several(annotation: Any) -> str:
    if annotation is Any:
        return "anything"
    return _WORDS[annotation][1] if annotation in _WORDS else f"items, each {_allowed(annotation)}"


def _each(arguments: tuple[Any, ...]) -> str:
    return ": " + ", ".join(_allowed(argument) for argument in arguments)


def _bounded(kind: Any, metadata: tuple[Any, ...]) -> str:
    for item in metadata:
        if getattr(item, "path_type", None):
            return "an existing directory" if item.path_type == "dir" else "an existing file"
    words = [_phrase(kind)]
    for item in metadata:
        for key, word in _BOUNDS.items():
            bound = getattr(item, key, None)
            if bound is None:
                continue
            if kind is int:
                words.append({"gt": f"of {bound + 1} or more", "ge": f"of {bound} or more"}.get(key, f"{word} {bound}"))
            else:
                words.append(f"of {bound} or more" if key == "ge" else f"{word} {bound}")
    return " ".join(words)


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else json.dumps(value)


def _hint(annotation: Any, value: Any) -> str:
    """What the value was probably meant to be."""
    if not isinstance(value, str):
        return ""
    literals = [v for m in _members(annotation) if get_origin(m) is Literal for v in get_args(m) if isinstance(v, str)]
    near = get_close_matches(value.lower(), literals, n=1, cutoff=0.6)
    if near:
        return f" (did you mean {near[0]!r}?)"
    try:
        json.loads(value.lower())
    except ValueError:
        return ""
    return f", not the text {value!r}"
