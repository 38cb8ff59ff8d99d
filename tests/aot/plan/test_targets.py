from __future__ import annotations

import pytest

from pretuned.aot.plan.targets import SUPPORTED, known_names, parse_sm, target_of
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.records import Target


def no_gpu() -> None:
    return None


def must_not_be_asked() -> int:
    raise AssertionError("asked for the GPU, and nobody said native")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("80,90", (80, 90)),
        ("90,80,90", (80, 90)),
        ("sm_90", (90,)),
        ("sm90", (90,)),
        ("SM_90a", (90,)),
        ("9.0", (90,)),
        ("9.0a", (90,)),
        ("12.1, 10.0", (100, 121)),
        ("compute_103", (103,)),
        ("h100", (90,)),
        ("h100,H200,a100", (80, 90)),
        ("A100-80GB", (80,)),
        ("a10", (86,)),
        ("NVIDIA GeForce RTX 4090", (89,)),
        ("rtx5090", (120,)),
        ("gb200", (100,)),
        ("Jetson Orin, DGX Spark", (87, 121)),
        (",".join(str(sm) for sm in SUPPORTED), SUPPORTED),
    ],
)
def test_forms(text: str, wanted: tuple[int, ...]) -> None:
    assert parse_sm(text, must_not_be_asked) == wanted


def test_every_known_name_is_one_capability() -> None:
    assert {"90", "native", "a100", "h100", "rtx4090", "rtx5090", "gb200"} <= set(known_names())
    for name in known_names():
        assert len(parse_sm(name, lambda: 90)) == 1


def test_native() -> None:
    assert parse_sm("native", lambda: 90) == (90,)
    assert parse_sm("80,Native", lambda: 90) == (80, 90)
    with pytest.raises(HostError, match="no NVIDIA GPU found here; name the capabilities"):
        parse_sm("native", no_gpu)
    with pytest.raises(InputError, match=r"'native': no kernels are built for it"):
        parse_sm("native", lambda: 75)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("75x", r"'75x' is no GPU or capability; did you mean 80\?"),
        ("75", r"'75': no kernels are built for it, torch runs there"),
        ("6.1", r"'6\.1': no kernels"),
        ("Tesla T4", r"'Tesla T4': no kernels"),
        ("v100", r"'v100': no kernels"),
        ("Jetson Thor", r"'Jetson Thor': no kernels"),
        ("mi300x", r"'mi300x' is no NVIDIA GPU: no kernels are built for it, torch for ROCm runs there"),
        ("9.5", r"'9\.5' is not supported; did you mean 90\?"),
        ("9", r"'9' is not supported; did you mean 90\?"),
        ("110", r"'110': no kernels are built for it"),
        ("100f", r"'100f' is no GPU or capability; did you mean 100\?"),
        ("nativ", r"did you mean native\?"),
        ("x4", r"'x4' is no GPU or capability"),
        ("h300", r"'h300' is no GPU or capability; did you mean h[12]00 or "),
        ("4090", r"'4090' is not supported; did you mean 89\?"),
        ("rtx 6000", r"'rtx 6000' is no GPU or capability; did you mean 89 or 120\?"),
        ("80-90", r"'80-90' is no GPU or capability\. Supported"),
        ("", "an empty part"),
        ("80,,90", "an empty part"),
        ("sm_101", "'sm_101': Triton's compiler aborts"),
        ("107", "'107': Triton's compiler aborts"),
        ("sm_80a", r"begins at sm_90a; did you mean 80\?"),
        ("9.00", "is no GPU or capability"),
        ("٩٠", "is no GPU or capability"),
    ],
)
def test_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        parse_sm(text, must_not_be_asked)
    assert "Supported: 80, 86, 87, 89, 90, 100, 103, 120, 121, native" in str(caught.value)


def test_every_mistake_is_reported() -> None:
    with pytest.raises(InputError, match=r"'75'.*'x'.*'101'"):
        parse_sm("75,x,80,101", must_not_be_asked)


def test_the_message_reads_well() -> None:
    with pytest.raises(
        InputError,
        match=r"^--sm 75: '75': no kernels .*, torch runs there\. Supported: 80, ",
    ):
        parse_sm("75", must_not_be_asked)
    with pytest.raises(InputError, match=r"^--sm '': an empty part\. Supported: 80, "):
        parse_sm("", must_not_be_asked)


def test_target() -> None:
    assert target_of(89) == Target(89, arch_specific=False)
    assert [str(target_of(sm)) for sm in (80, 90, 121)] == ["sm_80", "sm_90a", "sm_121a"]
    with pytest.raises(InputError, match="sm_75 is not supported"):
        target_of(75)
