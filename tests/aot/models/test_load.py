from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretuned.aot.models.catalogue import catalogue
from pretuned.aot.models.load import LoadedModels, load_models, words
from pretuned.aot.plan.plan import plan, planned_on
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import PLAIN_DTYPES, PRECISIONS, DType, Layout, Op, dtypes_of

ROOT = Path(__file__).resolve().parents[3]
MINE = "shape:E=16,H=512,I=240,k=2"
QWEN3 = {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


def written(tmp_path: Path, text: str) -> str:
    file = tmp_path / "models.txt"
    file.write_text(text)
    return str(file)


def mistakes(*values: str) -> list[str]:
    with pytest.raises(InputError) as caught:
        load_models(values)
    return str(caught.value).split("\n")


def test_a_file_of_models(tmp_path: Path) -> None:
    file = written(
        tmp_path,
        "\ufeff# models\r\n\r\n"
        "Qwen/Qwen3-30B-A3B tp=1,2,4 ep=1,8 dtype=bf16   # trailing\r\n"
        f"  {MINE} name=mine tokens=4..64 gated=0\r\n",
    )
    loaded = load_models([file])
    assert [(shape.name, shape.tp, shape.ep) for shape in loaded.shapes] == [
        *(("Qwen/Qwen3-30B-A3B", tp, ep) for tp in (1, 2, 4) for ep in (1, 8)),
        ("mine", 1, 1),
    ]
    mine = loaded.shapes[-1]
    assert (mine.E, mine.k, mine.H, mine.I, mine.tokens, mine.gated) == (16, 2, 512, 240, (4, 64), False)
    assert loaded.notes == ()


def test_the_models_of_the_tests_on_a_gpu_have_every_dtype_and_layout() -> None:
    planned = plan(load_models([str(ROOT / "tests" / "gpu" / "gpu-models.txt")]).shapes)
    problems = planned_on(planned, [90]).problems
    plain, quantised = (
        {(problem.dtype, problem.layout) for problem in problems if problem.dtype.quantised is q} for q in (False, True)
    )
    assert plain == {(dtype, layout) for dtype in PLAIN_DTYPES for layout in (Layout.NK, Layout.KN)}
    ordered = {dtype for dtype in DType if dtype.quantised}
    stored = {dtype for dtype in DType if dtype.quantised and not dtype.quantises_x}
    assert quantised == {*itertools.product(ordered, [Layout.NK]), *itertools.product(stored, [Layout.STORED])}


def test_defaults() -> None:
    (shape,) = load_models([MINE]).shapes
    assert shape.name == "E16-H512-I240-k2"
    assert (shape.dtypes, shape.tokens, shape.gated) == ((DType.BF16,), (1, 65536), True)
    assert (shape.shared_experts, shape.ops, shape.layouts) == (0, tuple(Op), (Layout.NK,))


def test_ops() -> None:
    assert load_models([MINE]).shapes[0].ops == tuple(Op)
    assert load_models([MINE + " ops=dw,forward"]).shapes[0].ops == (Op.DW, Op.FORWARD)


def test_some_ops_of_each() -> None:
    shape = "shape:E=8,H=256,I=128,k=2"
    (loaded,) = load_models([f"{shape} ops=forward,dX,dW"], only=[Op.FORWARD, Op.DX]).shapes
    assert loaded.ops == (Op.FORWARD, Op.DX)
    with pytest.raises(InputError, match=r"ops=dW: --ops forward leaves nothing of it"):
        load_models([f"{shape} ops=dW"], only=[Op.FORWARD])


def test_a_user_that_is_not_there_is_no_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nosuchuser"):
        load_models(["~nosuchuser/models.txt"])


def test_a_model_is_built_for_the_layouts_that_programs_hold_it_in() -> None:
    both, *alone = load_models(
        ["openai/gpt-oss-20b", "gpt-oss-20b layout=nk tp=2", "gpt-oss-20b layout=kn tp=4"]
    ).shapes
    assert both.layouts == (Layout.NK, Layout.KN)
    assert [shape.layouts for shape in alone] == [(Layout.NK,), (Layout.KN,)]


def test_layouts() -> None:
    shape, other = load_models([MINE + " layout=nk,kn", MINE + " layout=KN"]).shapes
    assert (shape.layouts, other.layouts) == ((Layout.NK, Layout.KN), (Layout.KN,))
    assert str(shape).endswith("dtype=bf16 layout=nk,kn")
    with pytest.raises(InputError, match=r"layout=nm: unknown layout 'nm'.*nk"):
        load_models([MINE + " layout=nm"])


def test_dtypes() -> None:
    (shape,) = load_models([MINE + " dtype=fp32,tf32,FP16,fp32"]).shapes
    assert shape.dtypes == (DType.FP32, DType.TF32, DType.FP16)


def test_shared_experts() -> None:
    assert load_models(["deepseek-ai/DeepSeek-V2"]).shapes[0].shared_experts == 0
    (shape,) = load_models(["deepseek-ai/DeepSeek-V2 shared=fuse ep=8"]).shapes
    assert (shape.shared_experts, shape.experts_per_rank, shape.experts_per_token) == (2, 22, 8)
    # A shared expert that is as wide as four routed ones is four of them.
    assert load_models(["Qwen/Qwen1.5-MoE-A2.7B shared=fuse"]).shapes[0].gemms()[0].E == 64


def test_paths_are_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my model").mkdir()
    (tmp_path / "my model" / "config.json").write_text(json.dumps(QWEN3))
    file = written(tmp_path, "'my model' tp=2\n\"my model/config.json\" name=org/other\n")
    assert [(shape.name, shape.tp) for shape in load_models([file]).shapes] == [("my-model", 2), ("org/other", 1)]
    monkeypatch.chdir(tmp_path)
    assert load_models(["'./my model'"]).shapes[0].I == 768
    assert load_models(["models.txt", "'my model/config.json' tp=4"]).shapes[-1].tp == 4
    for path in ("my model", "./my model/config.json", str(tmp_path / "my model")):
        assert load_models([path]).shapes[0].I == 768


def test_a_config_given_as_a_path_is_no_file_of_specs(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    for loaded in (tmp_path, tmp_path / "config.json"):
        (shape,) = load_models([str(loaded)]).shapes
        assert (shape.E, shape.I) == (128, 768)


def test_a_bare_name_is_taken_and_told() -> None:
    loaded = load_models(["qwen3-30b-a3b"])
    assert loaded.shapes[0].name == "Qwen/Qwen3-30B-A3B"
    assert loaded.notes == ("--models 'qwen3-30b-a3b': 'qwen3-30b-a3b' is taken as Qwen/Qwen3-30B-A3B",)


@pytest.mark.parametrize(
    ("spec", "weights", "dtypes"),
    [
        ("openai/gpt-oss-20b", "mxfp4", (DType.MXFP4,)),
        ("openai/gpt-oss-20b tp=3", "mxfp4", (DType.MXFP4,)),
        ("deepseek-ai/DeepSeek-R1", "fp8_block", (DType.FP8_BLOCK, DType.FP8_BLOCK_A16)),
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8_block", (DType.FP8_BLOCK, DType.FP8_BLOCK_A16)),
        ("moonshotai/Kimi-K2-Thinking ep=8", "int4_g32", (DType.INT4_G32,)),
    ],
)
def test_a_model_is_built_in_the_format_that_it_is_published_in(
    spec: str, weights: str, dtypes: tuple[DType, ...]
) -> None:
    loaded = load_models([spec])
    (shape,) = loaded.shapes
    assert (shape.weights, shape.dtypes, shape.instead, loaded.notes) == ((weights,), dtypes, (DType.BF16,), ())


def test_so_is_a_checkpoint_by_its_config(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps(
            QWEN3
            | {
                "quantization_config": {
                    "quant_method": "fp8",
                    "weight_block_size": [128, 128],
                    "activation_scheme": "dynamic",
                }
            }
        )
    )
    (shape,) = load_models([f"{tmp_path} name=mine"]).shapes
    assert (shape.dtypes, shape.instead) == ((DType.FP8_BLOCK, DType.FP8_BLOCK_A16), (DType.BF16,))
    (plain,) = load_models([f"{tmp_path} name=mine weights=bf16"]).shapes
    assert (plain.dtypes, plain.instead) == ((DType.BF16,), ())


def test_whatever_the_sizes_the_published_format_is_built() -> None:
    """1440 is no multiple of 64: such codes are read as they are stored."""
    loaded = load_models(["openai/gpt-oss-20b tp=1,2"])
    assert [(shape.tp, shape.dtypes, shape.instead) for shape in loaded.shapes] == [
        (tp, (DType.MXFP4,), (DType.BF16,)) for tp in (1, 2)
    ]
    assert loaded.notes == ()


def test_a_dtype_goes_before_the_format_and_is_reported() -> None:
    loaded = load_models(["deepseek-ai/DeepSeek-R1 dtype=fp16", "Qwen/Qwen3-30B-A3B-FP8 dtype=fp16"])
    assert {(shape.weights, shape.dtypes, shape.instead) for shape in loaded.shapes} == {
        (("fp8_block",), (DType.FP16,), ())
    }
    assert loaded.notes == (
        "fp16 is built for deepseek-ai/DeepSeek-R1, Qwen/Qwen3-30B-A3B-FP8; weights=fp8_block builds the checkpoint's "
        "format",
    )


def test_weights_of_a_spec_go_before_the_checkpoint_s() -> None:
    def read_as(spec: str) -> tuple[tuple[str, ...], tuple[DType, ...], int]:
        loaded = load_models([spec])
        return loaded.shapes[0].weights, loaded.shapes[0].dtypes, len(loaded.notes)

    assert read_as("deepseek-ai/DeepSeek-V3 weights=bf16") == (("bf16",), (DType.BF16,), 0)
    assert read_as("deepseek-ai/DeepSeek-V3 weights=fp16") == (("fp16",), (DType.FP16,), 0)
    assert read_as("deepseek-ai/DeepSeek-V3 dtype=fp16") == (("fp8_block",), (DType.FP16,), 1)
    both = (("fp8_block", "bf16"), (DType.FP8_BLOCK, DType.FP8_BLOCK_A16, DType.BF16), 0)
    assert read_as("deepseek-ai/DeepSeek-V3 weights=fp8_block,bf16") == both
    assert read_as("Qwen/Qwen3-30B-A3B weights=mxfp4,nvfp4") == (("mxfp4", "nvfp4"), (DType.MXFP4, DType.NVFP4), 0)
    twice = read_as("Qwen/Qwen3-30B-A3B weights=fp8_channel,fp8_channel_a16")
    assert twice == (("fp8_channel", "fp8_channel_a16"), (DType.FP8_CHANNEL, DType.FP8_CHANNEL_A16), 0)
    assert read_as("Qwen/Qwen3-30B-A3B weights=int4_g128_zp") == (("int4_g128_zp",), (DType.INT4_G128_ZP,), 0)
    assert read_as(f"{MINE} weights=mxfp4 dtype=fp16") == (("mxfp4",), (DType.FP16,), 1)
    assert read_as(f"{MINE} weights=int4_g128_zp dtype=fp16") == (("int4_g128_zp",), (DType.FP16,), 1)


@pytest.mark.parametrize("name", [name for name, precision in PRECISIONS.items() if precision.quantised])
def test_every_format_is_built_where_it_is_asked_for_whatever_the_sizes(name: str) -> None:
    for sizes in ("I=240", "I=256"):
        loaded = load_models([f"{MINE.replace('I=240', sizes)} weights={name} name=mine"])
        (shape,) = loaded.shapes
        assert (shape.dtypes, loaded.notes) == (dtypes_of(name), ())
        assert shape.dtypes


@pytest.mark.parametrize("how", ["awq", "bitsandbytes", "compressed-tensors"])
def test_a_checkpoint_quantised_in_another_way_is_not_taken_for_fp8(tmp_path: Path, how: str) -> None:
    config = {
        "model_type": "mixtral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "quantization_config": {"quant_method": how},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = load_models([f"{tmp_path} name=mine"]).notes
    name = {"bitsandbytes": "nf4"}.get(how, how)
    assert note == f"no kernels for {name} yet: bf16 is built instead for mine"


def test_every_kind_of_experts_is_built() -> None:
    shapes = load_models(["ERNIE-4.5-VL-28B-A3B-PT tp=1,2 ops=forward", "jetmoe/jetmoe-8b name=jet"]).shapes
    assert [(shape.name, shape.I, shape.tp, shape.gated) for shape in shapes] == [
        ("baidu/ERNIE-4.5-VL-28B-A3B-PT", 1536, 1, True),
        ("baidu/ERNIE-4.5-VL-28B-A3B-PT", 1536, 2, True),
        ("baidu/ERNIE-4.5-VL-28B-A3B-PT+vision", 512, 1, True),
        ("baidu/ERNIE-4.5-VL-28B-A3B-PT+vision", 512, 2, True),
        ("jet", 5632, 1, True),
        ("jet+attention", 2048, 1, False),
    ]
    fused, vision = load_models(["ERNIE-4.5-VL-28B-A3B-PT shared=fuse"]).shapes
    assert (fused.shared_experts, vision.shared_experts) == (2, 0)


@pytest.mark.parametrize("model", ["ibm-research/moe-7b-1b-active-shared-experts", "Zyphra/ZAYA1-8B"])
def test_sizes_that_nobody_published_are_reported(model: str) -> None:
    (note,) = load_models([model]).notes
    assert "class's defaults, maybe not the checkpoint's: give its config.json" in note


def test_a_shard_given_twice_counts_once(tmp_path: Path) -> None:
    file = written(tmp_path, f"{MINE} tp=1,2\n{MINE} tp=2,3\n")
    loaded = load_models([file])
    assert [shape.tp for shape in loaded.shapes] == [1, 2, 3]
    assert loaded.notes == (
        f"{file}:2: E16-H512-I240-k2 tp=2 ep=1 dtype=bf16 is there already ({file}:1); counted once",
    )


def test_one_name_for_two_sizes() -> None:
    (message,) = mistakes(MINE + " name=a", "shape:E=8,H=512,I=240,k=2 name=a")
    assert "'a' has other sizes at" in message
    assert "give one of them another name=" in message


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("Qwen/Qwen3-30B-A4B", "unknown model 'Qwen/Qwen3-30B-A4B': neither .*; did you mean 'Qwen/Qwen3-30B-A3B'"),
        ("Qwen/Qwen3-Nxt", "did you mean 'Qwen/Qwen3-Next-80B-A3B-Instruct'"),
        ("qwn3", "did you mean 'Qwen/Qwen3-30B-A3B'"),
        ("qzqzqz", "unknown model 'qzqzqz': .*`aot models` lists the catalogue; .*config.json, or shape:E=128,H="),
        ("./nope", "nope: no such file"),
        ("nope.json", r"nope\.json: no such file"),
        ("~/nope-nope.json", r"nope-nope\.json: no such file"),
        ("x" * 5000, "unknown model 'xxx"),
        ("'open", "a quote is opened and never closed: 'open"),
        ("a\x00b", "control character"),
        ("shapes:E=1", "a shape is written shape:E="),
        ("shape:E=4,H=0,I=8,k=2", "H=0: wanted 1 to 1048576"),
        ("shape:E=4,H=-3,I=8,k=2", "H=-3: wanted 1 to"),
        ("shape:E=4,H=8,I=8,k=5", "k=5 is more than E=4"),
        ("shape:E=4,H=8,I=8", "the shape lacks k"),
        ("shape:E=4,H=8,I=8,K=2", r"did you mean 'k=2'\?"),
        ("shape:E=4,H=8,I=8,k=2,k=2", "k= is given twice"),
        ("shape:E=4,H=1000000000000,I=8,k=2", "H=1000000000000: too large, wanted 1 to 1048576"),
        ("shape:E=4,H=8,I=10000000000000,k=2", "I=10000000000000: too large, wanted 1 to 1048576"),
        ("shape:E=4,H=10^12,I=8,k=2", r"H=10\^12: wanted a whole number, 1 to 1048576"),
        (MINE + " tokens=1..10^12", r"tokens=1..10\^12: wanted least..most, e.g. tokens=1..65536, at most 16777216"),
        (MINE + " tokens=1..1000000000000", "tokens=1..1000000000000: too large, wanted at most 16777216"),
        ("shape:E=4,H=8,I=1e3,k=2", "I=1e3: wanted a whole number"),
        ("shape:E=4,H=8, I=8,k=2", "sizes are one word"),
        (MINE + " tp=7", r"tp=7 does not divide I=240; tp can be 1, 2, 3, 4, 5, 6, 8, 10, .*, 48, 60, \.\.\."),
        (MINE.replace("240", "64") + " tp=7", "tp=7 does not divide I=64; tp can be 1, 2, 4, 8, 16, 32, 64$"),
        (MINE + " ep=3", "ep=3 does not divide E=16; ep can be 1, 2, 4, 8, 16$"),
        (MINE + " tp=0", "'0' is no whole number from 1"),
        (MINE + " tp=1,", "'' is no whole number from 1"),
        (MINE + " tp=-1", "'-1' is no whole number from 1"),
        (MINE + " tp=1 tp=2", "tp= is given twice; list the values"),
        (MINE + " experts=4", "unknown key 'experts', wanted one of tp, ep"),
        (MINE + " dtypes=bf16", r"unknown key 'dtypes'; did you mean 'dtype'\?"),
        (MINE + " tp", r"'tp' is no option, wanted key=value; did you mean 'tp'\?"),
        (MINE + " dtype=fp8", "dtype 'fp8'; it is the products' element type.* weights=, e.g. weights=fp8_block"),
        (MINE + " weights=fp8", "unknown weights 'fp8'; did you mean fp8_block or fp8_block_a16 or fp8_channel or"),
        (MINE + " weights=mxfp6", r"unknown weights 'mxfp6'; did you mean 'mxfp8'\?"),
        (MINE + " weights=bf16 dtype=fp16", "weights=bf16 and dtype=fp16 disagree"),
        (MINE + " dtype=bfloat16", r"unknown dtype 'bfloat16'; did you mean 'bf16'\?"),
        (MINE + " ops=forwards", r"unknown ops 'forwards'; did you mean 'forward'\?"),
        (MINE + " training=int8", "training=int8: wanted fp8"),
        ("shape:E=8,H=256,I=192,k=2 training=fp8", r"H=256 and I/tp=192: wanted multiples of 128"),
        (MINE + " tokens=64..1", "wanted 1 <= least <= most"),
        (MINE + " tokens=0..1", "wanted 1 <= least <= most"),
        (MINE + " tokens=1-64", "wanted least..most"),
        (MINE + " gated=yes", "gated=yes: wanted 1 or 0"),
        (MINE + " shared=2", "shared=2: wanted fuse or no"),
        (MINE + " shared=fuse", "shared=fuse: the model has no shared experts"),
        (MINE + " name=../x", "name=../x: wanted up to 96 letters"),
        (MINE + " name=", "name=: wanted up to 96 letters"),
    ],
)
def test_a_bad_line(tmp_path: Path, line: str, message: str) -> None:
    file = written(tmp_path, "# first\n" + line + "\n")
    with pytest.raises(InputError, match=message) as caught:
        load_models([file])
    assert f"{file}:2: " in str(caught.value)


def test_all_bad_lines_at_once(tmp_path: Path) -> None:
    file = written(tmp_path, f"{MINE} tp=7 ep=3\nqwn\n{MINE}\n{MINE} tp=x gated=2\n")
    head, *lines = mistakes(file, "nope.txt", "'")
    assert head == "7 mistakes in what to build for:"
    assert [line.removeprefix(file).split(" ")[0] for line in lines[:5]] == [":1:", ":1:", ":2:", ":4:", ":4:"]
    assert lines[5].startswith("nope.txt: no such file (looked in /")
    assert lines[6].startswith("--models ''': a quote is opened")


@pytest.mark.parametrize("text", ["", "\n\n", "# only\n  # comments\n"])
def test_an_empty_file(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, text)
    assert mistakes(file) == [f"{file}: no models in it; write one a line, e.g. Qwen/Qwen3-30B-A3B tp=1,2"]


def test_no_value_at_all() -> None:
    assert mistakes() == ["no models are given; name a models.txt, or a model, e.g. --models Qwen/Qwen3-30B-A3B"]
    assert mistakes("") == ["--models '': no model is named"]


def test_files_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "models.txt"
    file.write_bytes(b"Qwen\xff")
    assert mistakes(str(file)) == [f"{file}: byte 4 is no UTF-8; save the file as UTF-8 text"]
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    assert mistakes(str(file)) == [f"{file}: larger than 4 MiB; this is no models.txt"]


def test_a_dense_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8}))
    (message,) = mistakes(str(tmp_path))
    assert "no experts: found hidden_size but none of" in message


