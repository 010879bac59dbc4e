"""Targets are planted in a temporary folder, or real ones are held against what inspect says of the imported object."""

import importlib
import inspect
import math
import subprocess
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from pydantic import DirectoryPath, FilePath, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from runner.errors import BadInput
from runner.signature import Parameter, TargetNotFound, problem, read

ROOT = Path(__file__).parents[1]


@pytest.fixture
def plant(tmp_path, monkeypatch):
    """Write modules whose bodies raise, so that a test fails where anything imports them."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(**modules: str) -> None:
        for name, body in modules.items():
            path = tmp_path / (name.replace("__", "/") + ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(body) + "\nraise RuntimeError('this module was imported')\n")
        importlib.invalidate_caches()  # a finder tells new files by the folder's time, which is coarse

    return write


@pytest.fixture
def plant_package(plant, tmp_path):
    def write(name: str, **files: str) -> None:
        plant(**{f"{name}__{'INIT' if file == 'init' else file}": body for file, body in files.items()})
        folder = tmp_path / name
        if (folder / "INIT.py").exists():
            (folder / "INIT.py").rename(folder / "__init__.py")
            importlib.invalidate_caches()

    return write


def names(target: str) -> list[str]:
    signature = read(target)
    assert signature is not None
    return list(signature.parameters)


def annotation(target: str, name: str) -> Any:
    signature = read(target)
    assert signature is not None
    return signature.parameters[name].annotation


def reason(kind: Any, value: Any) -> str | None:
    return problem(Parameter("x", kind, is_required=True, is_keyword=True), value)


# --- real targets, with inspect as the oracle


@pytest.mark.parametrize(
    "target",
    [
        "torch.optim.SGD",
        "torch.optim.AdamW",
        "torch.nn.Linear",
        "torch.nn.CrossEntropyLoss",
        "torch.nn.Flatten",
        "torch.optim.lr_scheduler.CosineAnnealingLR",
        "torch.utils.data.DataLoader",
        "torch.nn.functional.cross_entropy",
        "torchvision.models.vit_b_16",
        "torchvision.models.resnet18",
        "torchvision.transforms.v2.RandomCrop",
        "timm.create_model",
        "timm.models.resnet50",
        "runner.batch.BatchPlan",
        "runner.schedule.cosine",
    ],
)
def test_a_real_target_reads_as_inspect_sees_the_imported_object(target):
    pytest.importorskip(target.partition(".")[0])
    signature = read(target)
    assert signature is not None
    module, _, name = target.rpartition(".")
    expected = inspect.signature(getattr(importlib.import_module(module), name)).parameters.values()
    keyword_names = [p.name for p in expected if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert list(signature.parameters) == keyword_names
    has_any_keyword = any(p.kind is p.VAR_KEYWORD for p in expected)
    assert signature.takes_any_keyword or not has_any_keyword
    if not signature.takes_any_keyword:
        for parameter in expected:
            assert signature.parameters[parameter.name].is_required is (parameter.default is parameter.empty)
            assert signature.parameters[parameter.name].is_keyword is (parameter.kind is not parameter.POSITIONAL_ONLY)


def test_no_model_that_timm_and_torchvision_offer_is_refused():
    timm_models, torchvision_models = pytest.importorskip("timm.models"), pytest.importorskip("torchvision.models")
    targets = [f"torchvision.models.{name}" for name in torchvision_models.list_models(module=torchvision_models)]
    targets += [f"timm.models.{name}" for name in timm_models.list_models()[::25]]
    targets += ["timm.models.vit_base_patch16_224_in21k", "timm.models.xception"]  # set while timm is imported
    assert len(targets) > 100
    for target in targets:
        read(target)


def test_the_defaults_of_real_targets_fit_their_annotations():
    for target in ("torch.optim.AdamW", "torch.nn.Conv2d", "torch.utils.data.DataLoader", "torch.nn.Transformer"):
        module, _, name = target.rpartition(".")
        oracle = inspect.signature(getattr(importlib.import_module(module), name)).parameters
        signature = read(target)
        assert signature is not None
        for parameter in signature.parameters.values():
            default = oracle[parameter.name].default
            if default is None or type(default) in (bool, int, float, str):
                assert problem(parameter, default) is None, parameter


def test_reading_imports_neither_torch_nor_pydantic():
    code = """
    import sys, runner.signature
    assert list(runner.signature.read("torch.optim.SGD").parameters)[:2] == ["params", "lr"]
    assert not {"torch", "numpy", "pydantic"} & set(sys.modules), sys.modules
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, cwd=ROOT)


