"""The emulated GPU with a bundle of float32 kernels, and the calls that tests of layers and forms make on it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from emulated_driver import H200, EmulatedGpu
from emulated_kernels import Code, bundle_of, variant_and_code

from pretuned.artifacts.codec import encode
from pretuned.artifacts.packed import pack
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Bundle, Choice, DType, Fusion, Layout, Op, Problem, RowOp, Source, bucket_of
from pretuned.kernels.rowops import WITHOUT_DTYPE, RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec
from pretuned.runtime import grouped_gemm, reload, sort_routing
from pretuned.runtime.api.product_plan import PlainPlan
from pretuned.runtime.launch import product_kernels, program
from pretuned.runtime.launch.program import Program

T, TOPK, E, N, K = 7, 2, 4, 8, 12
SLOTS = 5  # of a chunk that is sorted
ALL = {(op, fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)}
ALL |= {(Op.DW, Fusion.NONE)}
PASSES = {RowOp.GATHER, RowOp.ACTIVATION, RowOp.ACTIVATION_GRAD, RowOp.COMBINE, *WITHOUT_DTYPE}
LOW_RANK = {(op, Fusion.LOW_RANK | fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.NONE, Fusion.GATHER)}
SPECIALIZED = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
PERSISTENT = Config(16, 64, 64, 4, 2)
TILE = Config(16, 64, 64, 4, 2, schedule=Schedule.TILE)
_BLOCKS = {RowOp.SORT_SLOTS: SLOTS, RowOp.CLEAR: SLOTS}

Kind: TypeAlias = "RowOp | tuple[Op, Fusion]"


def specs(there: Iterable[Kind], dtype: DType, config: Config) -> list[tuple[Spec | RowOpSpec, int | None]]:
    """The variants of these kinds, aligned and not; row kernels with their blocks.

    They are for weights [E, N, K]. dX's are also the forward's of weights [E, K, N], and the other way round.
    """
    listed: list[tuple[Spec | RowOpSpec, int | None]] = []
    for kernel in sorted(there, key=str):
        if isinstance(kernel, RowOp):
            alignments = {RowOp.PLACE_ROWS: (1,), RowOp.SORT_SLOTS: (1,), RowOp.CLEAR: (16,)}.get(kernel, (16, 1))
            kind = DType.FP32 if kernel in WITHOUT_DTYPE else dtype
            listed += [(RowOpSpec(kernel, kind, alignment), _BLOCKS.get(kernel)) for alignment in alignments]
            continue
        op, fusion = kernel
        own = PERSISTENT if op is Op.DW and config.schedule.warp_specialized else config
        own = SPECIALIZED if Fusion.SILU in fusion else own  # the only code of it, for half precision
        layouts = (Layout.NK, Layout.KN) if Fusion.SILU in fusion else (Layout.NK,)
        listed += [
            (Spec(op, dtype, own, layout, fusion, alignment), None)
            for alignment in (16, 1)
            for layout in layouts
            if alignment == 16 or own.loads is Loads.POINTER
        ]
    return listed


@functools.lru_cache(maxsize=64)
def bundle_bytes(
    there: frozenset[Kind], dtype: DType, config: Config, times: frozenset[tuple[Problem, float]] = frozenset()
) -> bytes:
    """A bundle of these kinds; ``times`` in us are measured choices of an H200, of any number of rows up to 1,024."""
    listed = specs(there, dtype, config)
    choices = {}
    for problem, time_us in times:
        kind = problem.op, problem.layout, problem.fusion, 16
        index = next(
            i
            for i, (spec, _) in enumerate(listed)
            if isinstance(spec, Spec) and (spec.op, spec.layout, spec.fusion, spec.alignment) == kind
        )
        buckets = sorted({bucket_of(M) for M in range(1, 1025)})
        choices[problem] = [Choice(bucket, index, Source.MEASURED, int(1e3 * time_us), gpu=0) for bucket in buckets]
    gpus = [H200] if times else []
    return encode(bundle_of([variant_and_code(spec, block=block) for spec, block in listed], choices, gpus=gpus))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the warnings, except those of shipped bundles, which the emulated driver is too old for."""
    messages = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [message for message in messages if not message.startswith("pretuned: skipping ")]


