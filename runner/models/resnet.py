"""ResNet-18 for small images, under torchvision's names so that weights can be exchanged with its resnet18."""

from pydantic import PositiveInt
from torch import Tensor, nn

from runner.errors import BadInput


class ResNet18(nn.Module):
    """He et al. 2016 (arXiv:1512.03385), with the stem that suits small images: 3 x 3, stride 1, no max-pooling.

    BatchNorm looks at a whole micro-batch, so its size and the number of ranks change what is learned.

    Args:
        in_channels: of the images, of any height and width.
        num_classes: logits of an image.

    Raises:
        BadInput: a size below one.
    """

    def __init__(self, *, in_channels: PositiveInt, num_classes: PositiveInt) -> None:
        for key, size in {"in_channels": in_channels, "num_classes": num_classes}.items():
            if size < 1:
                raise BadInput(f"model.{key}={size}: must be 1 or more")
        super().__init__()
        self.conv1 = _conv3x3(in_channels, 64, stride=1)
        self.bn1 = nn.BatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = _stage(64, 64, stride=1)
        self.layer2 = _stage(64, 128, stride=2)
        self.layer3 = _stage(128, 256, stride=2)
        self.layer4 = _stage(256, 512, stride=2)
        self.fc = nn.Linear(512, num_classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, num_classes] of images [N, C, H, W]."""
        maps = self.relu(self.bn1(self.conv1(inputs)))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return self.fc(maps.mean(dim=(-2, -1)))


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions around a shortcut, which is projected where the shape changes (the paper's option B)."""

    def __init__(self, in_channels: int, out_channels: int, *, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv3x3(in_channels, out_channels, stride=stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv3x3(out_channels, out_channels, stride=1)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Sequential | None = None
        if stride > 1 or in_channels != out_channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, inputs: Tensor) -> Tensor:
        """Maps [N, out_channels, H / stride, W / stride] of maps [N, in_channels, H, W]."""
        maps = self.relu(self.bn1(self.conv1(inputs)))
        maps = self.bn2(self.conv2(maps))
        maps += inputs if self.downsample is None else self.downsample(inputs)
        return self.relu(maps)


def _stage(in_channels: int, out_channels: int, *, stride: int) -> nn.Sequential:
    return nn.Sequential(
        BasicBlock(in_channels, out_channels, stride=stride),
        BasicBlock(out_channels, out_channels, stride=1),
    )


def _conv3x3(in_channels: int, out_channels: int, *, stride: int) -> nn.Conv2d:
    """Without a bias: the BatchNorm after it has one."""
    return nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=stride, padding=1, bias=False)
