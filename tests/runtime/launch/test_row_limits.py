"""How many rows a specialised kernel takes: more are refused before anything is launched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from emulated_driver import EmulatedGpu, emulated

import pretuned.artifacts
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Gpu, LocalGpu, Op, Problem, Variant
from pretuned.kernels.registry import clears, transposed
from pretuned.kernels.spec import Config, Schedule
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.dispatch.decide import modelled
from pretuned.runtime.driver.launcher import Launcher
from pretuned.runtime.launch import gemm
from pretuned.runtime.launch.gemm import LoadedKernel

GIVEN = {"x": 16, "w": 16, "stride_x_m": 64, "stride_y_m": 64, "M": 8, "index": 16}
SHIPPED = Path(pretuned.artifacts.__file__).parent / "bundles" / "catalogue-sm90.msgpack"


def specialised(op: Op, fusion: Fusion) -> Variant:
    with open_bundle(SHIPPED) as bundle:
        return next(
            variant
            for variant in bundle.variants()
            if variant.op is op and variant.fusion is fusion and dict(variant.config).get("specialized")
        )


def in_turns(op: Op) -> LoadedKernel:
    with open_bundle(SHIPPED) as bundle:
        variant = next(
            variant
            for variant in bundle.variants()
            if variant.op is op
            and not variant.fusion
            and dict(variant.config).get("pingpong")
            and not transposed(op, Config.from_pairs(variant.config))
        )
    return load(variant)


def load(variant: Variant) -> LoadedKernel:
    with open_bundle(SHIPPED) as bundle:
        index = next(i for i, other in enumerate(bundle.variants()) if other == variant)
        return gemm.load_kernel(variant, bundle.cubin(index), 0, 132, "what ships")


Launched = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[EmulatedGpu]:
    """Whose launches store nothing."""
    with emulated(EmulatedGpu()) as gpu:
        gpu.know(SHIPPED)
        gpu.computes = False
        yield gpu


@pytest.fixture
def launched(gpu: EmulatedGpu) -> Launched:
    """Launches a kernel of a variant on words: its programs, and what it reads by name."""

    def launch(variant: Variant, launcher: Launcher, **words: int) -> tuple[int, dict[str, Any]]:
        launcher(16, 16, 0, **words)
        return gpu.launches[-1].grid, gpu.launches[-1].words

    return launch


def launcher(variant: Variant) -> Launcher:
    kernel = load(variant)
    if variant.op is Op.DW:
        return gemm.product_launcher(kernel, N=64, K=64, E=4, m_sizes_step=1)
    return gemm.product_launcher(kernel, N=64, K=64, E=4, m_sizes_step=1, fused=gemm.Fused(variant.fusion))


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER])
def test_a_product_of_rows_takes_2_30(fusion: Fusion) -> None:
    launch = launcher(specialised(Op.FORWARD, fusion))
    launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=1 << 30)
    with pytest.raises(InputError, match=r"M=1073741825, the most rows of .* is 2\^30"):
        launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=(1 << 30) + 1)


def test_dw_takes_what_its_steps_can_be_counted_in() -> None:
    variant = specialised(Op.DW, Fusion.NONE)
    most = dict(variant.config)["block_m"] * ((1 << 20) - 1)
    launch = launcher(variant)
    launch(16, 16, 0, dy=16, x=16, stride_dy_m=64, stride_x_m=64, M=most)
    with pytest.raises(InputError, match=f"the most rows of dW by .* is {most}"):
        launch(16, 16, 0, dy=16, x=16, stride_dy_m=64, stride_x_m=64, M=most + 1)


def plain(*, persistent: bool) -> Variant:
    with open_bundle(SHIPPED) as bundle:
        return next(
            variant
            for variant in bundle.variants()
            if variant.op is Op.FORWARD
            and not variant.fusion
            and variant.alignment == 16
            and not dict(variant.config)["specialized"]
            and bool(dict(variant.config)["persistent"]) is persistent
        )


@pytest.mark.parametrize("persistent", [False, True])
def test_plain_code_takes_2_30_rows(persistent: bool) -> None:
    """Beyond, rows past a tile's end, and 16 more for each program that zeroes rows, would pass 2^31."""
    launch = launcher(plain(persistent=persistent))
    rows = (1 << 30) if persistent else (1 << 29)
    launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=rows)
    with pytest.raises(InputError, match="split the batch"):
        launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=(1 << 30) + 1)


def test_programs_of_one_tile_are_2_26() -> None:
    variant = plain(persistent=False)
    block_m, most = dict(variant.config)["block_m"], 1 << 26
    launch = launcher(variant)
    launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=(most - 4) * block_m)
    with pytest.raises(InputError, match=f"the most is {most}: split the batch"):
        launch(16, 16, 0, x=16, w=16, stride_x_m=64, stride_y_m=64, M=(most + 1) * block_m)


