"""The tasks of lm_eval, on its own data sets or on local rows."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import lm_eval.tasks
from lm_eval.api.task import ConfigurableTask, Task
from lm_eval.tasks import TaskManager
from lm_eval.tasks.fda.task import FDA
from lm_eval.tasks.squad_completion.task import SQUADCompletion
from lm_eval.tasks.swde.task import SWDE

# The file of each task in lm_eval, and the part of its data set that is evaluated.
FILES = {
    "winogrande": ("winogrande/default.yaml", "validation"),
    "piqa": ("piqa/piqa.yaml", "validation"),
    "lambada_openai": ("lambada/lambada_openai.yaml", "test"),
    "hellaswag": ("hellaswag/hellaswag.yaml", "validation"),
    "arc_easy": ("arc/arc_easy.yaml", "test"),
    "arc_challenge": ("arc/arc_challenge.yaml", "test"),
}
RECALL: Mapping[str, type] = {"fda": FDA, "swde": SWDE, "squad_completion": SQUADCompletion}

Rows = Sequence[Mapping[str, Any]]


def make_task(name: str, rows: Rows | None, folder: pathlib.Path, *, strip: bool) -> Task:
    """One of the nine tasks.

    Args:
        name: of `FILES` or `RECALL`.
        rows: its rows; None: the published data set, from the cache of Hugging Face's library or,
            unless that is told to stay offline, from the network.
        folder: for files that are needed as long as the task.
        strip: whether prompts and answers of FDA, SWDE and SQuAD lose the white space around them:
            version 1 of these tasks. Otherwise it is version 0, where texts for all three have 48
            tokens at most and end with the line; lm_eval 0.4.13 takes 256 tokens for SQuAD.
    """
    split = FILES[name][1] if name in FILES else "validation"
    data = {} if rows is None else _local(name, rows, folder, split)
    if name in RECALL:
        return _recall(name, data, strip)
    path = pathlib.Path(lm_eval.tasks.__file__).parent / FILES[name][0]
    text = {"include": str(path), "task": name, **data}
    own = folder / name
    own.mkdir()
    (own / f"{name}.yaml").write_text(json.dumps(text))  # JSON is YAML
    manager = TaskManager(include_path=str(own), include_defaults=False)
    return manager.load([name])["tasks"][name]


def _local(name, rows, folder, split):
    path = folder / f"{name}.jsonl"
    with open(path, "w") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)
    return {
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {split: str(path)}, "cache_dir": str(folder / "cache")},
        "training_split": None,
        "fewshot_split": split,
    }


def _recall(name, data, strip):
    published = RECALL[name]
    version = 1 if strip else 0

    class Recall(published):  # type: ignore[misc, valid-type]
        VERSION = version
        DATASET_PATH = data.get("dataset_path", published.DATASET_PATH)
        DATASET_NAME = data.get("dataset_name", published.DATASET_NAME)

        def __init__(self):
            config = {"task": name, "metadata": {"version": version}}
            config["dataset_kwargs"] = data.get("dataset_kwargs")
            if not strip:
                config["generation_kwargs"] = {"until": ["\n"], "max_gen_toks": 48}
            ConfigurableTask.__init__(self, config=config)

        def doc_to_text(self, doc, **_):
            return doc["text"].strip() if strip else doc["text"]

        def doc_to_target(self, doc, **_):
            return doc["value"].strip() if strip else doc["value"]

    return Recall()
