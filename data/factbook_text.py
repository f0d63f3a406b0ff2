"""Short facts out of the CIA World Factbook's prose.

The factbook writes for people: "Pretoria (administrative capital); Cape Town (legislative capital)". A
question needs one short answer that stands on the document's line exactly as written, so every field has
one small function that returns the value first and sensible alternatives after it, or nothing. A value that
is long or ambiguous is left out for that country rather than guessed; `prepare` counts how many remain.
"""

from __future__ import annotations

import html
import re
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

Entity = Mapping[str, Any]
MAX_ANSWER = 30  # characters
MAX_EASY_ANSWER = 38  # "parliamentary constitutional monarchy" is one answer, not a long one

# Factbook files are named by FIPS code; their internet domain gives the ISO code but for these.
ISO_BY_FIPS = {"uk": "gb", "fr": "fr", "sx": "gs", "we": "ps"}
# One document per flag: these entities have none that is theirs alone.
LEFT_OUT = {
    "gz": "shares internet domain and flag with the West Bank",
    "io": "shares its flag with Diego Garcia",
    "ee": "the European Union is not a country",
}

# Short forms that are missing, abbreviated or decorated in the factbook.
TITLES = {
    "cd": "Democratic Republic of the Congo",
    "cg": "Republic of the Congo",
    "do": "Dominican Republic",
    "cf": "Central African Republic",
    "sh": "Saint Helena",
    "fm": "Micronesia",
    "ae": "United Arab Emirates",
    "sj": "Svalbard",
    "va": "Vatican City",
    "vi": "United States Virgin Islands",
    "tf": "French Southern Lands",
    "hm": "Heard and McDonald Islands",
    "gs": "South Georgia",
}

MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"


def clean(text: str) -> str:
    """Plain text on one line, in Unicode form NFC, without HTML tags or entities."""
    text = re.sub(r"<br\s*/?>|</p>", "; ", text)
    text = html.unescape(html.unescape(re.sub(r"<[^>]+>", "", text)))
    return re.sub(r"\s+", " ", unicodedata.normalize("NFC", text)).strip(" ;")


def lookup(entity: Entity, *path: str) -> str:
    """The cleaned text at ``path``, or an empty string."""
    node: Any = entity
    for name in path:
        node = node.get(name, {}) if isinstance(node, Mapping) else {}
    text = node.get("text", "") if isinstance(node, Mapping) else ""
    return clean(text)


def iso_code(fips: str, entity: Entity) -> str | None:
    """ISO 3166 two-letter code, by way of the internet domain; None if there is none to be had."""
    if fips in LEFT_OUT:
        return None
    if fips in ISO_BY_FIPS:
        return ISO_BY_FIPS[fips]
    match = re.fullmatch(r"\.([a-z]{2})", lookup(entity, "Communications", "Internet country code")[:3])
    return match[1] if match else None


def title(iso: str, entity: Entity) -> str:
    if iso in TITLES:
        return TITLES[iso]
    name = lookup(entity, "Government", "Country name", "conventional short form")
    return name if "(Keeling)" in name else re.sub(r"\s*\(.*", "", name)


def _names(text: str, separators: str = r";|,| or ") -> list[str]:
    """Names listed in ``text``: what is in brackets counts only when it looks like another name."""
    aside = [name for inner in re.findall(r"\(([^)]*)\)", text) for name in re.split(r"[,/]", inner)]
    main = re.split(separators, re.sub(r"\([^)]*\)?", "", re.split(r"; note|, note| note -", text)[0]))
    first = [name.strip() for name in main if name.strip()]
    also = [a.strip() for a in aside if re.fullmatch(r"\s*[A-Z][\w'’-]+(?: [A-Z][\w'’-]+)*\s*", a)]
    return first + also


def _capital(entity: Entity) -> list[str]:
    text = lookup(entity, "Government", "Capital", "name")
    if text.startswith(("no ", "none", "administered")):
        return []
    if text.startswith("Washington"):
        return ["Washington, D.C.", "Washington"]
    return _names(re.sub(r" in Romanian.*", "", text).replace("(city)", ""))


def _nationality(entity: Entity) -> list[str]:
    text = lookup(entity, "People and Society", "Nationality", "adjective")
    text = re.sub(r"\((?:singular|s|colloquial)\)", "", text)
    return [n for n in _names(text, r";|,| or |/") if n not in ("NA", "none") and not n.startswith("former")]


def _currency(entity: Entity) -> list[str]:
    rates = entity.get("Economy", {}).get("Exchange rates", {})
    text = lookup(entity, "Economy", "Exchange rates", "Currency") or lookup(entity, "Economy", "Exchange rates")
    codes = re.findall(r"[(/]([A-Z]{3})(?=[)/])", text)
    if not codes and "US dollar is used" in str(rates):
        codes = ["USD"]
    return codes


def _domain(entity: Entity) -> list[str]:
    found = re.findall(r"\.[a-z]{2}\b", lookup(entity, "Communications", "Internet country code"))
    return found[:1]


def _independence(entity: Entity) -> list[str]:
    text = lookup(entity, "Government", "Independence")
    match = re.match(rf"(?:\d{{1,2}}(?:-\d{{1,2}})? (?:{MONTHS}) )?(\d{{3,4}})\b", text)
    return [match[1]] if match else []


