"""The contents of a report, and a page that needs no other file."""

from __future__ import annotations

import hashlib
import html.parser
import math
import re
from dataclasses import replace

import pytest
from claims import H100, H200, able, chosen, with_twins
from reports import cells_of, packed

from pretuned.aot.bundle.assemble import config_text
from pretuned.aot.bundle.merge import merge
from pretuned.aot.journal.file import Contents, Header
from pretuned.aot.journal.records import HUNG, Failure, Measured, Rematch, Timing
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.report.cells import Cell, State, roofline
from pretuned.aot.report.page import headline, page
from pretuned.aot.report.sheets import _chip as chip_of
from pretuned.aot.report.sheets import sheet
from pretuned.artifacts import codec
from pretuned.artifacts.records import Bundle, DType, Gpu, Op, PlanRow, Problem, Way
from pretuned.kernels.chips import chip_for, chip_named
from pretuned.kernels.cost import Resources, expected_rows
from pretuned.kernels.cost_model import estimate_us

A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, 12080)


@pytest.fixture(scope="module")
def base(small_bundle) -> Bundle:
    """A real bundle for sm_80 of two models, two aligned variants a family."""
    return with_twins(codec.decode(small_bundle.read_bytes(), str(small_bundle)))


@pytest.fixture(scope="module")
def problem(base: Bundle) -> Problem:
    return next(choice for choice in base.choices if choice.N == 256 and not choice.fusion)


def journal(base: Bundle, *records: Measured | Failure, gpu: Gpu = A100) -> Contents:
    return Contents(Header(base.target.sm, gpu, base.kernels), records, 0, 0)


def measured(
    base: Bundle, problem: Problem, bucket: int, times: list[int], won: bool | None, torch: int | None = None
) -> Measured:
    """``times`` in ns of the first able variants, the first the modelled one, the second the challenger."""
    shas = [base.variants[i].cubin_sha256 for i in able(base, problem)]
    duel = None
    if won is not None:
        duel = Rematch(shas[1], shas[0], (times[1],), (times[0],), 0.9 if won else 0.999, 0.01)
        assert duel.won is won
    timings = tuple(Timing(sha, (time,), 0.001, 20, 0.001) for sha, time in zip(shas, times, strict=False))
    return Measured(problem, bucket, shas[0], timings, duel, torch and (torch,), 1.0, 12080)


@pytest.fixture(scope="module")
def distinct(base: Bundle) -> Bundle:
    """With a cubin of its own for each variant: journals tell variants by their cubins alone."""
    cubins = tuple(cubin + bytes([i]) for i, cubin in enumerate(base.cubins))
    variants = tuple(
        variant._replace(cubin_bytes=len(cubin), cubin_sha256=hashlib.sha256(cubin).digest())
        for variant, cubin in zip(base.variants, cubins, strict=True)
    )
    return base._replace(variants=variants, cubins=cubins)


def the_cell(cells: list[Cell], problem: Problem, bucket: int) -> Cell:
    (shown,) = [cell for cell in cells if (cell.problem, cell.bucket) == (problem, bucket)]
    return shown


def test_the_roofline_by_hand() -> None:
    chip = chip_named("NVIDIA H200")
    assert chip is not None
    dense = roofline(Problem(Op.FORWARD, DType.BF16, 1, 1024, 2048), 4096, chip)
    assert dense.compute_us == pytest.approx(2 * 4096 * 1024 * 2048 / 989.4e12 * 1e6)
    assert dense.memory_us == pytest.approx((1024 * 2048 + 4096 * (1024 + 2048)) * 2 / 4800e9 * 1e6)
    assert (dense.bound, dense.least_us) == ("compute", dense.compute_us)
    few = roofline(Problem(Op.DX, DType.BF16, 128, 1536, 2048), 8, chip)
    assert few.memory_us == pytest.approx((expected_rows(128, 8).active * 1536 * 2048 + 8 * 3584) * 2 / 4800e9 * 1e6)
    assert (few.bound, few.least_us) == ("memory", few.memory_us)
    gradient = roofline(Problem(Op.DW, DType.BF16, 128, 1536, 2048), 8, chip)
    assert gradient.memory_us > 128 * 1536 * 2048 * 2 / 4800e9 * 1e6, "dw of every expert is written"
    slow = roofline(Problem(Op.FORWARD, DType.FP32, 1, 1024, 2048), 4096, chip)
    assert slow.compute_us / dense.compute_us == pytest.approx(989.4 / 66.9)


