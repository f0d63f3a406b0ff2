"""Expected answers are read off the factbook's prose, which is quoted."""

import pytest

from data import factbook_text


def entity(section: str, *path: str, text: str) -> dict:
    node: dict = {"text": text}
    for name in reversed((section, *path)):
        node = {name: node}
    return node


CAPITAL = ("Government", "Capital", "name")
HIGHEST = ("Geography", "Elevation", "highest point")
CASES = [
    ("capital", CAPITAL, "Bogot&aacute;", ("Bogotá",)),
    ("capital", CAPITAL, "Port-Vila (on Efate)", ("Port-Vila",)),
    (
        "capital",
        CAPITAL,
        "Pretoria (administrative capital); Cape Town (legislative capital)",
        ("Pretoria", "Cape Town"),
    ),
    ("capital", CAPITAL, "Hanoi (Ha Noi)", ("Hanoi", "Ha Noi")),
    ("capital", CAPITAL, "Chisinau in Romanian (Kishinev in Russian)", ("Chisinau",)),
    ("capital", CAPITAL, "Washington, D.C.", ("Washington, D.C.", "Washington")),
    ("capital", CAPITAL, "no official capital; government offices in the Yaren District", ()),
    (
        "capital",
        CAPITAL,
        "Santiago; note - Valparaiso is the seat of the national legislature",
        ("Santiago",),
    ),
    ("nationality", ("People and Society", "Nationality", "adjective"), "Lao or Laotian", ("Lao", "Laotian")),
    ("nationality", ("People and Society", "Nationality", "adjective"), "none", ()),
    (
        "currency",
        ("Economy", "Exchange rates", "Currency"),
        "Nepalese rupees (NPR) per US dollar -",
        ("NPR",),
    ),
    (
        "currency",
        ("Economy", "Exchange rates", "Currency"),
        "rubles (BYB/BYR) per US dollar -",
        ("BYB", "BYR"),
    ),
    ("domain", ("Communications", "Internet country code"), ".np", (".np",)),
    ("independence", ("Government", "Independence"), "14-15 May 1811 (from Spain)", ("1811",)),
    ("independence", ("Government", "Independence"), "1768 (unified by Prithvi Narayan SHAH)", ("1768",)),
    ("independence", ("Government", "Independence"), "none (territory of the US); 1898", ()),
    ("independence", ("Government", "Independence"), "no official date of independence: 927 (unite)", ()),
    (
        "holiday",
        ("Government", "National holiday"),
        "Constitution Day, 20 September (2015)",
        ("20 September", "September 20"),
    ),
    ("holiday", ("Government", "National holiday"), "Constitution Day, the first Monday in July (1959)", ()),
    ("highest point", HIGHEST, "Mount Everest (highest peak in Asia) 8,849 m", ("Mount Everest",)),
    ("highest point", HIGHEST, "Maja e Korabit (Golem Korab) 2,764 m", ("Maja e Korabit", "Golem Korab")),
    ("highest point", HIGHEST, "Kao Volcano on Kao Island 1,046 m", ("Kao Volcano",)),
    ("highest point", HIGHEST, "K2 (Mt. Godwin-Austen) 8,611 m", ("K2", "Mt. Godwin-Austen")),
    ("highest point", HIGHEST, "unnamed elevation 805 m", ()),
    (
        "aircraft code",
        ("Transportation", "Civil aircraft registration country code prefix"),
        "HJ, HK",
        ("HJ", "HK"),
    ),
    (
        "symbol",
        ("Government", "National symbol(s)"),
        "turquoise-browed motmot (bird)",
        ("turquoise-browed motmot",),
    ),
    (
        "government",
        ("Government", "Government type"),
        "parliamentary democracy&nbsp;under a constitutional monarchy; a Commonwealth realm",
        ("parliamentary democracy",),
    ),
    ("climate", ("Geography", "Climate"), "desert; hot, dry summers with moderate winters", ("desert",)),
    ("climate", ("Geography", "Climate"), "varies from tropical to desert", ()),
    ("suffrage", ("Government", "Suffrage"), "18&nbsp;years of age; universal", ("18", "18 years")),
]


@pytest.mark.parametrize(("field", "path", "text", "expected"), CASES)
def test_answers(field: str, path: tuple[str, ...], text: str, expected: tuple[str, ...]):
    assert factbook_text.answers(entity(*path, text=text), field) == expected


def test_missing_values_give_no_answer():
    assert all(factbook_text.answers({}, field) == () for field in factbook_text.QUESTION_FIELDS)


def test_at_most_half_of_the_fields_are_easy_and_there_are_twelve():
    assert len(factbook_text.QUESTION_FIELDS) >= 12
    assert set(factbook_text.EASY_FIELDS) < set(factbook_text.QUESTION_FIELDS)
    assert 2 * len(factbook_text.EASY_FIELDS) <= len(factbook_text.QUESTION_FIELDS)


def test_iso_codes():
    def country(domain: str) -> dict:
        return entity("Communications", "Internet country code", text=domain)

    assert factbook_text.iso_code("np", country(".np")) == "np"
    assert factbook_text.iso_code("ja", country(".jp")) == "jp"
    assert factbook_text.iso_code("uk", country(".uk")) == "gb"
    assert factbook_text.iso_code("fr", country("metropolitan France - .fr; French Guiana - .gf")) == "fr"
    assert factbook_text.iso_code("ee", country(".eu")) is None
    assert factbook_text.iso_code("xx", {}) is None


def test_clean_takes_tags_and_entities_off():
    assert factbook_text.clean("<p>C&ocirc;te <em>d'Ivoire</em>&nbsp; x</p>") == "Côte d'Ivoire x"
