"""Parse ``--sm`` and ``--gpu``: the GPU capabilities that a build is for."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable

from ...artifacts.errors import HostError, InputError
from ...artifacts.records import Gpu, LocalGpu, Target
from ...kernels.arch import REFUSED, arch_of, supported
from ...kernels.chips import CHIPS, Chip, chip_for

SUPPORTED = supported()  # what Triton compiles and pretuned builds for

_ALSO = {"p100": 60, "v100": 70, "t4": 75, "orin": 87, "thor": 110, "spark": 121}  # words that no row of CHIPS has
_AMD = re.compile(r"(?:(?:amd|instinct)\b|mi ?[0-9]{3}|gfx[0-9]).*", re.I)
_FORM = re.compile(r"(?:sm_?|compute_?)?(?:(?P<dotted>[0-9]{1,2}\.[0-9])|(?P<plain>[0-9]{1,4}))(?P<suffix>a?)", re.I)


def parse_sm(text: str, native_sm: Callable[[], int | None], option: str = "--sm") -> tuple[int, ...]:
    """Parse ``80,90``, ``sm_90``, ``sm_90a``, ``9.0``, ``h100`` or ``native``, with commas, into sorted capabilities.

    ``native_sm`` returns this machine's capability (10 * major + minor), or None without a GPU; it is
    called only for ``native``.

    Raises
    ------
    InputError
        naming every part that is no supported capability, the nearest one, and the supported ones.
    HostError
        for ``native`` without a GPU.
    """
    parts = [part.strip() for part in text.split(",")]
    sms: set[int] = set()
    problems: list[str] = []
    for part in parts:
        if part.lower() == "native":
            sm = native_sm()
            if sm is None:
                raise HostError(f"no NVIDIA GPU found here; name the capabilities, e.g. {option} 80,90")
        elif match := _FORM.fullmatch(part):
            sm = int((match["dotted"] or match["plain"]).replace(".", ""))
            if match["suffix"] and sm in SUPPORTED and not arch_of(sm).arch_specific:
                problems.append(f"'{part}': architecture-specific code begins at sm_90a; did you mean {sm}?")
                continue
        elif len(named := _of_gpu(part)) == 1:
            sm = named[0]
        elif _AMD.fullmatch(part):
            problems.append(f"'{part}' is no NVIDIA GPU: no kernels are built for it, torch for ROCm runs there")
            continue
        else:
            problems.append(f"'{part}' is no GPU or capability{_suggestion(part)}" if part else "an empty part")
            continue
        if sm in SUPPORTED:
            sms.add(sm)
        elif sm in REFUSED:
            problems.append(f"'{part}': {REFUSED[sm]}")
        else:
            problems.append(f"'{part}' is not supported{_suggestion(part if part.lower() != 'native' else str(sm))}")
    if problems:
        supported = ", ".join(str(sm) for sm in SUPPORTED)
        mistakes = "; ".join(dict.fromkeys(problems))
        raise InputError(
            f"{option} {text or repr(text)}: {mistakes}{'' if mistakes.endswith('?') else '.'} Supported: {supported}, "
            "native, and GPUs by name, such as h100"
        )
    return tuple(sorted(sms))


def parse_gpu(text: str, here: Callable[[], LocalGpu]) -> LocalGpu:
    """Parse one GPU: ``h100`` with its published figures, ``90`` for any GPU of that capability, or ``native``.

    Raises
    ------
    InputError
        for several GPUs, or an unsupported GPU.
    HostError
        for ``native`` without a GPU.
    """
    part = text.strip()
    if part.lower() == "native":
        return here()
    if "," in part:
        raise InputError(f"--gpu {text}: wanted one GPU, e.g. h100")
    chips = [chip for chip in _chips_of(part) if chip.sm in SUPPORTED]
    if chips:
        chip = chips[0]
        return LocalGpu(chip.sm, Gpu(f"NVIDIA {chip.names[0]}", chip.sm_count, chip.memory_gib << 10, 0))
    (sm,) = parse_sm(part, lambda: None, "--gpu")
    chip = chip_for(sm)
    return LocalGpu(sm, Gpu("", chip.sm_count, chip.memory_gib << 10, 0))


def target_of(sm: int) -> Target:
    """The target that a build for ``sm`` compiles to: from sm_90 on, code for that one architecture (sm_90a).

    Raises
    ------
    InputError
        if ``sm`` is not supported.
    """
    if sm not in SUPPORTED:
        raise InputError(f"sm_{sm} is not supported. Supported: {', '.join(map(str, SUPPORTED))}")
    return arch_of(sm).target


def known_names() -> tuple[str, ...]:
    """The lower-case words that ``--sm`` takes for one capability: numbers, ``native`` and names of GPUs."""
    forms = [chip.name.lower().split() for chip in CHIPS]
    gpus = [name for form in forms for name in (form[0], "".join(form[:2]), "".join(form)) if not name.endswith("gb")]
    named = (name for name in dict.fromkeys((*gpus, *_ALSO)) if [sm in SUPPORTED for sm in _of_gpu(name)] == [True])
    return (*map(str, SUPPORTED), "native", *named)


def _suggestion(part: str) -> str:
    """A hint: the capability of a GPU of that name, else names like it, else the nearest supported capability."""
    if named := _of_gpu(part):
        return f"; did you mean {' or '.join(map(str, named))}?"
    word = re.sub(r"[^a-z0-9]", "", part.lower())
    if re.match(r"[a-z]+[0-9]{3}", word) and not word.startswith("sm"):  # looks like a GPU's name
        near = difflib.get_close_matches(word, [name for name in known_names() if not name[0].isdigit()], n=2)
        return f"; did you mean {' or '.join(near)}?" if near else ""
    digits = re.sub(r"[^0-9]", "", part)
    if not digits:
        return "; did you mean native?" if part.lower().startswith("n") else ""
    if len(digits) > 3:
        return ""
    number = int(digits) * (10 if len(digits) == 1 else 1)  # 9 means 9.0
    return f"; did you mean {min(SUPPORTED, key=lambda sm: (abs(sm - number), sm))}?"


def _of_gpu(part: str) -> list[int]:
    """The capabilities of the GPUs that a name with a number in it (H100, rtx4090), or one of ``_ALSO``, may mean."""
    if also := [sm for word, sm in _ALSO.items() if word in _words(part)]:
        return also
    return sorted({chip.sm for chip in _chips_of(part)})


def _chips_of(part: str) -> list[Chip]:
    """The rows of CHIPS that a name with a number in it may mean."""
    words = _words(part)
    if not re.search("[0-9]", " ".join(words)):
        return []
    forms = ((chip, chip.name.lower().split()) for chip in CHIPS)
    return [chip for chip, form in forms if words <= {*form, "".join(form), "".join(form[:2])}]


def _words(part: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", part.lower())) - {"nvidia", "geforce"}
