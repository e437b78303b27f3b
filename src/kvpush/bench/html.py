"""A comparison as one HTML file that needs nothing else: plots with plotly's script inside, and all tables."""

from importlib import resources
from typing import Any

import jinja2
import numpy as np
import plotly.graph_objects as go
from markupsafe import Markup
from plotly.offline import get_plotlyjs
from plotly.subplots import make_subplots

from kvpush.bench.contenders import Contender
from kvpush.bench.results import Report, Row, Sample
from kvpush.bench.split import STAGES

_COLOURS = {
    Contender.SINGLE: "#8a8f98",
    Contender.KVPUSH_PUSH: "#0b6e4f",
    Contender.KVPUSH_FIRST: "#14a06f",
    Contender.KVPUSH_PULL: "#6bbf59",
    Contender.VLLM_PUSH: "#d1495b",
    Contender.VLLM_PULL: "#edae49",
}
_COLUMN_PX = 420


def render(report: Report) -> str:
    """The whole page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.ChainableUndefined)
    environment.filters["ms"] = lambda value: f"{value:.1f}" if isinstance(value, float) else ""
    template = environment.from_string((resources.files("kvpush.bench") / "templates" / "report.html").read_text())
    figures = [(title, _embed(figure)) for title, figure in _figures(report)]
    return template.render(report=report, figures=figures, plotly_js=Markup(f"<script>{get_plotlyjs()}</script>"))


def _embed(figure: Any) -> Markup:
    return Markup(figure.to_html(full_html=False, include_plotlyjs=False, config={"displaylogo": False}))


def _figures(report: Report) -> list[tuple[str, Any]]:
    return [
        ("Time to first token against load", _against_load(report, "ttft")),
        ("Time per output token against load", _against_load(report, "tpot")),
        ("Time to first token, cumulative", _cumulative(report)),
        ("Where the time to first token went", _splits(report)),
    ]


def _against_load(report: Report, metric: str) -> Any:
    """A column per input length; means as lines, p99 dotted."""
    inputs = _inputs(report)
    figure = make_subplots(1, len(inputs), subplot_titles=[f"{tokens} tokens" for tokens in inputs])
    for column, tokens in enumerate(inputs, 1):
        for name in _connectors(report):
            rows = [row for row in report.summary if row.input_tokens == tokens and row.connector == name]
            for statistic, dash in (("mean", "solid"), ("p99", "dot")):
                figure.add_trace(_line(rows, name, metric, statistic, dash, column), 1, column)
    figure.update_yaxes(title_text="milliseconds", rangemode="tozero", col=1)
    return _finish(figure, len(inputs))


def _line(rows: list[Row], name: str, metric: str, statistic: str, dash: str, column: int) -> Any:
    return go.Scatter(
        x=[row.load for row in rows],
        y=[getattr(getattr(row, metric), statistic, None) for row in rows],
        name=f"{name} {statistic}",
        legendgroup=f"{name} {statistic}",
        showlegend=column == 1,
        mode="lines+markers",
        line={"color": _COLOURS[Contender(name)], "dash": dash},
    )


def _cumulative(report: Report) -> Any:
    """A row per load, a column per input length."""
    inputs, loads = _inputs(report), list(dict.fromkeys(row.load for row in report.summary))
    titles = [f"{tokens} tokens, {load}" for load in loads for tokens in inputs]
    figure = make_subplots(len(loads), len(inputs), subplot_titles=titles)
    for r, load in enumerate(loads, 1):
        for c, tokens in enumerate(inputs, 1):
            for name in _connectors(report):
                cell = [s for s in report.samples if (s.load, s.input_tokens, s.connector) == (load, tokens, name)]
                figure.add_trace(_steps(cell, name, r == c == 1), r, c)
    figure.update_xaxes(title_text="milliseconds", row=len(loads))
    return _finish(figure, len(inputs), rows=len(loads))


def _steps(samples: list[Sample], name: str, in_legend: bool) -> Any:
    times = np.sort([sample.ttft_ms for sample in samples if sample.ttft_ms is not None])
    share = np.arange(1, len(times) + 1) / max(1, len(times))
    line = {"color": _COLOURS[Contender(name)], "shape": "hv"}
    return go.Scatter(x=times.tolist(), y=share.tolist(), name=name, legendgroup=name, showlegend=in_legend, line=line)


def _splits(report: Report) -> Any:
    """One bar per row, a colour per stage."""
    rows = [row for row in report.summary if row.split]
    labels = [f"{row.input_tokens} · {row.load} · {row.connector}" for row in rows]
    figure = go.Figure()
    for stage in STAGES:
        if any(stage in row.split for row in rows):
            values = [row.split.get(stage, 0.0) for row in rows]
            figure.add_trace(go.Bar(y=labels, x=values, name=stage, orientation="h"))
    figure.update_layout(barmode="stack", height=140 + 26 * len(rows), template="plotly_white")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title_text="milliseconds, mean")
    return figure


def _finish(figure: Any, columns: int, rows: int = 1) -> Any:
    figure.update_layout(height=120 + 280 * rows, width=max(2, columns) * _COLUMN_PX + 200, template="plotly_white")
    return figure


def _inputs(report: Report) -> list[int]:
    return sorted({row.input_tokens for row in report.summary})


def _connectors(report: Report) -> list[str]:
    found = {row.connector for row in report.summary}
    return [contender.value for contender in Contender if contender.value in found]
