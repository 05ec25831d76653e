"""The pictures of the docs: each is what draw.py makes, and its words can be read."""
import re
import xml.etree.ElementTree as ElementTree

import matplotlib
import pytest
from PIL import ImageFont

from docs.pictures import draw

FONT = matplotlib.get_data_path() + "/fonts/ttf/DejaVuSans{}{}.ttf"  # wider than most


def words(node, x=0.0, y=0.0, turned=False):
    """(text, left, top, right, bottom) of each line of text; one that is turned is left out."""
    move = node.get("transform", "")
    turned = turned or "rotate" in move
    if found := re.search(r"translate\(([-\d.]+) ([-\d.]+)\)", move):
        x, y = x + float(found[1]), y + float(found[2])
    if node.tag.endswith("text") and not turned:
        size = float(node.get("font-size", 13))
        font = FONT.format("Mono" if node.get("font-family") == "monospace" else "",
                           "-Bold" if node.get("font-weight") == "bold" else "")
        width = ImageFont.truetype(font, 100).getlength(node.text) * size / 100
        left = x + float(node.get("x")) - width * {"middle": 0.5, "end": 1}.get(
            node.get("text-anchor"), 0)
        bottom = y + float(node.get("y"))
        yield node.text, left, bottom - 0.75 * size, left + width, bottom
    for child in node:
        yield from words(child, x, y, turned)


@pytest.mark.parametrize("name", draw.PICTURES)
def test_a_picture_is_what_its_command_draws_and_no_word_is_cut_or_covered(name):
    """Also where the reader's font is wide."""
    svg = draw.PICTURES[name]()
    assert (draw.HERE / f"{name}.svg").read_text() == svg
    root = ElementTree.fromstring(svg)
    found = [*words(root)]
    assert found
    for text, left, top, right, bottom in found:
        assert left >= 0 and right <= draw.WIDTH - 12, (text, left, right)
        assert top >= 0 and bottom <= float(root.get("height")), text
    for i, (text, left, top, right, bottom) in enumerate(found):
        for other, left2, top2, right2, bottom2 in found[:i]:
            apart = right + 5 <= left2 or right2 + 5 <= left or bottom <= top2 or bottom2 <= top
            assert apart, (text, other)


def test_a_sick_run_and_the_healthy_one_differ_in_more_than_their_color():
    """A reader who sees no red and green tells them by the dashes."""
    for name in draw.PICTURES:
        lines = re.findall("<polyline[^>]*>", draw.PICTURES[name]())
        dashed = {line for line in lines if "dasharray" in line}
        if name.startswith("sick_"):
            assert len(dashed) == len(lines) / 2 == 3, name
