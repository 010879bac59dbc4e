"""What a `_target_` accepts, read from its source; nothing is imported."""

from runner.signature.missing import TargetNotFound
from runner.signature.parameters import Parameter, Signature, read
from runner.signature.values import problem

__all__ = ["Parameter", "Signature", "TargetNotFound", "problem", "read"]