def test_whose_figures_make_the_roofline() -> None:
    assert chip_of(None, 90) == chip_for(90)
    assert chip_of(H200, 90).bandwidth_gbs == 4800
    assert chip_of(H200._replace(sm_count=66), 90).bf16_tflops == pytest.approx(989.4 / 2)
    unknown = chip_of(Gpu("NVIDIA Something New", 108, 81920, 12080), 80)
    assert unknown == chip_for(80).with_sm_count(108)


def test_a_bundle_alone(base: Bundle) -> None:
    page = sheet("title", {}, base, [], None)
    assert len(page.cells) == sum(map(len, base.choices.values()))
    assert {cell.state for cell in page.cells} == {State.MODELLED}
    for cell in page.cells:
        choice = next(choice for choice in base.choices[cell.problem] if choice.bucket == cell.bucket)
        assert cell.time_us == choice.time_ns / 1e3
        assert cell.config == config_text(base.variants[choice.variant])
        assert cell.model_us == pytest.approx(cell.time_us, abs=1e-3), "the same model on the same chip"
        assert cell.roofline == roofline(cell.problem, cell.bucket, chip_for(80))
        assert cell.fraction == cell.roofline.least_us / cell.time_us
        assert (cell.against_torch, cell.model_ratio, cell.candidates) == (None, None, ())
    assert page.chips == (chip_for(80),)
    assert {gemm.key[:3] for gemm in page.gemms} == {(choice.E, choice.N, choice.K) for choice in base.choices}


def test_what_is_missing(base: Bundle, problem: Problem) -> None:
    """Of the bundle's own models, and of a plan."""
    less = base._replace(choices={**base.choices, problem: base.choices[problem][1:]})
    gone = base.choices[problem][0].bucket
    missing = [cell for cell in sheet("t", {}, less, [], None).cells if cell.state is State.MISSING]
    assert [(cell.problem, cell.bucket) for cell in missing] == [(problem, gone)]
    wanted = plan(load_models(["shape:E=8,H=256,I=128,k=2 tokens=1..128 name=small"], (Op.FORWARD,)).shapes)
    page = sheet("t", {}, base, [], wanted)
    lacking = {(cell.problem, cell.bucket) for cell in page.cells if cell.state is State.MISSING}
    assert lacking == {(problem, 256) for problem in wanted.problems}
    assert page.models == wanted.models
    cell = the_cell(page.cells, problem, 256)
    assert math.isnan(cell.time_us)
    assert cell.roofline.least_us > 0


def test_measured_choices_are_held_against_their_own_gpu(base: Bundle, problem: Problem) -> None:
    two = chosen(base, {(problem, 8): (0, 5_000, A100), (problem, 16): (1, 6_000, H100), (problem, 32): (0, 1, None)})
    cells = sheet("t", {}, two, [], None).cells
    for bucket, gpu in ((8, A100), (16, H100)):
        cell = the_cell(cells, problem, bucket)
        assert (cell.state, cell.gpu) == (State.MEASURED, gpu)
        assert cell.roofline == roofline(problem, bucket, chip_of(gpu, 80))
        assert cell.model_ratio == pytest.approx((cell.model_us or 0) / cell.time_us)
    assert the_cell(cells, problem, 32).gpu is None, "with two GPUs there is no one to model for"


def test_a_cell_of_each_gpu_with_its_own_journal(distinct: Bundle, problem: Problem) -> None:
    bundles = [chosen(distinct, {(problem, 2): (0, us * 1000, gpu)}) for us, gpu in ((3, A100), (2, H200))]
    journals = [
        journal(distinct, measured(distinct, problem, 2, [3_000, 4_000], None, torch=6_000)),
        journal(distinct, measured(distinct, problem, 2, [2_000, 2_500], None, torch=3_000), gpu=H200),
    ]
    report_sheet = sheet("t", {}, merge({"a100": bundles[0], "h200": bundles[1]}).bundle, journals, None)
    rows = [(cell.gpu, cell.time_us, cell.torch_us) for cell in report_sheet.cells if cell.bucket == 2]
    assert rows == [(A100, 3.0, 6.0), (H200, 2.0, 3.0)]
    text = page(report_sheet)
    assert packed(text)["gpus"] == [A100.name, H200.name]
    glance = text.partition("<h2>At a glance</h2>")[2].partition("<h2>")[0]
    assert re.findall(r"<td[^>]*>forward</td><td[^>]*>([^<]*)</td>", glance) == ["A100-SXM4-80GB", "H200"]
    assert "<th>GPU</th>" not in page(sheet("t", {}, bundles[0], [], None)).partition("<h2>Cells")[0]


