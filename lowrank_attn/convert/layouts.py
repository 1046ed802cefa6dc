"""Names and shapes of published checkpoints, leaf by leaf, beside ours.

Three skeletons are known: that of BASED and its attention baseline (`transformer.layers.I...`),
Mamba's (`backbone.layers.I...`), and Llama's (`layers.I...`). A matrix there is [out, in], here
[in, out] with both sides split into their axes.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from lowrank_attn.models.decoder_configs import DecoderConfig

Shapes = Mapping[str, tuple[int, ...]]


class Entry(NamedTuple):
    """One array: there and here.

    Attributes:
        source: its name in the checkpoint.
        path: its path in our model.
        shape: its shape in the checkpoint.
        transposed: whether it is a matrix [out, in].
        part: which of the parts [E, parts, F] of ours it is; None: all of it.
    """

    source: str
    path: str
    shape: tuple[int, ...]
    transposed: bool = False
    part: int | None = None

    @property
    def place(self) -> str:
        """The path, and which part."""
        return self.path if self.part is None else f"{self.path}[:, {self.part}]"

    def here(self, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Our array of a shape, float32, from the checkpoint's.

        Always a copy: a view would keep the whole file mapped.
        """
        array = array.T if self.transposed else array
        return np.array(array, np.float32, order="C").reshape(shape)

    def there(self, array: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """The checkpoint's array, of a dtype, from ours."""
        array = np.asarray(array)
        array = array if self.part is None else array[:, self.part]
        if self.transposed:
            array = array.reshape(self.shape[::-1]).T
        return np.ascontiguousarray(array.reshape(self.shape), dtype=dtype)


# Names of the embedding and of the head that is tied to it; a checkpoint may have one or both.
TIED = {
    "gpt": ("transformer.embeddings.word_embeddings.weight", "lm_head.weight"),
    "mamba": ("backbone.embedding.weight", "backbone.embeddings.weight", "lm_head.weight"),
    "llama": ("embed_tokens.weight", "lm_head.weight"),
}


def skeleton(config: DecoderConfig) -> str:
    """`mamba`, `llama` or `gpt`, by the mixers of a model."""
    if "mamba" in config.layers:
        return "mamba"
    softmax = config.mixers.get("linear", {}).get("kernel") == "softmax"
    return "llama" if softmax and set(config.layers) == {"linear"} else "gpt"


def entries(config: DecoderConfig, shapes: Shapes) -> Iterator[Entry]:
    """Where every array of a checkpoint goes, the embedding first.

    Args:
        config: the model.
        shapes: the shapes of our parameters by path.
    """
    kind = skeleton(config)
    table = shapes["embedding/embedding"]
    yield Entry(TIED[kind][0], "embedding/embedding", table)
    if kind == "llama":
        yield from _llama(config, shapes)
        return
    for i, mixer in enumerate(config.layers):
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


def _llama(config, shapes):
    table = shapes["embedding/embedding"]
    E, _, F = shapes["blocks/0/mlp/up/kernel"]
    for i in range(len(config.layers)):
        there, here = f"layers.{i}.", f"blocks/{i}/"
        yield Entry(there + "input_layernorm.weight", here + "mixer_norm/scale", (E,))
        for name, path in (("q", "query"), ("k", "key"), ("v", "value")):
            path = f"{here}mixer/{path}/kernel"
            _, heads, size = shapes[path]
            yield Entry(f"{there}self_attn.{name}_proj.weight", path, (heads * size, E), True)
        path = here + "mixer/out/kernel"
        heads, size, _ = shapes[path]
        yield Entry(there + "self_attn.o_proj.weight", path, (E, heads * size), True)
        yield Entry(there + "post_attention_layernorm.weight", here + "mlp_norm/scale", (E,))
        for part, name in enumerate(("up", "gate")):
            source = f"{there}mlp.{name}_proj.weight"
            yield Entry(source, here + "mlp/up/kernel", (F, E), True, part)
        yield Entry(there + "mlp.down_proj.weight", here + "mlp/out/kernel", (E, F), True)
    yield Entry("norm.weight", "norm/scale", (E,))
    if not config.tied:
        yield Entry("lm_head.weight", "head/embedding", table)


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
