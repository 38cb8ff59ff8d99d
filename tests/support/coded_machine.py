"""An emulated H200 for products that read codes of both operands.

Its row kernels do what the real ones do; a product multiplies the codes that it is given by the weights that the test
has in float32.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from emulated_driver import H200, EmulatedGpu, Launch
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import SLOTS, publish_bytes_alone
from rowops_in_numpy import once

from pretuned.artifacts.codec import encode
from pretuned.artifacts.records import Choice, DType, Fusion, Op, Problem, RowOp, Source
from pretuned.kernels.hopper_w8a8_block import STARTS_CONFIGS, scale_columns
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows
from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights.row_codes import values_of_rows

E, T, TOP_K, H, I = 4, 24, 2, 256, 128  # noqa: E741
PASSES = (
    RowOp.ACTIVATION,
    RowOp.ACTIVATION_CODES,
    RowOp.QUANTIZE,
    RowOp.COMBINE,
    RowOp.QUANTIZE_ROWS,
    RowOp.ACTIVATION_ROW_CODES,
    RowOp.ORDER_CODES,
)
SCALED = Config(128, 256, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_BLOCK)
MIXED = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
BY_ROW = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
PRODUCTS = (
    Spec(Op.FORWARD, DType.FP8_BLOCK, SCALED),
    Spec(Op.FORWARD, DType.FP8_BLOCK_A16, MIXED),
    Spec(Op.FORWARD, DType.FP8_CHANNEL, BY_ROW),
    Spec(Op.FORWARD, DType.FP8_CHANNEL_A16, MIXED),
)
IN_PLACE = tuple(
    Spec(
        Op.FORWARD,
        DType.FP8_BLOCK,
        config,
        fusion=Fusion.STARTS,
    )
    for config in STARTS_CONFIGS
)
SCATTERS = tuple(spec._replace(fusion=Fusion.SCATTER) for spec in PRODUCTS)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory that begins there."""
    held = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype).view(shape)


@functools.cache
def _bundle(without: RowOp | None, quantises: bool, in_place: bool) -> bytes:
    """A bundle that measured that quantising x is faster, or slower; for 8 rows and fewer it is slower either way."""
    specs = [
        *PRODUCTS,
        *SCATTERS,
        *(IN_PLACE if in_place else ()),
        *(RowOpSpec(op, DType.BF16) for op in PASSES if op is not without),
    ]

    def ns(spec: Spec, bucket: int) -> int:
        codes_us = 1 if quantises and bucket > 8 else 2000
        return 1000 * (codes_us if spec.dtype.quantises_x else 1000)

    choices = {
        Problem(Op.FORWARD, spec.dtype, E, N, K, fusion=spec.fusion): [
            Choice(bucket, index, Source.MEASURED, ns(spec, bucket), gpu=0) for bucket in (4, 8, 32, 64)
        ]
        for index, spec in enumerate((*PRODUCTS, *SCATTERS))
        for N, K in ((2 * I, H), (I, H), (H, I))
    }
    lists = [variant_and_code(RowOpSpec(op, DType.FP32, 1), block=SLOTS) for op in (RowOp.SORT_SLOTS, RowOp.PLACE_ROWS)]
    return encode(bundle_of([*map(variant_and_code, specs), *lists], choices, gpus=[H200]))


@functools.cache
def _prepared_shapes(E: int, N: int, K: int) -> tuple[torch.Size, torch.Size]:
    """The shapes of codes and scales of prepared fp8_block weights."""
    w = ExpertWeights.quantize(torch.zeros(E, N, K), "fp8_block").prepare()
    return w.codes.shape, w.scale.shape


