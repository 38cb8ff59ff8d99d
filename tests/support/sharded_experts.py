"""Quantised experts under FSDP2, in two processes: ``python sharded_experts.py RANK FILE WHEN``.

``WHEN`` says when experts are prepared: never, before they are sharded, or in the first call. With two GPUs they run
there, by NCCL, and the first call prepares them wherever bundles have kernels for that.
"""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers import experts_forward
from pretuned.integrations.transformers.quantised import prepare_parameters, quantised, was_prepared

WORLD = 2
HERE = Path(__file__)
MODELS = HERE.parents[1] / "runtime/integrations/transformers"  # whose test_quantised.py makes them
PARTS = ("gate_up_proj", "down_proj")
GPU = torch.cuda.device_count() >= WORLD


def run_ranks(store: Path, when: str) -> None:
    """Run all ranks in processes of their own; an AssertionError has what they wrote if one fails."""
    paths = os.pathsep.join((str(HERE.parent), str(MODELS), os.environ.get("PYTHONPATH", "")))
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE), str(rank), str(store), when],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(WORLD)
    ]
    errors = [one.communicate(timeout=300)[1] for one in ranks]
    assert [one.returncode for one in ranks] == [0] * WORLD, "\n".join(errors)


def main(rank: int, file: str, when: str) -> None:
    """Compare a sharded model with one that is not; an AssertionError says where they differ."""
    import test_quantised as made
    import transformers
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register("pretuned", experts_forward)
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    model, _ = made.pair(transformers)
    ids = made.IDS
    if GPU:
        ids = ids.cuda()
        for name, one in model.named_parameters():
            one.data = (one.data if ".experts." in name else one.data.bfloat16()).cuda()
        model.cuda()
    every = [experts.requires_grad_(False) for _, experts in made.experts_of(model)]
    whole = copy.deepcopy(model)
    wanted = whole(ids).logits
    if when == "before":
        for experts in every:
            prepare_parameters(experts, PARTS, lambda w: True)
            assert all(quantised(experts, part).is_prepared for part in PARTS)
    if when == "call" and not GPU:
        ours._prepare_here, ours._load = lambda w: True, lambda problems, device: None  # type: ignore[assignment]
        ours.wants_order = lambda w, device: True  # type: ignore[assignment]
    try:
        for layer in [*model.model.layers, model]:
            fully_shard(layer)
    except RuntimeError as error:
        if when == "before" and "only Tensors of floating point dtype" in str(error):
            return  # torch 2.11 shards no integers, and says so
        raise
    for _ in range(3):
        same(model(ids).logits, wanted)
    assert all(was_prepared(experts) is (when == "before") for experts in every)  # what is gathered stays as it is
    model(ids).logits.square().sum().backward()
    check_state(model, whole)
    same(model(ids).logits, wanted)
    other = {name: flipped(one) if name.endswith("experts.down_proj") else one for name, one in raw_state(whole)}
    whole.load_state_dict(other)
    state = model.state_dict()
    mesh = next(one.device_mesh for one in state.values() if isinstance(one, DTensor))
    model.load_state_dict({name: spread(one, mesh, state[name]) for name, one in other.items()})
    again = whole(ids).logits
    assert not torch.equal(again, wanted)
    same(model(ids).logits, again)
    check_state(model, whole)
    dist.barrier()


def same(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the bit on the CPU. GPUs may have another kernel for another layout."""
    if not GPU:
        assert torch.equal(found, wanted)
    found, wanted = found.detach().float(), wanted.detach().float()
    assert float((found - wanted).norm() / wanted.norm()) < 2e-2


def check_state(model: Any, whole: Any) -> None:
    """The state has the checkpoint's layout."""
    state, plain = model.state_dict(), whole.state_dict()
    assert state.keys() == plain.keys()
    for name, one in state.items():
        mine, found = plain[name], one
        if isinstance(one, DTensor):
            assert one.shape == mine.shape
            mine = distribute_tensor(bytes_of(mine).to(one.device), one.device_mesh, one.placements).to_local()
            found = one.to_local()
        assert torch.equal(bytes_of(found).cpu(), bytes_of(mine).cpu()), name


def bytes_of(one: torch.Tensor) -> torch.Tensor:
    return one.detach().contiguous().view(torch.uint8)


def flipped(one: torch.Tensor) -> torch.Tensor:
    return bytes_of(one).flip(0).view(one.dtype)


def raw_state(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, one.detach().clone()) for name, one in model.state_dict().items()]


def spread(one: torch.Tensor, mesh: Any, like: Any) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return one
    local = distribute_tensor(bytes_of(one).to(like.device), mesh, like.placements).to_local().view(one.dtype)
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=one.shape, stride=one.stride())


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
    os._exit(0)  # all was compared: gloo's threads may abort a process that ends while the other still listens
