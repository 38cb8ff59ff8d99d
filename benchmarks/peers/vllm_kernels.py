"""vLLM's fused_moe kernel and the triton_kernels that its wheel brings, as calls on rows sorted by expert.

Both are Triton code, compiled where they run. Of vLLM's own fused_moe.py the kernel, the function that launches it and
its heuristic are taken as they stand; the rest of the package, which wants vLLM's extension modules, is not imported.
"""

from __future__ import annotations

import ast
import json
import sys
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from pretuned.aot.compare.run import Call, Inputs, TritonKernels

VERSION = "0.20.2"
INSTALL = f"pip download --no-deps vllm=={VERSION} && unzip -q vllm-{VERSION}-*.whl -d vllm-{VERSION}"
KERNEL_FILE = "model_executor/layers/fused_moe/fused_moe.py"
TAKEN = ("write_zeros_to_output", "fused_moe_kernel", "invoke_fused_moe_triton_kernel", "get_default_config")
FEW_ROWS = 4  # rows x this <= experts: vLLM gives each row a block of its own (_prepare_expert_assignment)


def package(folder: Path | None) -> Path:
    """Return the folder of the package vllm: ``folder``, its vllm, or the installed one. Raises FileNotFoundError."""
    if folder is None:
        spec = find_spec("vllm")
        places = list(map(Path, spec.submodule_search_locations or ())) if spec else []
    else:
        places = [folder, folder / "vllm"]
    for place in places:
        if (place / KERNEL_FILE).is_file():
            return place
    where = f"in {folder}" if folder else "installed here"
    raise FileNotFoundError(f"no vLLM {where} (no {KERNEL_FILE}). {INSTALL}; then --vllm vllm-{VERSION}")


def version_of(place: Path) -> str:
    """The version of the package in that folder, from the dist-info folder next to it; "unknown" if there is none."""
    folders = sorted(place.parent.glob("vllm-*.dist-info"))
    return folders[0].name.removeprefix("vllm-").removesuffix(".dist-info") if len(folders) == 1 else "unknown"


def taken(source: Path, wanted: Collection[str], names: dict[str, Any]) -> dict[str, Any]:
    """Run only the ``wanted`` functions of vLLM's file, with ``names`` as globals, and return them by name.

    Raises ValueError if a function is missing.
    """
    tree = ast.parse(source.read_text(), str(source))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    missing = sorted(set(wanted) - {node.name for node in functions})
    if missing:
        raise ValueError(f"{source} has no {', '.join(missing)}: this is written for vLLM {VERSION}")
    exec(compile(ast.Module([*functions], []), str(source), "exec"), names)
    return {name: names[name] for name in wanted}


def functions(source: Path, triton: Any, language: Any, *, invariant: bool = False) -> dict[str, Any]:
    """The functions ``TAKEN`` from vLLM's file, by name; ``invariant`` as with VLLM_BATCH_INVARIANT=1.

    Raises ValueError if a function is missing.
    """
    return taken(
        source,
        TAKEN,
        {
            "__name__": "vllm_fused_moe",
            "torch": torch,
            "triton": triton,
            "tl": language,
            "Any": Any,
            "envs": SimpleNamespace(VLLM_BATCH_INVARIANT=invariant),
            "current_platform": SimpleNamespace(is_rocm=lambda: False),
        },
    )


class FusedMoe:
    """vLLM's fused_moe kernel; ``place`` is the folder of the package vllm. Needs Triton.

    ``invariant``: its heuristic returns the single tile of VLLM_BATCH_INVARIANT=1 for all batches.
    """

    def __init__(self, place: Path, *, invariant: bool = False) -> None:
        import triton
        import triton.language as language

        self.configs = place / Path(KERNEL_FILE).parent / "configs"
        self.fused_moe = functions(place / KERNEL_FILE, triton, language, invariant=invariant)
        self.bf16 = language.bfloat16

    def configs_of(
        self, E: int, N: int, K: int, width: int, top_k: int, T: int, device: str = "NVIDIA_H200"
    ) -> dict[str, dict[str, int]]:
        """vLLM's configurations for T tokens: ``heuristic``, and ``tuned`` if it has a file for ``device``.

        ``width`` is I, which is in the files' names.
        """
        configs = {"heuristic": self.fused_moe["get_default_config"](T, E, width, K, top_k, None)}
        file = self.configs / f"E={E},N={width},device_name={device}.json"
        if file.is_file():
            tuned = {int(T): config for T, config in json.loads(file.read_text()).items() if T.isdigit()}
            configs["tuned"] = tuned[min(tuned, key=lambda rows: abs(rows - T))]
        return configs

    def vllm(self, inputs: Inputs, config: dict[str, int]) -> Call:
        """y[g] = x[g] @ w[g].T by fused_moe_kernel; each row's expert is made beforehand, in vLLM's form."""
        M, N = len(inputs.x), inputs.w.shape[1]
        slots, experts, padded = assignment(inputs.m_sizes, M, config["BLOCK_SIZE_M"])

        def call() -> torch.Tensor:
            y = inputs.x.new_empty(M, 1, N)
            self.fused_moe["invoke_fused_moe_triton_kernel"](
                inputs.x,
                inputs.w,
                y,
                None,
                None,
                None,
                slots,
                experts,
                padded,
                False,
                1,
                config,
                compute_type=self.bf16,
                use_fp8_w8a8=False,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=False,
            )
            return y.view(M, N)

        return call


class Kernels(FusedMoe, TritonKernels):
    """vLLM's fused_moe kernel and triton_kernels, from one folder of the package vllm."""

    def __init__(self, place: Path) -> None:
        FusedMoe.__init__(self, place)
        sys.path.insert(0, str(place / "third_party"))
        TritonKernels.__init__(self)


def assignment(m_sizes: torch.Tensor, M: int, block: int) -> tuple[torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Return moe_align_block_size's result for rows sorted by expert: slots [S], each block's expert, all rows [1].

    Each expert's rows fill whole blocks, padded with M; int32. If rows are few, slots is None, a block for each row.
    """
    E, device = len(m_sizes), m_sizes.device
    owner = torch.repeat_interleave(torch.arange(E, device=device), m_sizes.long())
    if M * FEW_ROWS <= E:
        return None, owner.int(), torch.tensor([M * block], dtype=torch.int32, device=device)
    blocks = (m_sizes.long() + block - 1) // block
    most = min(M * block, M + E * (block - 1)) if M < E else M + E * (block - 1)
    ends = m_sizes.long().cumsum(0)
    first = (blocks.cumsum(0) - blocks) * block  # each expert's first slot
    slots = torch.full((max(most, int(blocks.sum()) * block),), M, dtype=torch.int32, device=device)
    rows = torch.arange(M, device=device)
    slots[first[owner] + rows - (ends - m_sizes)[owner]] = rows.int()
    experts = torch.full((-(-len(slots) // block),), -1, dtype=torch.int32, device=device)
    whose = torch.repeat_interleave(torch.arange(E, device=device), blocks)
    experts[: len(whose)] = whose.int()
    return slots, experts, (blocks.sum() * block).int().view(1)