def test_the_glance_has_gpus_by_short_names_and_what_was_measured(base: Bundle, problem: Problem) -> None:
    def names(*gpus: Gpu) -> list[str]:
        """Of a bundle that has a cell of each of these, and one that was not measured."""
        cells = {(problem, 2 << i): (0, 5_000, gpu) for i, gpu in enumerate((*gpus, None))}
        glance = (
            page(sheet("t", {}, chosen(base, cells), [], None)).partition("At a glance</h2>")[2].partition("<h2>")[0]
        )
        return re.findall(rf"<td>{problem.op.value}</td><td>([^<]*)</td>", glance)

    assert names(H100, H200) == ["H100", "H200"]
    nvl = H100._replace(name="NVIDIA H100 NVL")
    assert names(H100, nvl) == ["H100 80GB HBM3", "H100 NVL"]
    assert names(H100) == []


def test_a_journal(distinct: Bundle, problem: Problem) -> None:
    base = distinct
    first, second, third = (config_text(base.variants[i]) for i in able(base, problem))
    broken = Failure(problem, 64, base.variants[able(base, problem)[2]].cubin_sha256, HUNG, "no end after 10 s")
    fought = measured(base, problem, 16, [3_000, 2_900], won=False)
    assert fought.duel
    contents = journal(
        base,
        measured(base, problem, 2, [3_000, 2_000, 4_000], won=True, torch=3_000),
        measured(base, problem, 4, [3_000, 2_999], won=False),
        measured(base, problem, 8, [1_000], won=None),
        replace(fought, duel=replace(fought.duel, ratio=1.02)),
        broken,
    )
    cells = sheet("t", {}, None, [contents], None, base.variants).cells
    assert [cell.bucket for cell in cells] == [2, 4, 8, 16, 64]
    won = the_cell(cells, problem, 2)
    assert (won.config, won.time_us, won.runner_up, won.runner_up_us) == (second, 2.0, first, 3.0)
    assert [(candidate.config, candidate.time_us) for candidate in won.candidates] == [
        (second, 2.0),
        (first, 3.0),
        (third, 4.0),
    ]
    assert won.against_torch == pytest.approx(1.5)
    for candidate in won.candidates:
        variant = next(
            v for i, v in enumerate(base.variants) if config_text(v) == candidate.config and i in able(base, problem)
        )
        assert candidate.model_us == pytest.approx(estimate_us(problem, 2, Resources.of(variant), chip_of(A100, 80)))
    stayed = the_cell(cells, problem, 4)
    assert (stayed.config, stayed.time_us, stayed.runner_up_us) == (second, 2.999, 3.0), "neither won: the times decide"
    lost = the_cell(cells, problem, 16)
    assert (lost.config, lost.time_us, lost.runner_up_us) == (first, 3.0, 2.9), "as aot build: who lost its duel is out"
    assert the_cell(cells, problem, 8).runner_up_us is None
    failed = the_cell(cells, problem, 64)
    assert failed.state is State.MISSING
    assert failed.failures == (f"{third}: hung, no end after 10 s",)


def test_a_variant_that_failed_anywhere_is_no_choice(distinct: Bundle, problem: Problem) -> None:
    sha = distinct.variants[able(distinct, problem)[1]].cubin_sha256
    contents = journal(
        distinct, measured(distinct, problem, 2, [3_000, 2_000, 4_000], won=True), Failure(problem, 64, sha, HUNG, "x")
    )
    cell = the_cell(sheet("t", {}, None, [contents], None, distinct.variants).cells, problem, 2)
    assert (cell.time_us, len(cell.candidates)) == (3.0, 3)


def test_of_two_journals_the_first_tells_a_cell(distinct: Bundle, problem: Problem) -> None:
    contents = journal(distinct, measured(distinct, problem, 2, [3_000], won=None))
    two = journal(
        distinct,
        measured(distinct, problem, 2, [1_000], won=None),
        measured(distinct, problem, 4, [1_000], won=None),
        gpu=H100,
    )
    cells = sheet("t", {}, None, [contents, two], None).cells
    assert [(cell.time_us, cell.gpu) for cell in cells] == [(3.0, A100), (1.0, H100)]