def test_the_models_of_this_repository() -> None:
    loaded = load_models([str(ROOT / "models.txt")])
    assert {"Qwen/Qwen3-30B-A3B", "deepseek-ai/DeepSeek-V3", "openai/gpt-oss-20b"} <= {
        shape.name for shape in loaded.shapes
    }
    built = {(shape, dtype) for shape in loaded.shapes for dtype in (*shape.dtypes, *shape.instead)}
    assert len(plan(loaded.shapes).models) == len(built)


def test_a_tab_ends_a_word_too(tmp_path: Path) -> None:
    (tmp_path / "models.txt").write_text("catalogue\tdtype=fp16 tp=1\n")
    shapes = load_models([str(tmp_path / "models.txt")]).shapes
    assert shapes == load_models(["catalogue dtype=fp16 tp=1"]).shapes


def test_the_whole_catalogue_is_one_word() -> None:
    loaded = load_models(["catalogue dtype=fp16 tokens=1..64"])
    assert {shape.name for shape in loaded.shapes} == {
        id_ for id_, entry in catalogue().items() if entry.source != "default"
    }
    assert {(shape.dtypes, shape.tokens) for shape in loaded.shapes} == {((DType.FP16,), (1, 64))}
    for same in ('"catalogue" tp=2', "Catalogue tp=2"):
        assert load_models([same]).shapes == load_models(["catalogue tp=2"]).shapes
    assert mistakes("catalogue tp=2 name=all") == [
        "--models 'catalogue tp=2 name=all': name= can't be given for catalogue, whose models have names of their own"
    ]


def test_words() -> None:
    assert words("") == []
    assert words(" # x") == []
    assert words("a#b  'c d'=\"#\" #e 'f") == ["a#b", "c d=#"]


@given(st.lists(st.text(max_size=12), max_size=4))
def test_any_text_is_models_or_an_input_error(parts: list[str]) -> None:
    try:
        loaded = load_models([MINE + " " + " ".join(parts)])
    except InputError:
        return
    assert isinstance(loaded, LoadedModels)
    assert len(loaded.shapes) == 1 or any("," in part for part in parts)
