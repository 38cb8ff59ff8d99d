"""Forms of the kernel for codes of 4 bits (kernels/gemm/hopper/wna16.py) beside today's, made from its own sources.

    python benchmarks/run.py wna16_forms --compile-only forms.xz     # no GPU, the Triton that compiles these kernels
    python benchmarks/run.py wna16_forms --forms forms.xz --json forms.jsonl --seconds 170      # a GPU of 9.0

What a form changes stands in ``wna16_changes.py``; no source here is touched. ``today`` is what the sources have.
``bare`` has no arithmetic: its results are wrong, its time is that of all else. ``8`` are tiles of 8 rows in place of
16. ``earlier`` waits for a product before the next begins, ``ahead`` begins a stage before the last one is done,
``two`` has two blocks an SM. The compiled forms are one file, which only this version of the repository reads.

Every form's result is held against torch on ragged rows and on the sizes that are timed, and beside each time stands
whether all bits are those of today's form of the same tile. Times are medians in turns (benchmarks/method.py), in
microseconds; ``per_sm`` is how many blocks an SM holds. A line of JSON is written after each number of tokens.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import pickle
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.speed import wna16_changes as changes

ROOT = Path(__file__).parents[2]
MOST_ERROR = 5e-3
RAGGED = (0, 1, 7, 8, 9, 16, 17, 40)  # rows of experts
RAGGED_SIZES = (192, 1280)  # N, K
TOKENS = (128, 16, 1, 1024, 8192)
# (model, dtype, E, top_k, (N, K) of its products): the ones asked about first.
MODELS = (
    ("kimi-k2", "int4_g32", 384, 8, ((4096, 7168), (7168, 2048))),
    ("qwen3-30b", "int4_g128", 128, 8, ((1536, 2048), (2048, 768))),
    ("gpt-oss-20b", "mxfp4", 32, 4, ((5760, 2880), (2880, 2880))),
    ("qwen3-30b", "nvfp4", 128, 8, ((1536, 2048), (2048, 768))),
)  # fmt: skip
INT4 = ("int4_g32", "int4_g128")
ALL = (*INT4, "mxfp4", "nvfp4")


class Form(NamedTuple):
    """A name, its tile (block_m, block_n, block_k, stages), what it changes, and the dtypes that it is made for."""

    name: str
    tile: tuple[int, int, int, int]
    changed: tuple[changes.Change, ...] = ()
    dtypes: tuple[str, ...] = INT4

    @property
    def fitted(self) -> bool:
        """Whether tiles have as many rows as there are."""
        return self.tile[0] >= 64

    def __str__(self) -> str:
        return f"{self.name} {'x'.join(map(str, self.tile[:3]))} s{self.tile[3]}"


BARE = "bare"  # what nobody judges
DEEP, WIDE, WIDER = (16, 64, 1024, 3), (16, 128, 512, 4), (16, 256, 256, 4)
FEW, MANY = (16, 64, 512, 3), (16, 128, 256, 4)  # an SM holds two of these blocks
FITTED, LARGE = (64, 256, 128, 4), (128, 256, 128, 3)
FORMS = (
    *(Form("today", tile, (), ALL) for tile in (DEEP, WIDE, WIDER)),
    *(Form(BARE, tile, changes.BARE) for tile in (DEEP, WIDE)),
    *(Form("earlier", tile, changes.EARLIER, ALL) for tile in (DEEP, WIDE, WIDER)),
    Form("ahead", WIDE, changes.AHEAD),
    Form("8", (*DEEP[:3], 4), changes.ROWS_8, ALL),
    *(Form("8", tile, changes.ROWS_8, ALL) for tile in (WIDE, WIDER)),
    *(Form("two", tile, changes.TWO_BLOCKS, ALL) for tile in (FEW, MANY)),
    *(Form("two 8", tile, changes.TWO_BLOCKS + changes.ROWS_8, ALL) for tile in (FEW, MANY)),
    *(Form("today", tile, (), ALL) for tile in (FITTED, LARGE)),
    *(Form("earlier", tile, changes.EARLIER, ALL) for tile in (FITTED, LARGE)),
)

CHILD = """
import json, pickle, sys
from dataclasses import replace

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op
from pretuned.kernels.contract.config import Config, Loads, Schedule, TileRows
from pretuned.kernels.contract.spec import Spec

