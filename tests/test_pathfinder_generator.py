"""Pictures of Pathfinder: what they show, and that only the paths tell the label."""

import hashlib

import numpy as np
import pytest
from scipy import ndimage

from experiments.tasks import pathfinder_generator as generator
from experiments.tasks.pathfinder_shapes import make_shapes

SIZES = [(32, 6, 300), (32, 9, 300), (32, 14, 300), (128, 6, 40), (128, 14, 20)]


def draw(side, contour_length, count, seed=0):
    p = generator.parameters(side, contour_length)
    pictures, labels = generator.generate(p, (seed,), count)
    return pictures.reshape(count, side, side), labels


def find_dots(picture):
    """The centres [dots, 2] of bright spots that are three pixels wide and high."""
    inside = ndimage.binary_erosion(picture > 240)
    spots, count = ndimage.label(inside, np.ones((3, 3)))
    return np.array(ndimage.center_of_mass(inside, spots, range(1, count + 1))).reshape(-1, 2)


def best_threshold(values, labels):
    """The accuracy on the second half of a threshold that is fitted on the first half."""
    (train, test), (labels, expected) = np.split(values, 2), np.split(labels, 2)
    above = train > np.unique(train)[:, None]
    accuracy = np.mean(above == labels, axis=1)
    best = np.abs(accuracy - 0.5).argmax()
    guess = (test > np.unique(train)[best]) == (accuracy[best] > 0.5)
    return np.mean(guess == expected)


@pytest.fixture(scope="module")
def many():
    return draw(32, 14, 3000)


def test_pictures_are_the_same_everywhere():
    """With any NumPy, on any machine: this hash is part of the data's definition."""
    pictures, labels = draw(32, 14, 64)
    assert pictures.dtype == np.uint8 and labels.dtype == np.int32
    digest = hashlib.sha256(pictures.tobytes() + labels.tobytes()).hexdigest()
    assert digest[:16] == "ddd6e4a3705980ef"


def test_other_seeds_draw_other_pictures():
    first, second = draw(32, 14, 50)[0], draw(32, 14, 50, seed=1)[0]
    assert len({picture.tobytes() for picture in [*first, *second]}) == 100


@pytest.mark.parametrize(("side", "contour_length", "count"), SIZES)
def test_every_picture_has_two_dots(side, contour_length, count):
    pictures, _ = draw(side, contour_length, count)
    assert [len(find_dots(picture)) for picture in pictures] == [2] * count


def test_trivial_statistics_do_not_tell_the_label(many):
    pictures, labels = many
    assert abs(labels.mean() - 0.5) < 4 * 0.5 / np.sqrt(len(labels))
    dots = np.stack([find_dots(picture) for picture in pictures])
    statistics = {
        "brightness": pictures.mean((1, 2)),
        "distance of the dots": np.linalg.norm(dots[:, 0] - dots[:, 1], axis=1),
        "distance from the centre": np.linalg.norm(dots.mean(1) - 15.5, axis=1),
        "covered pixels": (pictures > 0).mean((1, 2)),
    }
    for name, values in statistics.items():
        assert best_threshold(values, labels) < 0.55, name


def test_dots_lie_anywhere_and_one_near_the_centre(many):
    """Long paths begin near the centre and end anywhere."""
    dots = np.stack([find_dots(picture) for picture in many[0]]) - 15.5
    nearest = np.abs(dots).max(-1).min(1)
    farthest = np.abs(dots).max(-1).max(1)
    assert nearest.max() < 12 and np.median(farthest) > 8


def test_the_label_says_whether_one_path_joins_the_dots():
    """Where two lonely paths are far apart, gaps can be closed without joining the paths."""
    p = generator.Parameters(128, 6, 5, 1.5, (2,), 1.8, 28, 3.0, 0, 1.0, 1.0)
    pictures, labels = generator.generate(p, (0,), 300)
    told = 0
    near = np.linalg.norm(np.mgrid[-4:5, -4:5], axis=0) <= 4
    for picture, label in zip(pictures.reshape(-1, 128, 128), labels, strict=True):
        paths, count = ndimage.label(ndimage.binary_dilation(picture > 0, near))
        if count == 2:
            (y0, x0), (y1, x1) = np.rint(find_dots(picture)).astype(int)
            assert (paths[y0, x0] == paths[y1, x1]) == label
            told += 1
    assert told > 100


@pytest.mark.parametrize(("side", "margin"), [(32, 1), (128, 2), (128, 3)])
def test_dashes_keep_clear_of_each_other(side, margin):
    """Only the dash that follows may come near."""
    p = generator.parameters(side, 9)
    batch = generator._Batch(p, margin, np.random.PCG64(3), 400)
    batch.draw()
    n, dashes = batch.directions.shape
    assert n > 20
    found = 0
    for dash in range(dashes):
        rows = np.flatnonzero(batch.directions[:, dash] >= 0)
        masks = batch.shapes.mask[batch.directions[rows, dash]]
        cells = batch.owner[rows[:, None], batch.pivots[rows, dash, None] + masks]
        assert np.isin(cells, (dash + 1, dash + 2)).all()
        found += len(rows)
    assert found > 0.8 * n * dashes  # distractors that find no place are left out


@pytest.mark.parametrize("side", [32, 128])
def test_any_number_of_pictures(side, monkeypatch):
    """Also where a batch gives none at all."""
    monkeypatch.setattr(generator, "_CELLS", 8 * 160**2)
    pictures, labels = draw(side, 9, 3)
    assert pictures.any((1, 2)).all() and set(labels.tolist()) <= {0, 1}


@pytest.mark.parametrize(("length", "margin", "thickness"), [(2, 1, 0.5), (5, 3, 1.5)])
def test_shapes_have_the_published_sizes(length, margin, thickness):
    shapes = make_shapes(length, margin, thickness, 1.8, 3.0, row=100)
    for ink, coverage in zip(shapes.ink, shapes.coverage, strict=True):
        pixels = dict(zip(ink.tolist(), coverage.tolist(), strict=True))
        assert sum(pixels.values()) == pytest.approx(length * thickness, rel=0.1)
    assert shapes.dot_coverage.sum() == pytest.approx(np.pi * 3**2, rel=0.01)
    steps = np.array([(s + 50) // 100 + 1j * ((s + 50) % 100 - 50) for s in shapes.step])
    np.testing.assert_allclose(np.abs(steps), length + 2 * margin, atol=0.71)
    for direction, (followers, likelihood) in enumerate(
        zip(shapes.followers, shapes.likelihood, strict=True)
    ):
        turns = np.abs(np.angle(steps[followers] / steps[direction]))[likelihood > 0]
        assert followers[likelihood.argmax()] == direction
        assert turns.max() < np.pi / 2 / 1.8 + 0.35  # the steps are rounded to pixels
