"""First training steps with gradient checkpointing, each run by `test_hf_first_step.py` in fresh processes.

Non-reentrant checkpointing, which transformers uses by default, computes each layer twice and requires that both save
the same tensors. So nothing may differ between the first attention call of a process and the second.
"""

from __future__ import annotations

import copy
import functools
import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils import checkpoint as checkpoints

import headwise
import headwise.hf

VOCAB, B, T = 41, 2, 13
RELATIVE = 64 * torch.finfo(torch.float32).eps
"""The largest difference of a gradient, as a part of the largest number of that gradient; two layers deep."""

transformers.logging.set_verbosity_error()


def llama() -> Any:
    """A model whose layers have a sliding window and grouped heads."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 24, "intermediate_size": 19, "num_attention_heads": 3, "num_key_value_heads": 1}
    config = transformers.MistralConfig(vocab_size=VOCAB, num_hidden_layers=2, head_dim=8, sliding_window=5, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="headwise").train()


def tokens() -> Tensor:
    return torch.randint(VOCAB, (B, T), generator=torch.Generator().manual_seed(5))


def expected(model: Any, ids: Tensor) -> dict[str, Tensor]:
    """The gradients of a copy of the model on "eager", without checkpoints."""
    model.set_attn_implementation("eager")
    model.zero_grad()
    model(input_ids=ids, labels=ids).loss.backward()
    return {name: p.grad for name, p in model.named_parameters()}


def compare(gradients: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert gradients.keys() == right.keys() and len(right) > 9
    for name, grad in right.items():
        far = float((gradients[name] - grad).abs().max() / grad.abs().max())
        assert far <= RELATIVE, f"{name}: {far:.1e}"


def trainer() -> None:
    model, ids = llama(), tokens()
    twin, gradients = copy.deepcopy(model), {}

    class Keeps(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            gradients.update({name: p.grad.clone() for name, p in model.named_parameters()})

    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            folder, max_steps=1, per_device_train_batch_size=B, gradient_checkpointing=True, max_grad_norm=0.0,
            use_cpu=True, report_to="none", disable_tqdm=True, save_strategy="no",
        )  # fmt: skip
        data = [{"input_ids": row, "labels": row} for row in ids]
        transformers.Trainer(model, arguments, train_dataset=data, callbacks=[Keeps()]).train()  # type: ignore[arg-type]
    compare(gradients, expected(twin, ids))


def two_ranks(step: Callable[[Any, Tensor], dict[str, Tensor]]) -> None:
    """A step of two processes, each with one row of the batch."""
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        rank = int(child == 0)
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        code = 1
        try:
            model, ids = llama(), tokens()
            twin = copy.deepcopy(model)
            model.gradient_checkpointing_enable()
            gradients = step(model, ids[rank, None])
            compare(gradients, expected(twin, ids))
            code = 0
        finally:
            dist.destroy_process_group()
            if rank:
                sys.stderr.flush()
                os._exit(code)
        assert os.waitpid(child, 0)[1] == 0, "the other rank failed"


def ddp() -> None:
    def step(model: Any, ids: Tensor) -> dict[str, Tensor]:
        parallel = nn.parallel.DistributedDataParallel(model)
        parallel(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad for name, p in model.named_parameters()}

    two_ranks(step)


def fsdp() -> None:
    from torch.distributed.fsdp import fully_shard

    def step(model: Any, ids: Tensor) -> dict[str, Tensor]:
        mesh = dist.init_device_mesh("cpu", (2,))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model(input_ids=ids, labels=ids).loss.backward()
        return {name: p.grad.full_tensor() for name, p in model.named_parameters()}

    two_ranks(step)


def _with_residual(mask: headwise.Mask, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    out = headwise.attention(query, key, value, mask=mask)
    return torch.cat([out + query, out * 2 % 5], -1).where(query[..., :1] > 0, out[..., :1])


def selective() -> None:
    """Every result is saved, and the operations of a rule are also those of the model: none may take the other's."""
    policy = lambda *_, **__: checkpoints.CheckpointPolicy.MUST_SAVE  # noqa: E731
    contexts = functools.partial(checkpoints.create_selective_checkpoint_contexts, policy)
    query, key, value = torch.randn(3, 2, 3, T, 8, generator=torch.Generator().manual_seed(7)).unbind()
    masks = {
        "rule": headwise.rule(lambda b, h, i, j: (i + j) % 3 != 1),
        "kept rule": headwise.rule(lambda b, h, i, j: (i + 2 * j) % 5 != 1, keep=True),
        "union": headwise.window(3) | headwise.prefix(2),
        "complement": ~headwise.window(3),
        "segments": headwise.causal() & headwise.segments(torch.arange(T) // 5),
        "alibi": headwise.causal() & headwise.alibi(torch.tensor([0.5, 0.25, 0.125])),
        "lengths": headwise.window(4) & headwise.lengths(torch.tensor([11, 7])),
    }
    wrong = []
    for name, mask in masks.items():
        run = functools.partial(_with_residual, mask)
        gradients = []
        for way in (functools.partial(checkpoints.checkpoint, run, use_reentrant=False, context_fn=contexts), run):
            leaves = [x.clone().requires_grad_() for x in (query, key, value)]
            way(*leaves).square().sum().backward()
            gradients.append([x.grad for x in leaves])
        wrong += [name for ours, right in zip(*gradients, strict=True) if not torch.equal(ours, right)]
    assert wrong == []
