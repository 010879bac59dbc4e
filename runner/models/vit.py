"""A small vision transformer: which patches an image is cut into, and the blocks that let them look at each other."""

import torch
from pydantic import NonNegativeFloat, PositiveInt
from torch import Tensor, nn
from torch.nn import functional as F

from runner.errors import BadInput


class ViT(nn.Module):
    """Dosovitskiy et al. 2021 (arXiv:2010.11929): pre-norm blocks over patches with learned positions.

    The head reads the mean over patches, not a class token: no less accurate in small models (Beyer et al. 2022,
    arXiv:2205.01580), and the sequence keeps the length of the patch grid, 64 rather than 65 for 32 x 32 by 4.

    Args:
        in_channels, image_size: of the images, which are square.
        num_classes: logits of an image.
        patch_size: side of a square patch in pixels; must divide image_size.
        width: features of a patch; num_heads must divide it.
        depth: number of blocks.
        num_heads: of each attention.
        mlp_ratio: hidden features of a block's MLP, in widths.
        dropout: probability, below 1, after every dense layer but the one to queries, keys and values, and after the
            positions are added, as in the paper; 0 leaves accumulation and data parallelism exact.

    Raises:
        BadInput: a size that is not positive or does not divide; at the forward pass, images of another size.
    """

    def __init__(
        self,
        *,
        in_channels: PositiveInt,
        num_classes: PositiveInt,
        image_size: PositiveInt,
        patch_size: PositiveInt,
        width: PositiveInt,
        depth: PositiveInt,
        num_heads: PositiveInt,
        mlp_ratio: PositiveInt,
        dropout: NonNegativeFloat,
    ) -> None:
        sizes = {"in_channels": in_channels, "num_classes": num_classes, "image_size": image_size, "depth": depth}
        sizes |= {"patch_size": patch_size, "width": width, "num_heads": num_heads, "mlp_ratio": mlp_ratio}
        for key, size in sizes.items():
            if size < 1:
                raise BadInput(f"model.{key}={size}: must be 1 or more")
        if not 0 <= dropout < 1:
            raise BadInput(f"model.dropout={dropout}: must be at least 0 and below 1")
        _check_divides("patch_size", patch_size, f"model.image_size={image_size}", image_size)
        _check_divides("num_heads", num_heads, f"model.width={width}", width)
        super().__init__()
        self.image_size = image_size
        self.patches = nn.Conv2d(in_channels, width, kernel_size=patch_size, stride=patch_size)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (image_size // patch_size) ** 2, width))
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(
            Block(width, num_heads=num_heads, hidden=mlp_ratio * width, dropout=dropout) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits [N, num_classes] of images [N, C, image_size, image_size]."""
        height, width = inputs.shape[-2:]
        if height != self.image_size or width != self.image_size:
            raise BadInput(f"model.image_size={self.image_size}: the images are {height} x {width}")
        tokens = self.patches(inputs).flatten(2).transpose(1, 2)  # [N, T, width]
        tokens = self.dropout(tokens + self.positions)
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(dim=1))


class Block(nn.Module):
    """Attention, then an MLP, each normalised before and added after: tokens [N, T, width] to the same shape."""

    def __init__(self, width: int, *, num_heads: int, hidden: int, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(width)
        self.attention = Attention(width, num_heads=num_heads)
        self.dropout = nn.Dropout(dropout)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, hidden), nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, width), nn.Dropout(dropout)
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [N, T, width] that have seen each other."""
        tokens = tokens + self.dropout(self.attention(self.attention_norm(tokens)))
        return tokens + self.mlp(self.mlp_norm(tokens))


class Attention(nn.Module):
    """Every token's mixture of all tokens, by scaled dot products in num_heads subspaces (Vaswani et al. 2017)."""

    def __init__(self, width: int, *, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [N, T, width] to the same shape."""
        queries, keys, values = self.qkv(tokens).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(queries, keys, values)  # [N, heads, T, width / heads]
        return self.out(mixed.transpose(1, 2).flatten(2))


def _check_divides(key: str, divisor: int, what: str, size: int) -> None:
    """Raise BadInput, with all that would fit, unless model.<key> divides ``size``."""
    if size % divisor:
        fitting = ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)
        raise BadInput(f"model.{key}={divisor}: does not divide {what}; {key} may be {fitting}")
