"""Writes README's tables of all methods from the registries.

    python -m experiments.methods

What a method can do is asked of its layer and of the kernels, by shapes; nothing is computed. The
errors come from a file that `pytest -m oracle --oracle_errors=FILE` writes.
"""

import dataclasses
import functools
import inspect
import pathlib
import sys
import typing
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import read_json
from lowrank_attn.features import FEATURE_MAPS, FeatureMap
from lowrank_attn.layers import ATTENTION, GATINGS, AttentionMethod, Gating
from lowrank_attn.layers.attend import make_kernel, resolve_normalize
from lowrank_attn.layers.gates import Sizes
from lowrank_attn.layers.nnx import LinearAttention
from lowrank_attn.ops import RULES, State, pallas_gpu, pallas_tpu
from lowrank_attn.ops.arguments import Arguments, Method
from lowrank_attn.ops.normalize import needs_denominator

ROOT = pathlib.Path(__file__).parent.parent
BEGIN, END = "<!-- methods -->", "<!-- /methods -->"
D = 64  # head size, also of values, and the width of a layer with one head
T = 128
RULE_KERNEL = "elu"  # rules are asked with this map, which has M = D
EXPLANATION = f"""\
Sizes are those of one head of D = {D} with default options: M features, and trained parameters
(+ constants, which are drawn once). *Forms*: C causal, F full (bidirectional), D decoding with a
state, P packed documents (`segment_ids`). *Scores*: never negative or signed, and the default
normaliser. `xla` computes everything; *TPU* and *GPU* say what `pallas_tpu` and `pallas_gpu` do
with one document of this size: `fused` maps inside their kernels, `ready` takes features that XLA
has computed, – leaves it to `xla`. *Oracle*: code of others (`tests/golden/README.md`), or a
formula or loop in float64, that a test compares with, and the largest relative difference of
outputs (and of gradients, where the test has them), float32 on a CPU. Rules are shown with the map
`{RULE_KERNEL}`.

"""


@dataclasses.dataclass(frozen=True)
class Config:
    """Write README's tables of all methods."""

    errors: str = setting("tests/golden/errors.json", "measured errors, method -> oracle -> error")


def first_line(documented: Any) -> str:
    """The first line of a docstring, without its period, as a cell of a table."""
    return (inspect.getdoc(documented) or "").splitlines()[0].rstrip(".").replace("|", "\\|")


def form(factory: Callable) -> str:
    """What a registry's entry is, and which options it sets."""
    if not isinstance(factory, functools.partial):
        return first_line(factory)
    options = ", ".join(f"{name}={value}" for name, value in factory.keywords.items())
    return f"{first_line(factory.func)} ({options})"


def sizes(params: Mapping[str, jax.Array]) -> int:
    """The number of elements of all arrays."""
    return sum(leaf.size for leaf in params.values())


def parameters(kernel: FeatureMap | AttentionMethod) -> str:
    """Trained parameters, and constants, of one head."""
    trained, constant = jax.eval_shape(lambda: kernel.init(jax.random.key(0), D, 1))
    return f"{sizes(trained):,}" + (f" + {sizes(constant):,}" if constant else "")


def ask(kernel: str, rule: str, causal: bool, **arguments: jax.ShapeDtypeStruct) -> Any:
    """The shapes of a layer's output and state; None if it says that it cannot."""

    def call(arguments):
        layer = LinearAttention(D, 1, kernel=kernel, rule=rule, causal=causal, rngs=nnx.Rngs(0))
        return layer(jnp.zeros((1, T, D)), **arguments)

    try:
        return nnx.eval_shape(call, arguments)
    except (ValueError, NotImplementedError) as error:
        if not any(name in str(error) for name in ("causal", *arguments)):
            raise
        return None


def forms(kernel: str, rule: str = "additive") -> str:
    """Letters for the forms that a layer has; see `EXPLANATION`."""
    documents = jax.ShapeDtypeStruct((1, T), jnp.int32)
    packed = {causal: ask(kernel, rule, causal, segment_ids=documents) for causal in (True, False)}
    answers = {causal: packed[causal] or ask(kernel, rule, causal) for causal in packed}
    has = {
        "C": answers[True],
        "F": answers[False],
        "D": answers[True] and answers[True][1] is not None,
        "P": any(packed.values()),
    }
    return " ".join(letter for letter, answer in has.items() if answer)


def abstract_call(kernel: Any, rule: str, normalize: str) -> tuple[Arguments, Method]:
    """A call of an operation in bfloat16, without values."""
    array: Any = jax.ShapeDtypeStruct
    x = array((1, T, 1, D), jnp.bfloat16)
    M = kernel.dim(D)
    trained, constant = jax.eval_shape(lambda: kernel.init(jax.random.key(0), D, 1))
    gates = {
        name: array((1, T, 1, M) if name in RULES[rule].per_feature else (1, T, 1), jnp.float32)
        for name in RULES[rule].gates
    }
    z = array((1, 1, M), jnp.float32) if needs_denominator(normalize) else None
    state = State(array((1, 1, M, D), jnp.float32), z)
    positions = array((T,), jnp.int32)
    args = Arguments(x, x, x, trained | constant, gates, None, None, positions, positions, state)
    return args, Method(kernel, RULES[rule], normalize, 1e-6, 128)


