"""Language models: trains a decoder on a folder of text, from scratch or from a checkpoint.

    python -m experiments.lm --model=based-tiny --data=FOLDER --tokenizer=r50k_base.tiktoken
    python -m experiments.lm --checkpoint=MODEL --kernel=llops --data=FOLDER --tokenizer=...

FOLDER has .txt, .jsonl(.gz|.zst) or .parquet files, or the shards of `experiments.prepare_text`.
MODEL is a folder that `experiments.convert` or this command wrote; with --kernel=llops the Taylor
features of BASED become LLoPS features that begin as the same function. The last line on standard
output is one JSON object, the model is `<run>/model`, and `<run>/samples` has text that it wrote.
Started again, the same command continues where it was stopped.
"""

import json
import math
import pathlib
import shutil
import sys
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from tqdm import tqdm

from experiments.aot import report_step, topology_mesh
from experiments.common import flags, optimizer
from experiments.common.checkpoint import CheckpointError
from experiments.common.evaluate import evaluate
from experiments.common.module import PureModule
from experiments.common.phase import NonFiniteError, Phase
from experiments.common.placement import jit_evaluation, make_mesh, on_one_device
from experiments.common.plot import plot_run
from experiments.common.processes import ProcessesError, first_alone, is_first, say
from experiments.common.processes import start as start_processes
from experiments.common.record import timing, write_result
from experiments.common.tokenizer import Tokenizer, load_tokenizer
from experiments.common.train import train
from experiments.flops import peak_flops, training_flops
from experiments.lm_objective import next_token
from experiments.lm_settings import Config, check_mesh, choose_recipe
from experiments.lm_start import Start, make_start
from experiments.text_data.documents import BadText
from experiments.text_data.rows import Rows
from experiments.text_data.shards import TokenText, load_text
from lowrank_attn import parallel
from lowrank_attn.models.folder import arrays_of, save_decoder, shapes_of
from lowrank_attn.models.generate import stream
from lowrank_attn.models.sampling import Sampling

# Names of parameters without weight decay, besides vectors.
NOT_DECAYED = (*optimizer.NOT_DECAYED, "bias", "skip")
SAMPLED_TOKENS = 64
PROMPT_TOKENS = 16


