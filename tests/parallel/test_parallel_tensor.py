"""Heads dealt out to several processes give what one process gives: modules, the op, looks, checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import draw
import pytest
import ranks
import torch
import tp_cases
import tp_refusals
from mask_cases import LONG, MASKS, dense
from torch.distributed.tensor import Replicate, Shard

from headwise.ops.sharding.heads import Share, keys_read
from headwise.ops.sharding.masks import share_of_mask

WORLDS = (2, 3, 4)
every_world = pytest.mark.parametrize("world", WORLDS)


def alike(answers: list[Any]) -> Any:
    """What every rank says alike."""
    assert all(answer == answers[0] for answer in answers), answers
    return answers[0]


@pytest.mark.slow
@every_world
def test_split_modules_are_the_whole_ones(world: int) -> None:
    """More key-value heads than ranks, as many, fewer, and numbers that part groups."""
    cases = [("mha", 12, K) for K in (12, 6, 4, 3, 2, 1)] + [("cross", 12, 4), ("cross", 12, 1), ("bare", 12, 12)]
    cases = draw.drawn(cases, str(world)) + draw.drawn([("mla", 12, 1), ("mla low", 12, 1)], str(world))
    cases += draw.drawn([("gated", 12, 4), ("gated headwise", 12, 1)], str(world))
    for answer in ranks.pool(world).run(tp_cases.modules, cases):
        assert answer == {}


@every_world
def test_what_torch_splits_is_right(world: int) -> None:
    cases = [("cut", "mha plain", 12, 12), ("gathered", "mha", 12, 3), ("gathered", "mha", 12, 1)]
    cases += [("whole", "mha", 12, 2), ("cut", "mla", 12, 1), ("whole", "gated", 12, 3)]
    for answer in ranks.pool(world).run(tp_cases.torch_plans, draw.drawn(cases, str(world))):
        assert answer == {}


def test_what_answers_for_the_projection_of_latents_is_used_on_every_rank() -> None:
    for answer in ranks.pool(2).run(tp_cases.answered_for):
        assert answer == {}


def test_bfloat16_is_no_worse_than_twice_one_pass() -> None:
    for errors in ranks.pool(3).run(tp_cases.low_precision):
        assert all(split <= 2 * one for one, split in errors.values()), errors


def test_caches_hold_the_heads_of_their_process() -> None:
    for far in ranks.pool(3).run(tp_cases.decoding):
        assert max(far.values()) < 2e-6, far  # float32; the forms of latent attention differ by rounding, too


@every_world
def test_dtensors_by_batch_and_by_head(world: int) -> None:
    """Bit for bit where key-value heads stay with all their queries; and where they do not, to rounding."""
    cases = [(5, 4, 2, Shard(0), Shard(0), True), (4, 12, 12, Shard(1), Shard(1), True)]
    cases += [(2, 24, 12, Shard(1), Shard(1), True), (2, 24, 12, Shard(1), Replicate(), True)]
    cases += [(2, 12, 1, Shard(1), Replicate(), False), (2, 12, 2, Shard(1), Replicate(), False)]
    cases += [(3, 7, 7, Shard(1), Shard(1), True), (3, 4, 2, Replicate(), Replicate(), True)]
    cases += [(3, 4, 2, Shard(0), Replicate(), True)]
    for answer in ranks.pool(world).run(tp_cases.ops, draw.drawn(cases, str(world))):
        assert answer == {}


def test_a_heads_bits_do_not_depend_on_the_number_of_ranks() -> None:
    for world in (2, 4):
        for wrong in ranks.pool(world).run(tp_cases.bits):
            assert wrong == []


@pytest.mark.unchecked
def test_files_that_cannot_be_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"a.weight": torch.zeros(3, 2), "a.bias": torch.ones(3)}, tmp_path / "one.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no header")
    (tmp_path / "indexed").mkdir()
    (tmp_path / "indexed/model.safetensors.index.json").write_text("[]")
    texts = tp_refusals.files(str(tmp_path))
    expected = {
        "no module": "TypeError: load_slices takes a torch.nn.Module; got 3",
        "no path": "TypeError: source is the path of a safetensors file, or of a folder with some; got 3",
        "no file": "FileNotFoundError: .*none is no safetensors file, and no folder with such files",
        "another prefix": "ValueError: .* lacks 2 of 2 tensors, 'weight' first; `prefix` is what stands before",
        "another size": r"ValueError: a.weight is \(3, 2\) in .*, and \(5, 2\) in the module; build the module",
        "no safetensors": "ValueError: .*bad.safetensors is no safetensors file .*; download it again",
        "a bad index": "ValueError: .*index.json is no index of safetensors files .*; download it again",
        "all is well": "True",
    }
    assert texts.keys() == expected.keys()
    assert [texts[name] for name, text in expected.items() if not re.match(text, texts[name])] == []


def test_dtensors_on_a_mesh_of_two_dimensions() -> None:
    for answer in ranks.pool(4).run(tp_cases.a_mesh_of_two):
        assert answer == {}


@pytest.mark.parametrize("world", (2, 3))
def test_a_look_sees_the_heads_of_all(world: int) -> None:
    cases = draw.drawn([("mha", 12, 6), ("mha", 12, 1), ("mha", 12, 4), ("mla", 6, 1)], str(world))
    for answer in ranks.pool(world).run(tp_cases.looks, cases):
        assert answer == {}


def test_a_process_reads_its_slices_and_checkpoints_change_worlds(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    stored = {kind: tp_cases.build(kind, H, K).state_dict() for kind, H, K in tp_cases.STORED}
    for kind, state in stored.items():
        save_file({f"{kind}.{name}": x.contiguous() for name, x in state.items()}, tmp_path / f"{kind}.safetensors")
    for world, q_rows in ((2, 24), (3, 16)):
        for answer in ranks.pool(world).run(tp_cases.read_slices, str(tmp_path)):
            assert all(wrong == [] for wrong, _ in answer.values())
            assert answer["mha"][1]["q_proj.weight"] == (q_rows, 13)
            assert answer["mha"][1]["k_proj.weight"] == (4 if world == 2 else 8, 13)
            assert answer["mha"][1]["o_proj.weight"] == (13, 36 // world)
            assert answer["mla low"][1]["kv_b_proj.weight"] == (108 // world, 7)
    for world, other in ((3, 2), (2, 3)):
        assert alike(ranks.pool(world).run(tp_cases.read_checkpoint, str(tmp_path), other)) == []
    for kind, state in stored.items():  # and into one process, of which torch tells
        one = {name: torch.zeros_like(x) for name, x in state.items()}
        with pytest.warns(UserWarning, match="load in a single process"):
            dcp.load(one, checkpoint_id=str(tmp_path / f"{kind} 2"), no_dist=True)
        assert all(torch.equal(one[name], x) for name, x in state.items())


def test_optimizers_see_one_module() -> None:
    for split, one in ranks.pool(2).run(tp_cases.clipped):
        assert split == pytest.approx(one, rel=1e-5)


REFUSED = {
    "a linear layer": r"TypeError: tensor_parallel takes a headwise.MultiHeadAttention or LatentAttention; got Linear",
    "no mesh": r"TypeError: mesh is a torch.distributed DeviceMesh; got 2",
    "two dimensions": r"ValueError: heads are split along one dimension; the mesh has 2 \('dp', 'tp'\); take one",
    "twice": r"ValueError: this MultiHeadAttention is split over processes already; split a module once",
    "uneven heads": r"ValueError: .* 5 heads do not divide over 2 processes; take one of 1, 5, or split the tokens",
    "adapters": r"TypeError: tensor_parallel splits plain torch.nn.Linear projections; q_proj is Sequential; merge",
    "parameters": r"TypeError: the inner part Linear has parameters of its own",
    "a gate of the own heads": r"ValueError: gate has a number for each of all 6 heads, also where this process",
    "heads cut apart": r"ValueError: 6 query heads and 3 key-value heads are split over 2 processes: k_proj and "
    r"v_proj give whole key-value heads, or all 3 x 2 = 6 numbers a token; .* headwise.parallel.tensor_parallel",
    "torch's plan alone": r"ValueError: a projection gives .*; headwise.parallel.tensor_parallel",
    "by token": r"ValueError: attention of DTensors .* cut by token, .* use headwise.parallel.context_parallel",
    "mixed": r"ValueError: query, key and value are DTensors all, or none of them is; key is a Tensor; make",
    "a sum to come": r"ValueError: attention of DTensors .*; query is \(Partial\(sum\),\); bring it there with",
    "keys elsewhere": r"ValueError: 6 query heads and 3 key-value heads cut over 2 processes part queries from",
    "keys by batch": r"ValueError: key and value are cut as the query is, .*; key is \(Shard\(dim=0\),\)",
    "no heads": r"ValueError: 1 heads over 2 processes leave one process without a head; use a number that divides",
    "dropout of the op": r"ValueError: over processes dropout needs headwise's own kernel, .*; pass ",
    "what heads write": r"ValueError: Reader is split over 2 processes by tensor parallelism, and what reads its heads",
    "sinks of the own heads": r"ValueError: sinks are float logits, one a query head: \(H,\) = \(6,\)",
}


@pytest.mark.unchecked
def test_what_cannot_be_is_refused_on_every_rank() -> None:
    texts = alike(ranks.pool(2).run(tp_refusals.refusals))
    assert texts.keys() == REFUSED.keys()
    assert [f"{name}: {texts[name]}" for name, text in REFUSED.items() if not re.match(text, texts[name])] == []


def test_ranks_that_disagree_are_all_told() -> None:
    """Before anything is summed, which gloo would end by an abort; and what comes next is in step."""
    texts = alike(ranks.pool(2).run(tp_refusals.unlike_inputs))
    rule = "RankMismatch: a sum over heads: rank 1 does not agree with rank 0 on the "
    assert texts["length"].startswith(rule + "shape: rank 1 has (2, 6, 12), rank 0 has (2, 5, 12)")
    assert texts["dtype"].startswith(rule + "dtype: rank 1 has torch.float64, rank 0 has torch.float32")
    assert texts["after all"] == "nothing"


def test_who_has_which_heads() -> None:
    """Every query head finds its own key-value head among those that its process has."""
    for H, K, size in [(12, 6, 3), (12, 2, 4), (12, 3, 4), (12, 3, 2), (30, 3, 5), (12, 1, 12), (8, 8, 8)]:
        shares = [Share(H, K, size, rank) for rank in range(size)]
        assert len({len(share.keys) for share in shares}) == 1
        for share in shares:
            group = share.count // len(share.keys)
            for n, head in enumerate(range(share.heads.start, share.heads.stop)):
                assert share.keys[n // group] == head // (H // K)
        everything = [key for share in shares for key in share.keys]
        assert [everything[place] for place in shares[0].places] == list(range(K))
    assert keys_read(slice(0, 6), 2) == (0, 1, 2)


def test_a_share_of_a_mask_is_that_of_the_whole() -> None:
    n, rows, heads = LONG, (1, 3), (1, 4)
    wrong = []
    for name in MASKS:
        share = share_of_mask(MASKS[name](n).mask, rows, heads)
        share.check(2, 3, n.T, n.S, torch.device("cpu"))
        share = share.sized(2, 3)
        sees, adds = (x[slice(*rows), slice(*heads)] for x in dense(name, n))
        allowed, added = share.allowed(n.T, n.S), share.added(n.T, n.S)
        seen = torch.ones_like(sees) if allowed is None else allowed.expand(sees.shape)
        plus = torch.zeros_like(adds) if added is None else added.double().expand(adds.shape).masked_fill(~sees, 0)
        if not torch.equal(seen, sees) or not torch.allclose(plus, adds):
            wrong.append(name)
    assert wrong == []
