"""The plot of `experiments.bench`: time against the number of tokens."""

import pathlib

DIRECTIONS = ("forward", "forward+backward")


def plot_times(lines: list[dict], path: pathlib.Path) -> None:
    """Draw milliseconds against T, both logarithmic, forward and forward+backward side by side.

    One line for each implementation of a kernel that was measured at several lengths, and one
    dashed line for the limit of its operations and bytes on this device. Without such lines there
    is no file.

    Args:
        lines: rows of the table.
        path: the PNG file to write.
    """
    curves: dict = {}
    for line in lines:
        who = (line["implementation"], *_what(line))
        curves.setdefault((line["direction"], who), {})[int(line["T"])] = line
    curves = {key: points for key, points in curves.items()
              if key[0] in DIRECTIONS and len(points) > 1}  # fmt: skip
    if not curves:
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 5), layout="constrained")
    for axis, direction in zip(figure.subplots(1, 2), DIRECTIONS, strict=True):
        limits: dict = {}
        for (at, (implementation, *kernel)), points in curves.items():
            if at != direction:
                continue
            T = sorted(points)
            ms = [float(points[t]["ms"]) for t in T]
            (drawn,) = axis.plot(T, ms, "o-", label=" ".join([implementation, *kernel]))
            fractions = [float(points[t]["roofline_fraction"]) for t in T]
            limit = [f * m for f, m in zip(fractions, ms, strict=True)]
            limits.setdefault(tuple(kernel), (T, limit, drawn.get_color()))
        for kernel, (T, ms, color) in limits.items():
            axis.plot(T, ms, "--", color=color, linewidth=1, label=" ".join(["limit", *kernel]))
        axis.set(xscale="log", yscale="log", xlabel="T", ylabel="ms", title=direction)
        if axis.lines:
            axis.legend(fontsize="small")
    figure.savefig(path, dpi=120)


def _what(line: dict) -> tuple[str, ...]:
    """Kernel, degree, normaliser and batch size of a row, as a curve is named."""
    degree = f"p={line['p']}" if int(line["p"]) else ""
    normalize = "" if line["normalize"] in ("none", line["kernel"]) else line["normalize"]
    return tuple(x for x in (line["kernel"], degree, normalize, f"B={line['B']}") if x)
