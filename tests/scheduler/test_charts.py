"""Curves over time, point by point."""

from __future__ import annotations

from scheduler.charts import HEIGHT, WIDTH, Marker, Span, chart

SPAN = Span(since=1000.0, until=1600.0, step=60.0)


def whole(value: float) -> str:
    return f"{value:.0f} t"


def test_a_step_shows_the_mean_of_its_values_and_what_lies_outside_is_left_out() -> None:
    points = [(999.9, 50.0), (1000.0, 1.0), (1059.0, 3.0), (1061.0, 5.0), (1600.0, 9.0)]
    assert SPAN.means(points) == [(1030.0, 2.0), (1090.0, 5.0)]


def test_a_curve_is_drawn_to_scale_and_interrupted_where_nothing_is_known() -> None:
    found = chart("Load", {"a": ("after", [(1000, 0.0), (1060, 4.0), (1240, 4.0)])}, SPAN, whole)
    assert found is not None
    assert (found.width, found.height) == (WIDTH, HEIGHT) == (600, 120)
    [line] = found.lines
    # 30 s of 600 are 30 of 600; 0 is two above the lower edge, the top two below the upper one.
    assert line.path == "M30.0 118.0h1L90.0 2.0M270.0 2.0h1"
    assert found.top == "4 t"
    assert found.words == "Load: a 0 t to 4 t, last 4 t"


def test_a_fixed_top_is_kept_until_a_value_is_higher() -> None:
    curves = {"a": ("after", [(1000.0, 0.5)]), "b": ("before", [])}
    found = chart("Share", curves, SPAN, whole, top=1.0)
    assert found is not None
    assert [line.path for line in found.lines] == ["M30.0 60.0h1", ""]
    assert found.lines[1].words == "is not known"
    higher = chart("Share", {"a": ("after", [(1000.0, 2.0)])}, SPAN, whole, top=1.0)
    assert higher is not None
    assert higher.top == "2 t"


def test_markers_are_placed_in_time_and_only_within_it() -> None:
    events = [(900.0, "before"), (1300.0, "weight 3 → 4"), (1600.0, "after")]
    found = chart("Share", {"a": ("after", [(1000.0, 1.0)])}, SPAN, whole, markers=events)
    assert found is not None
    assert found.markers == [Marker(300.0, "weight 3 → 4")]


def test_there_is_no_chart_of_nothing() -> None:
    assert chart("Share", {"a": ("after", []), "b": ("after", [(99.0, 1.0)])}, SPAN, whole) is None
