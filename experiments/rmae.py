"""How well sketches approximate a polynomial kernel on queries and keys of a trained model.

    python -m experiments.rmae --out=experiments/results/rmae

Table 3 of LLoPS: a model with 16 layers of exact polynomial attention is trained on associative
recall; on queries and keys of layers 0, 8 and 15 random and fitted sketches of equal size are
compared, with the optimal sketch as the bound. What is finished is kept: the same command goes on.
"""

import dataclasses
import os
import pathlib
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.common import flags
from experiments.common.flags import setting
from experiments.common.record import read_csv, write_csv, write_text
from experiments.rmae_model import Heads, read_heads, trained_heads
from experiments.rmae_report import COLUMNS, PUBLISHED, markdown
from lowrank_attn.features import FeatureMap, llops, mlp
from lowrank_attn.theory import fit, optimal_sketch, rmae

METHODS = ("optimal", "psf", "mlp", "llops", "llops t=2", "llops t=4")


@dataclasses.dataclass(frozen=True)
class Config:
    """Compare sketches of polynomial kernels."""

    out: str = setting("experiments/results/rmae", "files, without suffix", changes_result=False)
    heads: str | None = setting(None, "an .npz file with q, k [heads, tokens, D] of a model")
    degrees: str = setting("2,3", "degrees p of the kernel", changes_result=False)
    methods: str = setting(",".join(METHODS), "sketches to compare", changes_result=False)
    features: int = setting(256, "features m of every sketch")
    width: int = setting(64, "of the model, and head size D")
    layers: int = setting(16, "of attention")
    vocab_size: int = setting(8192, "tokens")
    steps: int = setting(3000, "of training the model")
    learning_rate: float = setting(3e-3, "of the model, at its peak")
    rows: int = setting(1024, "queries and keys of a layer that sketches are fitted to")
    fit_steps: int = setting(5000, "of each fit")
    rates: str = setting("3e-3,1e-2", "learning rates of fits, of which the best is kept")
    quick: bool = setting(False, "small, for minutes on a CPU", changes_result=False)

    def __post_init__(self) -> None:
        """Refuse unknown methods and sizes that are out of range.

        Raises:
            ValueError: naming the setting.
        """
        unknown = [name for name in self.methods.split(",") if name not in METHODS]
        if unknown:
            raise ValueError(
                f"methods={self.methods!r}: expected names among {', '.join(METHODS)}."
            )
        for name in ("features", "width", "layers", "steps", "rows", "fit_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}, expected at least 1.")
        for name, kind in (("degrees", int), ("rates", float)):
            try:
                positive = min(map(kind, getattr(self, name).split(","))) > 0
            except ValueError:
                positive = False
            if not positive:
                raise ValueError(f"{name}={getattr(self, name)!r}, expected numbers > 0.")

    def chosen(self) -> list[int]:
        """The attention layers that are sampled: first, middle, last."""
        return sorted({0, self.layers // 2, self.layers - 1})


def quick_settings(config: Config) -> Mapping[str, Any]:
    """The settings of `--quick`."""
    if not config.quick:
        return {}
    return {
        "features": 32, "width": 16, "layers": 3, "vocab_size": 128, "steps": 60, "rows": 128,
        "fit_steps": 300, "rates": "1e-2",
    }  # fmt: skip


def sketch(method: str, degree: int, features: int) -> FeatureMap:
    """The map of a method, for kernels (q . k / D)^degree."""
    if method == "mlp":
        return mlp(features, qk_norm=False)
    rank = int(method[-1]) if "=" in method else 1
    return llops(
        degree, features, rank=rank, constants=False, tied=method == "psf", qk_norm=False, scale=1.0
    )


def scores(feature_map: FeatureMap, params, q, k) -> np.ndarray:
    """phi(q) phi(k)^T of all heads, [n, N, S]."""

    @jax.jit
    def all_scores(params, q, k):
        def one(params, q, k):
            phi_q = feature_map.apply(params, q, is_query=True)
            return jnp.dot(
                phi_q, feature_map.apply(params, k, is_query=False).T, precision="highest"
            )

        return jax.vmap(one)(params, q, k)

    return np.asarray(all_scores(params, q, k), np.float64)


def errors(approximation: np.ndarray, exact: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The relative mean absolute and Frobenius errors of each head."""
    difference = np.sum(np.square(approximation - exact), axis=(1, 2))
    frobenius = np.sqrt(difference / np.sum(np.square(exact), axis=(1, 2)))
    return np.asarray(rmae(jnp.asarray(approximation), jnp.asarray(exact))), frobenius


def fitted(feature_map: FeatureMap, degree: int, pair, rate: float, config: Config):
    """Parameters of all heads, fitted to one pair of queries and keys."""
    q, k = map(jnp.asarray, pair)

    def kernel(q, k):
        return (jnp.dot(q, k.T, precision="highest") / q.shape[-1]) ** degree

    return fit(
        feature_map, q, k, kernel, steps=config.fit_steps, key=jax.random.key(0), learning_rate=rate
    ).params


def compare(method: str, degree: int, heads: Heads, config: Config) -> list[dict[str, Any]]:
    """One method on all heads: its columns of each head's row."""
    D, half = heads.q.shape[-1], heads.q.shape[1] // 2
    sample, other = ((x[:, :half], x[:, half:]) for x in heads)
    pairs = [(sample[i], other[i]) for i in range(2)]  # (q, k) fitted to, and held out
    exact = [(np.einsum("htd,hsd->hts", *map(np.float64, pair)) / D) ** degree for pair in pairs]

    def measured(found):
        return np.stack([each for got, want in zip(found, exact) for each in errors(got, want)])

    rate, parameters = "", 0
    if method == "optimal":
        found: list[list[np.ndarray]] = [[], []]
        for q, k, *others in zip(*pairs[0], *pairs[1]):
            best = optimal_sketch(q / D**0.5, k / D**0.5, degree, config.features)
            for rows, target in zip(((q, k), others), found):
                target.append(best.query(rows[0] / D**0.5) @ best.key(rows[1] / D**0.5).T)
        result = measured([np.stack(x) for x in found])
        parameters = 2 * D**degree * config.features
    elif method == "psf":
        feature_map = sketch(method, degree, config.features)
        draws = [feature_map.init(jax.random.key(draw), D, len(heads.q))[0] for draw in range(5)]
        trials = [measured([scores(feature_map, x, *pair) for pair in pairs]) for x in draws]
        result = np.mean(trials, axis=0)
    else:
        feature_map = sketch(method, degree, config.features)
        rates = config.rates.split(",")
        fits = [fitted(feature_map, degree, pairs[0], float(rate), config) for rate in rates]
        trials = [measured([scores(feature_map, x, *pair) for pair in pairs]) for x in fits]
        chosen = int(np.nanargmin([np.mean(trial[1]) for trial in trials]))
        result, rate = trials[chosen], rates[chosen]
        parameters = sum(x.size for x in jax.tree.leaves(fits[0])) // len(heads.q)
    names = ("rmae", "frobenius", "held_out", "held_out_frobenius")
    return [
        dict(zip(names, column)) | {"rate": rate, "parameters": parameters} for column in result.T
    ]


def sampled(config: Config, degree: int) -> tuple[Heads, float | str]:
    """Queries and keys, and the recall of their model; those of a trained model are kept."""
    if config.heads is not None:
        return read_heads(config.heads, 2 * config.rows), ""
    path = pathlib.Path(f"{config.out}_p{degree}.npz")
    sizes = (
        config.layers,
        config.width,
        config.vocab_size,
        config.steps,
        config.rows,
        config.learning_rate,
    )
    if path.exists():
        with np.load(path) as kept:
            if tuple(kept["sizes"]) == sizes:
                return Heads(kept["q"], kept["k"]), float(kept["recall"])
    heads, recall = trained_heads(
        degree,
        config.layers,
        config.width,
        config.vocab_size,
        config.steps,
        config.learning_rate,
        config.chosen(),
        2 * config.rows,
    )
    temporary = path.with_suffix(".tmp.npz")
    np.savez(temporary, **heads._asdict(), recall=recall, sizes=sizes)
    os.replace(temporary, path)
    return heads, recall


def run(config: Config) -> None:
    """Compare what is missing, writing after each method."""
    out = pathlib.Path(config.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    rows = read_csv(f"{out}.csv", COLUMNS)
    name = flags.config_hash(config)
    lines = "".join(f"    {line}\n" for line in flags.format_config(config).splitlines())
    settings = f"\nSettings {name}:\n\n{lines}"
    done = {(int(row["degree"]), row["method"]) for row in rows if row["settings"] == name}
    for degree in map(int, config.degrees.split(",")):
        methods = [x for x in config.methods.split(",") if (degree, x) not in done]
        if not methods:
            continue
        heads, recall = sampled(config, degree)
        layers = config.chosen() if config.heads is None else range(len(heads.q))
        for method in methods:
            printed = PUBLISHED.get((degree, method), ())
            for i, (layer, found) in enumerate(zip(layers, compare(method, degree, heads, config))):
                row = dict.fromkeys(COLUMNS, "") | found
                row |= {"settings": name, "degree": degree, "layer": layer, "method": method}
                row |= {"features": config.features, "recall": recall}
                rows.append(row | {"published": printed[i] if i < 3 and printed else ""})
            write_csv(f"{out}.csv", COLUMNS, rows)
            write_text(f"{out}.md", markdown(rows) + settings)
            print(f"p={degree} {method}: {rows[-1]['rmae']:.3f} in the last layer", file=sys.stderr)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and files end with exit code 2 and one message."""
    config = flags.parse(Config, argv, quick_settings)
    try:
        run(config)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(sys.argv)
