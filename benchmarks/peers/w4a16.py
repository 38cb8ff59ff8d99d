"""Quantised weights and x in bf16, by others: triton_kernels (mxfp4), vLLM's Marlin (4 bits, mxfp8) and Humming.

Each takes the folder of the package vllm, a product and the tokens, prepares the weights as its library does, and
returns the function that makes a cell's calls, by name. Weights are the product's own, so every result can be tested.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.peers.vllm_kernels import taken
from pretuned.runtime.weights.codes import pack, unpack

from .products import INT4_ZERO, Call, Cell, Product

MARLIN_ROWS = (8, 16, 32, 48, 64)  # a block; vLLM takes the first size that 0.9 of the mean expert's rows don't fill
QUANTISATION = "model_executor/layers/quantization/utils"
MXFP8_SCALES = "mxfp8_marlin_process_scales"
LOCKS = 2048  # as in Humming's own layer
HUMMING_COLUMNS = 128  # four warps of 32 columns: what its wgmma kernels want


def triton_kernels(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """matmul_ogs, with the weights in the layout that it prefers on this GPU."""
    import triton_kernels.matmul_ogs_details.opt_flags as flags
    from triton_kernels import matmul_ogs as ogs
    from triton_kernels.numerics import InFlexData
    from triton_kernels.tensor import FP4, convert_layout, make_ragged_tensor_metadata, wrap_torch_tensor
    from triton_kernels.tensor_details import layout

    codes, scale = product.operands
    values, options = layout.make_default_matmul_mxfp4_w_layout(mx_axis=1)
    scales, scale_options = layout.make_default_matmul_mxfp4_w_scale_layout(mx_axis=1, num_warps=8)
    flags.update_opt_flags_constraints({"split_k": 1})
    w = convert_layout(wrap_torch_tensor(codes.transpose(-2, -1), dtype=FP4), values, **options)
    s = convert_layout(wrap_torch_tensor(scale.transpose(-2, -1)), scales, **scale_options)
    precision = ogs.PrecisionConfig(weight_scale=s, flex_ctx=ogs.FlexCtx(rhs_data=InFlexData()))

    def calls(cell: Cell) -> dict[str, Call]:
        ragged = make_ragged_tensor_metadata(cell.m_sizes, cell.M)
        routing = ogs.RoutingData(None, cell.m_sizes, cell.E, 1, expt_data=ragged)
        return {"triton_kernels": lambda: ogs.matmul_ogs(cell.x, w, None, routing, precision_config=precision)}

    return calls


def orders(place: Path, *, mxfp8: bool = False) -> dict[str, Any]:
    """vLLM's functions that reorder weights, scales and zero points for Marlin, by name. Needs NumPy, as they do.

    The function for mxfp8 is looked up at first use: older versions lack it.
    """
    import numpy

    folder, names = place / QUANTISATION, {"torch": torch, "np": numpy, "numpy": numpy}
    return {
        **taken(folder / "quant_utils.py", ("get_pack_factor", "pack_cols"), names),
        **taken(folder / "marlin_utils.py", ("get_scale_perms", "marlin_permute_scales", "marlin_zero_points"), names),
        **taken(folder / "marlin_utils_fp4.py", ("mxfp4_marlin_process_scales",), names),
        **(taken(folder / "marlin_utils_fp8.py", (MXFP8_SCALES,), names) if mxfp8 else {}),
        **taken(folder / "marlin_utils_test.py", ("get_weight_perm",), names),
    }


def marlin_sizes(N: int, K: int) -> tuple[int, int]:
    """N and K, padded like vLLM pads H and I if none of Marlin's tiles (128 x 64, 64 x 128) divides them."""
    if N % 128 == 0 == K % 64 or N % 64 == 0 == K % 128:
        return N, K
    return -(-N // 256) * 256, -(-K // 128) * 128


class Marlin:
    """Marlin in vLLM: the operator, the types, and the functions that reorder weights, scales and zero points."""

    def __init__(self, place: Path, *, mxfp8: bool = False) -> None:
        if not hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm"):
            modules = [place / f"{name}.abi3.so" for name in ("_moe_C", "_moe_C_stable_libtorch")]  # the latter: 0.26
            torch.ops.load_library(str(next((path for path in modules if path.is_file()), modules[0])))
        self.gemm = torch.ops._moe_C.moe_wna16_marlin_gemm
        self.types = _module("scalar_type", place / "scalar_type.py").scalar_types
        self.names = orders(place, mxfp8=mxfp8)

    def codes(self, codes: torch.Tensor) -> torch.Tensor:
        """[E, N, K / 2] uint8, or [E, N, K] e4m3, to [E, K / 16, bits N / 2] int32.

        gptq_marlin_repack's tiles of 16 x 64, a lane's in a word.
        """
        eight = codes.dtype is torch.float8_e4m3fn
        E, N, K = *codes.shape[:2], codes.shape[2] * (1 if eight else 2)
        order = self.names["get_weight_perm"](8 if eight else 4).to(codes.device)
        words = torch.empty(E, K // 16, (4 if eight else 2) * N, dtype=torch.int32, device=codes.device)
        for matrix, into in zip(codes.view(torch.uint8), words, strict=True):
            plain = matrix if eight else unpack(matrix)
            tiles = plain.T.reshape(K // 16, 16, N // 16, 16).transpose(1, 2).reshape(-1, len(order))[:, order]
            into.copy_((tiles if eight else pack(tiles)).contiguous().view(torch.int32).view_as(into))
        return words

    def scales(self, scale: torch.Tensor, K: int, group: int) -> torch.Tensor:
        """[E, N, K / group] to [E, K / group, N], as vLLM orders those of a bf16 x."""
        E, N, groups = scale.shape
        exponents = scale.dtype is torch.uint8
        dtype = torch.float8_e8m0fnu if exponents else scale.dtype
        permuted = torch.empty(E, groups, N, dtype=dtype, device=scale.device)
        for matrix, into in zip(scale, permuted, strict=True):
            plain = matrix.view(torch.float8_e8m0fnu).bfloat16() if exponents else matrix
            ordered = self.names["marlin_permute_scales"](plain.T, K, N, group)
            name = MXFP8_SCALES if MXFP8_SCALES in self.names else "mxfp4_marlin_process_scales"
            into.copy_(self.names[name](ordered) if exponents else ordered)
        return permuted

    def zeros(self, zero: torch.Tensor) -> torch.Tensor:
        """[E, N, K / group] uint8 to [E, K / group, N / 8] int32, as vLLM packs those of a bf16 x."""
        _, N, groups = zero.shape
        return torch.stack([self.names["marlin_zero_points"](matrix.T, groups, N, 4) for matrix in zero])


def marlin(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """vLLM's Marlin for MoE, w4a16; each call is as in vLLM's fused_marlin_moe for one product.

    A padded product's x is padded beforehand: gpt-oss's down product.
    """
    mxfp8 = product.format == "mxfp8"
    theirs, (codes, scale), zero = Marlin(place, mxfp8=mxfp8), product.operands, product.zero
    N, K = marlin_sizes(product.N, product.K)
    if (N, K) != (product.N, product.K):
        more = N - product.N, K - product.K
        wide = torch.nn.functional.pad(codes.view(torch.uint8), (0, more[1] // (1 if mxfp8 else 2), 0, more[0]))
        codes = wide.view(codes.dtype)
        wider = (0, more[1] // product.group, 0, more[0])
        scale = torch.nn.functional.pad(scale, wider)
        zero = None if zero is None else torch.nn.functional.pad(zero, wider)
    w, s = theirs.codes(codes), theirs.scales(scale, K, product.group)
    zeros = None if zero is None else theirs.zeros(zero)
    kinds = {"mxfp4": "float4_e2m1f", "mxfp8": "float8_e4m3fn", INT4_ZERO: "uint4"}
    kind = getattr(theirs.types, kinds.get(product.format, "uint4b8"))
    processors = torch.cuda.get_device_properties(0).multi_processor_count if w.is_cuda else 1
    workspace = torch.zeros(4 * processors, dtype=torch.int32, device=w.device)
    name = "marlin" if (N, K) == (product.N, product.K) else f"marlin (padded to {N} x {K})"

    def calls(cell: Cell) -> dict[str, Call]:
        block = next((rows for rows in MARLIN_ROWS if cell.M / cell.E / rows < 0.9), MARLIN_ROWS[-1])
        slots, experts, total = cell.slots(block)
        x = torch.nn.functional.pad(cell.x, (0, K - cell.K))
        y = torch.empty(cell.M, N, device=x.device, dtype=x.dtype)
        once = torch.ones(cell.M, 1, device=x.device)

        def call() -> torch.Tensor:
            theirs.gemm(
                x,
                y,
                w,
                None,
                s,
                None,
                None,
                zeros,
                None,
                None,
                workspace,
                slots,
                experts,
                total,
                once,
                block,
                1,
                False,
                kind.id,
                cell.M,
                N,
                K,
                True,
                False,
                True,
                False,
                -1,
                -1,
                -1,
            )
            return y[:, : cell.N]

        return {name: call}

    return calls


class Humming:
    """Humming's grouped product of rows sorted by expert, with its heuristic's configuration for each M.

    x is in bf16. Weights: mxfp4, mxfp8, int4 or fp8 128x128 blocks. Compiled kernels stay in its cache on the disk.
    """

    def __init__(self, product: Product) -> None:
        from humming.config import ComputeConfig
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config

        b, bs = {
            "mxfp4": ("float4e2m1", "float8e8m0"),
            "mxfp8": ("float8e4m3", "float8e8m0"),
            "fp8_block": ("float8e4m3", "float32"),
        }.get(product.format, ("uint4", "bfloat16"))
        blocks = {"weight_scale_group_size_n": product.group} if product.format == "fp8_block" else {}
        schema = HummingWeightSchema(b_dtype=b, bs_dtype=bs, weight_scale_group_size=product.group, **blocks)
        self.product = product
        self.layer = prepare_layer_config(
            product.N,
            product.K,
            schema,
            num_experts=product.E,
            pad_n_to_multiple=HUMMING_COLUMNS,
            torch_dtype=torch.bfloat16,
        )
        self.computed = ComputeConfig(gemm_type="grouped_contiguous")
        self.tensors: dict[str, torch.Tensor] = {}

    def kernels(self, rows: list[int]) -> torch.Tensor:
        """The kernels for these numbers of rows [len(rows), 4]; missing ones are compiled in parallel threads."""
        from humming.kernel.humming import HummingKernel
        from humming.tune import get_heuristics_config

        chosen = [get_heuristics_config(self.layer, M, gemm_type="grouped_contiguous") for M in rows]
        spans = [(0, 1 << 30, config | {"use_batch_invariant": False}) for config in chosen]
        kernels = HummingKernel.prepare_kernels(
            self.layer.to_str(), self.computed.to_str(), spans, device=torch.cuda.current_device()
        )
        return kernels.reshape(-1, 4)

    def prepare(self) -> None:
        """Reorder the weights as Humming wants them."""
        from humming.transform import transform_humming_tensors

        codes, scale = self.product.operands
        weight_scale = scale.view(torch.float8_e8m0fnu) if scale.dtype is torch.uint8 else scale
        tensors = {"weight": codes.view(torch.int32), "weight_scale": weight_scale}
        self.tensors = transform_humming_tensors(self.layer, tensors)
        self.locks = torch.zeros(LOCKS, dtype=torch.int32, device=codes.device)

    @property
    def name(self) -> str:
        """The call's name, with the sizes if the weights are padded."""
        layer = self.layer
        return "humming" if not layer.pad_shape_n else f"humming (padded to {layer.shape_n} x {layer.shape_k})"

    def call(self, cell: Cell) -> Call:
        """A call. Its kernel is looked up, and compiled if necessary, at the first run."""
        from humming import ops

        ends = torch.nn.functional.pad(cell.m_sizes.long().cumsum(0), (1, 0))
        y = torch.zeros(cell.M, cell.N, device=cell.device, dtype=torch.bfloat16)
        config: list[torch.Tensor] = []

        def call() -> torch.Tensor:
            if not config:
                config.append(self.kernels([cell.M])[0])
            ops.launch_kernel(
                configs=config[0],
                inputs=cell.x,
                outputs=y,
                locks=self.locks,
                top_k=1,
                expert_layout=ends,
                **self.tensors,
            )
            return y

        return call


def humming(place: Path, product: Product, tokens: list[int]) -> Callable[[Cell], dict[str, Call]]:
    """Humming's calls. The kernels for all numbers of tokens are compiled first."""
    theirs = Humming(product)
    with contextlib.suppress(Exception):  # a kernel that fails to compile is reported in its cell
        theirs.kernels([T * product.top_k for T in tokens])
    theirs.prepare()
    return lambda cell: {theirs.name: theirs.call(cell)}


def _module(name: str, file: Path) -> Any:
    """Import a file that needs nothing of its package."""
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise FileNotFoundError(f"no {file}")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