# --- what is not there


def test_a_misspelt_class_is_named_with_the_nearest_one():
    with pytest.raises(TargetNotFound, match=r"^module torch\.optim has no 'SDG' \(did you mean 'SGD'\?\)$"):
        read("torch.optim.SDG")


def test_a_class_that_differs_in_capitals_only_is_proposed():
    with pytest.raises(TargetNotFound, match=r"did you mean 'SGD'\?"):
        read("torch.optim.Sgd")


def test_a_misspelt_submodule_of_a_package_with_dynamic_names_is_told():
    with pytest.raises(TargetNotFound, match=r"^module torch has no 'optin' \(did you mean 'optim'\?\)$"):
        read("torch.optin.SGD")


def test_a_misspelt_package_is_named_with_the_nearest_one(plant):
    plant(my_models="class Net: pass")
    with pytest.raises(TargetNotFound, match=r"^no module named 'my_modelz' \(did you mean 'my_models'\?\)$"):
        read("my_modelz.Net")


def test_a_known_package_that_is_not_installed_is_told_how_to_install(monkeypatch):
    monkeypatch.setattr("runner.signature.find.locate", lambda name: None)
    with pytest.raises(TargetNotFound, match=r"^package 'timm' is not installed; pip install timm$"):
        read("timm.create_model_of_nobody")


def test_what_a_module_imports_from_a_missing_package_is_missing_too(plant):
    plant(needs_nobody="from nobody_has_this_package import Net")
    with pytest.raises(TargetNotFound, match="no module named 'nobody_has_this_package'"):
        read("needs_nobody.Net")


def test_a_module_or_a_bare_word_is_no_target(plant_package):
    plant_package("only_modules", init="", net="def build(): pass")
    with pytest.raises(TargetNotFound, match=r"'only_modules\.net' is a module"):
        read("only_modules.net")
    for target in ("Net", "", "a..b", "a.b c"):
        with pytest.raises(TargetNotFound, match="not a dotted name"):
            read(target)
    assert issubclass(TargetNotFound, BadInput)


def test_a_missing_method_is_told_with_its_class(plant):
    plant(methods="class Base:\n    def build(self): pass\nclass Net(Base): pass")
    with pytest.raises(TargetNotFound, match=r"^class methods\.Net has no 'biuld' \(did you mean 'build'\?\)$"):
        read("methods.Net.biuld")


def test_a_name_that_a_star_import_does_not_export_is_absent(plant_package):
    plant_package("starred", init="from .nets import *", nets="__all__ = ['Net']\nclass Net: pass\nclass Block: pass")
    assert names("starred.Net") == []
    with pytest.raises(TargetNotFound, match="'Block'"):
        read("starred.Block")


def test_all_may_grow_and_what_a_star_brings_is_searched_for_methods(plant_package):
    plant_package(
        "grown",
        init="from .nets import *",
        nets="__all__ = ['Net']\n__all__ += ['More']\nclass Net: pass\nclass More: pass",
    )
    assert names("grown.Net") == names("grown.More") == []
    with pytest.raises(TargetNotFound, match=r"^class grown\.nets\.Net has no 'build'$"):
        read("grown.Net.build")


# --- what cannot be read


@pytest.mark.parametrize(
    "target",
    ["builtins.dict", "math.sqrt", "torch.relu", "torch.Tensor.add", "dynamic.Anything", "dynamic.made", "updated.Net"],
)
def test_what_the_source_does_not_show_is_neither_read_nor_refused(plant, target):
    plant(dynamic="from functools import partial\ndef __getattr__(name): ...\nmade = partial(print, 1)")
    plant(updated="globals().update(Net=1)")
    assert read(target) is None


def test_a_name_that_a_module_hands_itself_to_be_given_is_not_refused(plant):
    plant(registered="register(__name__, {'old_net': 'net'})\ndef net(): pass")
    assert read("registered.old_net") is None
    with pytest.raises(TargetNotFound):
        read("registered.older_net")


def test_a_module_that_does_not_parse_is_not_read(plant):
    plant(unfinished="class Net(:")
    assert read("unfinished.Net") is None


def test_two_branches_that_disagree_are_not_read(plant):
    plant(branches="import sys\nif sys.argv:\n    def f(a): pass\n    def g(a): pass\nelse:\n    def f(b): pass")
    assert read("branches.f") is None
    assert names("branches.g") == ["a"]


