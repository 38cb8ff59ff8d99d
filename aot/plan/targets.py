"""``--sm``: the GPU capabilities that a build is for."""

from __future__ import annotations

import re
from collections.abc import Callable

from ...artifacts.errors import HostError, InputError
from ...artifacts.records.target import Target
from ...kernels.hardware.arch import REFUSED, arch_of, supported
from ...kernels.hardware.chips import CHIPS

SUPPORTED = supported()  # what Triton compiles and pretuned builds for

_ALSO = {"p100": 60, "v100": 70, "t4": 75, "orin": 87, "thor": 110, "spark": 121}  # words that no row of CHIPS has
_AMD = re.compile(r"(?:(?:amd|instinct)\b|mi ?[0-9]{3}|gfx[0-9]).*", re.I)
_FORM = re.compile(r"(?:sm_?|compute_?)?(?:(?P<dotted>[0-9]{1,2}\.[0-9])|(?P<plain>[0-9]{1,4}))(?P<suffix>a?)", re.I)


def parse_sm(text: str, native_sm: Callable[[], int | None]) -> tuple[int, ...]:
    """``80,90``, ``sm_90``, ``sm_90a``, ``9.0``, ``h100`` or ``native``, with commas -> capabilities, ascending.

    ``native_sm`` returns this machine's capability (10 * major + minor), or None where there is no GPU; it is
    called only for ``native``.

    Raises
    ------
    InputError
        naming every part that is no supported capability, the nearest one, and the supported ones.
    HostError
        for ``native`` where there is no GPU.
    """
    parts = [part.strip() for part in text.split(",")]
    found: set[int] = set()
    problems: list[str] = []
    for part in parts:
        if part.lower() == "native":
            sm = native_sm()
            if sm is None:
                raise HostError("--sm native: no NVIDIA GPU found here; name the capabilities, e.g. --sm 80,90")
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
            problems.append(f"'{part}' is no capability{_suggestion(part)}" if part else "an empty part")
            continue
        if sm in SUPPORTED:
            found.add(sm)
        elif sm in REFUSED:
            problems.append(f"'{part}': {REFUSED[sm]}")
        else:
            problems.append(f"'{part}' is not supported{_suggestion(part if part.lower() != 'native' else str(sm))}")
    if problems:
        supported = ", ".join(str(sm) for sm in SUPPORTED)
        told = "; ".join(dict.fromkeys(problems))
        raise InputError(
            f"--sm {text or repr(text)}: {told}{'' if told.endswith('?') else '.'} Supported: {supported}, native"
        )
    return tuple(sorted(found))


def target_of(sm: int) -> Target:
    """The target that a build for ``sm`` compiles to: from 9.0 up code for that one architecture (sm_90a).

    Raises
    ------
    InputError
        if ``sm`` is not supported.
    """
    if sm not in SUPPORTED:
        raise InputError(f"sm_{sm} is not supported. Supported: {', '.join(str(one) for one in SUPPORTED)}")
    return arch_of(sm).target


def known_names() -> tuple[str, ...]:
    """What ``--sm`` takes as one capability: numbers, ``native`` and GPUs' names, in small letters, without blanks."""
    forms = [chip.name.lower().split() for chip in CHIPS]
    gpus = [name for form in forms for name in (form[0], "".join(form[:2]), "".join(form)) if not name.endswith("gb")]
    named = (name for name in dict.fromkeys((*gpus, *_ALSO)) if [sm in SUPPORTED for sm in _of_gpu(name)] == [True])
    return (*map(str, SUPPORTED), "native", *named)


def _suggestion(part: str) -> str:
    """The capability of a GPU so named, else the nearest supported one, by number."""
    if named := _of_gpu(part):
        return f"; did you mean {' or '.join(map(str, named))}?"
    digits = re.sub(r"[^0-9]", "", part)
    if not digits:
        return "; did you mean native?" if part.lower().startswith("n") else ""
    if len(digits) > 3:
        return ""
    number = int(digits) * (10 if len(digits) == 1 else 1)  # 9 means 9.0
    return f"; did you mean {min(SUPPORTED, key=lambda sm: (abs(sm - number), sm))}?"


def _of_gpu(part: str) -> list[int]:
    """The capabilities of the GPUs that a name with a number in it (H100, rtx4090), or one of ``_ALSO``, may mean."""
    words = set(re.findall(r"[a-z0-9]+", part.lower())) - {"nvidia", "geforce"}
    if also := [sm for word, sm in _ALSO.items() if word in words]:
        return also
    if not re.search("[0-9]", " ".join(words)):
        return []
    forms = ((chip.sm, chip.name.lower().split()) for chip in CHIPS)
    return sorted({sm for sm, form in forms if words <= {*form, "".join(form), "".join(form[:2])}})
