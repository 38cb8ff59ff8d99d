"""Valid bundles with numbers at their limits, through all that reads a bundle: a result, in time."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import golden_bundles
import pytest

from pretuned.aot.bundle.diff import diff, time_ratio
from pretuned.aot.bundle.merge import merge
from pretuned.aot.cli.inspect import contents
from pretuned.aot.demand import tuner
from pretuned.aot.report.page import page
from pretuned.aot.report.sheets import read, sheet
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle, open_bytes
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Bundle, Gpu, LocalGpu, Producer, Target
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import examine

INT, LONG = 2**31 - 1, 2**53 - 1
CONFIGS: list[tuple[tuple[str, int], ...]] = [
    (),
    (("block_m", INT),),
    Config(16, 16, 16, 1, 1, 1).pairs(),
    Config(256, 256, 256, 16, 8, 1024).pairs(),
    Config(128, 128, 64, 8, 3, loads=Loads.TMA, schedule=Schedule.COOPERATIVE).pairs(),
    Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG).pairs(),
    Config(32, 128, 192, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG).pairs(),
    Config(32, 192, 128, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG).pairs(),
]
PRODUCERS = [Producer("", "", "", ()), Producer("9" * 200, "a,b,,", "1" * 199 + ",", ("x" * 200,) * 64)]


def odd(seed: int) -> Bundle:
    """A golden bundle with extreme figures; one seed gives one bundle."""
    pick = random.Random(seed)
    bundle = golden_bundles.medium(seed=seed % 3)

    def figure(most: int) -> int:
        return pick.choice([1, 2, 3, 255, 256, most // 2, most - 1, most])

    variants = tuple(
        variant._replace(
            config=pick.choice([variant.config, *CONFIGS]),
            threads=pick.choice([1, 128, 1024]),
            shared_bytes=pick.choice([0, 1 << 20]),
            registers=pick.choice([0, 1024]),
            spill_bytes=figure(INT),
            alignment=pick.choice([1, 16]),
            max_experts=65536,
        )
        for variant in bundle.variants
    )
    renamed = {
        problem: problem._replace(E=figure(65536), N=figure(INT), K=i + 1) for i, problem in enumerate(bundle.choices)
    }
    choices = {
        renamed[problem]: tuple(
            choice._replace(time_ns=figure(LONG), runner_up_ns=choice.runner_up_ns and figure(LONG)) for choice in row
        )
        for problem, row in bundle.choices.items()
    }
    return bundle._replace(
        target=pick.choice([bundle.target, Target(80, False), Target(100, True)]),
        min_driver=pick.choice([0, 12080]),
        producer=pick.choice([bundle.producer, *PRODUCERS]),
        gpus=tuple(gpu._replace(sm_count=figure(INT), memory_mib=i + 1) for i, gpu in enumerate(bundle.gpus)),
        variants=variants,
        choices=choices,
        models=tuple(
            model._replace(problems=tuple(map(renamed.__getitem__, model.problems))) for model in bundle.models
        ),
    )


def merged(bundle: Bundle, other: Bundle) -> None:
    codec.encode(merge({"a": bundle, "b": other._replace(target=bundle.target)}).bundle)


def compared(bundle: Bundle, other: Bundle) -> None:
    changes = diff(bundle, bundle._replace(choices={key: row[:1] for key, row in bundle.choices.items()}))
    assert not changes.choices or time_ratio(list(changes.choices)) > 0
    assert diff(bundle, other).differ == (bundle != other)


def tuned_on_top(bundle: Bundle, other: Bundle) -> None:
    codec.encode(tuner.joined(bundle, other._replace(target=bundle.target)))


def shown(bundle: Bundle, _: Bundle) -> None:
    with open_bytes(codec.encode(bundle), "odd") as file:
        listed = contents(file, choices=True)
        assert listed["size_bytes"] == file.size_bytes == len(codec.encode(bundle))


def explained(bundle: Bundle, _: Bundle) -> None:
    snapshot = Snapshot([])
    snapshot.add(open_bytes(codec.encode(bundle), "odd"))
    for sm in (80, 89, 90, 100):
        local = LocalGpu(sm, Gpu("NVIDIA H200", 132, 143771, 13000))
        for problem in list(bundle.choices)[:3]:
            for M in (1, INT):
                str(examine(snapshot, problem, M, local, aligned=M == 1))


@pytest.mark.parametrize("use", [merged, compared, tuned_on_top, shown, explained])
@pytest.mark.parametrize("seed", range(12))
def test_ends_with_a_result(seed: int, use: Callable[[Bundle, Bundle], None]) -> None:
    bundle, other = odd(seed), odd(seed + 100)
    assert codec.decode(codec.encode(bundle), "odd") == bundle
    use(bundle, other)


@pytest.mark.parametrize("seed", range(2))
def test_a_report_of_extremes_is_drawn(seed: int) -> None:
    page(sheet("odd", {}, odd(seed), [], None)).encode()


def test_a_report_of_a_capability_that_nobody_knows_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "turing.msgpack"
    empty = golden_bundles.small()._replace(variants=(), cubins=(), choices={}, models=())
    path.write_bytes(codec.encode(empty._replace(target=Target(75, False))))
    with pytest.raises(InputError, match="sm_75"):
        read(str(path), True, [], None, None)


def test_the_size_that_is_shown_is_that_of_the_file_that_was_opened(tmp_path: Path) -> None:
    path = tmp_path / "b.msgpack"
    data = codec.encode(golden_bundles.small())
    path.write_bytes(data)
    with open_bundle(path) as file:
        path.unlink()
        assert contents(file, choices=False)["size_bytes"] == len(data)
