"""What the activation's pass takes behind the product that made its h: both in one CUDA graph, less the product alone.

    python behind.py BENCHMARKS OUT.json

Of the time in which the memory, at its published rate, reads h and writes the result.
"""

import json
import statistics
import sys

sys.path.insert(0, sys.argv[1])
import method
import torch
from variants import MODELS

from pretuned.kernels.chips import chip_named
from pretuned.runtime import activation, grouped_gemm
from pretuned.runtime.activation import Activation

silu, rate = Activation("silu", True, False), chip_named(torch.cuda.get_device_name()).bandwidth_gbs
clock, cells = method.Clock(), []
for name, E, H, width, k in MODELS:
    w = method.weights(E, 2 * width, H, torch.bfloat16)
    for T in (1024, 2048, 4096, 8192):
        x = method.activations(T, H, torch.bfloat16)
        ids = torch.rand(T, E, device="cuda").topk(k, 1).indices.reshape(-1)
        index, sizes = ids.sort(stable=True).indices, torch.bincount(ids, minlength=E).int()

        def product() -> torch.Tensor:
            return grouped_gemm(x, w, sizes, k, index, permute_x=True)

        def both() -> torch.Tensor:
            return activation.forward(product(), silu)

        product(), both()
        graphs = [clock.capture(product), clock.capture(both)]
        alone, together = (statistics.median(row) for row in clock.rounds_us(graphs, 25))
        bytes_us = T * k * 3 * width * 2 / rate * 1e-3
        cells.append({"model": name, "tokens": T, "product_us": alone, "both_us": together, "bytes_us": bytes_us})
        print(name, T, f"{alone:.1f} {together:.1f} us, the pass {(together - alone) / bytes_us:.2f} of its bytes' time", flush=True)
    del w
json.dump({"gpu": torch.cuda.get_device_name(), "cells": cells}, open(sys.argv[2], "w"), indent=0)
