"""Models as flat vectors: nothing is lost on the way there and back, and views share memory."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector

from peerage.errors import InputError
from peerage.vectors import FlatModel, Layout, find_head, float_buffers, trained_parameters

DIMENSIONS = st.lists(st.integers(1, 5), max_size=5)


def numbered(shapes: list[list[int]]) -> dict[str, Tensor]:
    """Tensors that together hold 0, 1, 2, ... in row-major order."""
    tensors, start = {}, 0
    for i, shape in enumerate(shapes):
        tensor = torch.zeros(shape)
        tensors[f"layer{i}.weight"] = (
            torch.arange(start, start + tensor.numel()).float().view(shape)
        )
        start += tensor.numel()
    return tensors


@st.composite
def modules(draw: st.DrawFn) -> nn.Module:
    """Convolutions, normalisations and linear layers in any number; never run."""
    size = st.integers(1, 5)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 4))):
        match draw(st.sampled_from(["conv", "norm", "linear", "depthwise"])):
            case "conv":
                kernel = (draw(size), draw(size))
                layers.append(nn.Conv2d(draw(size), draw(size), kernel, bias=draw(st.booleans())))
            case "depthwise":
                channels = draw(size)
                layers.append(nn.Conv2d(channels, channels, 3, groups=channels))
            case "norm":
                layers.append(nn.BatchNorm2d(draw(size)))
            case "linear":
                layers.append(nn.Linear(draw(size), draw(size), bias=draw(st.booleans())))
    return nn.Sequential(*layers)


# Layout


@given(st.lists(DIMENSIONS, min_size=1, max_size=5))
@settings(deadline=None, max_examples=100)
def test_tensors_survive_the_way_into_a_vector_and_back(shapes):
    tensors = numbered(shapes)
    layout = Layout.of(tensors.items())
    vector = layout.flatten(tensors)
    assert vector.shape == (layout.size,)
    assert sorted(vector.tolist()) == list(range(layout.size))
    for name, view in layout.views(vector).items():
        assert torch.equal(view, tensors[name])
        assert torch.equal(layout.view(vector, name), tensors[name])
    assert layout.canonical(vector).tolist() == list(range(layout.size))


@given(modules())
@settings(deadline=None, max_examples=50)
def test_canonical_is_the_order_that_torch_uses(module):
    layout = Layout.of(module.named_parameters())
    vector = layout.flatten(dict(module.named_parameters()))
    expected = parameters_to_vector(module.parameters()).detach()
    assert torch.equal(layout.canonical(vector), expected)


def test_weights_of_convolutions_lie_channels_last():
    weight = torch.arange(8.0).view(1, 2, 2, 2)
    vector = Layout.of([("weight", weight)]).flatten({"weight": weight})
    assert vector.tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_flatten_copies_and_views_do_not():
    tensors = {"a": torch.zeros(2, 2), "b": torch.ones(1, 2, 1, 1)}
    layout = Layout.of(tensors.items())
    vector = layout.flatten(tensors)
    layout.view(vector, "b")[0, 1] = 7.0
    assert vector.tolist() == [0, 0, 0, 0, 1, 7]
    assert tensors["b"].sum() == 2


def test_a_model_without_buffers_has_an_empty_layout():
    layout = Layout.of([])
    assert layout.size == 0
    assert layout.flatten({}).shape == (0,)
    assert layout.canonical(torch.empty(0)).shape == (0,)
    assert layout.layers == ()


def test_layouts_are_values():
    one, other = (Layout.of(nn.Linear(3, 2).named_parameters()) for _ in range(2))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Layout.of(nn.Linear(2, 3).named_parameters())


def three_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.Linear(4, 5))


def test_layers_are_named_from_input_to_output():
    layout = Layout.of(three_layers().named_parameters())
    assert layout.layers == ("0", "2", "3")
    assert [slot.layer for slot in layout.slots] == ["0", "0", "2", "2", "3", "3"]
    assert [slot.start for slot in layout.slots] == [0, 6, 9, 21, 25, 45]


def test_span_is_the_part_of_a_layer():
    module = three_layers()
    layout = Layout.of(module.named_parameters())
    assert layout.span("0") == slice(0, 9)
    assert layout.span("2") == slice(9, 25)
    assert layout.span("2", "3") == layout.span("3", "2") == slice(9, 50)
    assert layout.span(*layout.layers) == slice(0, 50)
    vector = layout.flatten(dict(module.named_parameters()))
    assert torch.equal(vector[layout.span("3")], parameters_to_vector(module[3].parameters()))


@pytest.mark.parametrize("layers", [("0", "3"), ("nowhere",), ()])
def test_span_rejects_what_is_not_one_part(layers):
    with pytest.raises(KeyError, match="not adjacent in"):
        Layout.of(three_layers().named_parameters()).span(*layers)


# Core and head


class Backbone(nn.Module):
    """Its head is named before its core, beside modules with similar names; never run."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)
        self.body = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))
        self.fc2 = nn.Linear(4, 4)
        self.top = nn.Sequential(nn.BatchNorm1d(4), nn.ReLU(), nn.Sequential(nn.Linear(4, 4)))