found = []
for dtype, (m, n, k, stages), fitted in json.load(sys.stdin):
    rows = TileRows.FITTED if fitted else TileRows.FIXED
    config = Config(m, n, k, 8, stages, loads=Loads.TMA, schedule=Schedule.MIXED_INPUT, rows=rows)
    try:
        found.append(compile_variant(Spec(Op.FORWARD, DType(dtype), config), 90))
    except Exception as error:
        found.append(str(error))
sys.stdout.buffer.write(pickle.dumps([one if isinstance(one, str) else (one.variant, one.cubin) for one in found]))
"""


class Made(NamedTuple):
    """A form of a dtype as it was compiled."""

    form: str
    name: str
    tile: tuple[int, int, int, int]
    variant: Any
    cubin: bytes


def compiled(jobs: int = 2, only: Sequence[str] = ()) -> list[Made]:
    """All forms, or those of some names, for capability 9.0. What does not compile is told and left out."""
    groups: dict[tuple[changes.Change, ...], list[tuple[Form, str]]] = {}
    for form in FORMS:
        if not only or form.name in only:
            groups.setdefault(form.changed, []).extend((form, dtype) for dtype in form.dtypes)
    with ThreadPoolExecutor(jobs) as pool:
        found = [one for some in pool.map(_compiled, groups, groups.values()) for one in some]
    order = [str(form) for form in FORMS]
    return sorted(found, key=lambda one: order.index(one.form))


def _compiled(changed: tuple[changes.Change, ...], jobs: Sequence[tuple[Form, str]]) -> list[Made]:
    """Those of one set of changes, by a process that imports a changed copy."""
    with tempfile.TemporaryDirectory(prefix="wna16-") as folder:
        changes.changed_copy(ROOT, Path(folder), changed)
        asked = json.dumps([(dtype, form.tile, form.fitted) for form, dtype in jobs])
        child = subprocess.run(
            [sys.executable, "-c", CHILD], input=asked.encode(), stdout=subprocess.PIPE, check=True, cwd=folder,
            env=os.environ | {"PYTHONPATH": folder},
        )  # fmt: skip
    found = []
    for (form, dtype), one in zip(jobs, pickle.loads(child.stdout), strict=True):
        if isinstance(one, str):
            print(f"{form} {dtype}: {one}", flush=True)
            continue
        variant, cubin = one
        found.append(Made(str(form), form.name, form.tile, variant, cubin))
        print(f"{form} {dtype}: {variant.registers} registers, {variant.spill_bytes} bytes spilled, "
              f"{variant.shared_bytes} shared, {len(cubin)} bytes", flush=True)  # fmt: skip
    return found


def written(path: Path, forms: Sequence[Made]) -> None:
    """Into one file, pressed."""
    path.write_bytes(lzma.compress(pickle.dumps([tuple(one) for one in forms])))


def read(path: Path) -> list[Made]:
    """What ``written`` has."""
    return [Made(*one) for one in pickle.loads(lzma.decompress(path.read_bytes()))]


class Loaded(NamedTuple):
    """A form on a GPU: how many of its blocks an SM holds, and what makes a launch of tensors and rows of experts."""

    made: Made
    per_sm: int
    on: Callable[[Any, Any], Callable[[], object]]


def loaded(forms: Sequence[Made], dtype: str) -> list[Loaded]:
    """The forms of a dtype, those that the driver takes. (``load_kernel`` would refuse tiles of 8 rows.)"""
    from pretuned.aot.measure.calls import caller
    from pretuned.artifacts.errors import PretunedError
    from pretuned.runtime.driver import cuda
    from pretuned.runtime.driver.device import local_gpu
    from pretuned.runtime.launch.gemm import LoadedKernel

    found, sms = [], local_gpu(0).gpu.sm_count
    for one in forms:
        variant = one.variant
        if variant.dtype.value == dtype:
            try:
                function = cuda.load(one.cubin, variant.entry, threads=variant.threads,
                                     shared_bytes=variant.shared_bytes, device=0)  # fmt: skip
            except PretunedError as error:
                print(f"{one.form} {dtype} is not loaded: {error}", flush=True)
                continue
            found.append(Loaded(one, function.per_sm, partial(caller, LoadedKernel(variant, function, sms))))
    return found


def ragged(forms: Sequence[Loaded], dtype: str, device: str = "cuda") -> list[Loaded]:
    """The forms whose results on a few ragged experts are those of torch; the others are told."""
    import torch

    from pretuned.aot.measure.calls import Tensors
    from pretuned.aot.measure.inputs import activations, quantised_weights
    from pretuned.artifacts.records.precision import DType
    from pretuned.artifacts.records.problem import Op, Problem

    (N, K), E, M = RAGGED_SIZES, len(RAGGED), sum(RAGGED)
    w = quantised_weights(E, N, K, DType(dtype), device)
    dense = w.dequantize(torch.bfloat16).float()
    x = activations(M, K, torch.bfloat16, device)
    m_sizes = torch.tensor(RAGGED, dtype=torch.int32, device=device)
    wanted = torch.cat([part.float() @ one.T for part, one in zip(x.split(list(RAGGED)), dense, strict=True)])
    right = []
    for one in forms:
        y = torch.full((M, N), float("nan"), dtype=torch.bfloat16, device=device)
        call = one.on(Tensors(Problem(Op.FORWARD, DType(dtype), E, N, K), M, x, w, y), m_sizes)
        call()
        first = y.clone()
        call()
        off = (y.float() - wanted).norm(dim=1) / wanted.norm(dim=1)
        if one.made.name == BARE:
            right.append(one)
        elif not float(off.max()) < MOST_ERROR or not torch.equal(first, y):
            print(f"WRONG {one.made.form} {dtype}, ragged: rows are off by {float(off.max()):.2e} at most, "
                  f"{'the same' if torch.equal(first, y) else 'another'} result again", flush=True)  # fmt: skip
        else:
            right.append(one)
    return right


def useful(one: Loaded, T: int) -> bool:
    """Whether a form is meant for so many tokens: fitted tiles are for many."""
    return (one.made.tile[0] >= 64) == (T >= 512) or T == 1024


def cells(
    forms: Sequence[Loaded], model: tuple[Any, ...], size: tuple[int, int], tokens: Sequence[int], clock: Any,
    end: float, tell: Callable[[dict[str, Any]], None], device: str = "cuda",
) -> None:  # fmt: skip
    """One product at each number of tokens: judged, timed in turns, told."""
    import torch

    from benchmarks.speed.kernels import in_turns
    from pretuned.aot.measure.calls import Tensors
    from pretuned.aot.measure.inputs import activations, quantised_weights, routed_rows
    from pretuned.aot.measure.numerics import NumericsCheck
    from pretuned.artifacts.records.precision import DType
    from pretuned.artifacts.records.problem import Op, Problem

    name, dtype, E, top_k, _ = model
    N, K = size
    problem = Problem(Op.FORWARD, DType(dtype), E, N, K)
    w = quantised_weights(E, N, K, DType(dtype), device)
    judge = NumericsCheck(problem, w, torch.device(device))
    for T in tokens:
        if time.monotonic() > end:
            return
        M = T * top_k
        m_sizes = routed_rows(E, top_k, T, seed=1, device=device, skew=0.0)
        x = activations(M, K, torch.bfloat16, device)
        y = torch.empty(M, N, dtype=torch.bfloat16, device=device)
        on = Tensors(problem, M, x, w, y)
        wanted = judge.reference(on, m_sizes.tolist())
        calls: list[Callable[[], object]] = []
        told: list[dict[str, Any]] = []
        bits: dict[tuple[int, ...], Any] = {}
        for one in forms:
            if not useful(one, T):
                continue
            call = one.on(on, m_sizes)
            y.fill_(float("nan"))
            call()
            error = judge.error(on, wanted)
            if not error < MOST_ERROR and one.made.name != BARE:
                print(f"WRONG {one.made.form} {problem} T={T}: {error:.2e}", flush=True)
            today = bits.setdefault(one.made.tile[:3], y.clone())
            told.append({"form": one.made.form, "per_sm": one.per_sm, "error": error,
                         "bits_of_today": bool(torch.equal(today, y))})  # fmt: skip
            calls.append(call)
        active = int((m_sizes > 0).sum())
        cell = {"model": name, "dtype": dtype, "E": E, "N": N, "K": K, "T": T, "active": active,
                "bytes_us": 1e6 * active * DType(dtype).precision.w_bytes(N, K) / 4.3e12, "forms": told}  # fmt: skip
        for row, us in zip(told, in_turns(clock, *calls), strict=True):
            row["us"] = us
        tell(cell)


def table(cell: dict[str, Any]) -> str:
    """A cell, the fastest form first; times are of today's form that is fastest, too."""
    first = min((row["us"] for row in cell["forms"] if row["form"].removeprefix("today ")[0].isdigit()), default=1.0)
    head = f"{cell['model']} {cell['dtype']} N={cell['N']} K={cell['K']} T={cell['T']}: {cell['active']} experts, "
    lines = [f"{head}bytes alone at 4.3 TB/s {cell['bytes_us']:.1f} us"]
    for row in sorted(cell["forms"], key=lambda one: one["us"]):
        same = "" if row["bits_of_today"] else "  other bits"
        lines.append(f"  {row['form']:34}{row['us']:9.1f} us  x{first / row['us']:.3f}  {row['per_sm']} an SM  "
                     f"{cell['bytes_us'] / row['us']:.2f} of it bytes  {row['error']:.1e}{same}")  # fmt: skip
    return "\n".join(lines)


