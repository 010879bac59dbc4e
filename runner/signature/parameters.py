"""Which parameters a function or class takes, as its definition states them."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from runner.signature import annotations, missing
from runner.signature.find import Absent, Definition, body_of, dotted, find, linearize
from runner.signature.source import Import, scope_of

# Decorators that leave what a function or class takes as it is. Any other may add, fill in or rename parameters.
_TRANSPARENT = {"staticmethod", "classmethod", "abstractmethod", "final", "override", "deprecated", "overload"}
_TRANSPARENT |= {"no_grad", "enable_grad", "inference_mode", "cache", "lru_cache", "contextmanager", "total_ordering"}
_TRANSPARENT |= {"runtime_checkable", "dataclass", "export", "compile"}
_DESCRIPTORS = {"property", "cached_property"}
_UNREADABLE_BASES = {"NamedTuple", "TypedDict"}
_METACLASSES = {"ABCMeta", "type"}
_EXACT: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), str: (str,), bool: (bool,)}


@dataclass(frozen=True)
class Parameter:
    """One parameter.

    Args:
        annotation: the type as an object; ``typing.Any`` where it cannot be known without importing.
        is_required: it has no default, and no unknown decorator might fill it in.
        is_keyword: it may be given by name.
    """

    name: str
    annotation: Any
    is_required: bool
    is_keyword: bool


@dataclass(frozen=True)
class Signature:
    """What a target takes.

    Args:
        parameters: by name, in order, without self and cls.
        takes_any_keyword: other keywords may be right too: it has ``**kwargs``, or a base class or decorator hides
            what it takes.
    """

    target: str
    parameters: dict[str, Parameter]
    takes_any_keyword: bool


def read(target: str) -> Signature | None:
    """What ``target``, a dotted name, accepts; None: the source does not show it (compiled, or made while running).

    ``sys.path`` as it is now is searched, so the caller puts the working directory first.

    Raises:
        TargetNotFound: there is no such module, function or class, or it is a module.
    """
    return _read(target, tuple(sys.path))


@cache
def _read(target: str, path: tuple[str, ...]) -> Signature | None:
    parts = target.split(".")
    if len(parts) < 2 or not all(part.isidentifier() for part in parts):
        raise missing.TargetNotFound(f"'{target}' is not a dotted name, such as torch.optim.SGD")
    try:
        found = find(target)
        if found is None and (absent := missing.suspect(target)):
            raise absent
    except Absent as absent:
        raise missing.explain(absent) from None
    missing.is_callable(target, found)
    signature = _of(found) if isinstance(found, Definition) else None
    return replace(signature, target=target) if signature else None


def _of(definition: Definition) -> Signature | None:
    node = definition.node
    if isinstance(node, ast.ClassDef):
        return _of_class(definition)
    names = _decorator_names(definition)
    if names & _DESCRIPTORS:
        return None
    is_bound = definition.owner is not None and ("classmethod" in names or node.name == "__new__")
    return _of_function(definition, is_bound=is_bound)


def _of_function(definition: Definition, *, is_bound: bool) -> Signature:
    node = definition.node
    assert not isinstance(node, ast.ClassDef)
    stated = node.args
    positional = [*stated.posonlyargs, *stated.args]
    defaults = [*[None] * (len(positional) - len(stated.defaults)), *stated.defaults]
    is_wrapped = not _decorator_names(definition) <= _TRANSPARENT
    parameters = {}
    pairs = zip([*positional, *stated.kwonlyargs], [*defaults, *stated.kw_defaults], strict=True)
    for i, (argument, default) in enumerate(pairs):
        if i == 0 and is_bound and positional:
            continue
        parameters[argument.arg] = Parameter(
            argument.arg,
            _annotation(argument.annotation, default, definition),
            is_required=default is None and not is_wrapped,  # a decorator may fill it in
            is_keyword=i >= len(stated.posonlyargs),
        )
    return Signature("", parameters, takes_any_keyword=stated.kwarg is not None or is_wrapped)


def _of_class(definition: Definition) -> Signature | None:
    signature = _constructor(definition)
    if signature and not _decorator_names(definition) <= _TRANSPARENT:
        optional = {name: replace(p, is_required=False) for name, p in signature.parameters.items()}
        return Signature("", optional, takes_any_keyword=True)
    return signature


def _constructor(definition: Definition) -> Signature | None:
    """What the class's own or first inherited ``__init__`` (else ``__new__``) takes; a dataclass has its own."""
    hidden = Signature("", {}, takes_any_keyword=True)
    own = _own_constructor(definition)
    if own or _has_metaclass(definition):
        return own or hidden
    if isinstance(definition.node, ast.ClassDef) and _UNREADABLE_BASES & _base_names(definition.node):
        return None
    for base in linearize(definition)[1:]:
        if base is None or _has_metaclass(base):
            return hidden
        inherited = _own_constructor(base)
        if inherited:
            return inherited
    return Signature("", {}, takes_any_keyword=False)


