"""Zero-shot evaluation through lm_eval: prompts, versions, answers of its wrapper, the command."""

import dataclasses
import json
import os
import re

import pytest
from conftest import assert_close
from decoder_cases import random_model
from zero_shot_cases import CONFIG, ITEMS, published_mamba

os.environ["HF_HUB_OFFLINE"] = "1"  # read when lm_eval is imported
pytest.importorskip("lm_eval", reason="pip install lowrank-attn[lm_eval]")
pytestmark = pytest.mark.filterwarnings("ignore")  # of other packages

import numpy as np  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402

from experiments import zero_shot  # noqa: E402
from experiments.published_zero_shot import TASKS  # noqa: E402
from experiments.zero_shot_lm import DecoderLM  # noqa: E402
from experiments.zero_shot_rows import read_rows  # noqa: E402
from experiments.zero_shot_tasks import make_task  # noqa: E402
from lowrank_attn.models.folder import arrays_of, save_decoder  # noqa: E402


def instances(kind, arguments):
    return [Instance(kind, {}, tuple(args), i) for i, args in enumerate(arguments)]


def test_answers_are_those_of_the_hugging_face_wrapper(tmp_path):
    scorer, expected = published_mamba(tmp_path)
    lm = DecoderLM(scorer)
    found = lm.loglikelihood(instances("loglikelihood", [r[:2] for r in expected["loglikelihood"]]))
    values = np.array([r[2] for r in expected["loglikelihood"]])
    assert_close(np.array([value for value, _ in found]), values, 1e-5)
    assert [greedy for _, greedy in found] == [r[3] for r in expected["loglikelihood"]]
    texts = expected["loglikelihood_rolling"]
    sums = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [[t] for t, _ in texts]))
    assert_close(np.array(sums), np.array([value for _, value in texts]), 1e-5)
    asked = expected["generate_until"]
    found = lm.generate_until(instances("generate_until", [r[:2] for r in asked]))
    assert found == [r[2] for r in asked]


def test_samples_are_refused(tmp_path):
    lm = DecoderLM(published_mamba(tmp_path)[0])
    request = instances("generate_until", [("a", {"do_sample": True, "temperature": 0.5})])
    with pytest.raises(ValueError, match="expected do_sample=False"):
        lm.generate_until(request)


@pytest.fixture
def local(tmp_path):
    """A folder with one item for each task."""
    folder = tmp_path / "items"
    folder.mkdir()
    for task, item in ITEMS.items():
        (folder / f"{task}.jsonl").write_text(json.dumps(item) + "\n")
    return folder


def requests_of(name, local, folder, strip=True):
    task = make_task(name, read_rows(local, name), folder, strip=strip)
    task.build_all_requests(rank=0, world_size=1)
    return [instance.args for instance in task.instances], task


def test_prompts_of_every_task(local, tmp_path):
    prompts = {name: requests_of(name, local, tmp_path)[0] for name in TASKS}
    assert prompts["piqa"] == [
        ("Question: How?\nAnswer:", " so"),
        ("Question: How?\nAnswer:", " no"),
    ]
    assert [choice for _, choice in prompts["arc_easy"]] == [" a", " b", " c"]
    assert prompts["arc_challenge"][0][0] == "Question: Why?\nAnswer:"
    assert prompts["hellaswag"] == [("Cooking: A man", " eats."), ("Cooking: A man", " sits.")]
    assert prompts["winogrande"] == [("He", " ran."), ("It", " ran.")]
    assert prompts["lambada_openai"] == [("Once upon a", " time")]
    assert prompts["fda"][0][0] == "K12\nnumber:"
    assert prompts["fda"][0][1] == {"until": ["\n"], "max_gen_toks": 48}
    assert prompts["swde"][0][0] == "page title:"
    assert prompts["squad_completion"][0][0] == "France's capital is"


def test_version_0_keeps_white_space(local, tmp_path):
    for version, prompt, answers in ((1, "K12\nnumber:", [1, 1]), (0, " K12\nnumber:", [1, 0])):
        folder = tmp_path / str(version)
        folder.mkdir()
        requests, task = requests_of("fda", local, folder, strip=bool(version))
        assert requests[0][0] == prompt and version == task.VERSION
        doc = task.validation_docs()[0]
        scores = [task.process_results(doc, [text])["contains"] for text in ("is 12", "12")]
        assert scores == answers
    for name in ("swde", "squad_completion"):
        requests, task = requests_of(name, local, tmp_path / "0", strip=False)
        assert task.VERSION == 0
        assert (requests[0][1]["until"], requests[0][1]["max_gen_toks"]) == (["\n"], 48)


def test_the_command(local, tmp_path, capsys):
    config = dataclasses.replace(CONFIG, layers=("linear",))
    save_decoder(tmp_path / "model", config, arrays_of(random_model(config)))
    run = tmp_path / "run"
    argv = ["zero_shot", f"--model={tmp_path / 'model'}", "--tokenizer=bytes", f"--local={local}"]
    argv += [f"--run_dir={run}", "--max_length=320", "--batch_tokens=256", "--tasks=all"]
    assert zero_shot.main(argv) == 0
    first = json.loads((run / "result.json").read_text())["metrics"]
    assert set(first["scores"]) == set(TASKS)
    assert first["scores"]["fda"]["version"] == "1" and first["scores"]["piqa"]["metric"] == "acc"
    assert first["lm_eval"]["lambada_openai"]["perplexity,none"] > 1
    assert first["requests_computed"] == len((run / "answers.jsonl").read_text().splitlines())
    assert len(first["items"]["piqa"]) == 64
    table = (run / "result.md").read_text()
    assert re.search(r"\|  \| model \|( \d+\.\d\d \|){10}\n", table)

    # a run that died while it wrote its last answers computes those alone
    answers = (run / "answers.jsonl").read_bytes()
    (run / "answers.jsonl").write_bytes(answers[:-5])
    assert zero_shot.main(argv) == 0
    again = json.loads((run / "result.json").read_text())["metrics"]
    assert again["requests_computed"] == 1 and again["scores"] == first["scores"]

    # without items or a network the missing data set is named
    capsys.readouterr()
    argv = [part for part in argv if "--local" not in part and "--tasks" not in part]
    assert zero_shot.main([*argv, "--tasks=piqa"]) == 1
    assert re.search("task piqa: .*give --local=FOLDER", capsys.readouterr().err)


def test_the_network_is_not_used_unasked(monkeypatch):
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", False)
    with pytest.raises(ValueError, match="would use the network"):
        zero_shot._lm_eval(offline=True)
    assert zero_shot._lm_eval(offline=False)
