"""Quantised experts under FSDP2, in two processes: ``python sharded_experts.py FILE WHEN...``.

``WHEN`` says when experts are prepared: ``never``, ``before`` they are sharded, or in the first ``call``, which comes
last. With two GPUs they run there, by NCCL, and the first call prepares them wherever bundles have kernels for that.
"""

from __future__ import annotations

import copy
import os
import signal
import sys
import traceback
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


def run_ranks(store: Path, *when: str) -> None:
    """Run all ranks in processes of their own; an AssertionError has what they wrote if one fails."""
    import warm

    paths = os.pathsep.join((str(HERE.parent), str(MODELS), os.environ.get("PYTHONPATH", "")))
    done = warm.run([HERE, store, *when], env=os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr


def all_ranks(file: str, *when: str) -> bool:
    """Fork a process for each rank: all that they import is imported once. Returns whether all of them succeeded."""
    import test_quantised as small_models
    import transformers
    from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface
    from transformers.integrations.moe import ExpertsInterface

    for interface in (ExpertsInterface, FP8ExpertsInterface):
        interface.register("pretuned", experts_forward)
    small_models.pair(transformers)  # transformers imports the rest when it is used
    ranks = {_fork(rank, file, *when) for rank in range(WORLD)}
    good = True
    while ranks:
        rank, status = os.wait()
        ranks.remove(rank)
        if status:  # the other would wait for it
            good = False
            for other in ranks:
                os.kill(other, signal.SIGKILL)
    return good


def _fork(rank: int, file: str, *when: str) -> int:
    if child := os.fork():
        return child
    code = 1
    try:
        main(rank, file, *when)
        code = 0
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    os._exit(code)  # all was compared: gloo's threads may abort a process that ends while the other still listens


def main(rank: int, file: str, *when: str) -> None:
    """Compare sharded models with models that are not; an AssertionError says where they differ."""
    if GPU:
        torch.cuda.set_device(rank)
    dist.init_process_group("nccl" if GPU else "gloo", init_method=f"file://{file}", rank=rank, world_size=WORLD)
    for each in when:
        compare(each)


def compare(when: str) -> None:
    """Compare a sharded model, whose experts are prepared ``when``, with one that is not sharded."""
    import test_quantised as small_models
    import transformers

    model, _ = small_models.pair(transformers)
    ids = small_models.IDS
    if GPU:
        ids = ids.cuda()
        for name, parameter in model.named_parameters():
            parameter.data = (parameter.data if ".experts." in name else parameter.data.bfloat16()).cuda()
        model.cuda()
    modules = [experts.requires_grad_(False) for _, experts in small_models.experts_of(model)]
    whole = copy.deepcopy(model)
    wanted = whole(ids).logits
    if when == "before":
        for experts in modules:
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
    assert all(was_prepared(experts) is (when == "before") for experts in modules)  # what is gathered stays as it is
    model(ids).logits.square().sum().backward()
    check_state(model, whole)
    same(model(ids).logits, wanted)
    other = {
        name: flipped(tensor) if name.endswith("experts.down_proj") else tensor for name, tensor in raw_state(whole)
    }
    whole.load_state_dict(other)
    state = model.state_dict()
    mesh = next(tensor.device_mesh for tensor in state.values() if isinstance(tensor, DTensor))
    model.load_state_dict({name: spread(tensor, mesh, state[name]) for name, tensor in other.items()})
    again = whole(ids).logits
    assert not torch.equal(again, wanted)
    same(model(ids).logits, again)
    check_state(model, whole)
    dist.barrier()


def same(got: torch.Tensor, wanted: torch.Tensor) -> None:
    """To the bit on the CPU. GPUs may have another kernel for another layout."""
    if not GPU:
        assert torch.equal(got, wanted)
    got, wanted = got.detach().float(), wanted.detach().float()
    assert float((got - wanted).norm() / wanted.norm()) < 2e-2


def check_state(model: Any, whole: Any) -> None:
    """The state has the checkpoint's layout."""
    state, plain = model.state_dict(), whole.state_dict()
    assert state.keys() == plain.keys()
    for name, tensor in state.items():
        mine, theirs = plain[name], tensor
        if isinstance(tensor, DTensor):
            assert tensor.shape == mine.shape
            mine = distribute_tensor(bytes_of(mine).to(tensor.device), tensor.device_mesh, tensor.placements).to_local()
            theirs = tensor.to_local()
        assert torch.equal(bytes_of(theirs).cpu(), bytes_of(mine).cpu()), name


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().contiguous().view(torch.uint8)


def flipped(tensor: torch.Tensor) -> torch.Tensor:
    return bytes_of(tensor).flip(0).view(tensor.dtype)


def raw_state(model: Any) -> list[tuple[str, torch.Tensor]]:
    return [(name, tensor.detach().clone()) for name, tensor in model.state_dict().items()]


def spread(tensor: torch.Tensor, mesh: Any, like: Any) -> torch.Tensor:
    if not isinstance(like, DTensor):
        return tensor
    local = distribute_tensor(bytes_of(tensor).to(like.device), mesh, like.placements).to_local().view(tensor.dtype)
    return DTensor.from_local(local, mesh, like.placements, run_check=False, shape=tensor.shape, stride=tensor.stride())


if __name__ == "__main__":
    sys.exit(not all_ranks(*sys.argv[1:]))