def test_imports_in_a_circle_end(plant):
    plant(circle_a="from circle_b import Net\nfrom circle_b import *", circle_b="from circle_a import Net")
    assert read("circle_a.Net") is None
    plant(own_base="class Net(Net): pass\nclass A(B): pass\nclass B(A): pass")
    for target in ("own_base.Net", "own_base.A"):
        signature = read(target)
        assert signature is not None
        assert signature.takes_any_keyword


# --- following names


def test_re_exports_aliases_and_relative_imports_are_followed(plant_package, plant):
    plant_package(
        "zoo",
        init="from .nets import small as little, Hidden\nfrom . import nets\nimport zoo.nets as z\nalias = z.small",
        nets="from .sub.deep import small, Hidden",
    )
    plant_package(
        "zoo/sub", init="", deep="from ..leaf import small\nclass Hidden:\n    def __init__(self, depth): ..."
    )
    plant_package("zoo", leaf="def small(width, *, depth=2): pass")
    for target in ("zoo.little", "zoo.alias", "zoo.nets.small", "zoo.z.small", "zoo.sub.deep.small", "zoo.leaf.small"):
        assert names(target) == ["width", "depth"], target
    assert names("zoo.Hidden") == ["depth"]


def test_a_folder_without_init_is_a_package(plant):
    plant(bare_folder__nets="def small(width): pass")
    assert names("bare_folder.nets.small") == ["width"]


def test_a_function_named_as_its_module_is_reached_both_ways(plant_package):
    plant_package("same", init="from .net import net", net="def net(width): pass\ndef other(depth): pass")
    assert names("same.net") == ["width"]
    assert names("same.net.other") == ["depth"]
    assert names("same.net.net") == ["width"]


def test_the_fallback_of_a_try_counts_where_its_import_is_missing(plant):
    plant(has_fallback="try:\n    from not_there_at_all import f\nexcept ImportError:\n    def f(a): pass")
    plant(no_fallback="try:\n    from has_fallback import f\nexcept ImportError:\n    f = None")
    plant(no_way_on="try:\n    def f(a): pass\nexcept ImportError:\n    f = g = None\n    raise")
    assert names("has_fallback.f") == ["a"]
    with pytest.raises(TargetNotFound, match="'g'"):
        read("no_way_on.g")
    assert names("no_fallback.f") == ["a"]


def test_the_last_definition_counts_and_overloads_do_not(plant):
    plant(
        overloaded="""
        from typing import overload
        def f(old): pass
        @overload
        def f(a: int): ...
        @overload
        def f(a: str): ...
        def f(a, b=1): pass
        @overload
        def f(late: str): ...
        def gone(): pass
        del gone
        """
    )
    assert names("overloaded.f") == ["a", "b"]
    with pytest.raises(TargetNotFound):
        read("overloaded.gone")


def test_a_later_search_path_is_seen(tmp_path, monkeypatch):
    for folder, body in (("first", "def f(a): pass"), ("second", "def f(b): pass")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "moved.py").write_text(body)
        monkeypatch.syspath_prepend(tmp_path / folder)
        assert names("moved.f") == [body[6]]


# --- functions and classes


def test_each_kind_of_parameter_is_told(plant):
    plant(kinds="def f(a, /, b, c=1, *rest, d, e=2, **more): pass\ndef g(a): pass")
    signature = read("kinds.f")
    assert signature is not None
    assert signature.target == "kinds.f"
    assert [(p.name, p.is_required, p.is_keyword) for p in signature.parameters.values()] == [
        ("a", True, False),
        ("b", True, True),
        ("c", False, True),
        ("d", True, True),
        ("e", False, True),
    ]
    assert signature.takes_any_keyword
    other = read("kinds.g")
    assert other is not None
    assert not other.takes_any_keyword


def test_methods_lose_what_is_bound(plant):
    plant(
        bound="""
        class Base:
            @classmethod
            def build(cls, width): pass
        class Net(Base):
            @staticmethod
            def make(depth): pass
            def plain(self, depth): pass
            @property
            def size(self): pass
            class Inner:
                def __init__(self, x): pass
        """
    )
    assert names("bound.Net.build") == ["width"]
    assert names("bound.Net.make") == ["depth"]
    assert names("bound.Net.plain") == ["self", "depth"]  # as a target it is a function that needs an object
    assert names("bound.Net.Inner") == ["x"]
    assert read("bound.Net.size") is None


