"""Quantised products beside other libraries': how a cell is measured, how weights are ordered, how a run is judged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_wheels import unpacked

from pretuned.aot.measure.clock import HostClock
from pretuned.runtime.weights.codes import pack, unpack

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
UTILS = {  # as vLLM's files have them: functions among what can't be imported here
    "marlin_utils.py": """
import something_that_is_not_here
def get_scale_perms(): return list(reversed(range(64))), []
def marlin_permute_scales(s, size_k, size_n, group_size):
    return s.reshape(-1, 64)[:, get_scale_perms()[0]].reshape(-1, size_n)
def marlin_zero_points(zp, size_k, size_n, num_bits):
    return pack_cols(zp.reshape(-1, 64)[:, get_scale_perms()[0]].reshape(-1, size_n), num_bits, size_k, size_n)
""",
    "quant_utils.py": """
def get_pack_factor(num_bits): return 32 // num_bits
def pack_cols(q_w, num_bits, size_k, size_n):
    assert q_w.shape == (size_k, size_n)
    words = q_w.int().reshape(size_k, -1, get_pack_factor(num_bits))
    return sum(words[..., place] << num_bits * place for place in range(get_pack_factor(num_bits))).int()
""",
    "marlin_utils_fp4.py": """
def mxfp4_marlin_process_scales(marlin_scales): return marlin_scales.to(torch.float8_e8m0fnu)
""",
    "marlin_utils_test.py": """
def get_weight_perm(num_bits): return torch.from_numpy(np.arange(1024)[::-1].copy())
""",
}


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    from benchmarks.peers import beside_quantised

    return beside_quantised


def product(tool: ModuleType, format: str, N: int = 128, K: int = 256, E: int = 4) -> object:
    return tool.Product(format, "m", "down", E, N, K, K, 2, "cpu")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Marlin with orders of the test's own in files that are laid out as vLLM's."""
    from benchmarks.peers import w4a16

    place = tmp_path_factory.mktemp("vllm")
    folder = place / w4a16.QUANTISATION
    folder.mkdir(parents=True)
    for name, text in UTILS.items():
        (folder / name).write_text(text)
    marlin = object.__new__(w4a16.Marlin)
    marlin.names = w4a16.orders(place)
    return marlin


@pytest.mark.parametrize(
    "format", ["mxfp4", "mxfp8", "int4_g32", "int4_g128", "int4_g128_zp", "fp8_block", "fp8_channel"]
)
def test_ours_is_measured_and_what_fails_is_reported(tool: ModuleType, format: str) -> None:
    gemm = product(tool, format)

    def refuses(cell: object) -> dict[str, object]:
        raise RuntimeError("no such\n  shape")

    def fails(cell: object) -> dict[str, object]:
        return {"b": lambda: torch.ones(2, 2) @ torch.ones(3, 3)}

    kernels = {"ours": tool.ours(Path(), gemm, [16]), "a": refuses, "b": fails}
    row = tool.measured(tool.Cell(gemm, 16), kernels, HostClock())
    assert row["us"].keys() == row["error"].keys() == {"ours"}
    assert row["us"]["ours"] > 0
    assert row["error"]["ours"] < (3e-2 if format.startswith("fp8") else 5e-3)
    assert row["failed"].keys() == {"a", "b"}
    assert row["failed"]["a"] == "RuntimeError: no such shape"
    assert json.loads(json.dumps(row))["format"] == format
    warm = tool.measured(tool.Cell(gemm, 16), kernels, None)
    assert (warm["us"], warm["error"]) == ({}, {})


def test_an_error_is_of_the_products_own_weights(tool: ModuleType) -> None:
    """Those that are drawn, before ours put them into an order: the others' are made of the same."""
    for format in ("mxfp4", "int4_g128", "int4_g128_zp"):
        cell = tool.Cell(product(tool, format), 8)
        codes, scale = cell.product.operands
        zero = 8 if cell.product.zero is None else cell.product.zero.repeat_interleave(cell.product.group, 2).float()
        number = unpack(codes).float() - zero
        if format == "mxfp4":
            table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
            number = torch.cat((table, -table))[unpack(codes).long()]
            scale = torch.exp2(scale.float() - 127)
        w = number * scale.float().repeat_interleave(cell.product.group, 2)
        y = torch.cat([x.float() @ matrix.T for x, matrix in zip(cell.x.split(cell.m_sizes.tolist()), w, strict=True)])
        assert cell.error(y, of_codes=False) < 1e-6
        assert 0.9 < cell.error(torch.zeros_like(y), of_codes=False) <= 1


