"""Dashes and dots of Pathfinder: which pixels they cover, and how a path may turn.

Paths are made of dashes ("paddles"). Between two dashes lies a pivot, a pixel; a dash begins
`margin` pixels after one pivot, is `length` long and ends `margin` pixels before the next. As
pivots are pixels there is a finite number of directions, so all shapes are known beforehand, as
lists of pixels relative to the pivot.
"""

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

_SUBPIXELS = 16


class Shapes(NamedTuple):
    """Pixels as offsets into a flat picture of some row length; K directions.

    Attributes:
        mask: int32 [K, P], what a dash keeps free of others: all pixels at most `margin` away.
        ink: int32 [K, Q], the pixels that a dash covers at least in part.
        coverage: float64 [K, Q], how much of them.
        step: int32 [K], from a pivot to the next.
        tail: int32 [K], from a pivot to the pixel where the dash begins.
        head: int32 [K], to the pixel where it ends.
        followers: int64 [K, J], the directions that may follow a direction.
        likelihood: uint64 [K, J], how likely they follow, up to a factor; 0 where there are fewer.
        dot: int32 [D], the pixels of a dot.
        dot_coverage: float64 [D].

    Rows of different lengths are filled up by repeating their first entry.
    """

    mask: npt.NDArray[np.int32]
    ink: npt.NDArray[np.int32]
    coverage: npt.NDArray[np.float64]
    step: npt.NDArray[np.int32]
    tail: npt.NDArray[np.int32]
    head: npt.NDArray[np.int32]
    followers: npt.NDArray[np.int64]
    likelihood: npt.NDArray[np.uint64]
    dot: npt.NDArray[np.int32]
    dot_coverage: npt.NDArray[np.float64]


@functools.lru_cache
def make_shapes(
    length: int, margin: int, thickness: float, continuity: float, dot_radius: float, row: int
) -> Shapes:
    """Compute all shapes.

    Args:
        length: of a dash in pixels.
        margin: between dash and pivot.
        thickness: of a dash.
        continuity: c of a turn's likelihood, cos(min(c |angle|, 90 degrees))^2.
        dot_radius: of a dot.
        row: the length of the flat picture's rows.
    """
    angles = np.arange(0, 2 * np.pi, 0.01)
    radius = length + margin
    circle = np.stack([np.sin(angles), np.cos(angles)], axis=1)
    heads = np.unique(np.rint(radius * circle).astype(int), axis=0)  # [K, 2], (y, x)
    along = heads / np.linalg.norm(heads, axis=1, keepdims=True)
    tails = heads - length * along

    reach = radius + margin + 1
    window = np.arange(-reach, reach + 1)
    pixels = np.stack(np.meshgrid(window, window, indexing="ij"), -1).reshape(-1, 2)
    fine = (np.arange(_SUBPIXELS) + 0.5) / _SUBPIXELS - 0.5
    parts = np.stack(np.meshgrid(fine, fine, indexing="ij"), -1).reshape(-1, 2)
    points = pixels[:, None] + parts  # [pixels, parts of a pixel, 2]

    def offsets(positions: npt.NDArray[Any]) -> npt.NDArray[np.int32]:
        y, x = np.rint(positions).astype(np.int32).T
        return y * np.int32(row) + x

    masks, inks, coverages = [], [], []
    for tail, direction in zip(tails, along):
        at = (pixels - tail) @ direction
        nearest = tail + np.clip(at, 0, length)[:, None] * direction
        masks.append(offsets(pixels[np.linalg.norm(pixels - nearest, axis=-1) <= margin]))
        at = (points - tail) @ direction
        across = (points - tail) @ np.array([-direction[1], direction[0]])
        covered = (at >= 0) & (at <= length) & (np.abs(across) <= thickness / 2)
        coverage = covered.mean(-1)
        inks.append(offsets(pixels[coverage > 0]))
        coverages.append(coverage[coverage > 0])

    angle = np.arctan2(along[:, 0], along[:, 1])
    turn = np.abs(angle[:, None] - angle)
    turn = np.minimum(turn, 2 * np.pi - turn)
    turn = np.cos(np.minimum(continuity * turn, np.pi / 2)) ** 2
    likelihood = np.rint(turn * 2**20).astype(np.uint64)
    followers = np.argsort(likelihood == 0, axis=1, kind="stable")[
        :, : (likelihood > 0).sum(1).max()
    ]
    dot = (np.linalg.norm(points, axis=-1) <= dot_radius).mean(-1)
    return Shapes(
        mask=_rectangular(masks),
        ink=_rectangular(inks),
        coverage=_rectangular(coverages),
        step=offsets((length + 2 * margin) * along),
        tail=offsets(tails),
        head=offsets(heads),
        followers=followers,
        likelihood=np.take_along_axis(likelihood, followers, axis=1),
        dot=offsets(pixels[dot > 0]),
        dot_coverage=dot[dot > 0],
    )


def _rectangular(rows):
    longest = max(map(len, rows))
    return np.stack([np.pad(row, (0, longest - len(row)), constant_values=row[0]) for row in rows])
