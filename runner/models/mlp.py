"""A multilayer perceptron over pixels: the model that knows nothing of images, and costs next to nothing a step."""

from pydantic import PositiveInt
from torch import Tensor, nn

from runner.errors import BadInput


class MLP(nn.Module):
    """The flattened image through ``depth`` hidden layers of ``width`` with ReLU, then one linear layer.

    Args:
        in_channels, image_size: of the images, which are square.
        num_classes: logits of an image.
        width: features of a hidden layer.
        depth: number of hidden layers.

    Raises:
        BadInput: a size below one; at the forward pass, images of another size.
    """

    def __init__(
        self,
        *,
        in_channels: PositiveInt,
        num_classes: PositiveInt,
        image_size: PositiveInt,
        width: PositiveInt,
        depth: PositiveInt,
    ) -> None:
        sizes = {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size}
        for key, size in (sizes | {"width": width, "depth": depth}).items():
            if size < 1:
                raise BadInput(f"model.{key}={size}: must be 1 or more")
        super().__init__()
        self.image_size = image_size
        layers: list[nn.Module] = []
        num_features = in_channels * image_size**2
        for _ in range(depth):
            layers += [nn.Linear(num_features, width), nn.ReLU()]
            num_features = width
        self.layers = nn.Sequential(*layers, nn.Linear(num_features, num_classes))

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, num_classes] of images [N, C, image_size, image_size]."""
        height, width = inputs.shape[-2:]
        if height != self.image_size or width != self.image_size:
            raise BadInput(f"model.image_size={self.image_size}: the images are {height} x {width}")
        return self.layers(inputs.flatten(1))
