"""Data: which samples, in which order, read how, and brought to the device as what."""

from runner.data.folder import ImageFolder
from runner.data.idx import IdxImages
from runner.data.loader import NativeLoader
from runner.data.source import Data, EvaluationBatches, TrainBatches
from runner.data.synthetic import SyntheticImages
from runner.data.transforms import RandomCrop, RandomErasing, RandomHorizontalFlip

__all__ = [
    "Data",
    "EvaluationBatches",
    "IdxImages",
    "ImageFolder",
    "NativeLoader",
    "RandomCrop",
    "RandomErasing",
    "RandomHorizontalFlip",
    "SyntheticImages",
    "TrainBatches",
]
