"""Converters from the formats that users bring, by name; the order is that of ``--help``."""

from data.formats.atlas import Atlas
from data.formats.beir import Beir
from data.formats.dpr import Dpr
from data.formats.fid import Fid
from data.formats.format import Format
from data.formats.hub import Hub
from data.formats.img2dataset import Img2dataset
from data.formats.infoseek import InfoSeek
from data.formats.karpathy import Coco, Flickr30k
from data.formats.kilt import Kilt
from data.formats.tables import Folder
from data.formats.vqa import Vqa
from data.formats.wit import Wit
from data.formats.wordnet import WordNet

FORMATS: dict[str, type[Format]] = {
    form.name: form
    for form in (Img2dataset, Hub, Kilt, Dpr, Atlas, Coco, Vqa, Folder, Beir, Fid, InfoSeek, Flickr30k, Wit, WordNet)
}
