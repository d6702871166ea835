"""Models in wrappers, and models of which each process has a part."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hf_models import BY_NAME, PAD, inputs, token_ids
from torch import nn
from wrappers import Adapted

import headwise.hf as hf
import headwise.nn as hw_nn
from headwise.hf.attention.function import headwise_attention
from headwise.hf.models.architectures import CACHE
from headwise.nn import split_over

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")  # of torch's compiler

WRAPPERS: dict[str, Any] = {
    "an adapter": Adapted,
    "data parallelism": nn.DataParallel,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "all": lambda model: torch.compile(nn.DataParallel(Adapted(model)), backend="eager"),
}


@pytest.fixture(params=WRAPPERS)
def wrap(request: pytest.FixtureRequest) -> Any:
    return WRAPPERS[request.param]


@pytest.mark.unchecked
def test_the_probe_sees_through(wrap: Any) -> None:
    """Run through the wrapper or past it; and the probe of any module finds the way too."""
    model = BY_NAME["Llama GQA"].build()
    wrapped, arguments = wrap(model), inputs(BY_NAME["Llama GQA"])
    for probe in (hf.probe, hw_nn.probe):
        with probe(wrapped) as seen, torch.no_grad():
            wrapped(**arguments)
            model(**arguments)
        assert [call.module for call in seen.calls] == ["model.layers.0.self_attn", "model.layers.1.self_attn"] * 2
    assert model.config._attn_implementation == "eager"


def test_a_cache_for_what_is_wrapped(wrap: Any) -> None:
    model = BY_NAME["Mistral window"].build()
    model.set_attn_implementation("headwise")
    how = dict(max_new_tokens=5, min_new_tokens=5, do_sample=False, pad_token_id=PAD)
    exact = model.generate(token_ids(7), **how)
    assert torch.equal(model.generate(token_ids(7), **{CACHE: hf.make_cache(wrap(model))}, **how), exact)


@pytest.mark.unchecked
def test_a_wrapper_of_something_else_is_refused_by_what_is_inside() -> None:
    inner = nn.Linear(2, 3)
    with pytest.raises(TypeError, match="make_cache takes a transformers PreTrainedModel; got Linear"):
        hf.make_cache(Adapted(inner))
    with pytest.raises(TypeError, match="got Linear"), hf.probe(nn.DataParallel(inner)):
        pass


# -- tensor parallelism -----------------------------------------------------------------------------------------------


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Two processes, of which this is the first and the other is not there."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("H", "K", "fits"),
    [(6, 3, True), (2, 1, True), (6, 6, True), (3, 3, False), (2, 3, False), (6, 1, False), (6, 2, False)],
)
def test_which_numbers_of_heads_fit(H: int, K: int, fits: bool) -> None:
    """Of 6 query heads in 3 groups: all, a part, or keys that the model has repeated for every head."""
    module = nn.Module()
    module.num_key_value_groups, module.config = 2, SimpleNamespace(num_attention_heads=6)
    q, k = torch.randn(1, H, 5, 4), torch.randn(1, K, 5, 4)
    if fits:
        assert headwise_attention(module, q, k, k, None)[0].shape == (1, 5, H, 4)
        return
    with pytest.raises((hf.ModelError, ValueError), match=rf"{H} query heads and {K} key-value heads"):
        headwise_attention(module, q, k, k, None)
    del module.num_key_value_groups
    if H % K == 0:
        headwise_attention(module, q, k, k, None)


def test_whole_models_are_split_over_one_process(mesh: Any) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor

    model = BY_NAME["Llama GQA"].build()
    assert split_over(model) == 1
    norm = model.model.norm
    norm.weight = nn.Parameter(distribute_tensor(norm.weight.detach(), mesh, [Replicate()]))
    assert split_over(model) == 1
    model._tp_size = 3  # as transformers marks what it has split
    assert split_over(model) == 3


def test_shards_that_are_gathered_to_run_do_not_count(mesh: Any) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    class FSDPLinear(nn.Linear):
        """As FSDP calls the classes of what it shards."""

    sharded = FSDPLinear(4, 4)
    for named, count in ((init_device_mesh("cpu", (2,), mesh_dim_names=("fsdp",)), 1), (mesh, 1)):
        sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), named, [Shard(0)]))
        assert split_over(sharded) == count
    both = init_device_mesh("cpu", (1, 2), mesh_dim_names=("fsdp", "tp"))
    sharded.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), both, [Shard(0), Shard(0)]))
    assert split_over(sharded) == 2