def publish_alone(folder: Path, bundle: Bundle) -> None:
    """Put a bundle into the process's folder of bundles, and have the process look again."""
    publish_bytes_alone(folder, encode(bundle))


def publish_bytes_alone(folder: Path, bundle: bytes) -> None:
    """Put an encoded bundle into the process's folder of bundles, and have the process look again."""
    publish(folder / "emulated.msgpack", bundle)
    reload()


class Device(EmulatedGpu):
    """An H200 with a bundle of its own. ``there`` says which kernels that has; setting it publishes another.

    Its products are persistent float32 kernels, unless a test says ``has``.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(H200)
        self.layout = Layout.NK
        self._folder = folder
        self._there: frozenset[Kind] = frozenset({*ALL, *PASSES})
        self._config = PERSISTENT
        self._dtype = DType.FP32
        self._times: dict[Problem, float] = {}
        self.publish()

    def publish(self, bundle: bytes | None = None) -> None:
        """Put the bundle, or another, in place, and have the process look again."""
        bundle = bundle or bundle_bytes(self._there, self._dtype, self._config, frozenset(self._times.items()))
        publish(self._folder / "emulated.msgpack", bundle)
        reload()

    @property
    def there(self) -> frozenset[Kind]:
        return self._there

    @there.setter
    def there(self, kinds: Iterable[Kind]) -> None:
        self._there = frozenset(kinds)
        self.publish()

    def has(self, config: Config, dtype: DType = DType.FP32) -> None:
        """Publish a bundle of the same kinds in another config and dtype."""
        self._config, self._dtype = config, dtype
        self.publish()

    def measures(self, times: Mapping[tuple[Op, Fusion], float], *sizes: tuple[int, int]) -> None:
        """Have these times measured, in us, of these N and K."""
        for (op, fusion), time_us in times.items():
            for N, K in sizes:
                problem = Problem(op, self._dtype, E, N, K, self.layout, fusion)
                named = problem if self.layout is Layout.NK or Fusion.SILU in fusion else problem.transposed
                assert named is not None
                self._times[named] = time_us
        self.publish()

    def runs_torch(
        self, ops: Iterable[Op], *sizes: tuple[int, int], buckets: Iterable[int] = (1, 2, 4, 8, 16, 32)
    ) -> None:
        """Have it measured that torch's grouped_mm is faster for these ops, of these N and K and numbers of rows."""
        listed = specs(self._there, self._dtype, self._config)
        choices = {}
        for op, (N, K) in itertools.product(ops, sizes):
            problem = Problem(op, self._dtype, E, N, K, self.layout)
            named = problem if self.layout is Layout.NK else problem.transposed
            assert named is not None
            kind = named.op, named.fusion, 16
            index = next(
                i
                for i, (spec, _) in enumerate(listed)
                if isinstance(spec, Spec) and (spec.op, spec.fusion, spec.alignment) == kind
            )
            choices[named] = [
                Choice(bucket, index, Source.MEASURED, 10_000, gpu=0, torch_ns=5_000) for bucket in sorted(buckets)
            ]
        self.publish(
            encode(bundle_of([variant_and_code(spec, block=block) for spec, block in listed], choices, gpus=[H200]))
        )

    def gathers_first(self, *sizes: tuple[int, int]) -> None:
        """Have it measured that a row kernel and the plain product are faster, of these N and K."""
        times = {Fusion.NONE: 1.0, Fusion.GATHER: 1000.0}
        self.measures({(op, fusion): us for op in (Op.FORWARD, Op.DX) for fusion, us in times.items()}, *sizes)

    @property
    def launched(self) -> list[tuple[Op, Fusion]]:
        """The products that were launched, of weights in ``layout``: dX of one layout is the forward's of the other."""
        return [(self._op_of(launch.code), launch.code.fusion) for launch in self.products]

    def _op_of(self, code: Code) -> Op:
        if code.op is Op.DW:
            return Op.DW
        kn = (code.layout is Layout.KN) == (code.op is Op.FORWARD)
        return Op.FORWARD if kn == (self.layout is Layout.KN) else Op.DX

    @property
    def passed(self) -> list[RowOp]:
        """The row kernels that were launched, but for those of no dtype."""
        return [op for op in self._ops() if op not in WITHOUT_DTYPE]

    @property
    def sorted(self) -> list[RowOp]:
        return [op for op in self._ops() if op is RowOp.SORT_SLOTS]

    @property
    def cleared(self) -> list[RowOp]:
        return [op for op in self._ops() if op is RowOp.CLEAR]

    def _ops(self) -> list[RowOp]:
        return [row_kernel.code.op for row_kernel in self.passes if isinstance(row_kernel.code.op, RowOp)]