def _own_constructor(definition: Definition) -> Signature | None:
    """None: the class states none itself."""
    names = body_of(definition).names
    dataclass_arguments = _dataclass_arguments(definition)
    for name in ("__init__", "__new__"):
        if name == "__new__" and dataclass_arguments is not None:
            break
        if name in names:
            nodes = [binding.node for binding in names[name]]
            if len(nodes) > 1 or not isinstance(nodes[0], ast.FunctionDef):
                return Signature("", {}, takes_any_keyword=True)
            assert isinstance(definition.node, ast.ClassDef)
            return _of_function(Definition(definition.module, nodes[0], definition.node), is_bound=True)
    if dataclass_arguments is None or dataclass_arguments.get("init") is False:
        return None
    return _of_dataclass(definition)


def _of_dataclass(definition: Definition) -> Signature:
    parameters: dict[str, Parameter] = {}
    bases = linearize(definition)
    for base in reversed(bases):
        if base is not None and _dataclass_arguments(base) is not None:
            for name, parameter in _fields(base):
                if parameter is None:
                    parameters.pop(name, None)
                else:
                    parameters[name] = parameter
    return Signature("", parameters, takes_any_keyword=None in bases)


def _fields(definition: Definition) -> Iterator[tuple[str, Parameter | None]]:
    """A dataclass's own fields; None: the field is no parameter."""
    for statement in definition.node.body:
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        words = set(_words(statement.annotation))
        if words & {"ClassVar", "KW_ONLY"}:
            continue
        default, is_required, is_parameter = statement.value, statement.value is None, True
        if isinstance(default, ast.Call) and (dotted(default.func) or [""])[-1] in ("field", "Field"):
            stated = {keyword.arg: keyword.value for keyword in default.keywords}
            init = stated.get("init")
            is_parameter = not (isinstance(init, ast.Constant) and init.value is False)
            first = default.args[0] if default.args else None  # only pydantic's takes one, and `...` means none there
            is_stated = first is not None and not (isinstance(first, ast.Constant) and first.value is ...)
            is_required = not (is_stated or {"default", "default_factory", None} & set(stated))
            default = stated.get("default", first)
        name = statement.target.id
        annotation = _annotation(statement.annotation, default, definition)
        yield name, Parameter(name, annotation, is_required, is_keyword=True) if is_parameter else None


def _dataclass_arguments(definition: Definition) -> dict[str | None, Any] | None:
    """The constants given to ``@dataclass``; None: the class has no such decorator."""
    for name, decorator in _decorators(definition).items():
        if name.endswith("dataclasses.dataclass"):
            keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
            return {keyword.arg: keyword.value.value for keyword in keywords if isinstance(keyword.value, ast.Constant)}
    return None


def _annotation(node: ast.expr | None, default: ast.expr | None, definition: Definition) -> Any:
    """The annotation, widened where the default does not fit it: then the author does not mean it strictly."""
    annotation = annotations.evaluate(node, definition.module) if node else Any
    if isinstance(default, ast.Constant):
        if default.value is None:
            return annotations.union(annotation, None)
        if type(default.value) not in _EXACT.get(annotation, (type(default.value),)):
            return Any
    if isinstance(default, ast.Tuple | ast.List):
        return Any if any(isinstance(n, ast.Constant) and n.value is None for n in default.elts) else annotation
    return annotation


def _has_metaclass(definition: Definition) -> bool:
    """Whether something else than ``type`` makes the class, and perhaps its constructor."""
    keywords = definition.node.keywords if isinstance(definition.node, ast.ClassDef) else []
    return any(k.arg == "metaclass" and (dotted(k.value) or [""])[-1] not in _METACLASSES for k in keywords)


def _base_names(node: ast.ClassDef) -> set[str]:
    return {parts[-1] for base in node.bases if (parts := dotted(base))}


def _decorators(definition: Definition) -> dict[str, ast.expr]:
    """The decorators by their full names, whatever the module calls them."""
    named = {}
    for decorator in definition.node.decorator_list:
        parts = dotted(decorator.func if isinstance(decorator, ast.Call) else decorator) or ["?"]
        bindings = scope_of(definition.module).names.get(parts[0], ())
        origin = bindings[0].node if bindings else None
        if isinstance(origin, Import):
            parts[:1] = [origin.module, *([origin.name] if origin.name else [])]
        elif bindings:  # the module's own, so a well-known name says nothing
            parts = ["?"]
        named[".".join(parts)] = decorator
    return named


def _decorator_names(definition: Definition) -> set[str]:
    return {name.rpartition(".")[2] for name in _decorators(definition)}


def _words(node: ast.expr) -> Iterator[str]:
    """The names in an annotation."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield part.id
        elif isinstance(part, ast.Attribute):
            yield part.attr
        elif isinstance(part, ast.Constant) and isinstance(part.value, str):
            yield part.value.partition("[")[0].rpartition(".")[2]
