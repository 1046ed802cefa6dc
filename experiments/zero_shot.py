"""Zero-shot evaluation of a language model on nine tasks of lm_eval, beside published scores.

    python -m experiments.zero_shot --model=FOLDER --tokenizer=FILE --tasks=all --download
    python -m experiments.zero_shot --model=FOLDER --tokenizer=FILE --tasks=piqa --local=FOLDER

The model is a folder that `experiments.convert` or training wrote. Nothing is fetched without
`--download`: items come from `--local` (see `experiments.zero_shot_rows`) or from what Hugging
Face's library has in its cache. Every answer of the model is kept in the run's `answers.jsonl`, so
a killed run goes on where it was; `result.json` and `result.md` come last.
"""

import dataclasses
import os
import pathlib
import sys
import tempfile
import time
from typing import Any

from absl import logging

from experiments.common import flags, record
from experiments.common.flags import setting
from experiments.common.tokenizer import load_tokenizer
from experiments.published_zero_shot import TASKS
from experiments.tasks.files import file_hash
from experiments.zero_shot_answers import Answers, model_fingerprint
from experiments.zero_shot_rows import local_file, read_rows
from experiments.zero_shot_scorer import Scorer
from experiments.zero_shot_table import Score, to_markdown
from lowrank_attn.models.folder import build, load_decoder


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of an evaluation."""

    model: str = setting("", "folder of the model")
    tokenizer: str = setting(
        "", "`bytes`, a .tiktoken file, or a folder of a vocabulary; default: the model's folder"
    )
    tasks: str = setting("all", f"`all`, or some of {','.join(TASKS)}")
    local: str | None = setting(None, "folder with NAME.jsonl of each task")
    download: bool = setting(False, "fetch data sets that are not in the cache of Hugging Face")
    compat: str | None = setting(
        None,
        "FDA, SWDE and SQuAD as in 2024: prompts and answers keep the white space around them",
        choices=("based-v0",),
    )
    limit: int | None = setting(None, "items of each task, for a first look")
    max_length: int = setting(2048, "tokens; longer requests lose their beginning")
    run_dir: str | None = setting(
        None,
        "folder of the results; default: runs/zero_shot/<name of the model>",
        changes_result=False,
    )
    dtype: str = setting(
        "float32", "of the computation", group="machine", choices=("float32", "bfloat16")
    )
    batch_tokens: int = setting(16384, "tokens of a batch that is scored", group="machine")
    batch_size: int = setting(32, "texts that are generated at a time", group="machine")

    def __post_init__(self):
        """Check what can be checked without reading."""
        if not self.model:
            raise ValueError("--model=FOLDER is needed.")
        if self.local and self.download:
            raise ValueError("--local with --download: items come from one of them.")
        for name in ("limit", "max_length", "batch_tokens", "batch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name}={value}, expected at least 1.")
        self.task_names()

    def task_names(self) -> list[str]:
        """The tasks that were asked for.

        Raises:
            ValueError: for an unknown one.
        """
        names = list(TASKS) if self.tasks == "all" else self.tasks.split(",")
        if unknown := [name for name in names if name not in TASKS]:
            raise ValueError(f"--tasks has {unknown[0]!r}, expected `all` or {', '.join(TASKS)}.")
        return list(dict.fromkeys(names))


def evaluate(config: Config) -> dict[str, Score]:
    """Evaluate a model, and write the results.

    Raises:
        ImportError: if lm_eval is not installed.
        FileNotFoundError: for a model, tokenizer or items that are not there.
        FloatingPointError: if the model's numbers are not finite.
        ValueError: for files that do not fit.
    """
    started = time.time()
    rows = local_rows(config)
    names = list(rows) if rows else config.task_names()
    scorer = make_scorer(config)
    lm_eval, DecoderLM, make_task = _lm_eval(offline=not config.download)
    with tempfile.TemporaryDirectory() as folder:
        tasks = []
        for name in names:
            try:
                strip = config.compat is None
                tasks.append(make_task(name, rows.get(name), pathlib.Path(folder), strip=strip))
            except (OSError, ValueError) as error:
                raise FileNotFoundError(
                    f"task {name}: its data set could not be read ({error}); give --local=FOLDER, "
                    "or --download to fetch it."
                ) from error
        found = lm_eval.simple_evaluate(
            DecoderLM(scorer),
            tasks=tasks,
            task_manager=lm_eval.tasks.TaskManager(include_defaults=False),  # indexing takes 20 s
            limit=config.limit,
            bootstrap_iters=0,  # accuracies need none
            log_samples=False,
        )
    scores = {name: Score.read(name, found) for name in names}
    _write(config, scorer, scores, found, started)
    return scores


def local_rows(config: Config) -> dict[str, list[dict[str, Any]]]:
    """Rows of the tasks from `--local`; with `--tasks=all`, of those that are there, aloud.

    Raises:
        FileNotFoundError: naming the files that were looked for.
        ValueError: for a damaged file.
    """
    if config.local is None:
        return {}
    names, missing = config.task_names(), []
    if config.tasks == "all":
        missing = [name for name in names if not local_file(config.local, name).is_file()]
    if missing:
        files = ", ".join(f"{name}.jsonl" for name in missing)
        if len(missing) == len(names):
            raise FileNotFoundError(f"--local={config.local} has none of {files}.")
        logging.warning("--local=%s has no %s: these tasks are left out.", config.local, files)
    return {name: read_rows(config.local, name) for name in names if name not in missing}


def make_scorer(config: Config) -> Scorer:
    """The model with its tokenizer, and the answers that it gave before."""
    tokenizer = load_tokenizer(config.tokenizer or config.model)
    decoder, params, _ = load_decoder(config.model)
    if tokenizer.vocab_size < decoder.vocab_size:
        logging.warning(
            "The tokenizer %s has %d ids and the model %d: was it trained with another one?",
            tokenizer.name,
            tokenizer.vocab_size,
            decoder.vocab_size,
        )
    return Scorer(
        build(decoder, params, dtype=config.dtype),
        tokenizer,
        Answers(run_folder(config) / "answers.jsonl"),
        model_fingerprint(decoder, params, config.dtype, tokenizer.fingerprint),
        max_length=config.max_length,
        batch_tokens=config.batch_tokens,
        batch_size=config.batch_size,
    )


def run_folder(config: Config) -> pathlib.Path:
    """The folder of the results."""
    name = pathlib.Path(config.model).absolute().name
    return pathlib.Path(config.run_dir or f"runs/zero_shot/{name}")


def _lm_eval(*, offline: bool):
    """The library, which is slow to import, told first whether it may use the network."""
    os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"
    if offline:
        os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    try:
        import datasets
        import lm_eval.tasks
    except ImportError as error:
        raise ImportError("zero-shot evaluation needs `pip install lowrank-attn[lm_eval]`.") from (
            error
        )
    if offline and not datasets.config.HF_HUB_OFFLINE:
        raise ValueError(
            "the package datasets was imported before with HF_HUB_OFFLINE=0 and would use the "
            "network: set HF_HUB_OFFLINE=1 at the start, or give --download."
        )
    from experiments.zero_shot_lm import DecoderLM
    from experiments.zero_shot_tasks import make_task

    return lm_eval, DecoderLM, make_task


def _write(config, scorer, scores, found, started):
    folder = run_folder(config)
    seconds = time.time() - started
    metrics = {
        "scores": {name: dataclasses.asdict(score) for name, score in scores.items()},
        "lm_eval": {name: found["results"][name] for name in scores},
        "lm_eval_version": found["lm_eval_version"],
        "tokenizer": scorer.tokenizer.name,
        "model_fingerprint": scorer.fingerprint,
        "items": {
            name: file_hash(local_file(config.local, name)) if config.local else "published"
            for name in scores
        },
        "requests_computed": scorer.computed,
        "requests_truncated": scorer.truncated,
    }
    record.write_result(folder / "result.json", config, metrics, started=started, seconds=seconds)
    text = to_markdown(pathlib.Path(config.model).absolute().name, scores, config.limit)
    (folder / "result.md").write_text(text)
    print(text)
    print(f"{scorer.computed} requests computed in {seconds:.0f} s; written to {folder}")


def main(argv: list[str]) -> int:
    """Run the command; the exit status is 1 if something does not fit or is missing."""
    config = flags.parse(Config, argv)
    try:
        evaluate(config)
    except (FileNotFoundError, FloatingPointError, ImportError, ValueError) as error:
        print(f"zero_shot: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
