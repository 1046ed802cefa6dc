"""The HTML file of `experiments.report`: the table and curves as inline SVG, and nothing else.

No script, and nothing that is loaded from elsewhere.
"""

import html
import io
import re
from collections.abc import Mapping, Sequence

from experiments.report_runs import Group, Run

_STYLE = """
body { font: 14px sans-serif; margin: 2em; color: #222; }
table { border-collapse: collapse; margin-bottom: 1em; }
th, td { border: 1px solid #ccc; padding: 2px 6px; text-align: left; white-space: nowrap; }
th { background: #eee; }
tr.published { color: #666; font-style: italic; }
tr.chance { background: #fdd; }
svg { max-width: 100%; height: auto; }
"""
# What is drawn of a task: phase and metric.
_PANELS = (("pretrain", "loss"), ("train", "loss"), ("train", "accuracy"))


def to_html(
    table: Sequence[Sequence[str]],
    notes: Sequence[str],
    sections: Mapping[str, Sequence[str]],
    groups: Sequence[Group],
) -> str:
    """The whole file.

    Args:
        table: rows of cells, the column names first; with the columns `source` and `at chance`.
        notes: paragraphs, with `code` between back quotes.
        sections: lists by title, likewise.
        groups: the runs, for their curves.
    """
    columns = table[0]
    body = ["<h1>Long Range Arena</h1>", "<table>", _row(columns, "th", "")]
    for row in table[1:]:
        named = dict(zip(columns, row))
        kind = "published" if named["source"] else ""
        kind = "chance" if named["at chance"].endswith("AT CHANCE") else kind
        body.append(_row(row, "td", kind))
    body += ["</table>", *(f"<p>{_code(note)}</p>" for note in notes)]
    for task in dict.fromkeys(group.runs[0].config["task"] for group in groups):
        figure = draw(task, [g for g in groups if g.runs[0].config["task"] == task])
        if figure:
            body += [f"<h2>{html.escape(task)}</h2>", f"<figure>{figure}</figure>"]
    for title, items in sections.items():
        body += [f"<h2>{html.escape(title)}</h2>", "<ul>"]
        body += [*(f"<li>{_code(item)}</li>" for item in items), "</ul>"]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f"<title>Long Range Arena</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def draw(task: str, groups: Sequence[Group]) -> str | None:
    """Validation curves of a task's runs as an SVG element, a colour a group; None without rows."""
    import matplotlib
    from matplotlib.figure import Figure

    runs = [run for group in groups for run in group.runs]
    panels = [panel for panel in _PANELS if any(_points(run, *panel) for run in runs)]
    if not panels:
        return None
    figure = Figure(figsize=(5 * len(panels), 4.5), layout="constrained")
    axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axis, (phase, metric) in zip(axes, panels):
        for number, group in enumerate(groups):
            for run in group.runs:
                axis.plot(
                    *zip(*_points(run, phase, metric)),
                    ".-",
                    color=f"C{number % 10}",
                    label=_label(group) if run is group.runs[0] else None,
                )
        axis.set(xlabel="step", title=f"{phase}: validation {metric}")
    for name, accuracy in runs[0].metrics.get("reference", {}).items():
        if panels[-1][1] == "accuracy":
            axes[-1].axhline(accuracy, color="grey", linestyle=":")
            across = axes[-1].get_yaxis_transform()
            axes[-1].text(0.01, accuracy, name, fontsize=8, color="grey", transform=across)
    handles, labels = axes[-1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", fontsize=8)
    file = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": task}):
        about = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(file, format="svg", metadata=about)
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    # names are of one figure in matplotlib, and of the whole file in HTML
    return re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>{task}-", svg)


def _points(run: Run, phase: str, metric: str) -> list[tuple[float, float]]:
    """Step and value of every evaluation of a phase that has the metric."""
    return [(row["step"], row[metric]) for row in run.curves.get(phase, []) if metric in row]


def _label(group: Group) -> str:
    run = group.runs[0]
    parts = (run.config["kernel"], run.config["kernel_options"], run.config["preset"], run.changes)
    return " ".join(filter(None, parts))


def _row(cells: Sequence[str], tag: str, kind: str) -> str:
    of_class = f' class="{kind}"' if kind else ""
    inner = "".join(f"<{tag}>{html.escape(text)}</{tag}>" for text in cells)
    return f"<tr{of_class}>{inner}</tr>"


def _code(text: str) -> str:
    return re.sub("`([^`]*)`", r"<code>\1</code>", html.escape(text))