class Machine(EmulatedGpu):
    """An H200 whose bundle has the products of codes, and measured that quantising x is faster, or slower."""

    def __init__(self, folder: Path) -> None:
        super().__init__(H200)
        self.folder, self.dense = folder, dict[int, torch.Tensor]()
        self.after |= {variant_and_code(spec)[0].cubin_sha256: self.multiply for spec in (*PRODUCTS, *SCATTERS)}
        self.after |= {variant_and_code(spec)[0].cubin_sha256: self.multiply_in_place for spec in IN_PLACE}
        self.publish()

    def publish(self, *, without: RowOp | None = None, quantises: bool = True, in_place: bool = False) -> None:
        """Have a bundle without a row kernel, or with code that reads codes in place, and measured times."""
        publish_bytes_alone(self.folder, _bundle(without, quantises, in_place))
        self.launches.clear()

    @property
    def ran(self) -> list[RowOp]:
        """The row kernels that were launched, but for those that list rows."""
        return [
            RowOp(row_kernel.code.op)
            for row_kernel in self.passes
            if row_kernel.code.op not in (RowOp.SORT_SLOTS, RowOp.PLACE_ROWS)
        ]

    def multiply(self, launch: Launch) -> None:
        words, at = launch.words, launch.addresses()
        M, N, K = (words[name] for name in ("M", "N", "K"))
        if "x_scale" in at:
            codes = tensor_at(at["x"], (M, K), torch.float8_e4m3fn)
            by_row = launch.code.dtype is DType.FP8_CHANNEL
            scale = tensor_at(at["x_scale"], (M,) if by_row else (K // 128, scale_columns(M)), torch.float32)
            values, row = values_of_rows(codes, scale, slice(0, M)), 0
        else:
            values, row = tensor_at(at["x"], (M, K), torch.bfloat16).float(), 0
        stored, to = tensor_at(at["y"], (M, N), torch.bfloat16), torch.arange(M)
        if words["flags"] & Fusion.SCATTER.value:
            to = tensor_at(at["index"], (M,), torch.int32).long()
        there = torch.zeros(M, dtype=torch.bool)
        for e, count in enumerate(tensor_at(at["m_sizes"], (E,), torch.int32).tolist()):
            rows = to[row : row + count]
            stored[rows] = (values[row : row + count] @ self.dense[at["w"]][e].T).bfloat16()
            there[rows] = True
            row += count
        if words["flags"] & 16:
            stored[~there] = 0

    def multiply_in_place(self, launch: Launch) -> None:
        """Multiply like kernels/hopper_w8a8_block/starts.py; x's scales are read at their strides."""
        words, at = launch.words, launch.addresses()
        M, N, K, G, room, E = words["M"], words["N"], words["K"], words["K"] // 128, words["room"], words["E"]
        w = self.values_of(at, E, N, K)
        counts = tensor_at(at["m_sizes"], (E,), (torch.int32, torch.int64)[words["m_sizes_step"] - 1]).tolist()
        first = [e * room for e in range(E)]
        if words["starts_step"]:
            first = tensor_at(at["starts"], (E,), (torch.int32, torch.int64)[words["starts_step"] - 1]).tolist()
        codes, stored = (
            tensor_at(at["x"], (M, K), torch.float8_e4m3fn),
            tensor_at(at["y"], (M, words["stride_y_m"]), torch.bfloat16),
        )
        stored = stored[:, :N]
        steps = [words[f"stride_scale_{name}"] for name in ("e", "m", "k")]
        whole = tensor_at(
            at["x_scale"], (1 + steps[0] * (E - 1) + steps[1] * (M - 1) + steps[2] * (G - 1),), torch.float32
        )
        bounds = tensor_at(at["bounds"], (E + 1,), torch.int32).tolist() if words["packs"] else [0] * E
        for e, count in enumerate(counts):
            count = min(max(count, 0), room, max(M - first[e], 0)) if first[e] >= 0 else 0
            i = torch.arange(count)
            line = i if not words["starts_step"] else i + first[e]
            scale = whole[(e * steps[0] + line[:, None] * steps[1] + torch.arange(G) * steps[2])]
            values = codes[first[e] + i].float().view(count, G, 128) * scale[..., None]
            to = (bounds if words["packs"] else first)[e] + i
            stored[to] = (values.view(count, K) @ w[e].T).bfloat16()

    def values_of(self, at: Mapping[str, int], E: int, N: int, K: int) -> torch.Tensor:
        """Prepared fp8_block weights in this memory, float32 [E, N, K]."""
        if at["w"] in self.dense:
            return self.dense[at["w"]]
        codes_shape, scale_shape = _prepared_shapes(E, N, K)
        codes, scale = (
            tensor_at(at["w"], codes_shape, torch.int32),
            tensor_at(at["w_scale"], scale_shape, torch.float32),
        )

        def values() -> torch.Tensor:
            w = ExpertWeights("fp8_block", codes, scale)
            return torch.stack([w.dequantize(torch.float32, e) for e in range(E)])

        return once(("values", E, N, K), (codes, scale), values)

    def layer(self, gated: bool, format: str = "fp8_block") -> tuple[ExpertWeights, ExpertWeights]:
        """Prepared weights, whose values the GPU knows."""
        up, down = layer_of(gated, format)
        self.dense |= {packed.codes.data_ptr(): packed.dequantize(torch.float32) for packed in (up, down)}
        return up, down


def layer_of(gated: bool, format: str) -> tuple[ExpertWeights, ExpertWeights]:
    g = torch.Generator().manual_seed(3)
    pairs = ((1 + gated) * I, H), (H, I)
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K, generator=g) / K**0.5, format) for N, K in pairs)
    return up.prepare(), down.prepare()


def routed(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(T)
    ids = torch.rand(T, E, generator=g).topk(TOP_K).indices
    ids[T // 2 :, 1] = -1  # of no expert
    return torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g)
