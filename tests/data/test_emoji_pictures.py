import io

from PIL import Image

from data import emoji_pictures


def square(shade: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (24, 24), (shade, shade, shade)).save(out, "PNG")
    return out.getvalue()


def test_groups_join_over_drawings_and_transitively():
    ids = ["a", "b", "c", "d"]
    one = [square(0), square(0), square(90), square(200)]  # a = b
    two = [square(10), square(90), square(91), square(90)]  # b = d; c is off by 1
    assert emoji_pictures.same_picture_groups(ids, [one, two], threshold=0.5) == [("a", "b", "d"), ("c",)]
    assert emoji_pictures.same_picture_groups(ids, [one, two], threshold=1.0) == [("a", "b", "c", "d")]


def test_flag():
    assert emoji_pictures.flag("np") == "🇳🇵"


def test_base_emoji_has_no_flags_and_no_skin_tones():
    found = emoji_pictures.base_emoji(emoji_pictures.Pictures())
    assert found["😀"] == emoji_pictures.Emoji("emoji-1f600", "grinning face", "grinning face", "1")
    assert "👍" in found and "👍🏽" not in found and "🇳🇵" not in found
    assert "🏴󠁧󠁢󠁥󠁮󠁧󠁿" not in found and "🏴‍☠️" not in found and "🏳️" not in found
    assert "#️⃣" in found  # 23-20e3 in one set, 0023-FE0F-20E3 in the other
    assert 1600 <= len(found) <= 1700
    assert len({emoji.id for emoji in found.values()}) == len(found)


def test_the_two_drawings_differ_and_have_one_size():
    pictures = emoji_pictures.Pictures()
    asked, shown = pictures.query_png("🇳🇵"), pictures.document_png("🇳🇵")
    assert asked != shown
    for png in (asked, shown):
        with Image.open(io.BytesIO(png)) as image:
            assert image.size == (72, 72)
            assert image.convert("RGBA").getchannel("A").getextrema()[0] == 0
