"""Which of a module's cases are asked for: kernels are interpreted in one process for all of them."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def asked(request: pytest.FixtureRequest) -> list[str]:
    """The names of the cases of this module that are selected, each once."""
    here = (item for item in request.session.items if item.path == request.path)
    calls = (getattr(item, "callspec", None) for item in here)
    return list(dict.fromkeys(call.params["name"] for call in calls if call is not None and "name" in call.params))
