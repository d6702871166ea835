"""A small model that learns to copy, its sequences split over processes; the curve of one process stands beside it.

    torchrun --nproc-per-node 2 examples/parallel.py

Run without torchrun it is one process. Each rank holds half of every sequence's tokens; attention sees all of them.
"""

import os

import torch
import torch.distributed as dist
from torch import nn

import headwise
from headwise import parallel

LENGTH, VOCABULARY, WIDTH, STEPS = 61, 31, 32, 30


class Model(nn.Module):
    """Two layers of causal attention with rotary positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(
            headwise.MultiHeadAttention(WIDTH, 4, num_kv_heads=2, rotary=headwise.nn.Rotary(WIDTH // 4))
            for _ in range(2)
        )
        self.unembed = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = x + layer(nn.functional.rms_norm(x, (WIDTH,)), mask=headwise.causal())
        return self.unembed(x)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequences whose second half repeats the first: what comes next is known from there on."""
    half = torch.randint(VOCABULARY, (4, LENGTH // 2 + 1), generator=torch.Generator().manual_seed(step))
    ids = torch.cat([half, half], dim=1)[:, : LENGTH + 1]
    return ids[:, :-1], ids[:, 1:]


def train(split: bool) -> list[float]:
    """The loss after each step."""
    torch.manual_seed(0)
    model, curve = Model(), []
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        ids, targets = batch(step)
        if split:
            ids, targets = (parallel.split_sequence(x, order="zigzag") for x in (ids, targets))
            with parallel.context(order="zigzag", length=LENGTH):
                logits = model(ids)
        else:
            logits = model(ids)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / (4 * LENGTH)
        optimizer.zero_grad()
        loss.backward()
        if split:
            parallel.sum_gradients(model)  # each rank has its tokens' share
            loss = loss.detach().clone()
            dist.all_reduce(loss)  # of all tokens, to be shown
        optimizer.step()
        curve.append(loss.item())
    return curve


def main() -> None:
    if "RANK" not in os.environ:  # not by torchrun: a group of one
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    else:
        dist.init_process_group("gloo")
    torch.set_num_threads(1)
    split, whole = train(split=True), train(split=False)
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} processes, {LENGTH} tokens a sequence; loss")
        print("step      split  one process")
        for step in range(0, STEPS, 5):
            print(f"{step:4}  {split[step]:9.5f}  {whole[step]:11.5f}")
        worst = max(abs(a - b) for a, b in zip(split, whole, strict=True))
        print(f"largest difference over {STEPS} steps: {worst:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
