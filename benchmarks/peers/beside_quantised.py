"""Quantised products beside those of vLLM, DeepGEMM and triton_kernels, in one process, in turns.

    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    DG_JIT_USE_NVRTC=0 python benchmarks/run.py beside_quantised --vllm vllm-0.20.2 --out quantised-peers-h100.jsonl

y[g] = x[g] @ w[g].T, rows sorted by expert; ours by the public call with ``ExpertWeights``, x in bf16. In fp8 blocks
the others multiply an x that is quantised beforehand (w8a8), outside the time: vLLM's kernel by its heuristic, DeepGEMM
in its contiguous form (every expert's rows padded to 128) and its masked one; "ours, of codes" is our product of such
an x, by the choice of the bundle that has it. In mxfp4 triton_kernels' matmul_ogs. Each result is held against fp32 of
the dequantised operands (three experts of each). A line of JSON a cell: median microseconds, relative errors.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pretuned.aot.compare import vllm_kernels
from pretuned.aot.measure.calls import Tensors, caller
from pretuned.aot.measure.clock import Clock
from pretuned.aot.measure.inputs import routed_rows
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.runtime import ExpertWeights, grouped_gemm
from pretuned.runtime.dispatch.decide import Miss, decide
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch.loader import loaded
from pretuned.runtime.weights.row_codes import codes_of_rows

MODELS = {  # E, H, I, top_k
    "mxfp4": {"gpt-oss-20b": (32, 2880, 2880, 4), "gpt-oss-120b": (128, 2880, 2880, 4)},
    "fp8_block": {
        "qwen3-30b": (128, 2048, 768, 8), "qwen3-235b": (128, 4096, 1536, 8), "deepseek-v3": (256, 7168, 2048, 8),
    },
}  # fmt: skip
PADDED = 128  # DeepGEMM's rows of an expert
ROUNDS = 15
Call = Callable[[], torch.Tensor]


class Cell:
    """One product: its operands as we and as the others take them, and where each sorted row belongs."""

    def __init__(self, weights: ExpertWeights, top_k: int, width: int, T: int) -> None:
        self.weights, self.top_k, self.width, self.T = weights, top_k, width, T
        (self.E, self.N, self.K), self.M = weights.shape, T * top_k
        self.m_sizes = routed_rows(self.E, top_k, T).cuda()
        self.x = torch.randn(self.M, self.K, device="cuda").bfloat16()
        n = self.m_sizes.long()
        self.first = n.cumsum(0) - n
        self.owner = torch.repeat_interleave(torch.arange(self.E, device="cuda"), n)

    def quantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x in e4m3, and its scales [M, K / 128]."""
        parts = self.x.float().view(self.M, -1, 128)
        scale = parts.abs().amax(-1).clamp(1e-4) / 448
        return (parts / scale[..., None]).to(torch.float8_e4m3fn).view(self.M, self.K), scale

    def slots(self, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows padded to whole blocks an expert (M stands for none), each block's expert, and the rows in all."""
        blocks = (self.m_sizes.long() + block - 1) // block
        total = int(blocks.sum()) * block
        slots = torch.full((max(total, block),), self.M, dtype=torch.int32, device="cuda")
        rows = torch.arange(self.M, device="cuda")
        slots[((blocks.cumsum(0) - blocks) * block - self.first)[self.owner] + rows] = rows.int()
        experts = torch.repeat_interleave(torch.arange(self.E, device="cuda"), blocks).int()
        return slots, experts, torch.tensor([total], dtype=torch.int32, device="cuda")

    def error(self, y: torch.Tensor, x: torch.Tensor) -> float:
        """Of three experts' rows, against fp32 of the dequantised weights and this x."""
        off = total = 0.0
        there = (self.m_sizes > 0).nonzero()[:, 0]
        for e in {int(self.m_sizes.argmax()), int(there[0]), int(there[-1])}:
            rows = slice(int(self.first[e]), int(self.first[e]) + min(int(self.m_sizes[e]), 64))
            wanted = x[rows].float() @ self.weights.dequantize(torch.float32, e).T
            off += float((y[rows].float() - wanted).square().sum())
            total += float(wanted.square().sum())
        return (off / total) ** 0.5


def of_codes(cell: Cell) -> Call:
    """Our product of an x that is quantised beforehand."""
    local, problem = local_gpu(0), Problem(Op.FORWARD, DType.FP8_BLOCK, cell.E, cell.N, cell.K)
    chosen = decide(snapshot(), problem, cell.M, local)
    if isinstance(chosen, Miss):
        raise RuntimeError(chosen.reason)
    kernel = loaded(chosen.chosen.usable.bundle, chosen.chosen.index, 0, local.gpu.sm_count)
    y = torch.empty(cell.M, cell.N, device="cuda", dtype=torch.bfloat16)
    on = Tensors(problem, cell.M, cell.x, cell.weights, y, codes=codes_of_rows(cell.x))
    run = caller(kernel, on, cell.m_sizes.int())

    def call() -> torch.Tensor:
        run()
        return y

    return call


def vllm_calls(theirs: vllm_kernels.Kernels, cell: Cell, codes: torch.Tensor, scale: torch.Tensor) -> dict[str, Call]:
    """vLLM's Triton kernel, w8a8."""
    names, (x, x_scale) = theirs.fused_moe, cell.quantised()
    heuristic = names["get_default_config"](cell.T, cell.E, cell.width, cell.K, cell.top_k, "fp8_w8a8", [128, 128])
    found: dict[str, Call] = {}
    for name, config in {"vllm heuristic": heuristic}.items():
        slots, experts, total = cell.slots(config["BLOCK_SIZE_M"])

        def call(config: Any = config, slots: Any = slots, experts: Any = experts, total: Any = total) -> torch.Tensor:
            y = torch.empty(cell.M, 1, cell.N, device="cuda", dtype=torch.bfloat16)
            names["invoke_fused_moe_triton_kernel"](
                x, codes, y, x_scale, scale, None, slots, experts, total, False, 1, config,
                compute_type=theirs.bf16, use_fp8_w8a8=True, use_int8_w8a8=False, use_int8_w8a16=False,
                use_int4_w4a16=False, per_channel_quant=False, block_shape=[128, 128],
            )  # fmt: skip
            return y.view(cell.M, cell.N)

        found[name] = call
    return found


def deepgemm_calls(deep_gemm: Any, cell: Cell, codes: torch.Tensor, scale: torch.Tensor) -> dict[str, Call]:
    """DeepGEMM, w8a8: rows padded to 128 an expert, or every expert's rows in a room of their own."""
    x, x_scale = cell.quantised()
    n, rows = cell.m_sizes.long(), torch.arange(cell.M, device="cuda")
    whole = (n + PADDED - 1) // PADDED * PADDED
    at = ((whole.cumsum(0) - whole) - cell.first)[cell.owner] + rows
    room = max(64, (int(n.max()) + 63) // 64 * 64)
    masked_at = (torch.arange(cell.E, device="cuda") * room - cell.first)[cell.owner] + rows

    def padded(size: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        wide = torch.zeros(size, cell.K, device="cuda", dtype=torch.float8_e4m3fn)
        wide.view(torch.uint8)[at] = x.view(torch.uint8)
        scales = torch.ones(size, cell.K // 128, device="cuda")
        scales[at] = x_scale
        return wide, scales, torch.empty(size, cell.N, device="cuda", dtype=torch.bfloat16)

    found: dict[str, Call] = {}
    if cell.T >= PADDED:
        wide, scales, y = padded(int(whole.sum()), at)
        aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales)
        experts = torch.repeat_interleave(torch.arange(cell.E, device="cuda"), whole).int()

        def contiguous() -> torch.Tensor:
            deep_gemm.m_grouped_fp8_gemm_nt_contiguous(
                (wide, aligned), (codes, scale), y, experts, disable_ue8m0_cast=True
            )
            return y[at] if not torch.cuda.is_current_stream_capturing() else y

        found["deepgemm contiguous"] = contiguous
    if cell.T <= 1024:
        wide_m, scales_m, y_m = padded(cell.E * room, masked_at)
        aligned_m = deep_gemm.get_mn_major_tma_aligned_tensor(scales_m.view(cell.E, room, -1))
        counts, expected = cell.m_sizes.int(), max(1, cell.M // int((n > 0).sum()))

        def masked() -> torch.Tensor:
            deep_gemm.fp8_m_grouped_gemm_nt_masked(
                (wide_m.view(cell.E, room, cell.K), aligned_m), (codes, scale), y_m.view(cell.E, room, cell.N), counts,
                expected, disable_ue8m0_cast=True,
            )  # fmt: skip
            return y_m[masked_at] if not torch.cuda.is_current_stream_capturing() else y_m

        found["deepgemm masked"] = masked
    return found


def triton_kernels_call(cell: Cell, codes: torch.Tensor, scale: torch.Tensor) -> Call:
    """triton_kernels' matmul_ogs, mxfp4 weights and bf16 x."""
    import triton_kernels.matmul_ogs_details.opt_flags as flags
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    flags.update_opt_flags_constraints({"split_k": 1})
    w = convert_layout(wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4), values, **options)
    s = convert_layout(wrap_torch_tensor(scale.transpose(-2, -1)), scales, **scale_options)
    precision = ogs.PrecisionConfig(weight_scale=s, flex_ctx=ogs.FlexCtx(rhs_data=InFlexData()))
    ragged = make_ragged_tensor_metadata(cell.m_sizes, cell.M)
    routing = ogs.RoutingData(None, cell.m_sizes, cell.E, 1, expt_data=ragged)
    return lambda: ogs.matmul_ogs(cell.x, w, None, routing, precision_config=precision)


def drawn(format: str, E: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales."""
    g = torch.Generator("cuda").manual_seed(1)
    if format == "mxfp4":
        codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8, device="cuda", generator=g)
        return codes, torch.randint(119, 124, (E, N, K // 32), dtype=torch.uint8, device="cuda", generator=g)
    codes = torch.empty(E, N, K, dtype=torch.float8_e4m3fn, device="cuda")
    for one in codes:
        one.copy_((torch.randn(N, K, generator=g, device="cuda") * 100).clamp(-448, 448))
    return codes, (torch.rand(E, -(-N // 128), -(-K // 128), generator=g, device="cuda") + 0.5) * 5e-4


def main(args: list[str] | None = None) -> int:
    """Measure, a line a cell."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, required=True, help="where vLLM's wheel is unpacked")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--formats", default="mxfp4,fp8_block")
    parser.add_argument("--tokens", default="1,16,128,1024,8192")
    given = parser.parse_args(args)
    theirs, clock = vllm_kernels.Kernels(vllm_kernels.package(given.vllm)), Clock()
    with given.out.open("w") as out:
        for format in given.formats.split(","):
            for model, (E, H, width, top_k) in MODELS[format].items():
                for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
                    codes, scale = drawn(format, E, N, K)
                    make = ExpertWeights.mxfp4 if format == "mxfp4" else ExpertWeights.fp8_block
                    weights = make(codes.clone(), scale.clone()).prepare()
                    for T in map(int, given.tokens.split(",")):
                        cell = Cell(weights, top_k, width, T)
                        calls: dict[str, Call] = {"ours": partial(grouped_gemm, cell.x, weights, cell.m_sizes)}
                        if format == "mxfp4":
                            calls["triton_kernels"] = triton_kernels_call(cell, codes, scale)
                        else:
                            import deep_gemm

                            calls["ours, of codes"] = of_codes(cell)
                            calls |= vllm_calls(theirs, cell, codes, scale)
                            calls |= deepgemm_calls(deep_gemm, cell, codes, scale)
                        x8, x_scale = cell.quantised() if format != "mxfp4" else (cell.x, None)
                        rounded = cell.x if x_scale is None else (x8.float().view(cell.M, -1, 128) * x_scale[..., None])
                        errors = {
                            name: cell.error(call(), cell.x if name == "ours" else rounded.reshape(cell.M, K))
                            for name, call in calls.items()
                        }
                        graphs = [clock.capture(call) for call in calls.values()]
                        times = [statistics.median(one) for one in clock.rounds_us(graphs, ROUNDS)]
                        row = {
                            "format": format, "model": model, "gemm": gemm, "tokens": T, "E": E, "N": N, "K": K,
                            "us": {name: round(us, 2) for name, us in zip(calls, times, strict=True)},
                            "error": {name: float(f"{one:.2e}") for name, one in errors.items()},
                            "gpu": torch.cuda.get_device_name(),
                        }  # fmt: skip
                        out.write(json.dumps(row) + "\n")
                        out.flush()
                        print(format, model, gemm, T, row["us"], flush=True)
                        clock.release()
    return 0
