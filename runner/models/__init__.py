"""Models: images [N, C, H, W] in, logits [N, num_classes] out."""

from runner.models.cnn import SmallCNN
from runner.models.mlp import MLP
from runner.models.resnet import ResNet18
from runner.models.vit import ViT

__all__ = ["MLP", "ResNet18", "SmallCNN", "ViT"]
