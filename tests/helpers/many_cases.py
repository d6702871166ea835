"""What the tests of many processes have the ranks of `ranks.py` do."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import headwise
from headwise import look, parallel
from headwise.distributed.workers import Processes
from headwise.look import Look
from headwise.look.collect import corpus

WORDS, BLOCK = 61, 16


class Two(nn.Module):
    """Two layers whose linear parts are wide enough that a row's bits depend on the rows beside it."""

    def __init__(self, ahead: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.mask = None if ahead else headwise.causal()
        self.embed = nn.Embedding(WORDS, 97)
        self.one = headwise.MultiHeadAttention(97, 3, head_dim=17)
        self.two = headwise.MultiHeadAttention(97, 5, head_dim=11)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        x = x + self.one(x, mask=self.mask)
        return x + self.two(x, mask=self.mask)


def texts(count: int = 41) -> list[list[int]]:
    """Texts of few lengths; the first has one token, which does not show whether queries look ahead."""
    make = random.Random(7)
    return [[1]] + [[1, *make.choices(range(WORDS), k=make.choice([1, 6, 11, 29]))] for _ in range(count - 1)]


def readings() -> dict[str, list[look.Passage]]:
    return {"needles": look.needles(texts()[5], range(5, WORDS), around=13)}


class Stop(Exception):
    pass


def over(state: str | None = None, ahead: bool = False, stop: int = 0, shared: bool = True) -> Look:
    """A look at the texts; the one that stops does so after so many."""

    def progress(done: int, total: int) -> None:
        if done == stop:
            raise Stop("enough")

    corpus.BLOCK = BLOCK
    group = dist.group.WORLD if shared and dist.is_initialized() else None
    return look.over(
        Two(ahead),
        (row for row in texts()),
        name="two",
        batch=97,
        readings=readings(),
        state=state if group is None or dist.get_rank() == 0 else None,  # the first's alone counts
        progress=progress,
        group=group,
    )


def stopped(state: str, stop: int) -> str:
    """What is raised in each rank by a look that stops after some texts."""
    try:
        over(state, stop=stop)
    except (Stop, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def alone() -> Look | None:
    """The first rank looks by itself: it must not wait for others."""
    return over(shared=False) if dist.get_rank() == 0 else None


def different(fault: str, folder: str) -> str:
    """What each rank says where the last one differs."""
    corpus.BLOCK = BLOCK
    last = dist.get_rank() == dist.get_world_size() - 1
    model, rows, name, state = Two(), texts(), "two", None
    if last:
        if fault == "name":
            name = "another"
        elif fault == "text":
            rows[20] = [*rows[20][:-1], 0]
        elif fault == "fewer":
            rows = rows[:BLOCK]
        elif fault == "id":
            rows[3] = [1, WORDS]
        elif fault == "nan":
            model.two.q_proj.register_forward_hook(lambda *made: made[2] * float("nan"))
        elif fault == "weights":
            with torch.no_grad():
                model.two.q_proj.weight[0, 0] += 1
        elif fault == "code":
            rows[3] = None  # type: ignore[call-overload]
    if fault == "all":
        rows[3] = [1, WORDS]
    if fault == "state" and dist.get_rank() == 0:
        state = str(Path(folder) / "state")
        Path(state).write_bytes(b"none")
    try:
        look.over(model, rows, name=name, state=state, group=dist.group.WORLD)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def without(rank: int, ended: bool, run: str) -> str:
    """What each rank says where one stays away after the first block; `ended`: gloo's words for one that has ended.

    What is done once in a process is done before, for on a busy machine it takes longer than this group waits.
    """
    corpus.BLOCK = BLOCK
    look.over(Two(), texts(), group=dist.group.WORLD)
    group = dist.new_group(timeout=timedelta(seconds=2))
    store = dist.distributed_c10d._get_default_store()
    ways, me = (dist.send, dist.recv), dist.get_rank()

    def rows() -> Iterator[list[int]]:
        for n, row in enumerate(texts()):
            if n == 20 and me == rank:
                store.wait([f"{run} {r}" for r in range(3) if r != rank])
                raise Stop
            if n == 20 and ended:
                dist.send, dist.recv = (closed(way) for way in ways)
            yield row

    def closed(way: Any) -> Any:
        def act(tensor: Tensor, **options: Any) -> None:
            if rank in (options.get("group_src"), options.get("group_dst")):
                raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:29400")
            way(tensor, **options)

        return act

    try:
        look.over(Two(), rows(), group=group)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        store.set(f"{run} {me}", "")
        dist.send, dist.recv = ways
    return "nothing"


def exchanged(size: int) -> bytes:
    """The last bytes of all ranks, of messages that differ in length."""
    processes = Processes.of(dist.group.WORLD)
    return processes.exchange(
        lambda: bytes([processes.rank]) * (size * processes.rank + 1),
        lambda parts: b"".join(bytes([part[-1], len(part) % 251]) for part in parts),
    )


def subgroup() -> bytes | str:
    """Ranks 1 and 2 of three do something together; rank 0 is not of them."""
    group = dist.new_group([1, 2])
    try:
        processes = Processes.of(group)
    except TypeError as error:
        return str(error)
    return processes.exchange(lambda: bytes([10 + dist.get_rank()]), lambda parts: b"".join(parts))


def split(model_together: bool) -> tuple[Look | str, Look]:
    """Looks by four ranks, of which two and two have a model together; the first is shared as it should not be."""
    corpus.BLOCK = BLOCK
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tp"))
    model = Two()
    model.one = headwise.MultiHeadAttention(97, 4, head_dim=17)
    model.two = headwise.MultiHeadAttention(97, 6, num_kv_heads=2, head_dim=11)
    want = look.over(model, texts(), name="two", repeats=None)
    for part in (model.one, model.two):
        parallel.tensor_parallel(part, mesh["tp"])
    if model_together:
        try:
            return look.over(model, texts(), group=mesh["tp"].get_group()), want
        except ValueError as error:
            return str(error), want
    return look.over(model, texts(), name="two", repeats=None, group=mesh["data"].get_group()), want


class Loaded:
    """What `headwise look` needs of a checkpoint, without one: a token a letter."""

    def __init__(self) -> None:
        self.model, self.name, self.tokenizer = Two(), "two", self
        self.delimiters, self.bos_id, self.max_positions = (2, 3), 1, 31
        self.all_special_ids = [0, 1]

    def names(self) -> list[str]:
        return [chr(64 + i) for i in range(WORDS)]

    def encode_all(self, documents: list[str]) -> list[tuple[list[int], list[tuple[int, int]]]]:
        return [([1, *(ord(letter) % WORDS for letter in text)], []) for text in documents]


def command(folder: str, *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``headwise look``, as torchrun would have started it."""
    from command_line import CliRunner

    from headwise import cli

    os.chdir(folder)
    corpus.BLOCK = BLOCK
    load, cli.look.load = cli.look.load, lambda *_, **__: Loaded()
    several = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if several:
        agent = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False) if dist.get_rank() == 0 else None
        port = [agent.port if agent else 0]
        dist.broadcast_object_list(port)
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port[0])}
    try:
        result = CliRunner().invoke(cli.app, ["look", *arguments])
    finally:
        cli.look.load = load
        if several:
            dist.barrier()
            del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
        os.chdir("/")
    return result.exit_code, result.stdout, result.stderr


def said_of_a_name() -> str:
    """What each rank says where the last one fails on a file whose name is no UTF-8."""

    def work() -> bytes:
        if dist.get_rank() == dist.get_world_size() - 1:
            raise FileNotFoundError("a\udcff.txt: no such file")
        return b""

    try:
        Processes.of(dist.new_group(timeout=timedelta(seconds=5))).exchange(work, lambda parts: b"".join(parts))
    except (OSError, ValueError) as error:
        return str(error)
    return "nothing"