def _holiday(entity: Entity) -> list[str]:
    text = lookup(entity, "Government", "National holiday")
    match = re.search(rf"(?<![\d-])(\d{{1,2}}) ({MONTHS})\b", text)
    return [f"{match[1]} {match[2]}", f"{match[2]} {match[1]}"] if match else []


def _highest_point(entity: Entity) -> list[str]:
    text = lookup(entity, "Geography", "Elevation", "highest point")
    match = re.match(r"([^\d,;]+?|K2),? ?(?:\(([^)]*)\) ?)?(?: on [^\d,;]+?)?,? [\d,]+(?: m\b|$)", text)
    if not match or re.search(r"unnamed|location|pre-eruption|dunes|range", match[1]):
        return []
    names = re.split(r" on | \(", match[1])[0]
    alias = match[2] if match[2] not in (None, "South Georgia", "Tenerife") else ""
    return [names, *([alias] if re.fullmatch(r"[A-Z][\w'’. -]+", alias) else [])]


def _aircraft(entity: Entity) -> list[str]:
    text = lookup(entity, "Transportation", "Civil aircraft registration country code prefix")
    return [code.strip() for code in text.split(",") if code.strip()]


def _anthem(entity: Entity) -> list[str]:
    text = lookup(entity, "Government", "National anthem(s)", "title")
    match = re.match(r'["“]([^"”]+)["”](?: \(([^)]*)\))?', text)
    return [part.strip() for part in match.groups() if part] if match else []


def _symbol(entity: Entity) -> list[str]:
    text = lookup(entity, "Government", "National symbol(s)")
    plain = re.sub(r" +", " ", re.sub(r"\([^)]*\)?", "", text))
    parts = [part.strip() for part in re.split(r"[,;]", plain) if part.strip()]
    if not parts or re.search(r"\bno official|\bstars?\b.*\bfield\b", text) or len(parts[0].split()) > 4:
        return []
    return [part for part in parts if len(part.split()) <= 4]


def _government(entity: Entity) -> list[str]:
    text = re.sub(r"^(?:a|formerly,) ", "", lookup(entity, "Government", "Government type"))
    text = re.split(r"[;,(]| under | in free | in name| of the | of ", text)[0].strip()
    return [text] if re.search(r"republic|democracy|monarchy|state|federation|theocra", text) else []


def _climate(entity: Entity) -> list[str]:
    text = re.split(r"[;,:(.]| with | along | in | but | climate", lookup(entity, "Geography", "Climate"))[0]
    kinds = r"tropic|temperate|desert|arid|Mediterranean|continental|marine|mari|equator|arctic|oceanic"
    named = re.search(kinds, text) and "varies" not in text
    return [text.strip()] if named and len(text.split()) <= 6 else []


def _region(entity: Entity) -> list[str]:
    text = lookup(entity, "Geography", "Map references")
    return [text] if re.fullmatch(r"[A-Z][A-Za-z ]+", text) and "Political" not in text else []


def _suffrage(entity: Entity) -> list[str]:
    match = re.match(r"(\d\d) years of age", lookup(entity, "Government", "Suffrage"))
    return [match[1], f"{match[1]} years"] if match else []


# Question fields in the order of a document's lines. EASY ones can often be guessed without reading.
QUESTION_FIELDS: dict[str, Callable[[Entity], list[str]]] = {
    "capital": _capital,
    "nationality": _nationality,
    "currency": _currency,
    "domain": _domain,
    "independence": _independence,
    "holiday": _holiday,
    "highest point": _highest_point,
    "aircraft code": _aircraft,
    "anthem": _anthem,
    "symbol": _symbol,
    "government": _government,
    "climate": _climate,
    "region": _region,
    "suffrage": _suffrage,
}
EASY_FIELDS = ("government", "climate", "region", "suffrage")


def answers(entity: Entity, field: str) -> tuple[str, ...]:
    """Value and alternatives of a question field; empty when it is missing, too long or ambiguous."""
    found = [name.strip(" .'\"") if field != "domain" else name for name in QUESTION_FIELDS[field](entity)]
    found = [name if name != "Washington, D.C" else "Washington, D.C." for name in found]
    longest = MAX_EASY_ANSWER if field in EASY_FIELDS else MAX_ANSWER
    if not found or not 0 < len(found[0]) <= longest or not re.search(r"\w", found[0]):
        return ()
    return tuple(dict.fromkeys(name for name in found if 0 < len(name) <= longest))


def context_lines(entity: Entity) -> dict[str, str]:
    """Lines that nothing is asked about: they make the reader look for the right one."""
    location = re.split(r"[,;(]", lookup(entity, "Geography", "Location"))[0].strip()
    languages = lookup(entity, "People and Society", "Languages", "Languages") or lookup(
        entity, "People and Society", "Languages"
    )
    language = re.split(r"[,;(\d]", languages)[0].strip()
    population = re.match(r"[\d,]+", lookup(entity, "People and Society", "Population", "total"))
    area = re.match(r"[\d,.]+ sq km", lookup(entity, "Geography", "Area", "total ")) or re.match(
        r"[\d,.]+ sq km", lookup(entity, "Geography", "Area", "total")
    )
    lines = {
        "location": location if len(location) <= 40 else "",
        "population": population[0] if population else "",
        "area": area[0] if area else "",
        "language": language if len(language) <= 25 else "",
    }
    return {label: value for label, value in lines.items() if value}
