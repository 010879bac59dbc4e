import inspect
import math
import re
from pathlib import Path

import pytest
import torch
import torchvision
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch import nn
from torch.nn import functional as F

from runner.compile import find_repeated_blocks
from runner.errors import BadInput
from runner.models import MLP, ResNet18, SmallCNN, ViT
from runner.models.vit import Attention, Block

CONF = Path(__file__).parents[1] / "conf" / "model"
ARGUMENTS = {
    SmallCNN: {"in_channels": 1, "num_classes": 10, "width": 8},
    ResNet18: {"in_channels": 1, "num_classes": 10},
    ViT: {
        "in_channels": 1, "num_classes": 10, "image_size": 28, "patch_size": 4, "width": 24, "depth": 2,
        "num_heads": 3, "mlp_ratio": 2, "dropout": 0.0,
    },
    MLP: {"in_channels": 1, "num_classes": 10, "image_size": 28, "width": 20, "depth": 3},
}  # fmt: skip
MODELS = list(ARGUMENTS)
SPLITTABLE = [SmallCNN, ViT, MLP]


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Threads that wait for each other on a busy machine would make these small models slow."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def build(model_class, **changes):
    torch.manual_seed(0)
    known = inspect.signature(model_class).parameters
    return model_class(**ARGUMENTS[model_class] | {key: value for key, value in changes.items() if key in known})


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


# All of them


@pytest.mark.parametrize("image_size", [28, 32])
@pytest.mark.parametrize("num_channels", [1, 3])
@pytest.mark.parametrize("model_class", MODELS)
def test_a_model_maps_images_to_one_logit_a_class(model_class, num_channels, image_size):
    model = build(model_class, in_channels=num_channels, image_size=image_size, num_classes=7)
    logits = model(torch.randn(5, num_channels, image_size, image_size))
    assert logits.shape == (5, 7)
    assert logits.dtype == torch.float32
    assert (logits.std(dim=0) > 0).all()
    assert logits.min() < 0 < logits.max(), "logits, not what a ReLU or a softmax leaves of them"


@pytest.mark.parametrize("model_class", MODELS)
def test_the_gradient_reaches_every_parameter(model_class):
    model = build(model_class, in_channels=3)
    F.cross_entropy(model(torch.randn(8, 3, 28, 28)), torch.arange(8)).backward()
    unreached = [name for name, weight in model.named_parameters() if weight.grad is None or not weight.grad.any()]
    assert unreached == []


@pytest.mark.parametrize("model_class", SPLITTABLE)
def test_two_halves_of_a_batch_have_the_gradient_of_the_whole(model_class):
    model = build(model_class).double()
    inputs, targets = torch.randn(8, 1, 28, 28, dtype=torch.float64), torch.arange(8)
    whole = torch.autograd.grad(F.cross_entropy(model(inputs), targets), list(model.parameters()))
    halves = [
        torch.autograd.grad(F.cross_entropy(model(inputs[part]), targets[part]), list(model.parameters()))
        for part in (slice(4), slice(4, 8))
    ]
    for gradient, first, second in zip(whole, *halves, strict=True):
        torch.testing.assert_close((first + second) / 2, gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("model_class", SPLITTABLE)
def test_a_splittable_model_trains_and_evaluates_alike(model_class):
    model, inputs = build(model_class), torch.randn(4, 1, 28, 28)
    assert torch.equal(model.train()(inputs), model.eval()(inputs))
    assert list(model.buffers()) == [], "running statistics belong to models that depend on the micro-batch"


def test_only_resnet_depends_on_what_else_is_in_the_batch():
    inputs = torch.randn(4, 1, 28, 28)
    depends = {
        model_class: not torch.allclose(build(model_class)(inputs)[:2], build(model_class)(inputs[:2]), atol=1e-4)
        for model_class in MODELS
    }
    assert depends == {SmallCNN: False, ResNet18: True, ViT: False, MLP: False}


@pytest.mark.parametrize("model_class", MODELS)
def test_channels_last_changes_the_layout_and_not_the_logits(model_class):
    model, inputs = build(model_class, in_channels=3).double().eval(), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    expected = model(inputs)
    laid_out = model.to(memory_format=torch.channels_last)(inputs.to(memory_format=torch.channels_last))
    torch.testing.assert_close(laid_out, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("model_class", MODELS)
def test_a_model_is_one_graph_to_the_compiler(model_class):
    model, inputs = build(model_class).eval(), torch.randn(2, 1, 28, 28)
    expected = model(inputs)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs), expected)


