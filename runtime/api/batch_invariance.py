"""``python -m pretuned.runtime --batch-invariance``: tests that a row's bits do not depend on its batch.

One token's result is computed in batches of many sizes, and among other tokens, and compared bit for bit.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from ...artifacts.errors import HostError, ProblemNotInBundle
from ...artifacts.limits import printable
from ...artifacts.records import DType, dtypes_of
from ...artifacts.tuples import NamedTuple
from ...kernels.arch import ARCHS, Feature
from .. import hooks
from ..driver.device import local_gpu
from ..ops.low_rank import Lora
from ..settings import Invariance
from ..weights.expert_weights import ExpertWeights
from .grouped_gemm import grouped_gemm
from .moe import moe_mlp
from .routing import sort_routing

FORMATS = (
    "bf16",
    "fp16",
    "mxfp4",
    "mxfp8",
    "nvfp4",
    "int4_g32",
    "int4_g128",
    "int4_g128_zp",
    "fp8_block",
    "fp8_channel",
)
_PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16}
_E, _H, _I, _TOP_K, _RANK = 8, 2560, 512, 2, 16  # H is so long that some kernels sum it in parts
_TOKENS = 4096
_SIZES = (1, 2, 3, 5, 8, 16, 31, 64, 100, 257, 512, 1000, 2048)
_MIXES = 6

Results = Mapping[str, torch.Tensor]  # name -> result, a row for each computed token
Run = Callable[[torch.Tensor], Results]  # from the tokens' indices


class Counted(NamedTuple):
    """The number of batches in which a result was compared, and of those in which some bit differed."""

    batches: int
    differing: int


def compared(run: Run, tokens: int, sizes: Sequence[int], mixes: int, seed: int = 0) -> dict[str, Counted]:
    """Compare each token's bits in a batch of all ``tokens`` with its bits in other batches; counts by result name.

    The other batches are the first n tokens for each n of ``sizes``, and ``mixes`` random choices in random order.
    """
    generator = torch.Generator().manual_seed(seed)
    batches = [torch.arange(size, device="cpu") for size in sizes]
    for _ in range(mixes):
        count = int(
            2.0
            ** (
                torch.rand((), generator=generator, dtype=torch.float32, device="cpu") * (tokens.bit_length() - 1)
            ).item()
        )
        batches.append(torch.randperm(tokens, generator=generator, device="cpu")[:count])
    whole = run(torch.arange(tokens, device="cpu"))
    counts = {name: [0, 0] for name in whole}
    for some in batches:
        for name, result in run(some).items():
            same = torch.equal(result, whole[name][some.to(result.device)])
            counts[name][0] += 1
            counts[name][1] += not same
    return {name: Counted(*pair) for name, pair in counts.items()}


class Experts(NamedTuple):
    """A layer's tensors for the check: x [T, H], ids and weights [T, k], w of both products, dout [T, H]."""

    x: torch.Tensor
    ids: torch.Tensor
    weights: torch.Tensor
    gate_up: torch.Tensor | ExpertWeights
    down: torch.Tensor | ExpertWeights
    dout: torch.Tensor
    lora: tuple[Lora, Lora]

    @classmethod
    def drawn(cls, format: str, tokens: int, device: torch.device, *, H: int = _H, I: int = _I) -> Experts:  # noqa: E741
        """Return random tensors, equal on every device. Some slots choose no expert, as with experts on other ranks."""
        generator = torch.Generator().manual_seed(1)
        dtype = _PLAIN.get(format, torch.bfloat16)

        def random(*shape: int, spread: float = 1.0) -> torch.Tensor:
            return (spread * torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")).to(
                device, dtype
            )

        def w(rows: int, columns: int) -> torch.Tensor | ExpertWeights:
            dense = random(_E, rows, columns, spread=columns**-0.5)
            return dense if format in _PLAIN else ExpertWeights.quantize(dense, format).prepare()

        def adapter(rows: int, columns: int) -> Lora:
            return Lora(random(_E, _RANK, columns, spread=columns**-0.5), random(_E, rows, _RANK, spread=0.1), 0.5)

        return cls(
            random(tokens, H),
            torch.randint(-1, _E, (tokens, _TOP_K), generator=generator, device="cpu").to(device),
            torch.rand(tokens, _TOP_K, generator=generator, dtype=torch.float32, device="cpu").to(device),
            w(2 * I, H),
            w(H, I),
            random(tokens, H),
            (adapter(2 * I, H), adapter(H, I)),
        )

    def layer(self, some: torch.Tensor, *, lora: bool = False, expected: bool = False) -> Results:
        """Return ``moe_mlp``'s result for some tokens, its result in a call with a gradient, and x's gradient."""
        at = some.to(self.x.device)
        x, ids, weights = self.x[at], self.ids[at], self.weights[at]
        how: dict[str, Any] = {"lora": self.lora if lora else None}
        if expected:
            how["expected_rows"] = int((ids >= 0).sum())
        with torch.no_grad():
            out = moe_mlp(x, self.gate_up, self.down, ids, weights, **how)
        x.requires_grad_()
        trained = moe_mlp(x, self.gate_up, self.down, ids, weights, **how)
        (dx,) = torch.autograd.grad(trained, x, self.dout[at])
        return {"forward": out, "forward with a gradient": trained.detach(), "dX": dx}

    def products(self, some: torch.Tensor) -> Results:
        """y of each slot of some tokens by three products: x gathered and y scattered, x gathered alone, and neither.

        y of a slot without an expert is zero.
        """
        at = some.to(self.x.device)
        x, ids, weights = self.x[at], self.ids[at], self.weights[at]
        index, m_sizes = sort_routing(ids, _E)[:2]
        moved: dict[str, Any] = {"permute_x": True, "gather_indices": index}
        both = grouped_gemm(
            x, self.gate_up, m_sizes, _TOP_K, permute_y=True, topk_weights=weights, fuse_mul_post=True, **moved
        )
        results = {"moved and weighted": both}
        for name, y in (
            ("gathered", grouped_gemm(x, self.gate_up, m_sizes, _TOP_K, **moved)),
            ("plain", grouped_gemm(x[index // _TOP_K], self.gate_up, m_sizes)),
        ):
            results[name] = torch.empty_like(y)
            results[name][index] = y
        here = (ids >= 0).view(-1, 1)
        return {name: torch.where(here, y, 0).view(len(at), -1) for name, y in results.items()}


def forms(experts: Experts) -> dict[str, Run]:
    """The computations to check for a format: layers, with adapters too, and products."""
    return {
        "layer": experts.layer,
        "layer, expected_rows": functools.partial(experts.layer, expected=True),
        "layer with LoRA": functools.partial(experts.layer, lora=True),
        "products": experts.products,
    }


@dataclass(frozen=True, slots=True)
class Checked:
    """A format's results: for each computation, the batches compared and those in which a bit differed.

    ``free`` is the number of batches that differ without the mode; ``skipped`` says why nothing was computed.
    """

    format: str
    mode: str
    results: Mapping[str, Counted]
    free: Counted
    skipped: str | None = None

    @property
    def ok(self) -> bool:
        """True if no bit differed."""
        return not any(counted.differing for counted in self.results.values())


@dataclass(frozen=True, slots=True)
class BatchInvarianceReport:
    """The report of ``examine`` on one GPU."""

    gpu: str
    checked: tuple[Checked, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """True if no bit differed in any format."""
        return all(entry.ok for entry in self.checked)

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "ok": self.ok,
            "gpu": self.gpu,
            "seconds": self.seconds,
            "checked": [asdict(entry) for entry in self.checked],
        }

    def __str__(self) -> str:
        lines = [f"GPU       {self.gpu}", f"batches   of 1 to {_TOKENS} tokens, {self.seconds:.1f} s in all"]
        wide = max((len(entry.format) for entry in self.checked), default=0)
        for entry in self.checked:
            batches, differing = (sum(each) for each in zip((0, 0), *entry.results.values(), strict=True))
            what = (
                f"skipped: {entry.skipped}" if entry.skipped else f"{differing} of {batches} results differ in some bit"
            )
            free = "" if entry.skipped else f" (without the mode {entry.free.differing} of {entry.free.batches})"
            lines.append(f"{'ok' if entry.ok else 'DIFFERS':8}  {entry.format:{wide}}  {what}{free}; {entry.mode}")
            lines += [
                f"          {name}: {n.differing} of {n.batches}" for name, n in entry.results.items() if n.differing
            ]
        return "\n".join(map(printable, (*lines, "ok        " + ("yes" if self.ok else "no"))))


def check(
    format: str,
    experts: Experts,
    *,
    mode: Invariance | None = None,
    sizes: Sequence[int] = _SIZES,
    mixes: int = _MIXES,
    free: bool = True,
) -> Checked:
    """Compare a format's results in a batch-invariant mode (None: the default mode), and with ``free`` also without."""
    mode, tokens = mode or Invariance(), len(experts.ids)
    try:
        with hooks.within(mode):
            results = {
                f"{form}: {name}": count
                for form, run in forms(experts).items()
                for name, count in compared(run, tokens, sizes, mixes).items()
            }
            trained = experts.layer(torch.arange(min(tokens, 100), device="cpu"))
            same = torch.equal(trained["forward"], trained["forward with a gradient"])
            results["layer: training as serving"] = Counted(1, int(not same))
    except ProblemNotInBundle as error:
        return Checked(format, str(mode), {}, Counted(0, 0), str(error))
    other = Counted(0, 0)
    if free:
        with hooks.within(None):
            each = compared(experts.layer, tokens, sizes, mixes).values()
            other = Counted(*(sum(column) for column in zip(*each, strict=True)))
    return Checked(format, str(mode), results, other)


def examine(device: int | None = None, *, progress: Callable[[str], None] | None = None) -> BatchInvarianceReport:
    """Check all formats on a GPU, torch's current one by default, in a minute or so.

    ``progress`` is called with a line after each format: its name, the number of formats done, and the seconds left.

    Raises
    ------
    HostError
        if there is no GPU.
    """
    began = time.perf_counter()
    if not torch.cuda.is_available():
        raise HostError("--batch-invariance: no CUDA GPU is here: sums on the CPU are torch's, and have no such mode")
    at = torch.device("cuda", torch.cuda.current_device() if device is None else device)
    local = local_gpu(at.index)
    arch = ARCHS.get(local.sm)
    asked = [(format, Invariance()) for format in FORMATS]
    if arch is not None and arch.has(Feature.FP8):
        quantising = [format for format in FORMATS if any(DType(name).quantises_x for name in dtypes_of(format))]
        asked += [(format, Invariance(quantize_x=True)) for format in quantising]
    checked: list[Checked] = []
    for format, mode in asked:
        checked.append(check(format, Experts.drawn(format, _TOKENS, at), mode=mode))
        if progress is not None:
            spent = time.perf_counter() - began
            left = spent / len(checked) * (len(asked) - len(checked))
            state = "skipped" if checked[-1].skipped else "ok" if checked[-1].ok else "DIFFERS"
            progress(f"{len(checked)}/{len(asked)} {format}: {state}, {spent:.0f} s, about {left:.0f} s left")
    return BatchInvarianceReport(str(local), tuple(checked), time.perf_counter() - began)
