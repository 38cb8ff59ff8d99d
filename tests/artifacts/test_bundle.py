"""The producer of a bundle: compiler options, and the bundles that it was compared with."""

from __future__ import annotations

from pretuned.artifacts.limits import is_text
from pretuned.artifacts.records import Producer

MADE = Producer("0.1.0", "3.7.1", "12.8", ("enable_fp_fusion=True", "line_info=off"))


def test_what_it_was_held_against_is_an_option_of_its_own() -> None:
    held = MADE.with_held_against(["b" * 64, "a" * 64, "b" * 64])
    assert held.options == (*MADE.options, f"held_against={'a' * 16},{'b' * 16}")
    assert held.held_against == ("a" * 16, "b" * 16)
    assert held.compile_options == MADE.options
    assert held.with_held_against(()) == MADE
    assert MADE.held_against == ()


def test_very_many_are_a_text_that_a_bundle_takes() -> None:
    held = MADE.with_held_against(f"{number:064x}"[::-1] for number in range(4096))
    assert is_text(held.options[-1])
    assert 1 < len(held.held_against) < 4096
