"""Import engines' modules although torchvision's wheel is built for another torch.

Models with pictures import torchvision's transforms; nothing of their MoE layers does.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType


def stand_in() -> None:
    """Put empty modules in torchvision's place, unless it is there. transformers is told first that it is not."""
    if find_spec("torchvision") is not None:
        return
    from transformers.utils import is_torchvision_available

    assert not is_torchvision_available()  # it remembers
    names = ("transforms", "transforms.functional", "transforms.v2", "transforms.v2.functional")
    for name in ("torchvision", *(f"torchvision.{name}" for name in names)):
        module = sys.modules[name] = ModuleType(name)
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        module.InterpolationMode = object
        above, _, last = name.rpartition(".")
        if above:
            setattr(sys.modules[above], last, module)
