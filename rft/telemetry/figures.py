"""The figures of a report, as HTML that needs plotly's script on the page. Without a background: the page is light or dark."""

from collections.abc import Mapping, Sequence
from typing import Any

from rft.telemetry.records import Phase

BLUE = "#4c8dff"
PALETTE = ("#4c8dff", "#f2a65a", "#4bc08f", "#e06c9f", "#a98bff", "#e5c04b", "#5bc6d6", "#e8705a", "#8fb35a", "#b08968")
TEXT = "#8b93a5"
GRID = "rgba(139,147,165,0.18)"
WHOLE_TICKS = 12
"""Up to so many steps every one gets a tick; there is no half a step."""
SMOOTH = 5
"""Half-width, in steps, of the moving mean that is drawn over a noisy curve."""


def curve(metrics: Sequence[Mapping[str, Any]], name: str) -> str:
    """One number over the steps; more than a dozen points get a moving mean, with the points behind it."""
    from plotly import graph_objects

    points = [(line["step"], line[name]) for line in metrics if line.get(name) is not None]
    steps, values = [step for step, _ in points], [float(value) for _, value in points]
    figure: Any = graph_objects.Figure()
    many = len(points) > 12
    figure.add_scatter(x=steps, y=values, mode="lines+markers", opacity=0.35 if many else 1.0, line=_line(1.5), marker=_dots(many))
    if many:
        figure.add_scatter(x=steps, y=_moving_mean(values), mode="lines", line=_line(2.5), hoverinfo="skip")
    if max(steps, default=0) <= WHOLE_TICKS:
        figure.update_xaxes(dtick=1)
    return _html(figure, height=230, xaxis_title="step")


def timeline(phases: Sequence[Phase]) -> str:
    """A lane for each phase, and a bar for each time that it ran, over the seconds of the run."""
    from plotly import graph_objects

    names = list(dict.fromkeys(phase.name for phase in phases))
    figure: Any = graph_objects.Figure()
    for index, name in enumerate(names):
        own = [phase for phase in phases if phase.name == name]
        figure.add_bar(
            orientation="h",
            y=[name] * len(own),
            base=[phase.start_s for phase in own],
            x=[phase.end_s - phase.start_s for phase in own],
            customdata=[phase.step for phase in own],
            hovertemplate=f"{name}, step %{{customdata}}<br>%{{x:.3f}} s<extra></extra>",
            marker={"color": PALETTE[index % len(PALETTE)], "line": {"width": 0}},
        )
    figure.update_yaxes(autorange="reversed", showgrid=False)
    figure.update_layout(barmode="overlay", bargap=0.3)
    return _html(figure, height=90 + 34 * max(len(names), 1), xaxis_title="seconds")


def _line(width: float) -> dict[str, Any]:
    return {"color": BLUE, "width": width}


def _dots(many: bool) -> dict[str, Any]:
    return {"size": 4 if many else 7, "color": BLUE}


def _moving_mean(values: Sequence[float]) -> list[float]:
    windows = (values[max(i - SMOOTH, 0) : i + SMOOTH + 1] for i in range(len(values)))
    return [sum(window) / len(window) for window in windows]


def _html(figure: Any, *, height: int, xaxis_title: str) -> str:
    figure.update_layout(
        height=height,
        margin={"l": 10, "r": 14, "t": 8, "b": 8},
        showlegend=False,
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"color": TEXT, "size": 12, "family": "system-ui, sans-serif"},
        hovermode="closest",
    )
    figure.update_xaxes(gridcolor=GRID, zeroline=False, automargin=True, title={"text": xaxis_title, "font": {"size": 11}})
    figure.update_yaxes(gridcolor=GRID, zeroline=False, automargin=True)
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