def test_regional_compilation_finds_the_blocks_that_repeat():
    num_blocks = {model_class.__name__: len(find_repeated_blocks(build(model_class))) for model_class in MODELS}
    assert num_blocks == {"SmallCNN": 0, "ResNet18": 8, "ViT": 2, "MLP": 0}
    assert find_repeated_blocks(vit := build(ViT)) == list(vit.blocks)


@pytest.mark.parametrize(
    ("model_class", "key"),
    [(cls, key) for cls, arguments in ARGUMENTS.items() for key in arguments if key != "dropout"],
)
def test_a_size_below_one_is_refused_by_its_name(model_class, key):
    with pytest.raises(BadInput, match=rf"^model\.{key}=0: must be 1 or more$"):
        build(model_class, **{key: 0})


@pytest.mark.parametrize("model_class", MODELS)
def test_a_constructor_has_no_defaults_and_takes_keywords_only(model_class):
    parameters = inspect.signature(model_class).parameters.values()
    assert {(parameter.kind, parameter.default) for parameter in parameters} == {
        (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.empty)
    }
    assert all(parameter.annotation is not inspect.Parameter.empty for parameter in parameters)


# SmallCNN


def test_small_cnn_has_the_parameters_of_a_hand_sum():
    assert num_parameters(build(SmallCNN, width=16)) == (
        (9 * 1 * 16 + 16) + (9 * 16 * 32 + 32) + (9 * 32 * 64 + 64) + (64 * 2 * 2 * 10 + 10)
    )


