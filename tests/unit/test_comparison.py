"""comparison.svg of `grpo.replay --methods`: numbers stand at its axes."""

import xml.etree.ElementTree as ElementTree

from grpo.replay import COLUMNS, HEIGHT, WIDTH, picture

NAME = "{http://www.w3.org/2000/svg}"


def test_each_panel_has_ticks_where_the_values_are():
    """Of steps 1 to 5 and values 2 to 6: the middle of both is in the middle."""
    rows = [(step, "grpo", dict.fromkeys(COLUMNS, step + 1.0)) for step in range(1, 6)]
    panels = ElementTree.fromstring(picture(rows)).findall(f"{NAME}g")
    assert len(panels) == len(COLUMNS)
    for panel in panels:
        _, *labels = panel.findall(f"{NAME}text")
        at_x = {label.text: float(label.get("x")) for label in labels if label.get("text-anchor") == "middle"}
        at_y = {label.text: float(label.get("y")) - 4 for label in labels if label.get("text-anchor") == "end"}
        assert at_x == {"1": 0, "3": WIDTH / 2, "5": WIDTH}
        assert at_y == {"2": HEIGHT, "4": HEIGHT / 2, "6": 0}
        assert len(panel.findall(f"{NAME}path")) == 6


def test_one_step_and_one_value_have_one_tick_each():
    (panel, *_) = ElementTree.fromstring(picture([(7, "grpo", dict.fromkeys(COLUMNS, 2.0))])).findall(f"{NAME}g")
    assert [label.text for label in panel.findall(f"{NAME}text")][1:] == ["7", "2"]