def test_a_choice_is_held_against_the_torch_of_its_own_gpu(base: Bundle, problem: Problem) -> None:
    bundle = chosen(base, {(problem, 2): (0, 40_000, H200)})
    elsewhere = journal(base, measured(base, problem, 2, [90_000, 95_000], None, torch=20_000))
    here = journal(base, measured(base, problem, 2, [40_000, 45_000], None, torch=80_000), gpu=H200)
    listed = [
        the_cell(sheet("t", {}, bundle, some, None).cells, problem, 2) for some in ([elsewhere, here], [elsewhere])
    ]
    assert [cell.torch_us for cell in listed] == [80.0, None]


def test_a_look_at_a_slower_clock_makes_no_choice_slower_than_torch(distinct: Bundle, problem: Problem) -> None:
    first = measured(distinct, problem, 2, [20_000, 19_000, 18_000], None, torch=22_800)
    look = measured(distinct, problem, 2, [24_000, 22_800, 21_600], None)  # at 1.2 x, in more rounds, without torch
    look = replace(look, timings=tuple(timing._replace(rounds=60) for timing in look.timings))
    (cell,) = sheet("t", {}, None, [journal(distinct, first, look)], None).cells
    assert cell.time_us == 21.6
    assert cell.against_torch == pytest.approx(22.8 / 18, rel=1e-3)


def test_one_gpu_with_two_drivers_is_one(base: Bundle, problem: Problem) -> None:
    newer = A100._replace(driver=13000)
    two = chosen(base, {(problem, 8): (0, 5_000, A100), (problem, 16): (1, 6_000, newer), (problem, 32): (0, 1, None)})
    page = sheet("t", {}, two, [], None)
    assert len(page.chips) == 1
    assert the_cell(page.cells, problem, 32).gpu == A100


def test_a_journal_whose_cubins_nobody_names(distinct: Bundle, problem: Problem) -> None:
    contents = journal(distinct, measured(distinct, problem, 2, [3_000, 2_000], won=True))
    (cell,) = sheet("t", {}, None, [contents], None).cells
    sha = distinct.variants[able(distinct, problem)[1]].cubin_sha256
    assert cell.config == f"cubin {sha.hex()[:12]}"
    assert (cell.model_us, cell.model_ratio) == (None, None)


def test_a_bundle_with_its_journal(distinct: Bundle, problem: Problem) -> None:
    """The choice is the bundle's, the candidates and torch are the journal's."""
    bundle = chosen(distinct, {(problem, 2): (1, 2_100, A100), (problem, 4): (0, 9_000, None)})
    contents = journal(
        distinct,
        measured(distinct, problem, 2, [3_000, 2_000], won=True, torch=4_200),
        measured(distinct, problem, 4, [3_000, 2_000], won=True, torch=4_200),
    )
    cells = sheet("t", {}, bundle, [contents], None).cells
    cell = the_cell(cells, problem, 2)
    assert (cell.time_us, len(cell.candidates)) == (2.1, 2)
    assert cell.against_torch == pytest.approx(2.0)
    modelled = the_cell(cells, problem, 4)
    assert (modelled.state, modelled.time_us, modelled.torch_us) == (State.MODELLED, 9.0, 4.2)
    assert modelled.against_torch is None, "a modelled time is compared with none"


def test_a_cell_names_the_ways_of_its_plan(base: Bundle, problem: Problem) -> None:
    rows = (
        PlanRow(Way.FUSED_SILU, False, 0, 1),
        PlanRow(Way.FUSED_SILU, False, 2, 0),
        PlanRow(Way.QUANTISED_X, False, 1, None),
    )
    bundle = chosen(base, {(problem, 2): (1, 2_100, A100), (problem, 4): (0, 9_000, A100)})
    first, *others = bundle.choices[problem]
    bundle = bundle._replace(choices={**bundle.choices, problem: (first._replace(plan=rows), *others)})
    cells = sheet("t", {}, bundle, [], None).cells
    assert [the_cell(cells, problem, bucket).plan for bucket in (2, 4)] == ["fused_silu", ""]


VOID = {"meta", "br"}


