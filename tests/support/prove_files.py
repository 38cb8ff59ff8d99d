"""Proves every variant of some files of bundles or candidates on this GPU, also under a tool that watches its memory.

    python tests/support/prove_files.py artifacts/bundles/*sm90.msgpack*
    compute-sanitizer --error-exitcode 9 python tests/support/prove_files.py artifacts/bundles/*sm90.msgpack*

Each piece of code runs once, by the trial of ``runtime/launch/proof.py``. What is wrong is told, with exit code 1.
"""

from __future__ import annotations

import sys

import torch

from pretuned.artifacts.errors import PretunedError
from pretuned.artifacts.files.bundle_file import open_bundle
from pretuned.kernels.hardware.arch import arch_of
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import proof
from pretuned.runtime.launch.loader import loaded


def main(paths: list[str]) -> int:
    torch.zeros(1, device="cuda")
    local, seen, wrong, too_large = local_gpu(0), set(), 0, 0
    for path in paths:
        bundle = open_bundle(path)
        for i, variant in enumerate(bundle.variants()):
            if variant.cubin_sha256 in seen:
                continue
            if variant.shared_bytes > arch_of(local.sm).limits.shared_per_block_bytes:
                too_large += 1
                continue
            seen.add(variant.cubin_sha256)
            try:
                told = proof.tried(loaded(bundle, i, 0, local.gpu.sm_count))
            except PretunedError as error:
                told = str(error)
            if told:
                wrong += 1
                print(
                    f"{path}: variant {i}, {variant.entry} {variant.op.value} {variant.dtype.value}: {told}", flush=True
                )
    print(f"{len(seen)} cubins on {local}, {wrong} wrong, {too_large} that no block has the memory for")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