@pytest.mark.parametrize("shape", [(28, 28), (32, 32), (8, 8), (5, 5), (9, 17), (30, 28)])
def test_small_cnn_is_three_convolutions_and_a_mean_over_four_cells(shape):
    model, inputs = build(SmallCNN).double(), torch.randn(3, 1, *shape, dtype=torch.float64)
    first, second, third = (layer for layer in model.features if isinstance(layer, nn.Conv2d))
    maps = F.relu(F.conv2d(inputs, first.weight, first.bias, stride=2, padding=1))
    maps = F.relu(F.conv2d(maps, second.weight, second.bias, stride=2, padding=1))
    maps = F.relu(F.conv2d(maps, third.weight, third.bias, padding=1))
    height, width = maps.shape[-2:]
    rows = [slice(0, math.ceil(height / 2)), slice(height // 2, height)]
    columns = [slice(0, math.ceil(width / 2)), slice(width // 2, width)]
    cells = torch.stack([maps[..., row, column].mean(dim=(2, 3)) for row in rows for column in columns], dim=2)
    torch.testing.assert_close(model(inputs), cells.flatten(1) @ model.head.weight.T + model.head.bias)


def test_small_cnn_starts_at_the_scale_that_keeps_the_signal():
    model = build(SmallCNN, in_channels=3, width=64)
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            expected = math.sqrt(2 / (9 * layer.in_channels))
            assert abs(layer.weight.std().item() / expected - 1) < 0.06
            assert not layer.bias.any()


def test_small_cnn_refuses_images_below_five_pixels():
    with pytest.raises(BadInput, match="SmallCNN takes images from 5 pixels, and these are 8 x 4"):
        build(SmallCNN)(torch.randn(1, 1, 8, 4))


def test_small_cnn_learns_where_in_the_image_something_is():
    torch.manual_seed(1)
    targets = torch.arange(64) % 4
    inputs = 0.3 * torch.randn(64, 1, 28, 28)
    for image, corner in zip(inputs, targets.tolist(), strict=True):
        image[0, 14 * (corner // 2) + 4 : 14 * (corner // 2) + 9, 14 * (corner % 2) + 4 : 14 * (corner % 2) + 9] += 2
    model = build(SmallCNN, num_classes=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for _ in range(20):
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    assert (model(inputs).argmax(dim=1) == targets).float().mean() == 1


# ResNet18


def test_resnet18_has_the_parameters_of_a_hand_sum():
    def block(before, after):
        projection = before * after + 2 * after if before != after else 0
        return 9 * before * after + 9 * after * after + 4 * after + projection

    stem = 9 * 1 * 64 + 2 * 64
    stages = 2 * block(64, 64) + sum(block(n // 2, n) + block(n, n) for n in (128, 256, 512))
    assert num_parameters(build(ResNet18)) == stem + stages + 512 * 10 + 10 == 11_172_810


def torchvision_resnet18(num_channels, num_classes):
    reference = torchvision.models.resnet18(weights=None, num_classes=num_classes)
    reference.conv1 = nn.Conv2d(num_channels, 64, kernel_size=3, stride=1, padding=1, bias=False)
    reference.maxpool = nn.Identity()
    return reference


@pytest.mark.parametrize("is_training", [True, False])
def test_resnet18_is_bitwise_torchvisions_with_a_small_stem(is_training):
    model, reference = build(ResNet18, in_channels=3), torchvision_resnet18(3, 10)
    for buffer in model.buffers():
        if buffer.is_floating_point():
            buffer.uniform_(0.5, 1.5)
    model.train(is_training)
    reference.train(is_training)
    reference.load_state_dict(model.state_dict(), strict=True)
    assert list(model.state_dict()) == list(reference.state_dict())
    inputs, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    assert torch.equal(model(inputs), reference(inputs))
    for network in (model, reference):
        F.cross_entropy(network(inputs), targets).backward()
    for (name, weight), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert torch.equal(weight.grad, expected.grad), name
    for (name, buffer), expected in zip(model.named_buffers(), reference.buffers(), strict=True):
        assert torch.equal(buffer, expected), name


def test_resnet18_starts_at_the_same_scale_as_torchvisions():
    model, reference = build(ResNet18, in_channels=3), torchvision_resnet18(3, 10)
    for (name, weight), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if weight.dim() == 1 and name != "fc.bias":
            assert torch.equal(weight, expected), name
        elif name not in ("conv1.weight", "fc.bias"):  # the reference's stem was replaced, and is not initialised
            assert abs(weight.std() / expected.std() - 1).item() < 0.05, name
    assert abs(model.conv1.weight.std() / math.sqrt(2 / (9 * 64)) - 1).item() < 0.06


# ViT


def test_vit_has_the_parameters_of_a_hand_sum():
    width, hidden = 24, 48
    block = (
        4 * width + (3 * width * width + 3 * width) + (width * width + width) + (2 * width * hidden + hidden + width)
    )
    patches = 4 * 4 * 1 * width + width
    assert num_parameters(build(ViT)) == patches + 49 * width + 2 * block + 2 * width + (10 * width + 10)


def by_hand_attention(attention, tokens):
    """softmax(q k' / sqrt(d)) v, one image, head and query at a time."""
    num_images, num_tokens, width = tokens.shape
    size = width // attention.num_heads
    projected = tokens @ attention.qkv.weight.T + attention.qkv.bias
    mixed = torch.zeros_like(tokens)
    for image in range(num_images):
        for start in range(0, width, size):
            queries, keys, values = (projected[image, :, part + start :][:, :size] for part in (0, width, 2 * width))
            for place in range(num_tokens):
                scores = torch.stack([(queries[place] * key).sum() / math.sqrt(size) for key in keys])
                weights = scores.exp() / scores.exp().sum()
                mixed[image, place, start : start + size] = sum(w * v for w, v in zip(weights, values, strict=True))
    return mixed @ attention.out.weight.T + attention.out.bias


@torch.no_grad()
def test_attention_is_a_softmax_over_scaled_dot_products():
    torch.manual_seed(0)
    attention, tokens = Attention(24, num_heads=3).double(), 4 * torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(attention(tokens), by_hand_attention(attention, tokens))


def by_hand_norm(norm, tokens):
    centred = tokens - tokens.mean(dim=-1, keepdim=True)
    return centred / (centred.square().mean(dim=-1, keepdim=True) + 1e-5).sqrt() * norm.weight + norm.bias


def randomise(module):
    """Fresh values for every parameter, so that no weight is 1 and no bias 0."""
    for parameter in module.parameters():
        parameter.normal_(std=0.3)


@torch.no_grad()
def test_a_block_normalises_before_and_adds_after():
    torch.manual_seed(0)
    block, tokens = Block(24, num_heads=3, hidden=48, dropout=0.0).double(), torch.randn(2, 5, 24, dtype=torch.float64)
    randomise(block)
    first, second = (layer for layer in block.mlp if isinstance(layer, nn.Linear))
    middle = tokens + by_hand_attention(block.attention, by_hand_norm(block.attention_norm, tokens))
    hidden = by_hand_norm(block.mlp_norm, middle) @ first.weight.T + first.bias
    hidden = hidden * (1 + torch.erf(hidden / math.sqrt(2))) / 2
    torch.testing.assert_close(block(tokens), middle + hidden @ second.weight.T + second.bias)


@torch.no_grad()
def test_vit_reads_patches_row_by_row_and_the_mean_of_them():
    model, inputs = build(ViT, in_channels=3, patch_size=7).double(), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    randomise(model)
    tokens = torch.stack(
        [
            torch.einsum("nchw,dchw->nd", inputs[:, :, top : top + 7, left : left + 7], model.patches.weight)
            for top in range(0, 28, 7)
            for left in range(0, 28, 7)
        ],
        dim=1,
    )
    tokens = tokens + model.patches.bias + model.positions
    for block in model.blocks:
        tokens = block(tokens)
    tokens = by_hand_norm(model.norm, tokens)
    torch.testing.assert_close(model(inputs), tokens.mean(dim=1) @ model.head.weight.T + model.head.bias)


def test_vit_starts_from_small_positions_and_blocks_of_their_own():
    model = build(ViT)
    assert abs(model.positions.std().item() / 0.02 - 1) < 0.1
    assert len({id(parameter) for block in model.blocks for parameter in block.parameters()}) == 2 * 12


def test_dropout_follows_positions_and_every_dense_layer_but_qkv_and_head():
    model = build(ViT, dropout=0.5).train()
    kept = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Dropout):
            module.register_forward_hook(
                lambda module, inputs, output, name=name: kept.update({name: (output != 0).double().mean().item()})
            )
    inputs = torch.randn(16, 1, 28, 28)
    model(inputs)
    in_a_block = ("dropout", "mlp.2", "mlp.4")
    assert set(kept) == {"dropout"} | {f"blocks.{n}.{name}" for n in range(2) for name in in_a_block}
    assert all(abs(share - 0.5) < 0.02 for share in kept.values())
    assert not torch.equal(model(inputs), model(inputs))
    assert torch.equal(model.eval()(inputs), model(inputs))


@pytest.mark.parametrize("dropout", [-0.1, 1.0, math.nan])
def test_vit_refuses_a_dropout_that_is_no_probability_below_one(dropout):
    with pytest.raises(BadInput, match=r"model\.dropout=.*: must be at least 0 and below 1"):
        build(ViT, dropout=dropout)


def test_vit_refuses_patches_that_do_not_fill_the_image_and_says_which_would():
    with pytest.raises(BadInput, match=r"^model\.patch_size=5: does not divide model\.image_size=28; ") as error:
        build(ViT, patch_size=5)
    assert str(error.value).endswith("patch_size may be 1, 2, 4, 7, 14, 28")


def test_vit_refuses_heads_that_do_not_divide_its_width_and_says_which_would():
    with pytest.raises(BadInput, match=r"^model\.num_heads=5: does not divide model\.width=24; ") as error:
        build(ViT, num_heads=5)
    assert str(error.value).endswith("num_heads may be 1, 2, 3, 4, 6, 8, 12, 24")


@pytest.mark.parametrize("shape", [(32, 28), (28, 32), (14, 56)])
@pytest.mark.parametrize("model_class", [ViT, MLP])
def test_a_model_built_for_one_image_size_refuses_another(model_class, shape):
    with pytest.raises(BadInput, match=rf"^model\.image_size=28: the images are {shape[0]} x {shape[1]}$"):
        build(model_class)(torch.randn(1, 1, *shape))


# MLP


def test_mlp_has_the_parameters_of_a_hand_sum():
    assert num_parameters(build(MLP)) == (784 * 20 + 20) + 2 * (20 * 20 + 20) + (20 * 10 + 10)


def test_mlp_is_matrix_products_with_relu_between_them():
    model, inputs = build(MLP, in_channels=3).double(), torch.randn(2, 3, 28, 28, dtype=torch.float64)
    first, second, third, last = (layer for layer in model.layers if isinstance(layer, nn.Linear))
    values = inputs.reshape(2, 3 * 28 * 28)
    for layer in (first, second, third):
        values = (values @ layer.weight.T + layer.bias).clamp(min=0)
    torch.testing.assert_close(model(inputs), values @ last.weight.T + last.bias)


# conf/model


def composed(name, **data):
    sizes = {"num_channels": 1, "num_classes": 10, "image_size": 28} | data
    config = OmegaConf.create({"data": sizes, "model": OmegaConf.load(CONF / f"{name}.yaml")})
    return OmegaConf.to_container(config, resolve=True)["model"]


def test_the_menu_holds_six_models():
    assert sorted(path.stem for path in CONF.iterdir()) == ["cnn", "mlp", "resnet18", "timm", "torchvision", "vit"]


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet18", "timm", "torchvision", "vit"])
def test_a_yaml_builds_a_model_of_as_many_parameters_as_its_first_line_says(name):
    if name == "timm":
        pytest.importorskip("timm", reason="timm is an optional dependency")
    first_line = (CONF / f"{name}.yaml").read_text().splitlines()[0]
    count, channels = re.search(r"([\d,]+) parameters \((\d) x 28 x 28, 10 classes\)", first_line).groups()
    model = instantiate(composed(name, num_channels=int(channels)))
    assert num_parameters(model) == int(count.replace(",", ""))
    assert model.eval()(torch.randn(2, int(channels), 28, 28)).shape == (2, 10)


@pytest.mark.parametrize("name", ["cnn", "mlp", "resnet18", "timm", "torchvision", "vit"])
def test_a_yaml_follows_the_data(name):
    if name == "timm":
        pytest.importorskip("timm", reason="timm is an optional dependency")
    model = instantiate(composed(name, num_channels=3, num_classes=7, image_size=32))
    assert model.eval()(torch.randn(2, 3, 32, 32)).shape == (2, 7)


@pytest.mark.parametrize(("name", "key", "value"), [("torchvision", "weights", None), ("timm", "pretrained", False)])
def test_no_yaml_asks_for_weights_from_the_network(name, key, value):
    assert composed(name)[key] is value


def test_cnn_yaml_is_the_form_that_splits_exactly():
    model = instantiate(composed("cnn"))
    forbidden = nn.modules.batchnorm._BatchNorm | nn.modules.dropout._DropoutNd
    assert not any(isinstance(module, forbidden) for module in model.modules())
    assert composed("vit")["dropout"] == 0
