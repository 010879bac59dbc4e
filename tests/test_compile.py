"""Compilation: in place, counted, and without changing what is trained."""

import pytest
import torch
from conftest import distance
from torch import nn

from runner.compile import Compile, find_repeated_blocks, is_compile_error
from runner.errors import BadInput
from runner.record import read_json

MLP = ("model=mlp", "model.width=8", "batch.global_batch_size=20", "steps=4")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    import torch._dynamo

    torch._dynamo.reset()
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._dynamo.reset()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs):
        return self.layer(inputs).relu()


def policy(**changes):
    defaults = {"regional": False, "mode": "default", "dynamic": None, "fullgraph": False, "backend": "eager"}
    return Compile(**{**defaults, "on_error": "stop", **changes})


def broken_backend(graph, inputs):
    raise RuntimeError("planted in the backend")


@pytest.mark.parametrize(
    ("backend", "rounding"),
    [("eager", 0.0), ("aot_eager", 1e-6), pytest.param("inductor", 1e-5, marks=pytest.mark.slow)],
)
def test_compiled_training_equals_eager_training(composed, trained, tmp_path, backend, rounding):
    plain, _ = trained(composed(*MLP), tmp_path / "eager")
    pipe, rows = trained(composed(*MLP, "compile=default", f"compile.backend={backend}"), tmp_path / "compiled")
    assert pipe.model.state_dict().keys() == plain.model.state_dict().keys(), "no _orig_mod. in front"
    assert distance(pipe.model.state_dict(), plain.model.state_dict()) <= rounding
    assert rows[0]["compile_ms"] > 0
    assert {row["compile_ms"] for row in rows[1:]} == {0.0}
    assert rows[-1]["num_graphs"] > 0
    assert read_json(tmp_path / "compiled" / "rank.0.json")["compile"]["failures"] == []


def test_an_eager_run_compiles_nothing_and_counts_nothing(composed, trained, tmp_path):
    _, rows = trained(composed(*MLP), tmp_path)
    assert {(row["compile_ms"], row["num_graphs"]) for row in rows} == {(0.0, 0)}


def test_a_new_batch_size_compiles_anew_and_its_step_is_marked(composed, trained, tmp_path):
    overrides = ("compile=default", "compile.backend=eager", "data.last_batch=short", "data.train.num_samples=50")
    _, rows = trained(composed(*MLP, *overrides), tmp_path)
    assert [row["shape_is_new"] for row in rows] == [True, False, True, False]
    assert [row["compile_ms"] > 0 for row in rows] == [True, False, True, False]
    assert len(read_json(tmp_path / "rank.0.json")["compile"]["recompile_reasons"]) >= 1


def test_regional_compilation_compiles_the_repeated_blocks_only():
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(Block(), Block(), Block()))
    inputs = torch.randn(2, 4)
    expected = model(inputs)
    policy(regional=True).apply(model, find_repeated_blocks(model))
    assert [module._compiled_call_impl is not None for module in model[1]] == [True] * 3
    assert model._compiled_call_impl is None
    assert torch.equal(model(inputs), expected)


def test_regional_compilation_of_a_model_without_repeated_blocks_is_refused():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), Block())
    with pytest.raises(BadInput, match="Sequential has no repeated blocks"):
        policy(regional=True).apply(model, find_repeated_blocks(model))


def test_repeated_blocks_are_the_outermost_of_one_class_side_by_side():
    inner = nn.Sequential(Block(), Block())
    alone = Block()
    model = nn.ModuleDict(
        {"many": inner, "one": nn.Sequential(alone, nn.ReLU()), "layers": nn.Sequential(nn.ReLU(), nn.ReLU())}
    )
    assert find_repeated_blocks(model) == list(inner)


def test_what_the_compiler_raises_is_told_from_what_the_model_raises():
    model = policy(backend=broken_backend).apply(Block(), [])
    with pytest.raises(Exception, match="planted in the backend") as failure:
        model(torch.randn(2, 4))
    assert is_compile_error(failure.value)
    assert not is_compile_error(RuntimeError("planted in the model"))


def test_on_error_eager_runs_on_without_the_compiler():
    model, inputs = Block(), torch.randn(2, 4)
    expected = model(inputs)
    policy(backend=broken_backend, on_error="eager").apply(model, [])
    assert torch.equal(model(inputs), expected)