@pytest.mark.parametrize(("index_end", "more"), [(1, 1), (16, 1), (17, 2), (1024, 64)])
def test_programs_that_clear_rows_come_on_top(index_end: int, more: int, launched: Launched) -> None:
    with open_bundle(SHIPPED) as bundle:
        variant = next(
            variant
            for variant in bundle.variants()
            if variant.op is Op.FORWARD
            and clears(variant.fusion, Config.from_pairs(variant.config))
            and not dict(variant.config)["specialized"]
        )
    kernel = load(variant)
    programs = []
    for zero_tail in (False, True):
        launcher = gemm.product_launcher(
            kernel,
            N=64,
            K=64,
            E=4,
            m_sizes_step=1,
            fused=gemm.Fused(Fusion.SCATTER, zero_tail=zero_tail),
        )
        programs.append(launched(variant, launcher, **GIVEN, index_end=index_end)[0])
    assert programs[1] == programs[0] + more
    with pytest.raises(InputError, match="split the batch"):
        launcher(
            16, 16, 0, **GIVEN | {"M": ((1 << 26) - 4) * dict(variant.config)["block_m"] + 4, "index_end": index_end}
        )


@pytest.mark.parametrize("beside", [False, True])
def test_specialised_code_has_a_warp_for_it(beside: bool, launched: Launched) -> None:
    with open_bundle(SHIPPED) as bundle:
        variant = next(
            variant
            for variant in bundle.variants()
            if variant.op is Op.FORWARD and variant.fusion == Fusion.SCATTER and dict(variant.config)["specialized"]
        )
    kernel = load(variant)
    ran = []
    for zero_tail in (False, True):
        launcher = gemm.product_launcher(
            kernel,
            N=64,
            K=64,
            E=4,
            m_sizes_step=1,
            fused=gemm.Fused(Fusion.SCATTER, zero_tail=zero_tail, few=False, beside=beside),
        )
        assert launcher.zeroes is (zero_tail and beside)
        ran.append(launched(variant, launcher, **GIVEN, index_end=4096))
    assert ran[0][0] == ran[1][0], "no more programs"
    assert (ran[0][1] != ran[1][1]) is beside, "it is told"


@pytest.mark.parametrize("what", ["persistent", "gathers", "many rows"])
def test_code_that_cannot_clear_is_not_told_to(what: str, launched: Launched) -> None:
    with open_bundle(SHIPPED) as bundle:
        code = Fusion.GATHER if what == "gathers" else Fusion.SCATTER
        variant = next(
            variant
            for variant in bundle.variants()
            if variant.op is Op.FORWARD
            and variant.fusion == code
            and variant.alignment == 16
            and not dict(variant.config)["specialized"]
            and bool(dict(variant.config)["persistent"]) is (what == "persistent")
        )
    kernel = load(variant)
    flags = []
    for zero_tail in (False, True):
        launcher = gemm.product_launcher(
            kernel,
            N=64,
            K=64,
            E=4,
            m_sizes_step=1,
            fused=gemm.Fused(code | Fusion.SCATTER, zero_tail=zero_tail, few=what != "many rows"),
        )
        assert not launcher.zeroes
        flags.append(launched(variant, launcher, **GIVEN, index_end=16)[1]["flags"])
    assert flags[0] == flags[1] == (code | Fusion.SCATTER).value


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_columns_and_steps_that_a_tile_can_be_told_by(op: Op) -> None:
    """Where warpgroups take turns a tile's column goes to them in 20 bits, and its steps do in all specialised code."""
    kernel, reduction = in_turns(op), 64 * ((1 << 20) - 1)
    columns = dict(kernel.variant.config)["block_n"] << 20

    def make(columns: int, reduction: int) -> Launcher:
        return gemm.product_launcher(kernel, N=columns, K=reduction, E=1, strides=(1, 1), m_sizes_step=1)

    make(columns, 8)(16, 16, 0, x=16, w=16, stride_x_m=8, stride_y_m=columns, M=8)
    make(8, reduction)(16, 16, 0, x=16, w=16, stride_x_m=reduction, stride_y_m=8, M=8)
    with pytest.raises(InputError, match=f"the most columns of .* are {columns}, these are {columns + 8}"):
        make(columns + 8, 8)
    with pytest.raises(InputError, match=f"the longest reduction of .* is {reduction}, this is {reduction + 8}"):
        make(8, reduction + 8)


def test_columns_that_a_tile_of_dw_can_be_told_by() -> None:
    kernel, columns = in_turns(Op.DW), 192 << 20

    def make(K: int) -> Launcher:
        return gemm.product_launcher(kernel, N=8, K=K, E=1, m_sizes_step=1)

    make(columns)(16, 16, 0, dy=16, x=16, stride_dy_m=8, stride_x_m=columns, M=8)
    with pytest.raises(InputError, match=f"the most columns of .* are {columns}, these are {columns + 8}"):
        make(columns + 8)


@pytest.mark.parametrize("op", Op)
def test_more_columns_are_left_to_other_variants(op: Op) -> None:
    """The cost model would choose pingpong for nearly all such products."""
    bundle_set = snapshot.Snapshot([])
    bundle_set.add(open_bundle(SHIPPED))
    h200 = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13000))
    for columns, turns in ((192 << 20, True), ((192 << 20) + 8, False)):
        problem = Problem(op, DType.BF16, 1, *((columns, 8) if op is Op.FORWARD else (8, columns)))
        view = bundle_set.view(h200, installed=True)
        ranked = modelled(bundle_set, problem, 128, h200, view, aligned=True)
        along = [config.config for config in ranked if not transposed(op, config.config)]
        assert any(config.schedule is Schedule.PINGPONG for config in along) is turns
        assert ranked