def test_the_first_base_that_states_a_constructor_counts(plant):
    plant(
        bases="""
        from typing import Generic
        class Root:
            def __init__(self, root): pass
        class A(Root): pass
        class B(Root):
            def __init__(self, b): pass
        class Diamond(A, B): pass
        class New:
            def __new__(cls, size): pass
        class Child(Generic[int], New): pass
        class Empty(object): pass
        class OnDict(dict): pass
        class WithMeta(metaclass=Maker): pass
        class OnMeta(WithMeta, New): pass
        class Own(dict):
            def __init__(self, own): pass
        """
    )
    assert names("bases.Diamond") == ["b"]
    assert names("bases.Child") == ["size"]
    hidden = {name: read(f"bases.{name}") for name in ("Empty", "OnDict", "WithMeta", "OnMeta", "Own")}
    assert {name: s.takes_any_keyword for name, s in hidden.items() if s} == {
        "Empty": False,
        "OnDict": True,
        "WithMeta": True,
        "OnMeta": True,
        "Own": False,
    }


def test_an_unknown_decorator_leaves_room_and_a_known_one_does_not(plant):
    plant(
        decorated="""
        import torch
        @torch.no_grad()
        def known(a: int): pass
        @somebody.fills_in("a")
        def unknown(a: int): pass
        def cache(function): return function
        @cache
        def own(a: int): pass
        @register
        class Net:
            def __init__(self, a): pass
        """
    )
    expected = {"known": (False, True), "unknown": (True, False), "own": (True, False), "Net": (True, False)}
    for name, (takes_any_keyword, is_required) in expected.items():
        signature = read(f"decorated.{name}")
        assert signature is not None
        assert (signature.takes_any_keyword, signature.parameters["a"].is_required) == (takes_any_keyword, is_required)


DATACLASSES = """
from dataclasses import KW_ONLY, dataclass, field
from typing import ClassVar
from pydantic import Field
from pydantic.dataclasses import dataclass as checked

@dataclass
class Base:
    width: int
    depth: int = 3
    kind: ClassVar[str] = "net"
    size: int = field(init=False)

@dataclass(repr=False, kw_only=True)
class Net(Base):
    names: list[str] = field(default_factory=list)
    rate: float = field(repr=False)
    depth: float = 2.0

class Child(Net):
    pass

@dataclass
class Own:
    a: int
    def __init__(self, b): pass

@dataclass(init=False)
class Without:
    a: int

@checked
class Checked:
    _: KW_ONLY
    low: int = Field(gt=0)
    must: int = Field(..., gt=0)
    may: int = Field(3, gt=0)
"""


def test_a_dataclass_takes_its_fields_and_the_inherited_ones(plant, tmp_path):
    plant(fields=DATACLASSES)
    (tmp_path / "fields_run.py").write_text(DATACLASSES)
    importlib.invalidate_caches()
    oracle = importlib.import_module("fields_run")
    for name in ("Base", "Net", "Child", "Own", "Without", "Checked"):
        signature = read(f"fields.{name}")
        assert signature is not None
        expected = inspect.signature(getattr(oracle, name)).parameters.values()
        stated = {p.name: p.default is p.empty for p in expected}
        assert {p.name: p.is_required for p in signature.parameters.values()} == stated, name
        assert not signature.takes_any_keyword
    assert annotation("fields.Net", "depth") is float


def test_a_dataclass_on_an_unreadable_base_and_a_named_tuple_are_open(plant):
    plant(
        open_fields="""
        import dataclasses as dc
        from typing import NamedTuple
        from math import Base
        @dc.dataclass
        class Net(Base):
            width: int
        class Pair(NamedTuple):
            left: int
        """
    )
    signature = read("open_fields.Net")
    assert signature is not None
    assert list(signature.parameters) == ["width"]
    assert signature.takes_any_keyword
    assert read("open_fields.Pair") is None


# --- annotations


ANNOTATIONS = {
    "int": int,
    "int | None": int | None,
    "t.Optional[float]": float | None,
    "Union[int, str]": int | str,
    "Lit['a', 'b', 1, -1, None, True]": Literal["a", "b", 1, -1, None, True],
    "Mode": Literal["fast", "slow"],
    "Mode | None": Literal["fast", "slow"] | None,
    "Shared": Literal["x"],
    "'int | None'": int | None,
    "list[int]": list[int],
    "Maybe[int]": int | None,
    "tuple[list[int]]": tuple[list[int], ...],
    "list['torch.device']": list[Any],
    "dict[str, float]": dict[str, float],
    "tuple[int, ...]": tuple[int, ...],
    "tuple[int]": tuple[int, ...],
    "Sequence[int]": Sequence[int],
    "Path": Path,
    "PositiveInt | Lit['auto']": PositiveInt | Literal["auto"],
    "pydantic.DirectoryPath": DirectoryPath,
    "Annotated[int, Whatever(3)]": int,
    "torch.device | str | None": Any,
    "Optional": Any,
    "Callable[[int], int]": Any,
    "type[int]": Any,
    "str.upper": Any,
    "open": Any,
    "Hidden": Any,
    "T": Any,
    "Loop": Any,
    "(lambda: int)()": Any,
    "[x for x in ()]": Any,
    "__import__('os').system('false')": Any,
    "Lit[Path]": Any,
    "list": Any,
}