def captures_arrays(kernel: FeatureMap, params: Mapping[str, jax.Array]) -> bool:
    """Whether a map refers to arrays of its own, which a TPU kernel cannot hold."""

    def apply(params, x, positions):
        return kernel.apply(params, x, is_query=True, positions=positions)

    head = {name: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype) for name, leaf in params.items()}
    x = jax.ShapeDtypeStruct((16, D), jnp.bfloat16)
    positions = jax.ShapeDtypeStruct((16,), jnp.int32)
    return bool(jax.make_jaxpr(apply)(head, x, positions).consts)


def implementations(kernel: FeatureMap, rule: str = "additive") -> tuple[str, str]:
    """What the TPU and the GPU kernels do with a map and a rule."""
    args, method = abstract_call(kernel, rule, resolve_normalize(kernel, None, rule))
    ops = ("causal", "bidirectional") if rule == "additive" else ("causal",)
    fused = {
        pallas_tpu: not captures_arrays(kernel, args.params),
        pallas_gpu: kernel.product is not None,
    }

    def does(module):
        """The device of this process does not matter, so its reason does not count."""
        for op in ops:
            if module.unsupported(op, args, method) not in (None, module.unsuited(args)):
                return "–"
        return "fused" if fused[module] else "ready"

    return does(pallas_tpu), does(pallas_gpu)


def backends(factory: Callable) -> str:
    """The implementations that a method's factory lets choose; else it is plain XLA."""
    option = inspect.signature(factory).parameters.get("implementation")
    names = typing.get_args(option.annotation)[0] if option else None
    return ", ".join(f"`{name}`" for name in typing.get_args(names) or ("xla",))


def oracle(errors: Mapping[str, float]) -> str:
    """Each oracle with its error."""
    return "; ".join(
        f"{source} {error:.1e}".replace("e-0", "e-") for source, error in errors.items()
    )


def map_row(name: str, errors: Mapping[str, float]) -> list[str]:
    """A feature map's cells."""
    kernel = FEATURE_MAPS[name]()
    scores = f"{'≥ 0' if kernel.non_negative else 'signed'}, `{kernel.normalize}`"
    sizes_of_head = [f"{kernel.dim(D):,}", parameters(kernel)]
    what = [scores, forms(name), *implementations(kernel)]
    return [f"`{name}`", form(FEATURE_MAPS[name]), *sizes_of_head, *what, oracle(errors)]


def method_row(name: str, errors: Mapping[str, float]) -> list[str]:
    """An attention method's cells."""
    factory = ATTENTION[name]
    what = [parameters(factory()), forms(name), backends(factory)]
    return [f"`{name}`", form(factory), *what, oracle(errors)]


def rule_row(name: str, errors: Mapping[str, float]) -> list[str]:
    """A rule's cells, with the gates of a layer."""
    gating: Gating = GATINGS[name]
    rule = RULES[gating.rule]
    kernel = make_kernel(RULE_KERNEL, rule=gating.rule)
    assert isinstance(kernel, FeatureMap)
    gates = jax.eval_shape(lambda: gating.init(jax.random.key(0), Sizes(D, 1, kernel.dim(D), D)))
    kinds = [gate.apply.__qualname__.split(".")[0] for gate in gating.gates.values()]
    what = [
        ", ".join(f"`{kind}`" for kind in kinds),
        f"{sizes(gates):,}",
        "any" if rule.sums else "`rms`, `none`",
        forms(RULE_KERNEL, name),
        *("–" if does == "–" else "yes" for does in implementations(kernel, gating.rule)),
    ]
    return [f"`{name}`", first_line(sys.modules[rule.step.__module__]), *what, oracle(errors)]


TABLES: dict[str, tuple[Mapping[str, Any], Callable[..., list[str]]]] = {
    "`--kernel`, maps | features | M | parameters | scores | forms | TPU | GPU | oracle": (
        FEATURE_MAPS,
        map_row,
    ),
    "`--kernel`, methods | what | parameters | forms | computed by | oracle": (
        ATTENTION,
        method_row,
    ),
    "`--rule` | state | gates | their parameters | normaliser | forms | TPU | GPU | oracle": (
        GATINGS,
        rule_row,
    ),
}


def tables(errors: Mapping[str, Mapping[str, float]]) -> str:
    """The part of README between `BEGIN` and `END`."""
    text = EXPLANATION
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "slay_auto")  # that uniform attention is as good
        for header, (registry, row) in TABLES.items():
            rows = [" | ".join(row(name, errors.get(name, {}))) for name in registry]
            ruler = " | ".join("---" for _ in header.split(" | "))
            text += "\n".join(f"| {line} |" for line in [header, ruler, *rows]) + "\n\n"
    return text


def with_tables(readme: str, errors: Mapping[str, Mapping[str, float]]) -> str:
    """README's text with new tables.

    Raises:
        ValueError: if it does not have both marks.
    """
    if BEGIN not in readme or END not in readme:
        raise ValueError(f"README.md has no {BEGIN} ... {END} to write the tables between.")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n\n{tables(errors)}{END}{rest.split(END)[1]}"


def main(argv: list[str]) -> None:
    """Run the command line."""
    config = flags.parse(Config, argv)
    readme = ROOT / "README.md"
    readme.write_text(with_tables(readme.read_text(), read_json(pathlib.Path(config.errors))))


if __name__ == "__main__":
    main(sys.argv)
