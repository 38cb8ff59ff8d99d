"""fp8 products of an x that is quantised beforehand: vLLM's Triton kernel, DeepGEMM (128x128 blocks only), and ours.

Each takes the folder of the package vllm, a product and the tokens, prepares the weights, and returns the function that
makes a cell's calls, by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers import vllm_kernels
from pretuned.aot.measure.inputs import Tensors, caller
from pretuned.artifacts.records import DType, Op, Problem
from pretuned.runtime.dispatch.decide import Miss, decide
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch.loader import loaded
from pretuned.runtime.weights.row_codes import codes_of_rows

from .products import Call, Cell, Product

PADDED = 128  # DeepGEMM pads each expert's rows to a multiple of this
TUNED_ON = ("NVIDIA_H100_80GB_HBM3", "NVIDIA_H100", "NVIDIA_H200")  # the first of these that vLLM has a file for
TILE = {  # of vLLM's kernel; its rows are 128 for many rows, 64 for fewer
    "BLOCK_SIZE_N": 256,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 16,
    "SPLIT_K": 1,
    "num_warps": 8,
    "num_stages": 3,
}


def ours(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """Our product of codes, with the variant that the bundles choose."""

    def calls(cell: Cell) -> dict[str, Call]:
        dtype = DType(product.format)
        local, problem, scale = (
            local_gpu(0),
            Problem(Op.FORWARD, dtype, cell.E, cell.N, cell.K),
            dtype.precision.x.scale,
        )
        if scale is None:
            raise AssertionError(f"x of {product.format} has no scale")
        chosen = decide(snapshot(), problem, cell.M, local)
        if isinstance(chosen, Miss):
            raise RuntimeError(chosen.reason)
        kernel = loaded(chosen.chosen.usable.bundle, chosen.chosen.index, 0, local.gpu.sm_count)
        y = torch.empty(cell.M, cell.N, device="cuda", dtype=torch.bfloat16)
        on = Tensors(problem, cell.M, cell.x, product.weights, y, codes=codes_of_rows(cell.x, scale))
        run = caller(kernel, on, cell.m_sizes.int())

        def call() -> torch.Tensor:
            run()
            return y

        return {"ours, of codes": call}

    return calls


def vllm(
    place: Path, product: Product, tokens: list[int], *, invariant: bool = False
) -> Callable[[Cell], dict[str, Call]]:
    """vLLM's Triton kernel with its heuristic; per channel also with its tuned files and with two tiles for many rows.

    ``invariant``: only with the heuristic of VLLM_BATCH_INVARIANT=1.
    """
    theirs, (codes, scale) = vllm_kernels.FusedMoe(place, invariant=invariant), product.operands
    names, by_row = theirs.fused_moe, product.format == "fp8_channel"
    block = None if by_row else [128, 128]

    def configs(cell: Cell) -> dict[str, dict[str, int]]:
        sizes = cell.T, cell.E, product.width, cell.K, product.top_k, "fp8_w8a8", block
        table = {"heuristic": names["get_default_config"](*sizes)}
        if by_row and not invariant:
            for device in TUNED_ON:
                file = theirs.configs / f"E={cell.E},N={product.width},device_name={device},dtype=fp8_w8a8.json"
                if file.is_file() and "tuned" not in table:
                    tuned = {int(T): config for T, config in json.loads(file.read_text()).items() if T.isdigit()}
                    table["tuned"] = tuned[min(tuned, key=lambda rows: abs(rows - cell.T))]
            table |= {f"{m}x256x128": TILE | {"BLOCK_SIZE_M": m} for m in (64, 128)} if cell.T >= PADDED else {}
        return table

    def make_call(cell: Cell, config: dict[str, int]) -> Call:
        (x, x_scale), scales = cell.quantised, scale.unsqueeze(-1) if by_row else scale
        slots, experts, total = cell.slots(config["BLOCK_SIZE_M"])

        def call() -> torch.Tensor:
            y = torch.empty(cell.M, 1, cell.N, device="cuda", dtype=torch.bfloat16)
            names["invoke_fused_moe_triton_kernel"](
                x,
                codes,
                y,
                x_scale,
                scales,
                None,
                slots,
                experts,
                total,
                False,
                1,
                config,
                compute_type=theirs.bf16,
                use_fp8_w8a8=True,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=by_row,
                block_shape=block,
            )
            return y.view(cell.M, cell.N)

        return call

    return lambda cell: {f"vllm {name}": make_call(cell, config) for name, config in configs(cell).items()}


def deepgemm(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """DeepGEMM's contiguous call (rows padded to 128 an expert) and its masked call (padded to a maximum)."""
    import deep_gemm

    codes, scale = product.operands

    def calls(cell: Cell) -> dict[str, Call]:
        by_name: dict[str, Call] = {}
        if cell.T >= PADDED:
            by_name["deepgemm contiguous"] = _contiguous(deep_gemm, cell, codes, scale)
        if cell.T <= 1024:
            by_name["deepgemm masked"] = _masked(deep_gemm, cell, codes, scale)
        return by_name

    return calls


def _padded(cell: Cell, size: int, at: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x's codes and scales with row r at row at[r] of ``size`` rows, and an uninitialised y."""
    x, x_scale = cell.quantised
    wide = torch.zeros(size, cell.K, device=cell.device, dtype=torch.float8_e4m3fn)
    wide.view(torch.uint8)[at] = x.view(torch.uint8)
    scales = torch.ones(size, cell.K // 128, device=cell.device)
    scales[at] = x_scale
    return wide, scales, torch.empty(size, cell.N, device=cell.device, dtype=torch.bfloat16)


def contiguous(cell: Cell) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x's codes and scales with each expert's rows padded, y, each row's expert, and the positions of x's rows."""
    n = cell.m_sizes.long()
    whole = (n + PADDED - 1) // PADDED * PADDED
    at = ((whole.cumsum(0) - whole) - cell.first)[cell.owner] + torch.arange(cell.M, device=cell.device)
    wide, scales, y = _padded(cell, int(whole.sum()), at)
    return wide, scales, y, torch.repeat_interleave(torch.arange(cell.E, device=cell.device), whole).int(), at


def _contiguous(deep_gemm: Any, cell: Cell, codes: torch.Tensor, scale: torch.Tensor) -> Call:
    wide, scales, y, experts, at = contiguous(cell)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales)

    def call() -> torch.Tensor:
        deep_gemm.m_grouped_fp8_gemm_nt_contiguous((wide, aligned), (codes, scale), y, experts, disable_ue8m0_cast=True)
        return y[at] if not torch.cuda.is_current_stream_capturing() else y

    return call


def _masked(deep_gemm: Any, cell: Cell, codes: torch.Tensor, scale: torch.Tensor) -> Call:
    n, E = cell.m_sizes.long(), cell.E
    room = max(64, (int(n.max()) + 63) // 64 * 64)
    at = (torch.arange(E, device="cuda") * room - cell.first)[cell.owner] + torch.arange(cell.M, device="cuda")
    wide, scales, y = _padded(cell, E * room, at)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales.view(E, room, -1))
    counts, expected = cell.m_sizes.int(), max(1, cell.M // int((n > 0).sum()))

    def call() -> torch.Tensor:
        deep_gemm.fp8_m_grouped_gemm_nt_masked(
            (wide.view(E, room, cell.K), aligned),
            (codes, scale),
            y.view(E, room, cell.N),
            counts,
            expected,
            disable_ue8m0_cast=True,
        )
        return y[at] if not torch.cuda.is_current_stream_capturing() else y

    return call
