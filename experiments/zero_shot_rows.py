"""Local files of evaluation items, and the same items as the rows that lm_eval's tasks read.

A file NAME.jsonl has one item a line:

    piqa, arc_easy, arc_challenge, hellaswag: {"query": ..., "choices": [...], "gold": 0}
    winogrande: {"context_options": [a, b], "continuation": ..., "gold": 0}
    lambada_openai: {"context": ..., "continuation": one word}
    fda, swde, squad_completion: {"text": prompt, "value": what the answer must contain}

Rows are such that lm_eval's own templates make the prompts.
"""

import json
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

Item = Mapping[str, Any]
QUESTION = "Question: "


def read_rows(folder: str | os.PathLike[str], task: str) -> list[dict[str, Any]]:
    """The rows of lm_eval's task from `FOLDER/TASK.jsonl`.

    Raises:
        FileNotFoundError: naming the file, and the others that are there.
        ValueError: for a line that is no item of this task.
    """
    path = local_file(folder, task)
    if not path.is_file():
        there = sorted(file.name for file in path.parent.glob("*.jsonl"))
        raise FileNotFoundError(
            f"task {task}: looked for {path.absolute()}, which is not there; "
            f"--local={folder} has {', '.join(there) or 'no .jsonl files'}."
        )
    rows = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                rows.append(ROWS[task](json.loads(line)))
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise ValueError(
                    f"{path}, line {number}, is no item of {task}: {type(error).__name__}: {error}."
                ) from error
    if not rows:
        raise ValueError(f"{path} is empty, expected items of {task}.")
    return rows


def local_file(folder: str | os.PathLike[str], task: str) -> pathlib.Path:
    """Where the items of a task are looked for."""
    return pathlib.Path(folder) / f"{task}.jsonl"


def _piqa(item: Item) -> dict[str, Any]:
    sol1, sol2 = item["choices"]
    goal = item["query"].removeprefix(QUESTION).removesuffix("\n")
    return {"goal": goal, "sol1": sol1, "sol2": sol2, "label": _gold(item, 2)}


def _arc(item: Item) -> dict[str, Any]:
    labels = [chr(ord("A") + i) for i in range(len(item["choices"]))]
    return {
        "question": item["query"].removeprefix(QUESTION),
        "choices": {"text": _texts(item["choices"]), "label": labels},
        "answerKey": labels[_gold(item, len(labels))],
    }


def _hellaswag(item: Item) -> dict[str, Any]:
    activity, colon, context = item["query"].partition(": ")
    if not colon:
        raise ValueError(f"query={item['query']!r} has no 'activity: ' in front")
    gold = str(_gold(item, len(item["choices"])))
    # the second half of the context would be lowercased by the task: all of it is the first
    return {
        "activity_label": activity,
        "ctx_a": context,
        "ctx_b": "",
        "endings": _texts(item["choices"]),
        "label": gold,
    }


def _winogrande(item: Item) -> dict[str, Any]:
    option1, option2 = item["context_options"]
    # the task puts each option in the place of "_": here an option is all of the context
    sentence = f"_ {item['continuation']}"
    answer = str(1 + _gold(item, 2))
    return {"sentence": sentence, "option1": option1, "option2": option2, "answer": answer}


def _lambada(item: Item) -> dict[str, Any]:
    if not item["continuation"] or " " in item["continuation"]:
        raise ValueError(f"continuation={item['continuation']!r} is not one word")
    return {"text": f"{item['context']} {item['continuation']}"}


def _recall(item: Item) -> dict[str, Any]:
    return {name: _texts([item[name]])[0] for name in ("text", "value")}


def _gold(item: Item, count: int) -> int:
    if item["gold"] not in range(count):
        raise ValueError(f"gold={item['gold']!r}, expected 0 to {count - 1}")
    return int(item["gold"])


def _texts(values: Iterable[Any]) -> list[str]:
    values = list(values)
    if wrong := [value for value in values if not isinstance(value, str)]:
        raise TypeError(f"expected text, got {wrong[0]!r}")
    return values


ROWS: dict[str, Callable[[Item], dict[str, Any]]] = {
    "winogrande": _winogrande,
    "piqa": _piqa,
    "lambada_openai": _lambada,
    "hellaswag": _hellaswag,
    "arc_easy": _arc,
    "arc_challenge": _arc,
    "fda": _recall,
    "swde": _recall,
    "squad_completion": _recall,
}
