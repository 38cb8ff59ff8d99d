"""Count a replayed call's launches and torch operators, to distinguish more work from slower work."""

from __future__ import annotations

from collections.abc import Callable, Sized
from typing import Any

from benchmarks.speed.host_turns import WARM, Timed

Work = dict[str, dict[str, Any]]
KINDS = ("operators", "kernels")
_WIDE = 100  # longest kernel name, in characters


def work(timed: Timed, launched: Sized | None, settle: Callable[[], object]) -> Work:
    """Count each call's launches (by the growth of ``launched``; None: not known), operators and kernels.

    The calls are replayed ones, like those in timed batches. Operators and kernels are counted by name; kernels are
    ours, torch's, and copies, if torch's profiler sees the GPU.
    """
    works: Work = {}
    for name, (call, _) in timed.items():
        for _ in range(WARM):
            call()
        settle()
        before = 0 if launched is None else len(launched)
        call()
        settle()
        works[name] = {"launches": None if launched is None else len(launched) - before, **profiled(call, settle)}
    return works


def profiled(call: Callable[[], object], settle: Callable[[], object]) -> dict[str, dict[str, int]]:
    """Count the operators and kernels of a call."""
    import torch  # here, because host_trees, which prints the results, does not need torch
    from torch.autograd.profiler import profile  # torch.profiler imports Inductor

    with profile(use_device="cuda" if torch.cuda.is_available() else None, use_kineto=True) as seen:
        call()
        settle()
    counts: dict[str, dict[str, int]] = {kind: {} for kind in KINDS}
    for event in seen.function_events or ():
        on_gpu = event.device_type != torch.autograd.DeviceType.CPU
        names = counts["kernels" if on_gpu else "operators"]
        if on_gpu or not event.name.startswith(("cuda", "cu", "Activity Buffer")):
            names[event.name[:_WIDE]] = names.get(event.name[:_WIDE], 0) + 1
    return counts


def show(works: dict[str, Work]) -> None:
    """Print the two trees' numbers, and the names whose counts differ."""
    old, new = works["old"], works["new"]
    print(f"{'one replayed call':42} {'launches':>12} {'operators':>12} {'kernels':>12}  old, new")
    for name in new:
        shown = [f"{_known(old[name]['launches'])}, {_known(new[name]['launches'])}"]
        shown += [f"{sum(old[name][kind].values())}, {sum(new[name][kind].values())}" for kind in KINDS]
        print(f"{name:42} " + " ".join(f"{text:>12}" for text in shown))
        for kind in KINDS:
            for word in sorted(old[name][kind].keys() | new[name][kind].keys()):
                counts = [tree[name][kind].get(word, 0) for tree in (old, new)]
                if counts[0] != counts[1]:
                    print(f"    {word}: {counts[0]}, {counts[1]}")


def _known(launches: int | None) -> str:
    return "?" if launches is None else str(launches)