def test_marlins_weights_are_tiles_in_vllms_order(theirs: object) -> None:
    """[K, N] in tiles of 16 x 64, each in the order that the permutation says, eight codes a word from its low end."""
    E, N, K = 2, 128, 64
    codes = torch.randint(0, 256, (E, N, K // 2), dtype=torch.uint8)
    words = theirs.codes(codes)
    assert (words.shape, words.dtype) == ((E, K // 16, 2 * N), torch.int32)
    nibbles = torch.stack([words >> (4 * place) & 15 for place in range(8)], -1).reshape(E, K // 16, N // 64, 1024)
    for e, k, n in ((0, 0, 0), (0, 17, 70), (1, 63, 127), (1, 40, 5)):
        inside = (n % 64) // 16 * 256 + (k % 16) * 16 + n % 16
        assert nibbles[e, k // 16, n // 64, 1023 - inside] == unpack(codes[e, n])[k]


def test_marlins_weights_of_8_bits_are_tiles_in_vllms_order(theirs: object) -> None:
    E, N, K = 2, 128, 64
    codes = torch.randint(0, 127, (E, N, K), dtype=torch.uint8)
    words = theirs.codes(codes.view(torch.float8_e4m3fn))
    assert (words.shape, words.dtype) == ((E, K // 16, 4 * N), torch.int32)
    result = words.view(torch.uint8).reshape(E, K // 16, N // 64, 1024)
    for e, k, n in ((0, 0, 0), (0, 17, 70), (1, 63, 127), (1, 40, 5)):
        inside = (n % 64) // 16 * 256 + (k % 16) * 16 + n % 16
        assert result[e, k // 16, n // 64, 1023 - inside] == codes[e, n, k]


def test_marlins_scales_are_in_vllms_order(theirs: object) -> None:
    exponents = torch.randint(119, 124, (2, 64, 4), dtype=torch.uint8)
    tensor = theirs.scales(exponents, 128, 32)
    assert tensor.dtype is torch.float8_e8m0fnu
    assert torch.equal(tensor.view(torch.uint8), exponents.transpose(1, 2).flip(2))
    scale = torch.rand(2, 128, 3).bfloat16()
    tensor = theirs.scales(scale, 384, 128)
    assert torch.equal(tensor.view(2, 3, 2, 64), scale.transpose(1, 2).reshape(2, 3, 2, 64).flip(3))


def test_marlins_zero_points_are_in_vllms_order(theirs: object) -> None:
    zero = torch.randint(0, 16, (2, 128, 3), dtype=torch.uint8)
    words = theirs.zeros(zero)
    assert (words.shape, words.dtype) == ((2, 3, 16), torch.int32)
    nibbles = torch.stack([words >> (4 * place) & 15 for place in range(8)], -1).reshape(2, 3, 2, 64)
    assert torch.equal(nibbles, zero.transpose(1, 2).reshape(2, 3, 2, 64).flip(3).int())


@pytest.mark.parametrize("version", ["0.20.2", "0.26.0"])
def test_marlins_int4_with_zero_points_is_what_vllms_own_functions_make(version: str) -> None:
    """Codes, scales and zero points, of the weights that vLLM's tests quantise for Marlin, and of an AWQ checkpoint."""
    import numpy

    from benchmarks.peers import w4a16
    from pretuned.runtime import ExpertWeights

    place = unpacked("vllm", version) / "vllm"
    marlin, folder = object.__new__(w4a16.Marlin), place / w4a16.QUANTISATION
    marlin.names = w4a16.orders(place)
    types = w4a16._module("scalar_type", place / "scalar_type.py")
    names = {"torch": torch, "np": numpy, "numpy": numpy, "GPTQ_MARLIN_TILE": 16}
    names |= {"ScalarType": types.ScalarType, "scalar_types": types.scalar_types}
    of_file = {
        "quant_utils.py": ("get_pack_factor", "pack_cols", "unpack_cols", "quantize_weights"),
        "marlin_utils.py": (
            "get_scale_perms",
            "marlin_permute_scales",
            "marlin_zero_points",
            "awq_to_marlin_zero_points",
            "moe_awq_to_marlin_zero_points",
        ),
        "marlin_utils_test.py": (
            "get_weight_perm",
            "marlin_permute_weights",
            "marlin_weights",
            "awq_marlin_quantize",
        ),
    }
    for file, wanted in of_file.items():
        w4a16.taken(folder / file, wanted, names)

    N, K, group = 192, 384, 128
    w = torch.randn(K, N, generator=torch.Generator().manual_seed(4)) + torch.linspace(-1, 1, N)
    w_ref, words, s, zeros = names["awq_marlin_quantize"](w, types.scalar_types.uint4, group)
    _, q_w, scale, zp = names["quantize_weights"](w, types.scalar_types.uint4, group, zero_points=True)
    assert len(zp.unique()) > 4
    codes = pack(q_w.T.to(torch.uint8).contiguous())[None]
    scale, zero = scale.T.contiguous()[None], zp.T.to(torch.uint8).contiguous()[None]
    assert torch.equal(marlin.codes(codes)[0], words)
    assert torch.equal(marlin.scales(scale, K, group)[0], s)
    assert torch.equal(marlin.zeros(zero)[0], zeros)
    assert marlin.zeros(zero).shape == (1, K // group, N // 8)
    torch.testing.assert_close(ExpertWeights.int4(codes, scale, zero).dequantize(torch.float32, 0), w_ref.T)

    of_awq = zp.reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].reshape(zp.shape)
    packed = names["pack_cols"](of_awq, 4, *zp.shape)[None]
    assert torch.equal(marlin.zeros(zero), names["moe_awq_to_marlin_zero_points"](packed, *zp.shape, 4))


@pytest.mark.parametrize(
    ("sizes", "wanted"), [((5760, 2880), (5760, 2880)), ((2880, 2880), (3072, 2944)), ((64, 128), (64, 128))]
)
def test_marlin_pads_what_its_tiles_do_not_divide(sizes: tuple[int, int], wanted: tuple[int, int]) -> None:
    from benchmarks.peers import w4a16

    assert w4a16.marlin_sizes(*sizes) == wanted


def test_marlin_is_called_as_vllm_calls_it(
    tool: ModuleType, theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.peers import w4a16

    kinds = SimpleNamespace(float4_e2m1f=SimpleNamespace(id=4), uint4b8=SimpleNamespace(id=8))
    asked: list[tuple[object, ...]] = []
    theirs.gemm, theirs.types = lambda *args: asked.append(args), kinds
    monkeypatch.setattr(w4a16, "Marlin", lambda _place, **_: theirs)
    gemm = product(tool, "mxfp4", N=192, K=192)
    cell = tool.Cell(gemm, 16)
    ((name, call),) = w4a16.marlin(Path(), gemm, [16])(cell).items()
    assert call().shape == (32, 192)
    assert name == "marlin (padded to 256 x 256)"
    (arguments,) = asked
    assert [tuple(arguments[at].shape) for at in (0, 1, 2, 4)] == [(32, 256), (32, 256), (4, 16, 512), (4, 8, 256)]
    assert torch.equal(arguments[0][:, :192], cell.x)
    assert not arguments[0][:, 192:].any()
    assert arguments[15:] == (16, 1, False, 4, 32, 256, 256, True, False, True, False, -1, -1, -1)  # 8 rows an expert
    slots, experts, total = arguments[11:14]
    assert int(total) == len(slots) == 16 * len(experts)


def test_marlin_has_zero_points_where_vllm_passes_them(
    tool: ModuleType, theirs: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from benchmarks.peers import w4a16

    asked: list[tuple[object, ...]] = []
    theirs.gemm, theirs.types = lambda *args: asked.append(args), SimpleNamespace(uint4=SimpleNamespace(id=5))
    monkeypatch.setattr(w4a16, "Marlin", lambda _place, **_: theirs)
    gemm = product(tool, "int4_g128_zp")
    ((name, call),) = w4a16.marlin(Path(), gemm, [16])(tool.Cell(gemm, 16)).items()
    call()
    (arguments,) = asked
    assert name == "marlin"
    assert torch.equal(arguments[7], theirs.zeros(gemm.zero))  # b_qzeros of moe_wna16_marlin_gemm
    assert [at for at, argument in enumerate(arguments) if argument is None] == [3, 5, 6, 8, 9]
    assert arguments[18] == 5
    assert arguments[25] is False  # is_zp_float


def test_a_library_that_is_absent_is_reported_in_every_cell(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tool.vllm_kernels, "package", lambda place: place)
    monkeypatch.setattr(tool, "Clock", HostClock)
    monkeypatch.setattr(tool, "products", lambda *_: iter([product(tool, "int4_g32")]))
    monkeypatch.setattr(sys, "path", [*sys.path])
    rows: list[dict[str, object]] = []
    asked = ["--vllm", str(tmp_path), "--out", "o", "--formats", "int4_g32", "--tokens", "1,16", "--peers", "marlin"]
    options = tool.arguments(asked)
    assert tool.measure(options, rows.append) == 0
    assert [row["tokens"] for row in rows] == [1, 16]
    assert all(row["us"].keys() == {"ours"} and row["failed"].keys() == {"marlin"} for row in rows)
    rows.clear()
    options.budget = -1.0
    assert tool.measure(options, rows.append) == 0
    assert rows == []


def test_the_table(tool: ModuleType) -> None:
    def line(format: str, gemm: str, tokens: int, **us: float) -> dict[str, object]:
        return {
            "format": format,
            "model": format[-3:],
            "gemm": gemm,
            "tokens": tokens,
            "us": {name.replace("_", " "): time_us for name, time_us in us.items()},
        }

    padded = {"marlin (padded to 3072 x 2944)": 400.0, "ours": 100.0}
    lines = tool.table(
        [
            line("int4_g32", "down", 1, ours=10, marlin=20, humming=15),
            line("int4_g128", "down", 1, ours=10, marlin=6),
            line("int4_g128_zp", "down", 1, ours=10, marlin=30),
            line("mxfp4", "down", 1, ours=10),
            {**line("mxfp4", "gate_up", 8192), "us": padded},
        ]
    )
    assert lines[0] == "| tokens | 1 | 8,192 |"
    assert lines[2:8] == [
        "| int4: g32, 128 | 0.95 (0.60) | - |",
        "| int4: marlin | 1.10 (0.60) | - |",
        "| int4: humming | 1.50 (1.50) | - |",
        "| int4_g128_zp: _zp | 3.00 (3.00) | - |",
        "| int4_g128_zp: marlin | 3.00 (3.00) | - |",
        "| mxfp4: fp4 | - | 4.00 (4.00) |",
    ]


def test_what_is_asked_for(tool: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    options = tool.arguments(["--vllm", ".", "--out", "o", "--formats", "int4_g128,mxfp4", "--models", "gpt-oss-20b"])
    assert tool.pairs(options) == [("mxfp4", "gpt-oss-20b")]
    for wrong, said in (
        (["--formats", "int3"], "'int3' is none of mxfp4, fp8_block"),
        (["--peers", "x"], "'x' is none of codes"),
        ([], "--vllm and --out are needed"),
    ):
        with pytest.raises(SystemExit):
            tool.arguments(wrong)
        assert said in capsys.readouterr().err


@pytest.mark.nightly
def test_a_process_that_fails_is_reported_and_the_rest_goes_on(tmp_path: Path) -> None:
    """(There is no vLLM in the folder.)"""
    out = tmp_path / "o.jsonl"
    asked = ["--vllm", str(tmp_path), "--out", str(out), "--formats", "mxfp4", "--tokens", "1", "--budget", "100"]
    ended = subprocess.run(
        [sys.executable, str(BENCHMARKS / "run.py"), "beside_quantised", *asked, "--peers", "marlin"],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 1
    assert ended.stdout.count("its process ended with 1") == 4  # two models, warm and timed
    assert "no vLLM in" in ended.stderr
    assert out.read_text() == ""


def test_recent_models_are_measured_where_they_are_asked_for(tool: ModuleType) -> None:
    words = ["--vllm", "v", "--out", "o"]
    usual, recent = tool.arguments(words), tool.arguments([*words, "--models", "flagships"])
    assert len(tool.pairs(usual)) == 16
    assert tool.pairs(recent) == [
        ("mxfp4", "v4-flash"),
        ("mxfp4", "v4-pro-ep8"),
        ("mxfp4", "kimi-k3-ep8"),
        ("fp8_block", "glm-5.3-flash"),
    ]
    products = list(tool.products(["mxfp4"], ["v4-pro-ep8"]))
    assert [(product.E, product.N, product.K) for product in products] == [(48, 6144, 7168), (48, 7168, 3072)]
    assert {product.model for product in tool.products(["mxfp4"])} == {"gpt-oss-20b", "gpt-oss-120b"}
