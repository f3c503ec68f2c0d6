"""The colours of all that vpipe draws: pictures of schedules, reports, plots, `vpipe top`. One meaning, one colour."""

from __future__ import annotations

from collections.abc import Mapping

LIGHT = {
    "paper": "#f6f6f3", "card": "#ffffff", "ink": "#1d2126", "quiet": "#666d76", "line": "#e2e2dc", "hover": "#f0f0ea",
    "forward": "#3f7fd6", "backward": "#2c9a6b", "weight": "#7cc7a2", "update": "#e09b2d", "send": "#8d7fc9",
    "evaluation": "#9db9df", "wait": "#d5d4cc", "stripe": "#bdbcb2", "flight": "#e4e4de", "between": "#efeee8",
    "accent": "#c2483d", "on": "#ffffff", "on-pale": "#1d2126",
}  # fmt: skip
"""On a light page; `weight` is the gradient of the weights, `on` the text upon a colour, `on-pale` upon a pale one."""
DARK = {
    "paper": "#14171b", "card": "#1c2026", "ink": "#e6e8ea", "quiet": "#9099a4", "line": "#30353d", "hover": "#252a31",
    "forward": "#5b95e3", "backward": "#3fae7e", "weight": "#7fcaa6", "update": "#e5a945", "send": "#a296dc",
    "evaluation": "#47638c", "wait": "#3a3f47", "stripe": "#525963", "flight": "#2f343c", "between": "#23272d",
    "accent": "#e5776c", "on": "#0d1013", "on-pale": "#0d1013",
}  # fmt: skip
# Okabe and Ito's colours, which colour-blind readers can distinguish, without the two that are faint on white.
SERIES_LIGHT = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8a7a1f", "#5b6470")
"""Of the runs of a comparison, in their order."""
SERIES_DARK = ("#56a8e0", "#ec9152", "#33c193", "#e09bc2", "#c3b04c", "#9aa3ae")


def variables(colours: Mapping[str, str], series: tuple[str, ...]) -> str:
    """As declarations of CSS."""
    named = {**colours, **{f"series-{place}": colour for place, colour in enumerate(series)}}
    return " ".join(f"--{name}: {colour};" for name, colour in named.items())


def css(selector: str) -> str:
    """The colours for a selector, after the reader's light or dark ones, or those that `data-theme` says there."""
    light, dark = variables(LIGHT, SERIES_LIGHT), variables(DARK, SERIES_DARK)
    return (
        f"{selector} {{ {light} }}\n"
        f'@media (prefers-color-scheme: dark) {{ {selector}:not([data-theme="light"]) {{ {dark} }} }}\n'
        f'{selector}[data-theme="dark"] {{ {dark} }}\n'
    )