def timed(args: argparse.Namespace) -> None:
    """The run on a GPU."""
    import torch

    from benchmarks import method

    end = time.monotonic() + args.seconds
    forms, clock = read(args.forms), method.Clock()
    gpu = torch.cuda.get_device_name()
    print(f"{gpu}, torch {torch.__version__}, {len(forms)} compiled forms")

    def tell(cell: dict[str, Any]) -> None:
        print(table(cell), flush=True)
        if args.json:
            with args.json.open("a") as file:
                file.write(json.dumps({"gpu": gpu} | cell) + "\n")

    for model in MODELS:
        if model[1] in args.dtypes and time.monotonic() < end:
            right = ragged(loaded(forms, model[1]), model[1])
            for size in model[4]:
                if time.monotonic() < end:
                    cells(right, model, size, args.tokens, clock, end, tell)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile-only", type=Path, metavar="FILE", help="compile the forms into a file, and stop")
    parser.add_argument("--jobs", type=int, default=2, help="processes that compile")
    parser.add_argument("--only", nargs="*", default=(), help="names of forms that are compiled, for a try")
    parser.add_argument("--forms", type=Path, help="the file that --compile-only made")
    parser.add_argument("--dtypes", nargs="*", default=ALL, choices=ALL)
    parser.add_argument("--tokens", type=int, nargs="*", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=170.0, help="no further cell is begun after so long")
    parser.add_argument("--json", type=Path, help="a line is added for each cell")
    args = parser.parse_args()
    if args.compile_only:
        written(args.compile_only, compiled(args.jobs, args.only))
    elif args.forms:
        timed(args)
    else:
        parser.error("--forms FILE times what --compile-only FILE has compiled: one of them is needed")