def install_candidates_bundle(patch: pytest.MonkeyPatch, folder: Path, bundle: bytes) -> None:
    """Install a package below ``folder`` that has this bundle as its candidates, as pretuned's own are."""
    for name, text in {
        "emulated_candidates/__init__.py": "",
        "emulated_candidates-1.0.dist-info/METADATA": "Name: emulated-candidates\nVersion: 1.0\n",
        "emulated_candidates-1.0.dist-info/entry_points.txt": "[pretuned.bundles]\nemulated = emulated_candidates\n",
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (folder / "emulated_candidates" / "candidates-sm90.msgpack.xz").write_bytes(pack(bundle))
    patch.syspath_prepend(str(folder))
    reload()


def use_low_rank_kernels(patch: pytest.MonkeyPatch, folder: Path) -> None:
    """Have float32 kernels that add a low-rank part, among the candidates. (Shipped ones are of bfloat16.)"""
    patch.setattr(product_kernels, "_LOW_RANK_DTYPES", (torch.float32,))
    install_candidates_bundle(patch, folder, bundle_bytes(frozenset(LOW_RANK), DType.FP32, PERSISTENT))


class Replay(NamedTuple):
    """A program that ran: its number of rows, and the program."""

    M: int
    program: Program

    def is_of(self, other: Program | None) -> bool:
        """Return True if the program is this one."""
        return self.program is other


@contextlib.contextmanager
def replays(noted: Callable[[Replay], None]) -> Iterator[None]:
    """Hands over each program that runs in this thread: of a call like an earlier one, which was recorded in here."""
    here = threading.get_ident()

    def note(M: int, ran: Program) -> None:
        if threading.get_ident() == here:
            noted(Replay(M, ran))

    class Noted(Program):
        __slots__ = ()

        def __init__(self, *recorded: Any) -> None:
            super().__init__(*recorded)
            run = self.run

            def noted_run(M: int, stream: int, inputs: Any) -> Any:
                note(M, self)
                return run(M, stream, inputs)

            self.run = noted_run

    def noted_plain(make: Callable[..., Any]) -> Callable[..., Any]:
        """Note calls of a plain plan's function, which does what its program does, or returns None."""

        def wrapped(plan: PlainPlan, *how: Any) -> Callable[..., Any]:
            again = make(plan, *how)

            def noted_again(M: int, *operands: Any) -> Any:
                y = again(M, *operands)
                if y is not None and plan.program is not None:
                    note(M, plan.program)
                return y

            return noted_again

        return wrapped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "Program", Noted)
        for name in ("_new", "_into"):
            patch.setattr(PlainPlan, name, noted_plain(getattr(PlainPlan, name)))
        yield


def tensors(
    *, permute_x: bool, weights: bool, bias: bool, layout: str, seed: int = 0
) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    return {
        "x": random(T if permute_x else T * TOPK, K),
        "w": random(E, N, K) if layout == "nk" else random(E, K, N),
        "topk_weights": random(T, TOPK) if weights else None,
        "bias": random(E, N) if bias else None,
    }


def ran(form: dict[str, Any], inputs: dict[str, torch.Tensor | None], wide: bool) -> tuple[torch.Tensor, ...]:
    ids = torch.randint(-1, E + 1, (T, TOPK), generator=torch.Generator().manual_seed(5))  # some on other ranks
    routing = sort_routing(ids, E)
    kind = torch.int64 if wide else torch.int32
    y = grouped_gemm(
        **inputs,
        m_sizes=routing.m_sizes.to(kind),
        topk=TOPK,
        gather_indices=routing.gather_indices.to(kind),
        fuse_mul_post=inputs["topk_weights"] is not None,
        zero_tail=True,
        **form,
    )
    check_tensors = [tensor for tensor in inputs.values() if tensor is not None]
    dy = torch.linspace(-1, 1, y.numel()).view_as(y)
    return y, *torch.autograd.grad(y, check_tensors, dy)