def layouts(module: nn.Module, *names: str) -> tuple[Layout, Layout]:
    head = find_head(module, names)
    parameters, buffers = trained_parameters(module), float_buffers(module)
    return Layout.of(parameters, head), Layout.of(buffers, head)


def names_in(layout: Layout, part: str) -> list[str]:
    """By the entries that a vector has in a part."""
    marks = torch.zeros(layout.size)
    marks[layout.part(part)] = 1.0
    views = layout.views(marks)
    assert all(view.min() == view.max() for view in views.values())
    assert int(marks.sum()) == layout.part_size(part)
    return [name for name, view in views.items() if view.any()]


def test_by_default_the_head_is_the_last_linear_layer():
    layout, buffers = layouts(Backbone())
    assert layout.head == ("top.2.0",)
    assert names_in(layout, "head") == ["top.2.0.weight", "top.2.0.bias"]
    assert isinstance(layout.part("head"), slice)
    assert buffers.part("head") == slice(buffers.size, buffers.size)
    assert layouts(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Conv2d(2, 3, 3)))[0].head == ("1",)
    # A layer with parameters after the last linear one does not make it the head.
    assert layouts(nn.Sequential(nn.Linear(2, 3), nn.LayerNorm(3)))[0].head == ("0",)


def test_a_head_is_named_by_its_modules_and_brings_its_buffers():
    layout, buffers = layouts(Backbone(), "top")
    assert layout.head == ("top.0", "top.2.0")
    assert names_in(layout, "head") == [
        "top.0.weight",
        "top.0.bias",
        "top.2.0.weight",
        "top.2.0.bias",
    ]
    assert names_in(buffers, "head") == ["top.0.running_mean", "top.0.running_var"]
    assert names_in(buffers, "core") == ["body.1.running_mean", "body.1.running_var"]
    for each in (layout, buffers):
        assert sorted(names_in(each, "head") + names_in(each, "core")) == sorted(
            each.views(torch.zeros(each.size))
        )


def test_a_part_that_is_not_adjacent_gives_indices():
    layout, _ = layouts(Backbone(), "fc", "top.2")
    assert names_in(layout, "head") == ["fc.weight", "fc.bias", "top.2.0.weight", "top.2.0.bias"]
    entries = layout.part("head")
    assert isinstance(entries, Tensor)
    vector = torch.arange(float(layout.size))
    assert vector[entries].tolist() == [*range(15), *range(layout.size - 20, layout.size)]
    assert isinstance(layout.part("core"), slice)
    # A name is not the beginning of another: fc2 is in the core.
    assert "fc2.weight" in names_in(layout, "core")


