"""Compilation policies, applied in place before wrapping, and what the compiler did and how long it took."""

import time
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from runner.errors import BadInput


class Eager:
    """Run the model as written: the policy that the compiling ones refine."""

    def apply(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Return the model ready to run; ``blocks`` are its repeated blocks, found by the builder."""
        del blocks
        return model


class Compile(Eager):
    """torch.compile, in place, so that state_dict keys gain no ``_orig_mod.`` prefix.

    Args:
        regional: compile the model's repeated blocks one by one (one compilation serves them all) and leave the
            rest eager: a far shorter compile time for deep models, at a small cost in fusion.
        mode, dynamic, fullgraph, backend: as torch.compile has them.
        on_error: ``stop`` ends the run with the compiler's reason; ``eager`` goes on without compilation and says so.
    """

    def __init__(
        self,
        *,
        regional: bool,
        mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"],
        dynamic: bool | None,
        fullgraph: bool,
        backend: str,
        on_error: Literal["stop", "eager"],
    ) -> None:
        self.regional, self.on_error = regional, on_error
        # torch.compile takes either a mode or a backend that knows modes; only inductor does.
        self.options: dict[str, Any] = {"dynamic": dynamic, "fullgraph": fullgraph, "backend": backend}
        if backend == "inductor":
            self.options["mode"] = mode

    def apply(self, model: nn.Module, blocks: Sequence[nn.Module]) -> nn.Module:
        """Mark the model, or its repeated blocks, for compilation at the first forward pass.

        Raises:
            BadInput: regional compilation of a model without repeated blocks.
        """
        if self.on_error == "eager":
            import torch._dynamo

            torch._dynamo.config.suppress_errors = True
        if not self.regional:
            model.compile(**self.options)
            return model
        if not blocks:
            raise BadInput(
                f"compile=regional: {type(model).__name__} has no repeated blocks (two or more modules of one class in "
                "a ModuleList or Sequential); compile=default compiles it whole"
            )
        for block in blocks:
            block.compile(**self.options)
        return model


class CompileMeter:
    """Counts compilations and the wall time they take, for the record; costs nothing while nothing is compiled.

    ``ms`` and ``num_graphs`` only grow; a step's share is their difference over the step.
    """

    def __init__(self, *, enabled: bool) -> None:
        self.ms = 0.0
        self._began: float | None = None
        self._stats: dict[str, int] = {}
        if enabled:
            # Imported here: torch._dynamo costs a second or more, and an eager run has no use for it.
            from torch._dynamo.callback import callback_handler
            from torch._dynamo.utils import counters

            # dynamo's own counters: they count what was compiled, the callbacks also fire for attempts.
            self._stats = counters["stats"]
            callback_handler.register_start_callback(self._start)
            callback_handler.register_end_callback(self._end)

    @property
    def num_graphs(self) -> int:
        """Graphs compiled so far in this process."""
        return self._stats["unique_graphs"] if self._stats else 0

    def _start(self, *_: object) -> None:
        self._began = time.perf_counter()

    def _end(self, *_: object) -> None:
        if self._began is not None:
            self.ms += 1e3 * (time.perf_counter() - self._began)
        self._began = None

    @staticmethod
    def report() -> dict[str, Any]:
        """Graphs, graph breaks, and the reasons of recompilations and failures: {} where nothing was compiled."""
        import sys

        if "torch._dynamo" not in sys.modules:
            return {}
        from torch._dynamo import utils

        metrics = utils.get_compilation_metrics()
        return {
            "num_graphs": int(utils.counters["stats"]["unique_graphs"]),
            "num_graph_breaks": int(sum(utils.counters["graph_break"].values())),
            "recompile_reasons": _distinct(metric.recompile_reason for metric in metrics),
            "failures": _distinct(metric.fail_reason for metric in metrics),
        }


def _distinct(reasons: Any) -> list[str]:
    """Each reason once, in order, its first line only: a hundred equal recompilations are one fact."""
    lines = [str(reason).strip().splitlines()[0] for reason in reasons if reason]
    return list(dict.fromkeys(lines))[:20]


def find_repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """The modules that repeat: two or more of one class side by side in a ModuleList or Sequential, outermost first.

    Layers of torch.nn itself (Linear, Conv2d ...) do not count: a block is what a model's author defined.
    """
    blocks: list[nn.Module] = []
    covered: set[int] = set()
    for module in model.modules():
        if id(module) in covered or not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = [child for child in module if not type(child).__module__.startswith("torch.nn.modules.")]
        repeated = [child for child in children if sum(type(other) is type(child) for other in children) > 1]
        blocks += repeated
        covered |= {id(inner) for block in repeated for inner in block.modules()}
    return blocks


def is_compile_error(error: BaseException) -> bool:
    """Whether an exception came out of the compiler rather than out of the model."""
    return any(cls.__module__.startswith("torch._dynamo") for cls in type(error).__mro__) and not isinstance(
        error, getattr(torch, "OutOfMemoryError", ())
    )
