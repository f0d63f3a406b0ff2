"""The tables of VQA's answer normalisation: facts of the published evaluation, kept apart from the code that uses them.

Source: the evaluation code of the VQA data set (Antol et al., 1505.00468), tables unchanged since 2016. Its table of
contractions also has ``Im``, ``Ive`` and ``Id've``, which lower-cased words never match; they are left out.
"""

from __future__ import annotations

# Right spellings whose wrong one lacks every apostrophe, then the other wrong ones as wrong>right (the published table
# has one entry that goes the other way: somebody'd).
_SPELLINGS = """
    ain't aren't can't could've couldn't didn't doesn't don't hadn't hasn't haven't he'd he's how'd how'll how's
    isn't it'd it'll ma'am mightn't might've mustn't must've needn't not've o'clock oughtn't shan't should've
    shouldn't somebody'll somebody's someone'd someone'll someone's something'd something'll that's there'd there're
    there's they'd they'll they're they've 'twas wasn't we've weren't what'll what're what's what've when's where'd
    where's where've who'd who'll who's who've why'll why're why's won't would've wouldn't y'all you'd you'll you're
    you've
"""
_OTHERS = """
    couldn'tve>couldn't've couldnt've>couldn't've hadnt've>hadn't've hadn'tve>hadn't've hed've>he'd've
    he'dve>he'd've itd've>it'd've it'dve>it'd've mightnt've>mightn't've mightn'tve>mightn't've ow's'at>'ow's'at
    'ows'at>'ow's'at 'ow'sat>'ow's'at shed've>she'd've she'dve>she'd've shouldnt've>shouldn't've
    shouldn'tve>shouldn't've somebody'd>somebodyd somebodyd've>somebody'd've somebody'dve>somebody'd've
    someoned've>someone'd've someone'dve>someone'd've somethingd've>something'd've something'dve>something'd've
    thered've>there'd've there'dve>there'd've theyd've>they'd've they'dve>they'd've wed've>we'd've we'dve>we'd've
    whod've>who'd've who'dve>who'd've wouldnt've>wouldn't've wouldn'tve>wouldn't've yall'll>y'all'll
    y'allll>y'all'll yall'd've>y'all'd've y'alld've>y'all'd've y'all'dve>y'all'd've youd've>you'd've
    you'dve>you'd've
"""

CONTRACTIONS: dict[str, str] = {word.replace("'", ""): word for word in _SPELLINGS.split()}
CONTRACTIONS |= dict(pair.split(">") for pair in _OTHERS.split())

_UP_TO_TEN = "zero one two three four five six seven eight nine ten"
NUMBERS: dict[str, str] = {"none": "0"} | {word: str(number) for number, word in enumerate(_UP_TO_TEN.split())}

ARTICLES = frozenset({"a", "an", "the"})

PUNCTUATION = tuple(';/[]"{}()=+\\_-><@`,?!')
