"""Backends that know no tags and send from their device alone (NCCL): the order of messages, and where they lie."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
import untagged_cases

from headwise.distributed import messages
from headwise.distributed.messages import ReceiveBuffer
from headwise.parallel import Comm

pytestmark = [pytest.mark.slow, pytest.mark.unchecked]


@pytest.mark.parametrize("world", [3, 4])
def test_ranks_that_do_one_batch_after_another_end(world: int) -> None:
    records = ranks.pool(world).run(untagged_cases.recorded)
    for name in records[0]:
        assert untagged_cases.stuck([own[name] for own in records]) == "", name


def test_a_deadlock_is_seen() -> None:
    both = [[("receive", 1, 4)], [("send", 1, 4)]], [[("receive", 0, 4)], [("send", 0, 4)]]
    assert untagged_cases.stuck(list(both)).startswith("ranks wait for each other")
    assert untagged_cases.stuck([[[*one[0], *one[1]]] for one in both]) == ""
    assert untagged_cases.stuck([[[("send", 1, 4)]], [[("receive", 0, 5)]]]).endswith("which takes 5")


def test_messages_without_tags_give_the_same_bits() -> None:
    for equal in ranks.pool(3).run(untagged_cases.sent):
        assert all(equal.values()), equal


def test_header_device_where_the_backend_sends_from() -> None:
    def lie(*kinds: str) -> str:
        group = SimpleNamespace(_device_types=[torch.device(kind) for kind in kinds])
        where: torch.device = Comm._header_device.fget(SimpleNamespace(group=group))  # type: ignore[attr-defined]
        return where.type

    assert (lie("cuda"), lie("cpu"), lie("cuda", "cpu"), lie()) == ("cuda", "cpu", "cpu", "cpu")


def test_what_comes_lies_on_the_device_of_the_call_where_nothing_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is one batch, with what goes: a backend without tags would else take before it sends, on both sides."""
    seen: list[Any] = []
    monkeypatch.setattr(dist, "P2POp", lambda run, x, group, group_peer: (run, x, group_peer))
    monkeypatch.setattr(
        dist, "batch_isend_irecv", lambda ops: seen.append(ops) or [SimpleNamespace(wait=lambda _: None)]
    )
    group = SimpleNamespace(group_name="fake")
    comm = Comm.__new__(Comm)
    comm.rank, comm.world, comm.timeout, comm._broken, comm.count = 0, 3, 1.0, None, 0
    comm._group = lambda: group  # type: ignore[assignment]
    comm.sent, comm.messages = Counter(), Counter()
    meta = torch.device("meta")
    heard = comm.exchange("kind", {}, {2: ReceiveBuffer((3, 5), torch.float32, meta)}).wait()
    assert heard[2].device == meta and [(op[0], op[1].device, op[2]) for op in seen[0]] == [(dist.irecv, meta, 2)]
    comm.exchange("kind", {1: torch.empty(7, device=meta)}, {1: ReceiveBuffer((2,), torch.int8, meta)}).wait()
    assert [(op[0], op[1].numel()) for op in seen[1]] == [(dist.irecv, 2), (dist.isend, 28)] and len(seen) == 2
    assert messages.has_tags(torch.device("cpu")) and not messages.has_tags(meta)
