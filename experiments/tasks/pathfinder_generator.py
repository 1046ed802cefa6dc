"""Pathfinder pictures: are two dots the ends of one dashed path, or of two?

Two paths grow in lock-step from seeds near the centre, avoiding each other, themselves and the
border. Shorter paths that distract are put where there is space. One dot marks where one of the two
long paths begins; the other dot marks where the same path ends (label 1) or the other one
(label 0). Labels are drawn last, so nothing but the dots depends on them.

Source: Linsley et al. (2018) and Kim et al. (2020), with the parameters that Long Range Arena (Tay
et al. 2020) gives. We grow hundreds of pictures at once, and differ in details: a dash chooses
among all places that are free, where the original draws at most three times and starts the picture
anew; pictures whose possible dots would touch are not used; coverage of pixels is computed in
place of Lanczos filtering; white is the brightest value before and not after scaling.
"""

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from experiments.tasks.pathfinder_shapes import Shapes, make_shapes

_CELLS = 2**24  # at most, of all pictures that grow at once
_ATTEMPTS = 32  # for every picture that is wanted; one in 2 to one in 200 succeeds
_PROPOSALS = 32  # places that are tried at once for the first dash of a distractor
_RETRIALS = 4  # of a distractor, as published
_BORDER = 127


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Of the pictures; lengths in pixels. Contrasts multiply the coverage of pixels.

    Attributes:
        side: pictures are side x side.
        contour_length: dashes of the two long paths.
        dash_length, thickness: of a dash.
        margins: half of the gap between dashes; each picture draws one.
        continuity: how straight paths are.
        seed_distance: between the beginnings of the two long paths, which are also at least twice
            as far from the border.
        dot_radius: of the two dots.
        distractor_dashes: of all distractors together, each a third of a long path.
        contrast, distractor_contrast: of the long paths and of the others.
        padding: pixels along the border that paths keep free.
    """

    side: int
    contour_length: int
    dash_length: int
    thickness: float
    margins: tuple[int, ...]
    continuity: float
    seed_distance: int
    dot_radius: float
    distractor_dashes: int
    contrast: float
    distractor_contrast: float
    padding: int = 1

    @property
    def distractor_length(self) -> int:
        """Dashes of a distractor."""
        return self.contour_length // 3

    @property
    def num_distractors(self) -> int:
        """Distractors that are tried; where there is no space there are fewer."""
        return self.distractor_dashes // self.distractor_length


def parameters(side: int, contour_length: int) -> Parameters:
    """The published parameters of pathfinder32 and pathfinder128.

    At 32 pixels the contrast is 2 for a distractor and 0.75 of that for a long path.

    Raises:
        KeyError: for another side.
    """
    return {
        32: Parameters(32, contour_length, 2, 0.5, (1,), 1.0, 7, 1.5, 20, 0.75 * 2.0, 2.0),
        128: Parameters(128, contour_length, 5, 1.5, (2, 3), 1.8, 20, 3.0, 35, 0.9, 0.9),
    }[side]


def generate(
    p: Parameters, seed: tuple[int, ...], count: int
) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """Draw `count` pictures, a pure function of the arguments.

    Only raw words are drawn, because numpy keeps those, unlike its distributions, the same in all
    versions.

    Returns:
        Grey levels [count, side^2], row by row, and labels 0 or 1 [count].
    """
    bits = np.random.PCG64(seed)
    margins = np.array(p.margins)[_integers(bits, len(p.margins), count)]
    pictures = np.empty((count, p.side**2), np.uint8)
    labels = np.empty(count, np.int32)
    for margin in p.margins:
        places = np.flatnonzero(margins == margin)
        while len(places):
            drawn, drawn_labels = _Batch(p, margin, bits, _ATTEMPTS * len(places)).draw()
            used, places = np.split(places, [len(drawn)])
            pictures[used], labels[used] = drawn[: len(used)], drawn_labels[: len(used)]
    return pictures, labels


def _integers(bits: np.random.PCG64, stop: Any, *shape: int) -> npt.NDArray[np.int64]:
    words = bits.random_raw(int(np.prod(shape))).reshape(shape)
    return (words % np.asarray(stop, np.uint64)).astype(np.int64)


class _Batch:
    """Pictures that grow together, each in a flat array with a border around it.

    `owner` [n, cells] holds which dash keeps a cell free for itself, counted from 1; 0 is free.
    """

    def __init__(self, p: Parameters, margin: int, bits: np.random.PCG64, attempts: int):
        self.p = p
        self.bits = bits
        self.border = p.dash_length + 3 * margin + 2  # a pivot may lie outside by margin + 1
        self.row = p.side + 2 * self.border
        self.shapes: Shapes = make_shapes(
            p.dash_length, margin, p.thickness, p.continuity, p.dot_radius, self.row
        )
        owner = np.full((self.row, self.row), _BORDER, np.int8)
        inner = slice(self.border + p.padding, self.border + p.side - p.padding)
        owner[inner, inner] = 0
        n = min(attempts, _CELLS // owner.size)
        self.owner = np.tile(owner.reshape(-1), (n, 1))
        # Pivot and direction of every dash, in the order of `owner`; direction -1 is no dash.
        dashes = 2 * p.contour_length + p.num_distractors * p.distractor_length
        self.pivots = np.zeros((n, dashes), np.int64)
        self.directions = np.full((n, dashes), -1)

    def draw(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        """Give the pictures that succeeded, and their labels."""
        self._add_long_paths()
        for i in range(self.p.num_distractors):
            self._add_distractor(2 * self.p.contour_length + i * self.p.distractor_length)
        return self._render()

    def _keep(self, which: npt.NDArray[np.bool_]) -> None:
        self.owner = self.owner[which]
        self.pivots = self.pivots[which]
        self.directions = self.directions[which]

    def _free(self, owner, pivots, masks, previous=0):
        """Whether masks [n, ..., P] at pivots [n, ...] are free, except for the dash `previous`."""
        rows = np.arange(len(owner)).reshape(-1, *[1] * (masks.ndim - 1)) * owner.shape[1]
        found = owner.reshape(-1)[rows + pivots[..., None] + masks]
        return ((found == 0) | (found == previous)).all(-1)

    def _put(self, owner, pivots, directions, dash):
        rows = np.arange(len(owner))[:, None]
        owner[rows, pivots[:, None] + self.shapes.mask[directions]] = dash

    def _turn(self, owner, pivots, directions, previous):
        """Draw directions that follow `directions` into free places; whether there are any."""
        followers = self.shapes.followers[directions]
        free = self._free(owner, pivots[:, None], self.shapes.mask[followers], previous)
        cumulative = np.cumsum(self.shapes.likelihood[directions] * free, axis=1)
        total = cumulative[:, -1]
        word = self.bits.random_raw(len(owner)) % np.maximum(total, 1)
        chosen = np.minimum((cumulative <= word[:, None]).sum(1), followers.shape[1] - 1)
        return total > 0, followers[np.arange(len(followers)), chosen]

    def _add_long_paths(self) -> None:
        p, shapes = self.p, self.shapes
        n, length = len(self.owner), p.contour_length
        corner = self.border + 2 * p.seed_distance
        y, x = corner + _integers(self.bits, p.side - 4 * p.seed_distance, 2, n)
        angle = _integers(self.bits, 360, n) * np.pi / 180
        dy, dx = (np.rint(p.seed_distance * f(angle)).astype(int) for f in (np.sin, np.cos))
        for first, tail in ((0, y * self.row + x), (length, (y + dy) * self.row + x + dx)):
            self.directions[:, first] = _integers(self.bits, len(shapes.step), n)
            self.pivots[:, first] = tail - shapes.tail[self.directions[:, first]]
        for dash in range(length):
            for at in (dash, length + dash):
                if dash:
                    last = self.directions[:, at - 1]
                    pivots = self.pivots[:, at - 1] + shapes.step[last]
                    alive, directions = self._turn(self.owner, pivots, last, at)
                    self.pivots[:, at], self.directions[:, at] = pivots, directions
                else:
                    masks = shapes.mask[self.directions[:, at]]
                    alive = self._free(self.owner, self.pivots[:, at], masks)
                self._keep(alive)
                self._put(self.owner, self.pivots[:, at], self.directions[:, at], at + 1)
        self._keep(self._dots_are_apart())

    def _tips(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Where the long paths begin and end, [n, 2]."""
        length = self.p.contour_length
        first, last = [0, length], [length - 1, 2 * length - 1]
        begins = self.pivots[:, first] + self.shapes.tail[self.directions[:, first]]
        ends = self.pivots[:, last] + self.shapes.head[self.directions[:, last]]
        return begins, ends

    def _dots_are_apart(self) -> npt.NDArray[np.bool_]:
        """Whether every pair of dots that could be drawn leaves two pixels between them."""
        (y0, x0), (y1, x1) = (np.divmod(tips, self.row) for tips in self._tips())
        squares = (y0[:, :, None] - y1[:, None]) ** 2 + (x0[:, :, None] - x1[:, None]) ** 2
        return (squares >= (2 * self.p.dot_radius + 2) ** 2).all((1, 2))

    def _add_distractor(self, first: int) -> None:
        """Add dashes `first`, first + 1, ... to the pictures that have space for them."""
        p, shapes = self.p, self.shapes
        waiting = np.arange(len(self.owner))
        for _ in range(1 + _RETRIALS):
            shape = (len(waiting), _PROPOSALS)
            y, x = self.border + _integers(self.bits, p.side, 2, *shape)
            proposals = y * self.row + x
            turns = _integers(self.bits, len(shapes.step), *shape)
            free = self._free(self.owner[waiting], proposals, shapes.mask[turns])
            chosen = (np.arange(len(waiting)), free.argmax(1))
            rows, pivots, directions = waiting, proposals[chosen], turns[chosen]
            alive = free[chosen]
            dashes: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]] = []
            for dash in range(first, first + p.distractor_length):
                if dash == first:
                    owner = self.owner[rows]
                else:
                    pivots = pivots + shapes.step[directions]
                    alive, directions = self._turn(owner, pivots, directions, dash)
                dashes = [(a[alive], b[alive]) for a, b in [*dashes, (pivots, directions)]]
                owner, rows = owner[alive], rows[alive]
                pivots, directions = pivots[alive], directions[alive]
                self._put(owner, pivots, directions, dash + 1)
            self.owner[rows] = owner
            for i, (pivots, directions) in enumerate(dashes):
                self.pivots[rows, first + i] = pivots
                self.directions[rows, first + i] = directions
            waiting = np.setdiff1d(waiting, rows)

    def _render(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
        p, shapes = self.p, self.shapes
        pictures = np.zeros(self.owner.shape, np.uint8)
        for dash in range(self.pivots.shape[1]):
            contrast = p.contrast if dash < 2 * p.contour_length else p.distractor_contrast
            levels = np.rint(255 * np.minimum(contrast * shapes.coverage, 1)).astype(np.uint8)
            rows = np.flatnonzero(self.directions[:, dash] >= 0)
            direction = self.directions[rows, dash]
            at = (rows[:, None], self.pivots[rows, dash, None] + shapes.ink[direction])
            pictures[at] = np.maximum(pictures[at], levels[direction])
        n = len(pictures)
        labels, origin = _integers(self.bits, 2, 2, n)
        rows = np.arange(n)
        begins, ends = self._tips()
        dot = np.rint(255 * shapes.dot_coverage).astype(np.uint8)
        for tips in (begins[rows, origin], ends[rows, np.where(labels == 1, origin, 1 - origin)]):
            at = (rows[:, None], tips[:, None] + shapes.dot)
            pictures[at] = np.maximum(pictures[at], dot)
        inner = slice(self.border, self.border + p.side)
        pictures = pictures.reshape(n, self.row, self.row)[:, inner, inner]
        return pictures.reshape(n, p.side**2), labels.astype(np.int32)
