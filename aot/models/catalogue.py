"""The models known by name: catalogue.tsv, read once."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...artifacts.records.problem import Layout
from .layer import ExpertLayer

COLUMNS = ("id", "E", "k", "H", "I", "shared_width", "gated", "layouts", "quantised", "source", "aliases", "note")


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One line of the catalogue.

    ``source`` is ``config`` (the published config.json) or ``class`` (the defaults of the model's
    configuration class in transformers); ``aliases`` are repositories of the same shape.
    """

    id: str
    layer: ExpertLayer
    source: str
    aliases: tuple[str, ...]


@functools.cache
def catalogue() -> Mapping[str, CatalogueEntry]:
    """Hugging Face id -> entry, in the file's order. Aliases are fields of an entry, not keys.

    Raises
    ------
    ValueError
        if the packaged table is damaged.
    """
    text = importlib.resources.files(__package__).joinpath("catalogue.tsv").read_text(encoding="utf-8")
    return MappingProxyType(parse_table(text))


def parse_table(text: str) -> dict[str, CatalogueEntry]:
    """The table's text -> entries.

    Raises
    ------
    ValueError
        with the line and what is wrong in it.
    """
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line and not line.startswith("#")]
    if not lines or tuple(lines[0][1].split("\t")) != COLUMNS:
        raise ValueError(f"catalogue.tsv: the first line must name the columns {' '.join(COLUMNS)}")
    entries: dict[str, CatalogueEntry] = {}
    for number, line in lines[1:]:
        fields = line.split("\t")
        if len(fields) != len(COLUMNS):
            raise ValueError(f"catalogue.tsv:{number}: {len(fields)} fields, wanted {len(COLUMNS)}")
        row = {name: "" if field == "-" else field for name, field in zip(COLUMNS, fields, strict=True)}
        try:
            E, k, H, width, shared_width, gated = (int(row[name]) for name in COLUMNS[1:7])
            layouts = tuple(Layout(one) for one in row["layouts"].split(","))
        except ValueError as error:
            raise ValueError(f"catalogue.tsv:{number}: {error}") from None
        layer = ExpertLayer(E, k, H, width, shared_width, bool(gated), row["quantised"], row["note"], layouts)
        problems = layer.contradictions()
        if row["id"] in entries:
            problems.append(f"{row['id']} is there twice")
        if problems:
            raise ValueError(f"catalogue.tsv:{number}: {'; '.join(problems)}")
        aliases = tuple(filter(None, row["aliases"].split(",")))
        entries[row["id"]] = CatalogueEntry(row["id"], layer, row["source"], aliases)
    return entries


@dataclass(frozen=True, slots=True)
class NameMatch:
    """A word of the user's that means a model: the id as published, and its entry."""

    id: str
    entry: CatalogueEntry


def find(word: str) -> NameMatch | None:
    """The model that ``word`` means: an id or alias in any case, or its part after the slash.

    None where nothing matches, or where several models have that last part.
    """
    ids = _ids()
    wanted = word.lower()
    matches = [NameMatch(id_, entry) for id_, entry in ids.items() if id_.lower() == wanted]
    if not matches and "/" not in word:
        matches = [NameMatch(id_, entry) for id_, entry in ids.items() if id_.lower().rpartition("/")[2] == wanted]
    return matches[0] if len(matches) == 1 else None


def nearest_ids(word: str, most: int = 3) -> list[str]:
    """Up to ``most`` known ids that look like ``word``, best first; else those that contain it."""
    by_form: dict[str, str] = {}
    for id_ in _ids():
        by_form[id_.lower()] = id_
        if "/" not in word:
            by_form[id_.lower().rpartition("/")[2]] = id_
    forms = difflib.get_close_matches(word.lower(), by_form, n=most, cutoff=0.7)
    if not forms and len(word) >= 3:
        forms = [form for form in by_form if word.lower() in form][:most]
    if not forms:  # the beginning of a name, misspelt
        begun = {form[:end]: form for form in reversed(by_form) for end in (len(word), len(word) + 1)}
        forms = [begun[one] for one in difflib.get_close_matches(word.lower(), begun, n=most, cutoff=0.8)]
    return list(dict.fromkeys(by_form[form] for form in forms))


def _ids() -> dict[str, CatalogueEntry]:
    found: dict[str, CatalogueEntry] = {}
    for id_, entry in catalogue().items():
        found[id_] = entry
        found.update(dict.fromkeys(entry.aliases, entry))
    return found
