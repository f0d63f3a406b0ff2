from data import images
from data.dataset import SPLITS, Dataset
from tests.conftest import COUNTRIES


def samples(factbook: Dataset):
    return {sample.id: sample for split in SPLITS for sample in factbook.questions(split)}


def test_documents(factbook: Dataset):
    assert len(factbook.store) == len(COUNTRIES) + 40
    nepal = factbook.store.fetch(["np"])[0]
    assert nepal.title == "Nepal" and nepal.meta["kind"] == "country"
    expected = {"capital": "Kathmandu", "nationality": "Nepali", "currency": "NPR", "domain": ".np"}
    expected |= {"holiday": "20 September", "highest point": "Mount Everest", "aircraft code": "9N"}
    expected |= {"location": "Southern Asia", "region": "Asia", "area": "147,181 sq km", "language": "Nepali"}
    assert expected.items() <= nepal.fields.items()
    for document in factbook.store.fetch(factbook.store.ids):
        assert images.decode(document.image or b"", 24).float().std() > 0


def test_first_answer_is_the_value_on_the_document(factbook: Dataset):
    for sample in samples(factbook).values():
        assert factbook.store.fetch([sample.subject])[0].fields[sample.field] == sample.answers[0]
        assert len(sample.answers[0]) <= 38


def test_each_present_field_is_asked_by_name_and_by_picture(factbook: Dataset):
    expected = {
        f"{document.id}-{label.replace(' ', '-')}-{kind}"
        for document in factbook.store.fetch(COUNTRIES)
        for label in document.fields
        if label in factbook.fields
        for kind in ("name", "picture")
    }
    assert set(samples(factbook)) == expected


def test_picture_questions_do_not_leak_the_name(factbook: Dataset):
    titles = {document.id: document.title.lower() for document in factbook.store.fetch(COUNTRIES)}
    for sample in samples(factbook).values():
        if sample.kind == "picture":
            words = sample.question.lower()
            assert sample.image and not any(title in words for title in titles.values())
            assert not any(answer.lower() in words for answer in sample.answers if len(answer) > 3)
        else:
            assert sample.image is None and sample.gold == (sample.subject,)
            assert titles[sample.subject].removeprefix("the ") in sample.question.lower()


def test_identical_flags_are_one_group_and_their_answers_all_count(factbook: Dataset):
    groups = [["au", "hm"], ["bv", "no", "sj"], ["fr", "mf"], ["id", "mc"], ["ro", "td"]]
    assert factbook.info["duplicate_flags"] == groups  # and not Jordan with Palestine, New Zealand with Australia
    by_id = samples(factbook)
    romania = by_id["ro-capital-picture"]
    assert romania.gold == ("ro", "td") and romania.answers == ("Bucharest", "N'Djamena")
    assert by_id["ro-capital-name"].answers == ("Bucharest",)
    for fold in range(4):
        dataset = Dataset(factbook.directory, fold=fold)
        assert all(len({dataset.split_of(country) for country in group}) == 1 for group in groups)


def test_pairs(factbook: Dataset):
    pairs = {pair.id: pair for split in SPLITS for pair in factbook.pairs(split)}
    assert len(pairs) == 2 * len(factbook.store)
    assert pairs["np-name"].text == "Nepal" and pairs["np-name"].image is None
    assert pairs["np-picture"].text == "" and pairs["np-picture"].gold == ("np",)
    assert pairs["mc-picture"].gold == ("id", "mc") and pairs["mc-name"].gold == ("mc",)
    assert all(set(pair.gold) <= set(factbook.store.ids) for pair in pairs.values())


def test_dataset_json_says_what_must_be_said(factbook: Dataset):
    info = factbook.info
    assert info["counts"]["documents"] == {"country": len(COUNTRIES), "emoji": 40}
    assert len(info["easy_fields"]) * 2 <= len(info["fields"]) and len(info["fields"]) >= 12
    licences = {entry["what"]: entry["licence"] for entry in info["licences"]}
    assert licences["texts"] == "public domain" and "CC-BY 4.0" in licences["question pictures"]
    assert any("CC-BY-SA 4.0" in licence for licence in licences.values())
    assert "held-out" in info["tokenizer"] and len(info["fingerprint"]) == 64
    assert all(info["left_out"].values())
