"""The default model: a convolutional network small enough for one CPU core, the same however its batch is split."""

from pydantic import PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import BadInput

_GRID_SIZE = 2
# Two convolutions of stride 2 leave such an image exactly one value for each cell of the grid.
_MIN_IMAGE_SIZE = 5


class SmallCNN(nn.Module):
    """Three 3 x 3 convolutions with ReLU, mean over a 2 x 2 grid, one linear layer.

    It has neither batch statistics nor dropout, so accumulation and data parallelism train it as one large batch
    would. Without normalisation the initial scale decides how fast it learns: He et al. 2015 (arXiv:1502.01852).

    Args:
        in_channels: of the images, of any height and width from 5.
        num_classes: logits of an image.
        width: channels after the first convolution; the second has twice, the third four times as many.

    Raises:
        BadInput: a size below one; at the forward pass, images too small.
    """

    def __init__(self, *, in_channels: PositiveInt, num_classes: PositiveInt, width: PositiveInt) -> None:
        for key, size in {"in_channels": in_channels, "num_classes": num_classes, "width": width}.items():
            if size < 1:
                raise BadInput(f"model.{key}={size}: must be 1 or more")
        super().__init__()
        # Strides rather than max-pooling: half the time of a step on a CPU.
        self.features = nn.Sequential(
            nn.Conv2d(in_channels, width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(2 * width, 4 * width, kernel_size=3, padding=1),
            nn.ReLU(),
        )
        self.head = nn.Linear(4 * width * _GRID_SIZE**2, num_classes)
        for parameter in self.features.parameters():
            if parameter.dim() > 1:
                nn.init.kaiming_normal_(parameter, nonlinearity="relu")
            else:
                nn.init.zeros_(parameter)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, num_classes] of images [N, C, H, W]."""
        height, width = inputs.shape[-2:]
        if min(height, width) < _MIN_IMAGE_SIZE:
            raise BadInput(
                f"model: SmallCNN takes images from {_MIN_IMAGE_SIZE} pixels, and these are {height} x {width}"
            )
        return self.head(_mean_over_grid(self.features(inputs)).flatten(1))


def _mean_over_grid(maps: Tensor) -> Tensor:
    """Means [N, C, 2, 2] over four cells that cover maps [N, C, H, W]; they overlap by a row where H is odd.

    In place of adaptive_avg_pool2d, whose backward pass on CUDA has no deterministic form.
    """
    height, width = maps.shape[-2:]
    stride = (height // _GRID_SIZE, width // _GRID_SIZE)
    cell = (height - (_GRID_SIZE - 1) * stride[0], width - (_GRID_SIZE - 1) * stride[1])
    return F.avg_pool2d(maps, kernel_size=cell, stride=stride)
