"""What a compiled program communicates: collectives of its HLO, loops counted in full."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_SHAPE = re.compile(r"[a-z]+(\d*)(?:e\dm\d\w*)?\[([\d,]*)\]")


class Collective(NamedTuple):
    """All collectives of one kind in one run of a program.

    Attributes:
        number: how many.
        payload: bytes of the whole arrays: what is summed, gathered, scattered or passed on.
        sent: bytes that leave one device along a ring of its group.
    """

    number: int
    payload: int
    sent: int


def collectives(text: str) -> dict[str, Collective]:
    """Sum up the collectives of an optimised HLO module, as `compiled.as_text()` gives it.

    Those inside of loops count as often as the loop is known to run, once where that is unknown.
    One that the TPU compiler splits into a start, steps beside other work and an end is one. With
    n devices in a group, an array of S bytes costs each of them 2 S (n - 1) / n to sum,
    S (n - 1) / n to gather, scatter or exchange, and S to pass on.
    """
    bodies, entry = _computations(text)
    partitions = re.search(r"num_partitions=(\d+)", text)
    devices = int(partitions.group(1)) if partitions else 1
    sums: dict[str, Collective] = {}
    for name, times in _times(bodies, entry).items():
        for line in bodies[name]:
            operation = _OPERATION.match(line)
            if not operation:
                continue
            shapes, written = operation.groups()
            kind = written.removesuffix("-start")
            if kind not in KINDS:
                continue
            size, n = _size(shapes, written), _group(line) or devices
            if kind == "reduce-scatter":
                size *= n
            elif name.startswith("all-reduce-scatter"):  # a sum of which each keeps its part
                kind = "reduce-scatter"
            before = sums.get(kind, Collective(0, 0, 0))
            cost = _cost(kind, size, n)
            sums[kind] = Collective(*(a + times * b for a, b in zip(before, cost)))
    return sums


def _computations(text):
    """The lines of each computation by name, and the name of the entry."""
    bodies: dict[str, list[str]] = {}
    entry, lines = "", []
    for line in text.splitlines():
        begins = _COMPUTATION.match(line)
        if begins:
            lines = bodies[begins.group(2)] = []
            entry = begins.group(2) if begins.group(1) else entry
        elif line.startswith(" "):
            lines.append(line)
    if not entry:
        raise ValueError("text is no optimised HLO module: it has no entry computation.")
    return bodies, entry


def _times(bodies, entry):
    """How often each computation that is reached from the entry runs.

    The steps and the end of a collective that is split are left out.
    """
    times: dict[str, int] = {}

    def visit(name, count):
        times[name] = times.get(name, 0) + count
        for line in bodies[name]:
            if line.lstrip().startswith("%async-collective-done"):
                continue
            trips = _TRIPS.search(line) if " while(" in line else None
            for called in {*_CALLED.findall(line), *_branches(line)} & bodies.keys():
                if called.startswith("async_collective_fusion"):
                    continue
                visit(called, count * (int(trips.group(1)) if trips else 1))

    visit(entry, 1)
    return times


def _branches(line):
    return [name.strip(" %") for names in _BRANCHES.findall(line) for name in names.split(",")]


def _size(shapes, operation):
    """Bytes of the results; of an asynchronous start, whose operands stand first, the second half.

    An asynchronous permutation has two more numbers behind.
    """
    sizes = [
        math.prod(map(int, filter(None, dims.split(",")))) * int(bits or 8) // 8
        for bits, dims in _SHAPE.findall(re.sub(r"\{[^}]*\}", "", shapes))
    ]
    if operation == "collective-permute-start":
        return sizes[1]
    if operation in ("all-gather-start", "all-to-all-start", "reduce-scatter-start"):
        sizes = sizes[len(sizes) // 2 :]
    return sum(sizes)


def _cost(kind, size, n):
    if kind == "collective-permute":
        return Collective(1, size, size)
    return Collective(1, size, (2 if kind == "all-reduce" else 1) * size * (n - 1) // n)


def _group(line):
    """How many devices take part in a collective together; 0: all, without a list of them."""
    groups = line.partition("replica_groups=")[2]
    if listed := re.match(r"\{\{([\d,]+)\}", groups):
        return listed.group(1).count(",") + 1
    if iota := re.match(r"\[\d+,(\d+)\]<=", groups):
        return int(iota.group(1))
    if mesh := re.match(r"mesh\[([^]]*)\][^{]*\{([^}]*)\}", groups):
        sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh.group(1)))
        return math.prod(int(sizes[name]) for name in re.findall(r"'(\w+)'", mesh.group(2)))
    return 0