class _Reader(html.parser.HTMLParser):
    """Checks that tags are closed in order, and gathers ids, links and text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.outside: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        if values.get("id"):
            self.ids.append(str(values["id"]))
        for name in ("href", "xlink:href", "src"):
            if name in values:
                (self.links if str(values[name]).startswith("#") else self.outside).append(str(values[name]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert not reader.open
    return reader


def everything(distinct: Bundle, problem: Problem) -> str:
    """A page with every kind of cell and chart."""
    bundle = chosen(distinct, {(problem, 2): (1, 2_100, A100), (problem, 4): (0, 9_000, None)})
    others = {product: row for product, row in distinct.choices.items() if product != problem}
    bundle = bundle._replace(choices={**bundle.choices, **others}, models=distinct.models)
    contents = journal(
        distinct,
        *(measured(distinct, problem, bucket, [3_000, 2_000, 9_000], won=True, torch=4_200) for bucket in (2, 4, 256)),
        Failure(problem, 4, bytes(32), HUNG, "<no end>"),
    )
    return page(sheet("a <b> & c", {"file": "<&>"}, bundle, [contents], None))


def test_the_page_stands_alone(distinct: Bundle, problem: Problem) -> None:
    text = everything(distinct, problem)
    reader = read(text)
    assert not reader.outside, "it would load something"
    assert not re.search(r"@import|url\((?!#)", text)
    assert len(set(reader.ids)) == len(reader.ids)
    assert {link[1:] for link in reader.links} <= set(reader.ids)
    assert {match[1] for match in re.finditer(r"url\(#([^)]+)\)", text)} <= set(reader.ids)
    assert "a <b> & c" in "".join(reader.text)
    assert "<no end>" not in text
    (failures,) = [cell["failures"] for cell in cells_of(text) if cell["failures"]]
    assert failures[0].endswith("hung, <no end>")


def test_the_page_has_every_cell_and_the_same_bytes_each_time(distinct: Bundle, problem: Problem) -> None:
    text = everything(distinct, problem)
    assert text == everything(distinct, problem)
    cells = cells_of(text)
    count = sum(map(len, distinct.choices.values())) - len(distinct.choices[problem]) + 3
    missing = len(distinct.choices[problem]) - 2
    assert [sum(cell["state"] == state for cell in cells) for state in ("measured", "modelled", "missing")] == [
        2,
        count - 2,
        missing,
    ]
    (cell,) = [cell for cell in cells if (cell["state"], cell["rows"]) == ("measured", 2)]
    assert (cell["us"], cell["torch"], cell["tried"], cell["spread"], cell["gpu"]) == (2.1, 4.2, 3, 1.5, A100.name)
    assert cell["least"] == pytest.approx(roofline(problem, 2, chip_of(A100, 80)).least_us, rel=1e-4)
    assert cell["flop"] == pytest.approx(2e-6 * 2 * problem.N * problem.K, rel=1e-4)
    for words in ("x torch", "The search", "Modelled against measured", "it was the fastest"):
        assert words in text


def test_the_headline_says_the_answer(base: Bundle, distinct: Bundle, problem: Problem) -> None:
    bundle = chosen(distinct, {(problem, 2): (1, 2_100, A100), (problem, 4): (1, 4_200, A100)})
    contents = journal(
        distinct,
        *(measured(distinct, problem, bucket, [3_000, 2_000], won=True, torch=4_032) for bucket in (2, 4)),
    )
    assert headline(sheet("t", {}, bundle, [contents], None)).startswith(
        "1.36 x torch over 2 cells, worst 0.96, 2 measured"
    )
    modelled = headline(sheet("t", {}, base, [], None))
    assert "56 modelled. Nothing was timed: all times are modelled for the A100 80GB SXM." in modelled
    assert headline(sheet("t", {}, None, [journal(base)], None)) == "0 cells."


def test_a_page_of_nothing_and_one_where_all_is_missing(base: Bundle) -> None:
    empty = page(sheet("t", {}, None, [journal(base)], None))
    assert "0 cells" in empty
    read(empty)
    wanted = plan(load_models(["shape:E=8,H=256,I=128,k=2 tokens=1..4 name=small"], (Op.FORWARD,)).shapes)
    missing = page(sheet("t", {}, None, [journal(base)], wanted))
    assert "<svg" not in missing
    assert "12 missing" in missing
    assert 'id="chart"' not in missing
    read(missing)
