"""How many rows a specialised kernel takes: more are refused before anything is launched."""

from __future__ import annotations

from pathlib import Path

import pytest

import pretuned.artifacts
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.store import open_bundle
from pretuned.artifacts.types import Fusion, Op, Variant
from pretuned.runtime import driver, launch
from pretuned.runtime.launcher import Launcher
from pretuned.runtime.tensormaps import MAP_BYTES, TensorMaps

SHIPPED = Path(pretuned.artifacts.__file__).parent / "bundles" / "catalogue-sm90.msgpack"


def specialised(op: Op, fusion: Fusion) -> Variant:
    with open_bundle(SHIPPED) as bundle:
        return next(
            one for one in bundle.variants()
            if one.op is op and one.fusion is fusion and dict(one.config).get("specialized")
        )  # fmt: skip


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "launch_kernel", lambda: None)
    monkeypatch.setattr(TensorMaps, "encode", lambda *_: bytes(MAP_BYTES))


def launcher(variant: Variant) -> Launcher:
    function = driver.Function(1, 1, 0, variant.threads, variant.shared_bytes, 1)
    kernel = launch.LoadedKernel(variant, function, 132)
    if variant.op is Op.DW:
        return launch.weight_launcher(kernel, N=64, K=64, E=4, stride_dw_e=4096, stride_dw_row=64, m_sizes_step=1)
    return launch.row_launcher(
        kernel, columns=64, reduction=64, E=4, w_kn=False, stride_w_e=4096, stride_w_row=64, m_sizes_step=1,
        fused=launch.Fused(variant.fusion),
    )  # fmt: skip


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER])
def test_a_product_of_rows_takes_2_30(fusion: Fusion) -> None:
    prepare = launcher(specialised(Op.FORWARD, fusion)).prepare
    prepare(16, 16, 64, 64, 1 << 30)
    with pytest.raises(InputError, match=r"M=1073741825, the most rows of .* is 2\^30"):
        prepare(16, 16, 64, 64, (1 << 30) + 1)


def test_dw_takes_what_its_steps_can_be_counted_in() -> None:
    variant = specialised(Op.DW, Fusion.NONE)
    most = dict(variant.config)["block_m"] * ((1 << 20) - 1)
    prepare = launcher(variant).prepare
    prepare(16, 16, 64, 64, most)
    with pytest.raises(InputError, match=f"the most rows of dW by .* is {most}"):
        prepare(16, 16, 64, 64, most + 1)