def test_the_head_of_a_single_layer_is_the_whole_model():
    layout, _ = layouts(nn.Linear(3, 2))
    assert layout.part("head") == slice(0, 8)
    assert layout.part("core") == slice(8, 8)
    assert (layout.part_size("head"), layout.part_size("core")) == (8, 0)
    with pytest.raises(
        InputError, match="only=head requires a model with a core and a head, but its"
    ):
        layout.check_parts("only=head")
    layouts(three_layers())[0].check_parts("only=head")


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["tpo"], r"has no module 'tpo', which should be its head; did you mean 'top'\? known: "),
        (["top", "fc1"], r"has no module 'fc1'.*did you mean 'fc2?'\?"),
        (["top.1"], r"the head top\.1 has no parameters that are trained; name a layer"),
    ],
)
def test_heads_that_do_not_exist_are_refused(names, found):
    with pytest.raises(InputError, match=found):
        find_head(Backbone(), names)


def test_a_frozen_head_is_refused():
    module = Backbone()
    module.fc.requires_grad_(False)
    with pytest.raises(InputError, match="the head fc has no parameters that are trained"):
        find_head(module, ["fc"])


def test_a_model_has_two_parts():
    with pytest.raises(InputError, match=r"no part 'haed'; did you mean 'head'\? known: core, hea"):
        layouts(Backbone())[0].part("haed")


# FlatModel


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)
    )


def test_parameters_are_views_into_one_vector():
    torch.manual_seed(0)
    module = convolutional()
    before = parameters_to_vector(module.parameters()).detach()
    model = FlatModel(module)
    assert torch.equal(model.layout.canonical(model.params), before)
    start = model.params.data_ptr()
    for slot, parameter in zip(model.layout.slots, module.parameters(), strict=True):
        assert parameter.data_ptr() == start + 4 * slot.start
    model.params.fill_(2.0)
    assert all((parameter == 2.0).all() for parameter in module.parameters())
    with torch.no_grad():
        module[3].bias[1] = 5.0
    assert model.layout.view(model.params, "3.bias").tolist() == [2, 5, 2, 2]
    assert module[0].weight.is_contiguous(memory_format=torch.channels_last)


def test_a_flat_model_computes_what_the_module_computes():
    torch.manual_seed(0)
    module = convolutional()
    x = torch.randn(5, 2, 4, 4)
    expected = module(x)
    torch.testing.assert_close(FlatModel(module).module(x), expected, rtol=1e-5, atol=1e-6)


def test_loading_gives_the_model_of_another_node():
    torch.manual_seed(0)
    source, model = convolutional(), FlatModel(convolutional())
    source[1].running_mean.fill_(0.5)
    named, buffers = dict(source.named_parameters()), float_buffers(source)
    model.load(model.layout.flatten(named), Layout.of(buffers).flatten(dict(buffers)))
    x = torch.randn(5, 2, 4, 4)
    source.eval(), model.module.eval()
    torch.testing.assert_close(model.module(x), source(x), rtol=1e-5, atol=1e-6)


def test_loading_copies():
    model = FlatModel(nn.Linear(2, 1))
    params = torch.tensor([1.0, 2.0, 3.0])
    model.load(params, torch.empty(0))
    model.params += 1
    assert params.tolist() == [1, 2, 3]


def test_running_statistics_are_views_and_counters_stay():
    module = convolutional()
    assert [name for name, _ in float_buffers(module)] == ["1.running_mean", "1.running_var"]
    model = FlatModel(module)
    assert model.buffers.tolist() == [0, 0, 0, 1, 1, 1]
    x = 3 + torch.randn(50, 2, 4, 4)
    module(x)
    activations = module[0](x)
    mean = 0.1 * activations.mean((0, 2, 3))  # the momentum of running statistics
    torch.testing.assert_close(model.buffers[:3], mean.detach())
    assert module[1].num_batches_tracked == 1
    model.load(model.params, torch.tensor([1.0, 2, 3, 4, 5, 6]))
    assert module[1].running_var.tolist() == [4, 5, 6]


def test_views_of_a_gradient_have_the_strides_of_parameters():
    model = FlatModel(convolutional())
    vector = torch.zeros_like(model.params)
    for view, parameter in zip(model.like_tensors(vector), model.tensors, strict=True):
        assert view.shape == parameter.shape
        assert view.stride() == parameter.stride()
