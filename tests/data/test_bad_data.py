import json
from pathlib import Path

from data.bad_data import JUDGED_FROM, BadData

A, B = Path("a.tar"), Path("b.tar")


def test_each_sample_counts_once_an_epoch():
    bad = BadData("questions/train", total=4)
    for _ in range(2):
        bad.record(0, None, key="s0", shard=A)
        bad.record(1, "not UTF-8", key="s1", shard=A)
    assert (bad.num_read, bad.num_bad, bad.share) == (2, 1, 0.5)
    assert bad.report() == ["questions/train: 1 of 2 samples kept their place with weight 0: not UTF-8 (s1)"]
    bad.start_epoch()
    assert (bad.num_read, bad.num_bad, bad.report()) == (0, 0, [])
    bad.record(1, "not UTF-8", key="s1", shard=A)
    assert (bad.num_read, bad.num_bad) == (1, 1)


def test_a_batch_over_the_end_of_an_epoch_counts_in_both():
    bad, again = BadData("a", total=4), BadData("a", total=4)
    for position in (0, 1, 2, 3, 1, 0):  # the last two are the next epoch's
        bad.record(position, "link" if position == 1 else None, key=f"s{position}", shard=A)
    assert (bad.num_read, bad.num_bad) == (4, 1)
    bad.start_epoch([1, 0])
    assert (bad.num_read, bad.num_bad, bad.shards, bad.examples) == (2, 1, {A: 1}, {"link": ["s1"]})
    again.load(json.loads(json.dumps(bad.state())))  # a run that goes on here
    for counts in (bad, again):
        for position in (3, 2):
            counts.record(position, None, key=f"s{position}", shard=B)
        assert counts.report() == ["a: 1 of 4 samples kept their place with weight 0: link (s1)"]
        assert "the most, 1, are in a.tar" in (counts.complaint(0.2) or "")


def test_the_report_names_the_most_frequent_reason_first_and_three_samples_of_it():
    bad = BadData("pairs/train", total=9)
    for i in range(9):
        bad.record(i, "link" if i == 0 else "not an image" if i < 6 else None, key=f"s{i}", shard=A)
    assert bad.report() == [
        "pairs/train: 5 of 9 samples kept their place with weight 0: not an image (s1, s2, s3, ...)",
        "pairs/train: 1 of 9 samples kept their place with weight 0: link (s0)",
    ]


def test_too_large_a_share_names_the_worst_shard():
    bad = BadData("questions/train", total=100)
    for i in range(100):
        bad.record(i, "not an image" if i in (0, 98, 99) else None, key=f"s{i}", shard=A if i < 50 else B)
    assert bad.complaint(0.03) is None  # 3 of 100 is not more than 3 %
    said = bad.complaint(0.02) or ""
    assert "3 of 100 samples read are bad (3.00%), more than data.max_bad_share" in said
    assert "the most, 2, are in b.tar" in said


def test_a_share_is_not_judged_before_enough_was_read():
    bad = BadData("questions/train", total=JUDGED_FROM * 2)
    for i in range(JUDGED_FROM - 1):
        bad.record(i, "not an image", key=f"s{i}", shard=A)
    assert bad.complaint(0.01) is None
    bad.record(JUDGED_FROM, None, key="s", shard=A)
    assert bad.complaint(0.01) is not None
    small = BadData("questions/train", total=2)
    small.record(0, "not an image", key="s0", shard=A)
    assert small.complaint(0.01) is None
    small.record(1, None, key="s1", shard=A)
    assert small.complaint(0.5) is None and small.complaint(0.49) is not None
