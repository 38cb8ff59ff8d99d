"""A program that is the trainer of a group of two, which sends SGLang's other process new weights.

    python sglang_trainer.py PORT FILE

FILE (of torch.save) has lists of (name, tensor): each is sent as one of SGLang's flattened buckets, by gloo.
"""

from __future__ import annotations

import sys

import torch
import torchvision_absent


def main(port: str, file: str) -> None:
    """Join the group and send."""
    torchvision_absent.stand_in()
    from sglang.srt.utils import init_custom_process_group
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    group = init_custom_process_group("gloo", f"tcp://127.0.0.1:{port}", world_size=2, rank=0, group_name="refit")
    for bucket in torch.load(file):
        flat = FlattenedTensorBucket(named_tensors=bucket).get_flattened_tensor()
        torch.distributed.broadcast(flat, src=0, group=group)


if __name__ == "__main__":
    main(*sys.argv[1:])
