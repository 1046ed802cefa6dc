"""Names and shapes of published checkpoints, leaf by leaf, beside ours.

Two skeletons are known: that of BASED and its attention baseline (`transformer.layers.I...`), and
Mamba's (`backbone.layers.I...`). A matrix there is [out, in], here [in, out] with both sides split
into their axes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

Shapes = Mapping[str, tuple[int, ...]]


class Entry(NamedTuple):
    """One array: there and here.

    Attributes:
        source: its name in the checkpoint.
        path: its path in our model.
        shape: its shape in the checkpoint.
        transposed: whether it is a matrix [out, in].
    """

    source: str
    path: str
    shape: tuple[int, ...]
    transposed: bool = False

    def here(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array of a shape, float32, from the checkpoint's.

        Always a copy: a view would keep the whole file mapped.
        """
        array = array.T if self.transposed else array
        return np.array(array, np.float32, order="C").reshape(shape)

    def there(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The checkpoint's array, of a dtype, from ours."""
        if self.transposed:
            array = np.asarray(array).reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape), dtype=dtype)


# Names of the embedding and of the head that is tied to it; a checkpoint may have one or both.
TIED = {
    "gpt": ("transformer.embeddings.word_embeddings.weight", "lm_head.weight"),
    "mamba": ("backbone.embedding.weight", "backbone.embeddings.weight", "lm_head.weight"),
}


def skeleton(layers: tuple[str, ...]) -> str:
    """`mamba` or `gpt`, by the mixers of a model."""
    return "mamba" if "mamba" in layers else "gpt"


def entries(layers: tuple[str, ...], shapes: Shapes) -> Iterator[Entry]:
    """Where every array of a checkpoint goes, the embedding first.

    Args:
        layers: the mixers of the model.
        shapes: the shapes of our parameters by path.
    """
    kind = skeleton(layers)
    table = shapes["embedding/embedding"]
    yield Entry(TIED[kind][0], "embedding/embedding", table)
    for i, mixer in enumerate(layers):
        there = f"{'backbone' if kind == 'mamba' else 'transformer'}.layers.{i}."
        here = f"blocks/{i}/"

        def entry(source, path, shape, transposed=False, there=there, here=here):
            return Entry(there + source, here + path, shape, transposed)

        def shape(path, here=here):
            return shapes[f"{here}mixer/{path}"]

        norm = (table[1],)
        yield entry("norm.weight" if kind == "mamba" else "norm1.weight", "mixer_norm/scale", norm)
        for source, path, *rest in MIXER_ENTRIES[mixer](shape):
            yield entry(f"mixer.{source}", f"mixer/{path}", *rest)
        if kind == "gpt":
            E, _, F = shapes[f"{here}mlp/up/kernel"]
            yield entry("norm2.weight", "mlp_norm/scale", norm)
            yield entry("mlp.fc1.weight", "mlp/up/kernel", (2 * F, E), True)
            yield entry("mlp.fc2.weight", "mlp/out/kernel", (E, F), True)
    last = "backbone.norm_f.weight" if kind == "mamba" else "transformer.ln_f.weight"
    yield Entry(last, "norm/scale", norm)


def _short_conv(shape):
    E, _, inner = shape("up/kernel")
    return [
        ("in_proj.weight", "up/kernel", (2 * inner, E), True),
        ("in_proj.bias", "up/bias", (2 * inner,)),
        ("conv.conv.weight", "conv", (inner, 1, shape("conv")[1])),
        ("out_proj.weight", "out/kernel", (E, inner), True),
        ("out_proj.bias", "out/bias", (E,)),
    ]


def _linear(shape):
    E, H, D = shape("query/kernel")
    P = shape("value/kernel")[2]
    return [
        ("proj_q.weight", "query/kernel", (H * D, E), True),
        ("proj_k.weight", "key/kernel", (H * D, E), True),
        ("proj_v.weight", "value/kernel", (H * P, E), True),
        ("out_proj.weight", "out/kernel", (E, H * P), True),
    ]


def _softmax(shape):
    E, _, H, D = shape("qkv/kernel")
    return [
        ("Wqkv.weight", "qkv/kernel", (3 * H * D, E), True),
        ("out_proj.weight", "out/kernel", (E, H * D), True),
    ]


def _mamba(shape):
    E, _, inner = shape("up/kernel")
    R, N = shape("scan/dt_proj")[1], shape("scan/A_log")[2]
    return [
        ("in_proj.weight", "up/kernel", (2 * inner, E), True),
        ("conv1d.weight", "scan/conv", (inner, 1, shape("scan/conv")[2])),
        ("conv1d.bias", "scan/conv_bias", (inner,)),
        ("x_proj.weight", "scan/x_proj", (R + 2 * N, inner), True),
        ("dt_proj.weight", "scan/dt_proj", (inner, R), True),
        ("dt_proj.bias", "scan/dt_bias", (inner,)),
        ("A_log", "scan/A_log", (inner, N)),
        ("D", "scan/skip", (inner,)),
        ("out_proj.weight", "out/kernel", (E, inner), True),
    ]


MIXER_ENTRIES: dict[str, Callable] = {
    "short_conv": _short_conv,
    "linear": _linear,
    "sliding_window": _softmax,
    "softmax": _softmax,
    "mamba": _mamba,
}