def test_annotations_are_understood_or_taken_for_anything(plant):
    plant(alias_source="from typing import Literal\nShared = Literal['x']\nfloat = 3")
    header = """
    import torch, pydantic, typing as t
    from collections.abc import Callable, Sequence
    from pathlib import Path
    from typing import Annotated, Literal as Lit, Optional, TypeVar, Union
    from pydantic import PositiveInt
    from alias_source import Shared
    try:
        from typing import Optional as Maybe
    except ImportError:
        Maybe = None
    Mode: t.TypeAlias = Lit["fast", "slow"]
    T = TypeVar("T")
    Loop = Optional["Loop"]
    class Hidden: pass
    class list: pass
    """
    for i, (text, expected) in enumerate(ANNOTATIONS.items()):
        own = header if text == "list" else header.replace("class list: pass", "")
        plant(**{f"annotated_{i}": textwrap.dedent(own) + f"def f(a: {text}, b): pass"})
        assert annotation(f"annotated_{i}.f", "a") == expected, text
        assert annotation(f"annotated_{i}.f", "b") is Any


def test_a_default_that_does_not_fit_widens_its_annotation(plant):
    plant(sloppy="def f(a: int = None, b: int = 0.5, c: str = 'x', d: float = 1, e: list[bool] = (None, True)): pass")
    expected = {"a": int | None, "b": Any, "c": str, "d": float, "e": Any}
    assert {name: annotation("sloppy.f", name) for name in expected} == expected


# --- values


@pytest.mark.parametrize(
    ("kind", "good", "bad", "words"),
    [
        (int, 3, 1.5, "must be an integer"),
        (int, -3, True, "must be an integer"),
        (int, 0, "3", "must be an integer, not the text '3'"),
        (float, 1, "1e-3", "must be a number, not the text '1e-3'"),
        (float, math.inf, True, "must be a number"),
        (bool, False, 1, "must be true or false"),
        (str, "3", 3, "must be text"),
        (None, None, 3, "must be null"),
        (PositiveInt, 1, 0, "must be an integer of 1 or more"),
        (NonNegativeFloat, 0, -1.0, "must be a number of 0 or more"),
        (PositiveFloat | None, None, 0, "must be a number above 0 or null"),
        (NonNegativeInt | Literal["auto"], "auto", -1, "must be an integer of 0 or more, or 'auto'"),
        (bool | None, None, "yes", "must be true, false, or null"),
        (Literal["none", "linear", "sqrt"], "sqrt", 3, "must be one of 'none', 'linear', 'sqrt'"),
        (
            Literal["none", "linear", "sqrt"],
            "none",
            "liner",
            "must be one of 'none', 'linear', 'sqrt' (did you mean 'linear'?)",
        ),
        (DirectoryPath, ".", "./nobody", "must be an existing directory"),
        (FilePath, __file__, ".", "must be an existing file"),
        (Path | None, "a/b", 3, "must be a path or null"),
        (tuple[float, float], [0.9, 1], [0.9], "must be a list of 2 numbers"),
        (tuple[int, str], [1, "a"], [1, 1], "must be a list of 2: an integer, text"),
        (list[int], [1], ["a"], "must be a list of integers"),
        (list[PositiveInt], [], [0], "must be a list of items, each an integer of 1 or more"),
        (Sequence[int], [1], "12", "must be a list of integers, not the text '12'"),
        (dict[str, int], {"a": 1}, {"a": "b"}, "must be a mapping of texts to integers"),
        (list[float], [math.nan, math.inf], math.nan, "must be a list of numbers"),
    ],
)
def test_a_value_fits_or_is_told_what_would(kind, good, bad, words):
    assert reason(kind, good) is None
    assert reason(kind, bad) == words


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (int, {"_target_": "a.b"}),
        (list[int], [1, {"_target_": "a.b"}]),
        (int, {"a": [{"_target_": "a.b"}]}),
        (Any, object()),
        (int, object()),
        (type, "a"),
        (type[int] | None, "a"),
        (Callable[[int], int], "a"),
        (subprocess.Popen, 3),
    ],
)
def test_what_cannot_be_judged_is_let_through(kind, value):
    assert reason(kind, value) is None
