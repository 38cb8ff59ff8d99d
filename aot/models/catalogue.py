"""The models known by name, read from catalogue.tsv."""

from __future__ import annotations

import difflib
import functools
import importlib.resources
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

from ...artifacts.limits import PART
from ...artifacts.records import Layout
from .layer import ExpertLayer, parse_activation
from .quant_config import UNQUANTISED

COLUMNS = (
    "id",
    "E",
    "k",
    "H",
    "I",
    "shared_width",
    "zero_experts",
    "gated",
    "activation",
    "layouts",
    "weights",
    "source",
    "where",
    "aliases",
    "note",
)
NUMBERS = COLUMNS[1:8]


_LONGEST = 200  # characters of a word that are compared with the names
CLASS = "class"  # a source: the defaults of the class in transformers that names the checkpoint
DEFAULT = "default"  # a source: defaults that are of no checkpoint


@dataclass(frozen=True, slots=True)
class CatalogueEntry:
    """One line of the catalogue.

    ``source`` is ``config`` (sizes from the published config.json), ``class`` (from the defaults of the model's
    configuration class in transformers) or ``default`` (from class defaults that belong to no particular checkpoint).
    ``where`` is the public file or page that the sizes were read from, or empty. ``weights`` is the format of the
    entry's experts, empty if unknown. ``aliases`` maps repositories with experts of equal shape to their formats.
    """

    id: str
    layer: ExpertLayer
    weights: str
    source: str
    where: str
    aliases: Mapping[str, str]

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats that this model is published in, the entry's own first."""
        return tuple(dict.fromkeys(filter(None, (self.weights, *self.aliases.values()))))


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
    """Parse the table's text into entries.

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
            E, k, H, width, shared_width, zero_experts, gated = (int(row[name]) for name in NUMBERS)
            layouts = tuple(Layout(layout) for layout in row["layouts"].split(","))
            activation = parse_activation(row["activation"]) if row["activation"] else None
        except ValueError as error:
            raise ValueError(f"catalogue.tsv:{number}: {error}") from None
        part = row["id"].partition(PART)[2]
        layer = ExpertLayer(
            E,
            k,
            H,
            width,
            shared_width,
            bool(gated),
            row["weights"] or UNQUANTISED,
            row["note"],
            layouts,
            zero_experts,
            part,
            activation,
        )
        problems = layer.contradictions()
        if row["id"] in entries:
            problems.append(f"{row['id']} is there twice")
        if problems:
            raise ValueError(f"catalogue.tsv:{number}: {'; '.join(problems)}")
        pairs = (alias.partition("=") for alias in row["aliases"].split(",") if alias)
        aliases = MappingProxyType({name: format_ or row["weights"] for name, _, format_ in pairs})
        entries[row["id"]] = CatalogueEntry(row["id"], layer, row["weights"], row["source"], row["where"], aliases)
    return entries


@dataclass(frozen=True, slots=True)
class NameMatch:
    """A model name that the user gave: the id as published, and its entry."""

    id: str
    entry: CatalogueEntry

    @property
    def layers(self) -> tuple[ExpertLayer, ...]:
        """The entry's layer in the format of ``id``, and the layers of the model's other kinds of experts."""
        others = (entry.layer for id_, entry in catalogue().items() if id_.startswith(self.entry.id + PART))
        weights = self.entry.aliases.get(self.id) or self.entry.layer.weights
        return replace(self.entry.layer, weights=weights), *others


def find(word: str) -> NameMatch | None:
    """Find the model that ``word`` names: an id or alias in any case, or its part after the slash.

    Returns None if nothing matches, or if several models end in that part.
    """
    ids = _ids()
    wanted = word.lower()
    matches = [NameMatch(id_, entry) for id_, entry in ids.items() if id_.lower() == wanted]
    if not matches and "/" not in word:
        matches = [NameMatch(id_, entry) for id_, entry in ids.items() if id_.lower().rpartition("/")[2] == wanted]
    return matches[0] if len(matches) == 1 else None


def nearest_ids(word: str, most: int = 3) -> list[str]:
    """Up to ``most`` known ids that look like ``word``, best first; if none does, ids that contain it."""
    word = word[:_LONGEST]
    by_form: dict[str, str] = {}
    for id_ in _ids():
        by_form[id_.lower()] = id_
        if "/" not in word:
            by_form[id_.lower().rpartition("/")[2]] = id_
    scores = {form: _likeness(word.lower(), form) for form in by_form}
    forms = sorted((form for form in by_form if scores[form]), key=lambda form: scores[form], reverse=True)[:most]
    if not forms and len(word) >= 3:
        forms = [form for form in by_form if word.lower() in form][:most]
    return list(dict.fromkeys(by_form[form] for form in forms))


def _likeness(word: str, form: str) -> float:
    """Likeness of a misspelt word to a name or to the name's beginning, 0 to 1; 0 below a threshold."""
    whole, *begun = (
        difflib.SequenceMatcher(None, word, text).ratio() for text in (form, form[: len(word)], form[: len(word) + 1])
    )
    return max(whole if whole >= 0.7 else 0.0, max(begun) - 0.01 if max(begun) >= 0.8 else 0.0)


def _ids() -> dict[str, CatalogueEntry]:
    entries: dict[str, CatalogueEntry] = {}
    for id_, entry in catalogue().items():
        entries[id_] = entry
        entries.update(dict.fromkeys(entry.aliases, entry))
    return entries
