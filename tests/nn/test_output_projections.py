"""The module that reads the heads of each attention module is known by its input, without a word about the model."""

import pytest
import torch
from hf_models import ROWS, Row, inputs
from torch import Tensor, nn

import headwise
from headwise.hf.models.support import attention_modules
from headwise.nn import LatentAttention, MultiHeadAttention, output_projections

CALLED = {
    "GPT-2": "c_proj",
    "GPT-NeoX": "dense",
    "OPT": "out_proj",
    "BERT": "dense",
    "DistilBERT": "out_lin",
    "ALBERT": "dense",
    "ModernBERT": "Wo",
    "T5": "o",
    "BART": "out_proj",
    "Whisper": "out_proj",
    "CLIP": "out_proj",
}


@pytest.mark.sweep(4)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_of_every_kind_of_model(row: Row) -> None:
    model, arguments = row.build(), inputs(row, "right")
    projections = output_projections(model, lambda model: model(**arguments))
    assert projections.keys() == attention_modules(model).keys()
    for attention, name in projections.items():
        assert name.rpartition(".")[2] == CALLED.get(row.name, "o_proj")
        assert name.rpartition(".")[0] in (attention, attention.rpartition(".")[0] + ".output")


class Gated(nn.Module):
    """A gate between the heads and their projection; then the heads of another module, which nothing stands before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MultiHeadAttention(12, 3, value_dim=4), MultiHeadAttention(12, 2, num_kv_heads=1)
        self.first.o_proj = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
        self.first.o_proj[0].register_forward_pre_hook(lambda _, args: (args[0].sigmoid(),))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def test_of_our_modules_and_where_there_is_none() -> None:
    x = torch.randn(2, 5, 12)
    model = Gated()
    hooks = [len(part._forward_pre_hooks) for part in model.modules()]
    assert output_projections(model, lambda model: model(x)) == {"second": "second.o_proj"}
    assert [len(part._forward_pre_hooks) for part in model.modules()] == hooks
    latent = LatentAttention(12, 3, kv_lora_rank=7, nope_dim=5, rope_dim=2, value_dim=5)
    assert output_projections(latent, lambda model: model(x, form="expanded")) == {"": "o_proj"}
    assert output_projections(latent, lambda model: model(x, form="absorbed")) == {}, "kv_b_proj stands between"
    assert output_projections(nn.DataParallel(latent), lambda model: model(x)) == {"": "o_proj"}
    with pytest.raises(TypeError, match="nothing to probe"):
        output_projections(nn.Linear(2, 2), lambda model: model(x))
    assert headwise.nn.output_projections is output_projections


class Particular(nn.Module):
    """A part that takes the heads as they are, and does otherwise with zeros."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.inside, self.how = nn.Linear(12, 12), how

    def forward(self, x: Tensor) -> Tensor:
        zeros = not x.any()
        if self.how == "raises" and zeros:
            raise ValueError("zeros are no heads")
        y = self.inside(2 * x)  # not the heads themselves: a module that reads these is their projection
        return y.mean(1) if self.how == "of another shape" and zeros else y


@pytest.mark.parametrize("how", ["linear", "raises", "of another shape"])
def test_a_part_that_cannot_be_seen_to_add_is_no_projection(how: str) -> None:
    module = MultiHeadAttention(12, 3, value_dim=4)
    module.o_proj = Particular(how)  # type: ignore[assignment]
    found = output_projections(module, lambda model: model(torch.randn(2, 5, 12)))
    assert found == ({"": "o_proj"} if how == "linear" else {})


@pytest.mark.parametrize("bias", [False, True])
def test_an_adapter_that_adds_nothing_yet_is_a_projection(bias: bool) -> None:
    """Many training runs begin with zeros there: twice the input is then twice the output, to the last bit."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base, self.down = nn.Linear(14, 14, bias=bias), nn.Linear(14, 3, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return self.base(x)

    mha = MultiHeadAttention(14, 2)
    mha.o_proj = Adapted()  # type: ignore[assignment]
    nn.init.zeros_(mha.o_proj.base.weight)
    model, x = nn.Sequential(mha), torch.randn(1, 5, 14)
    assert output_projections(model, lambda model: model(x)) == {"0": "0.o_proj"}
