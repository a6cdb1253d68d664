"""comparison.svg of `grpo.replay --methods`: a panel for each column, with numbers at the ends of its axes."""

import xml.etree.ElementTree as ElementTree

from grpo.replay import COLUMNS, picture

NAME = "{http://www.w3.org/2000/svg}"


def test_each_panel_has_the_range_of_steps_and_values():
    """Steps 1 to 5 with values 2 to 6: the corners of the panel are (1, 6) and (5, 2), y being negative."""
    history = {"grpo": [dict.fromkeys(COLUMNS, step + 1.0) for step in range(1, 6)]}
    drawing = ElementTree.fromstring(picture(history))
    panels = drawing.findall(f"{NAME}svg")
    name, *texts = [text.text for text in drawing.findall(f"{NAME}text")]
    assert name == "grpo"
    assert texts == [text for column in COLUMNS for text in (column, "6", "2", "1", "5")]
    for panel in panels:
        assert panel.get("viewBox") == "1 -6.0 4 4.0"
        (curve,) = panel.findall(f"{NAME}polyline")
        assert curve.get("points") == "1,-2.0 2,-3.0 3,-4.0 4,-5.0 5,-6.0"


def test_what_was_not_measured_or_is_not_finite_is_left_out():
    history = {"a": [{"kl": 1.0}, {"kl": float("nan")}], "b": [{"kl": 3.0}, {}]}
    drawing = ElementTree.fromstring(picture(history))
    points = [[curve.get("points") for curve in panel] for panel in drawing.findall(f"{NAME}svg")]
    assert points[list(COLUMNS).index("kl")] == ["1,-1.0", "1,-3.0"]
    assert points[list(COLUMNS).index("entropy")] == ["", ""]
