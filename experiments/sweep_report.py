"""The report of a sweep: tables beside published numbers, where kernels cross, the plot."""

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments.common.record import markdown_table, write_text

Curve = Mapping[int, float]  # T -> milliseconds


class Published(NamedTuple):
    """Numbers of a paper by kernel and T, and the kernel that others are compared with.

    Attributes:
        ms: forward times in milliseconds.
        mib: peak memory of the forward pass.
        pairs: (kernel, other) whose crossovers are named.
    """

    ms: Mapping[str, Curve]
    mib: Mapping[str, Curve]
    pairs: Sequence[tuple[str, str]]


def milliseconds(line: Mapping[str, Any]) -> float | None:
    """The time of a row: of its kernels where it was looked at, else of the call."""
    text = line["kernel_ms"] if line.get("kernel_ms") else line.get("ms", "")
    return float(text) if text else None


def curves(lines: Sequence[Mapping[str, Any]], direction: str) -> dict[str, dict[int, float]]:
    """Measured times, kernel -> T -> milliseconds."""
    found: dict[str, dict[int, float]] = {}
    for line in lines:
        ms = milliseconds(line)
        if line["direction"] == direction and ms is not None:
            found.setdefault(line["kernel"], {})[int(line["T"])] = ms
    return found


def crossover(one: Curve, other: Curve) -> str:
    """From which T `one` is faster than `other`, between the lengths that both were measured at.

    The place is where the straight lines between neighbouring lengths meet, both axes logarithmic.
    """
    common = sorted(set(one) & set(other))
    if not common:
        return "no length at which both were measured"
    ratios = [math.log(one[T] / other[T]) for T in common]
    if all(ratio < 0 for ratio in ratios):
        return f"faster at every length measured, {common[0]:,} to {common[-1]:,}"
    if all(ratio >= 0 for ratio in ratios):
        return f"not faster at any length measured, {common[0]:,} to {common[-1]:,}"
    parts = ["faster at first" if ratios[0] < 0 else "slower at first"]
    for i in range(1, len(common)):
        before, after = ratios[i - 1], ratios[i]
        if (before < 0) != (after < 0):
            share = before / (before - after)
            T = common[i - 1] * (common[i] / common[i - 1]) ** share
            parts.append(
                f"{'faster' if after < 0 else 'slower'} from about T = {T:,.0f} on "
                f"(measured at {common[i - 1]:,} and {common[i]:,})"
            )
    return ", ".join(parts)


def table(
    lines: Sequence[Mapping[str, Any]], direction: str, column: str, published: Mapping[str, Curve]
) -> str:
    """One row a kernel, one column a length, the published number in parentheses."""
    lines = [line for line in lines if line["direction"] == direction]
    lengths = sorted({int(line["T"]) for line in lines})
    kernels = list(dict.fromkeys(line["kernel"] for line in lines))
    by_point = {(line["kernel"], int(line["T"])): line for line in lines}

    def cell(kernel, T):
        line = by_point.get((kernel, T))
        if line is None:
            return ""
        value = milliseconds(line) if column == "ms" else line.get(column)
        # What the compiler assigns is known of a row that did not fit, too.
        text = f"{float(value):.4g}" if value else ""
        if line["status"] != "ok":
            text = " ".join(filter(None, [text, line["status"]]))
        known = published.get(kernel, {}).get(T)
        return text if known is None else f"{text} ({known:g})"

    rows = []
    for kernel in kernels:
        own = [line for line in lines if line["kernel"] == kernel]
        who = sorted({line["computed_by"] for line in own if line.get("computed_by")})
        rows.append([kernel, str(own[0]["M"]), ", ".join(who), *(cell(kernel, T) for T in lengths)])
    return markdown_table(["kernel", "M", "computed by", *(f"T = {T:,}" for T in lengths)], rows)


def write(
    lines: Sequence[Mapping[str, Any]], path: pathlib.Path, about: str, published: Published
) -> None:
    """Write the markdown file and the plot beside the table `path`."""
    first = lines[0]
    sizes = ", ".join(f"{name}={first[name]}" for name in ("B", "H", "D", "dtype"))
    calls = [int(line["calls"]) for line in lines if line.get("calls")]
    text = [
        about,
        f"{first['device']}, jax {first['jax']}, {sizes}. Random inputs; medians of "
        f"{min(calls, default=0):,} to {max(calls, default=0):,} calls (`calls` in the CSV) after "
        "one that warms up. Times are those of the kernels on the GPU where `kernel_ms` is given "
        "(short sequences, whose calls wait for Python), else wall time. Memory is what the "
        "compiler assigns: arguments, outputs and temporary memory, also of rows that do not fit; "
        "`allocator_mib` in the CSV is the allocator's peak where a row raised it. `computed by`: "
        "our kernels for the whole operation or for its scan, cuDNN, or XLA alone.",
    ]
    for direction in dict.fromkeys(line["direction"] for line in lines):
        forward = direction == "forward"
        text.append(f"## Milliseconds, {direction}")
        text.append(table(lines, direction, "ms", published.ms if forward else {}))
        found = curves(lines, direction)
        crossings = []
        for one, other in published.pairs:
            if one in found and other in found:
                crossings.append(
                    f"* `{one}` against `{other}`: {crossover(found[one], found[other])}."
                )
        text += ["\n".join(crossings)] if crossings else []
        text.append(f"## Peak memory in MiB, {direction}")
        text.append(table(lines, direction, "compiler_mib", published.mib if forward else {}))
    write_text(path.with_suffix(".md"), "\n\n".join(text) + "\n")
    plot(lines, path.with_suffix(".png"))


def plot(lines: Sequence[Mapping[str, Any]], path: pathlib.Path) -> None:
    """Draw time and memory against T, all axes logarithmic, one column a direction."""
    from matplotlib.figure import Figure

    directions = list(dict.fromkeys(line["direction"] for line in lines))
    figure = Figure(figsize=(6 * len(directions), 9), layout="constrained")
    axes = figure.subplots(2, len(directions), squeeze=False)
    for (time, memory), direction in zip(zip(*axes, strict=True), directions, strict=True):
        for kernel in dict.fromkeys(line["kernel"] for line in lines):
            own = [ln for ln in lines if (ln["kernel"], ln["direction"]) == (kernel, direction)]
            ms = {int(ln["T"]): milliseconds(ln) for ln in own if milliseconds(ln) is not None}
            mib = {int(ln["T"]): float(ln["compiler_mib"]) for ln in own if ln["status"] == "ok"}
            for axis, points in ((time, ms), (memory, mib)):
                if points:
                    axis.plot(list(points), list(points.values()), "o-", label=kernel)
        time.set(title=direction, ylabel="ms")
        memory.set(ylabel="MiB")
        for axis in (time, memory):
            axis.set_xlabel("T")
            if axis.lines:
                axis.set(xscale="log", yscale="log")
                axis.legend(fontsize="small")
    figure.savefig(path, dpi=110)