def make_optimizer(config: Config, model: PureModule):
    """AdamW; not decayed: biases, gains, and what decides how fast a state decays."""
    schedule = optimizer.learning_rate_schedule(
        config.schedule,
        config.learning_rate,
        min(config.warmup_steps, config.steps // 10),
        config.steps,
        config.last_rate * config.learning_rate,
    )
    return optimizer.adamw(
        schedule,
        b2=config.b2,
        weight_decay=config.weight_decay,
        no_decay=lambda name: name.split("/")[-1] in NOT_DECAYED,
        frozen=model.is_constant,
        clip_at=config.clip_at,
    )


def make_phase(
    config: Config,
    start: Start,
    text: TokenText,
    after_eval: Callable[[Any, int], None] = lambda params, step: None,
) -> tuple[Phase, PureModule]:
    """The only phase of the run, and the model."""
    model = PureModule(
        lambda rngs: start.decoder.make(dtype=config.dtype, remat=config.remat, rngs=rngs)
    )
    objective = next_token(model.module, text.eot, config.accumulate)
    phase = Phase(
        name="train",
        steps=config.steps,
        batch_size=config.batch_size,
        source=Rows(text.splits["train"], config.length),
        init=lambda key, previous: model.init(key) if start.params is None else start.params,
        loss_fn=objective.loss,
        optimizer=make_optimizer(config, model),
        eval_source=Rows(text.splits["validation"], config.length, config.validation_rows),
        eval_fn=objective.evaluate,
        best_metric="loss",
        best_mode="min",
        after_eval=after_eval,
    )
    return phase, model


def write_samples(model, text: TokenText, tokenizer: Tokenizer, path: pathlib.Path) -> str:
    """Let a model go on from the beginnings of two validation documents; the text is returned."""
    tokens = next(shard for shard in text.splits["validation"] if len(shard))[: 2**20]
    begins = np.flatnonzero(tokens == text.eot)[:2]
    prompts = [tokens[begin : begin + PROMPT_TOKENS].tolist() for begin in begins]
    steps = stream(
        model,
        prompts,
        max_new_tokens=SAMPLED_TOKENS,
        sampling=Sampling(temperature=0.8, top_p=0.95),
        key=jax.random.key(0),
        stop_tokens=(text.eot,),
    )
    rows = zip(prompts, np.stack([*steps], axis=1))
    sample = "\n\n".join(
        f"{tokenizer.decode(prompt[1:])} |"
        f"{tokenizer.decode([i for i in row.tolist() if i not in (-1, text.eot)])}"
        for prompt, row in rows
    )
    path.parent.mkdir(exist_ok=True)
    path.write_text(sample + "\n")
    return sample


def validate(config: Config, phase: Phase, params: Any) -> dict[str, float]:
    """The metrics of parameters that have not been trained here yet."""
    mesh = make_mesh(config.mesh)
    params = jax.device_put(params, parallel.shardings(params, mesh))
    found = evaluate(
        jit_evaluation(phase.eval_fn, mesh),
        params,
        phase.eval_source,
        config.batch_size,
        jax.random.key(0),
        mesh=mesh,
    )
    assert found is not None
    return found


def run(config: Config) -> dict[str, Any] | None:
    """Load the text, train, and leave everything in the run's folder.

    Returns:
        The summary that `main` prints, in process 0.
    """
    tokenizer = load_tokenizer(config.tokenizer)
    start = make_start(config, tokenizer)
    check_mesh(config, start.decoder, make_mesh(config.mesh))
    with first_alone("load_text"):
        text = load_text(config, tokenizer)
    what = pathlib.Path(config.checkpoint).name if config.checkpoint else config.model
    name = f"lm-{what}-{config.kernel or 'own'}-{flags.config_hash(config)}-{text.fingerprint[:6]}"
    run_dir = pathlib.Path(config.run_dir or pathlib.Path("runs") / name)

    def after_eval(params, step):
        if not config.samples:
            return
        path = run_dir / "samples" / f"{step}.txt"
        params = on_one_device(params)
        if not is_first():
            return
        sample = write_samples(model.module(params), text, tokenizer, path)
        tqdm.write(f"step {step}:\n{sample}\n", file=sys.stderr)

    phase, model = make_phase(config, start, text, after_eval)
    before = {}
    if start.params is not None:
        before = validate(config, phase, start.params)
        say(f"before training: validation {_perplexity(before)}")
    described = flags.to_dict(config, changes_result=True) | {"data": text.fingerprint}
    outcome = train([phase], config, run_dir, described, tokenizer.fingerprint)
    trained = on_one_device(outcome.params)
    if not is_first():
        return None
    _save(run_dir / "model", start, arrays_of(model.module(trained)))
    plot_run(run_dir)
    flops, speed = training_flops(start.decoder, config.length), timing(run_dir, "train")
    peak = peak_flops(jax.local_devices()[0].device_kind) if config.dtype == "bfloat16" else None
    metrics: dict[str, Any] = {
        "validation_loss": outcome.best["loss"],
        "validation_perplexity": float(np.exp(outcome.best["loss"])),
        "validation_loss_before": before.get("loss"),
        "best_step": outcome.best_step,
        "parameters": sum(x.size for x in jax.tree.leaves(trained)),
        "tokens": config.steps * config.batch_size * config.length,
        "flops_per_token": flops,
        "mfu": peak and speed["tokens_per_second"] * flops / (peak * jax.device_count()),
        "data": text.fingerprint,
        "left_out": text.skipped,
        "timing": speed,
    }
    write_result(
        run_dir / "result.json",
        config,
        metrics,
        started=outcome.started,
        seconds=outcome.seconds,
    )
    say(f"validation {_perplexity(outcome.best)}; model: {run_dir / 'model'}")
    return {
        "model": what,
        "kernel": config.kernel,
        "steps": config.steps,
        "seconds": round(outcome.seconds, 1),
        "validation_loss": metrics["validation_loss"],
        "validation_perplexity": metrics["validation_perplexity"],
        "validation_loss_before": metrics["validation_loss_before"],
        "tokens_per_second": speed["tokens_per_second"],
        "mfu": metrics["mfu"],
        "run_dir": str(run_dir),
    }


def compile_ahead(config: Config) -> dict[str, Any]:
    """What a step needs on the TPUs of `--aot`; text is not read."""
    mesh = topology_mesh(config.aot or "", config.mesh)
    start = make_start(config, load_tokenizer(config.tokenizer) if config.tokenizer else None)
    check_mesh(config, start.decoder, mesh)
    tokens = [np.zeros(config.length + 1, np.uint16)]
    splits = {"train": tokens, "validation": tokens}
    phase, _ = make_phase(
        config, start, TokenText(pathlib.Path(), splits, start.decoder.vocab_size - 1, (), "")
    )
    tokens_per_device = config.batch_size * config.length / mesh.size
    flops = training_flops(start.decoder, config.length) * tokens_per_device
    return report_step(phase, mesh, config.aot or "") | {
        "model_flops": flops,
        "parameters": sum(math.prod(shape) for shape in shapes_of(start.decoder).values()),
    }


def _perplexity(metrics):
    return f"loss {metrics['loss']:.4f}, perplexity {np.exp(metrics['loss']):.2f}"


def _save(folder, start, params):
    """Write the model, unless a process before did; one that was stopped on the way starts anew."""
    if not (folder / "decoder.json").exists():
        shutil.rmtree(folder, ignore_errors=True)
        # without the devices that they are on, which another machine may not have
        save_decoder(folder, start.decoder, jax.device_get(params), start.source)


def main(argv: list[str]) -> None:
    """Run the command line; wrong settings and data end with exit code 2 and one message."""

    def settings_of_recipe(config):
        if config.aot is None:
            start_processes(config)
        name, settings = choose_recipe(config, "tpu" if config.aot else jax.default_backend())
        return {**settings, "recipe": name}

    try:
        config = flags.parse(Config, argv, settings_of_recipe)
        summary = compile_ahead(config) if config.aot else run(config)
    except (CheckpointError, NonFiniteError, ProcessesError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except (ValueError, FileNotFoundError, ImportError) as error:
        hint = " --skip_bad_shards leaves it out." if isinstance(error, BadText) else ""
        print(f"error: {error}{hint}", file=sys.stderr)
        sys.exit(2)
    if summary is not None:
        print(json.dumps(summary))


if __name__ == "__main__":
    main(sys.argv)
