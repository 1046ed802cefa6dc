"""Zero-shot evaluation without lm_eval: batches, answers, rows, the table."""

import dataclasses
import json
import re
import statistics

import jax
import numpy as np
import pytest
from conftest import assert_close
from flax import nnx
from zero_shot_cases import CONFIG, ITEMS, every_mixer, published_mamba

from experiments import zero_shot
from experiments.common.tokenizer import load_tokenizer
from experiments.published_zero_shot import ROWS, TASKS
from experiments.zero_shot_answers import Answers, model_fingerprint, request_key
from experiments.zero_shot_rows import ROWS as CONVERTERS
from experiments.zero_shot_rows import read_rows
from experiments.zero_shot_scorer import Scorer, _compiled, plan
from experiments.zero_shot_table import Score, to_markdown
from lowrank_attn.models.decoder import Decoder

BYTES = load_tokenizer("bytes")


def make_scorer(folder):
    """All tests use the same few shapes, so that they are compiled once."""
    answers = Answers(folder / "answers.jsonl")
    return Scorer(
        every_mixer(), BYTES, answers, "model", max_length=96, batch_tokens=128, batch_size=4
    )


def random_pairs(count, seed=0):
    """Contexts and continuations, short ones and such that are cut."""
    random = np.random.default_rng(seed)
    sizes = [
        (random.integers(70, 120), random.integers(1, 60))
        if i % 4 == 0
        else (random.integers(1, 20), random.integers(1, 12))
        for i in range(count)
    ]
    return [tuple(random.integers(0, 257, n).tolist() for n in pair) for pair in sizes]


# ---- shapes


def test_every_request_is_in_one_batch_of_few_shapes():
    random = np.random.default_rng(0)
    sizes = [(n, int(random.integers(1, n + 1))) for n in random.integers(1, 97, 500).tolist()]
    batches = plan(sizes, max_length=96, batch_tokens=1024)
    assert sorted(i for batch in batches for i in batch.indices) == list(range(500))
    for batch in batches:
        assert len(batch.indices) <= batch.rows <= 1024 // batch.length
        assert all(sizes[i][0] <= batch.length and sizes[i][1] <= batch.scored <= batch.length
                   for i in batch.indices)  # fmt: skip
    assert {batch.length for batch in batches} == {32, 64, 96}
    assert [batch.length for batch in batches] == sorted((b.length for b in batches), reverse=True)
    # full batches of one shape for each length and number of scores, and what is left over
    assert len({(b.rows, b.length, b.scored) for b in batches}) <= 2 * 5


def test_one_program_for_a_shape_whatever_the_requests(tmp_path):
    scorer = make_scorer(tmp_path)
    run = _compiled(nnx.split(every_mixer())[0])
    pairs = [(list(range(20 - i)), list(range(1, 3 + i))) for i in range(8)]
    scorer.loglikelihoods(pairs[:3])
    before = run._cache_size()
    scorer.loglikelihoods([(a[1:], b[::-1]) for a, b in pairs[:7]])
    assert scorer.computed == 10 and run._cache_size() == before > 0


# ---- scores


def test_scores_are_those_of_the_model_alone(tmp_path):
    pairs = [*random_pairs(12), ([5], [256])]
    assert max(len(a) + len(b) for a, b in pairs) > 97
    scores = make_scorer(tmp_path).loglikelihoods(pairs)
    run = nnx.jit(Decoder.__call__)
    for (context, continuation), (value, greedy) in zip(pairs, scores):
        tokens = [*context, *continuation][-97:]
        # what comes after a token cannot matter: one length for all
        row = np.pad(tokens[:-1], (0, 96 - len(tokens) + 1))[None]
        logits = run(every_mixer(), row)[0][0, : len(tokens) - 1][-len(continuation) :]
        log_p = np.asarray(jax.nn.log_softmax(logits))
        expected = log_p[np.arange(len(continuation)), continuation].sum()
        assert_close(np.float64(value), expected, 2e-6)
        assert greedy == bool(np.all(np.argmax(log_p, axis=-1) == continuation))


def test_the_likeliest_text_is_greedy_and_stops_where_it_should(tmp_path):
    scorer = make_scorer(tmp_path)
    prompts = [[65], list(b"A longer prompt"), list(b"Third"), [66]]
    texts = scorer.continuations(prompts, [], 6)
    # only text of whole characters has the ids that were chosen
    whole = [i for i, text in enumerate(texts) if "\ufffd" not in text and text]
    pairs = [(prompts[i], list(texts[i].encode())) for i in whole]
    assert all(greedy for _, greedy in scorer.loglikelihoods(pairs))
    stop = texts[1][2]
    stopped = scorer.continuations(prompts, [stop, "never"], 6)
    assert stopped == [text.split(stop)[0] for text in texts] and scorer.computed == 8 + len(whole)


def test_answers_are_those_of_lm_eval_with_a_hugging_face_model(tmp_path):
    scorer, expected = published_mamba(tmp_path)
    encode = scorer.tokenizer.encode
    requests = [r for r in expected["loglikelihood"] if r[0] and r[0] == r[0].rstrip()]
    scores = scorer.loglikelihoods([(encode(r[0]), encode(r[1])) for r in requests])
    assert_close(np.array([s[0] for s in scores]), np.array([r[2] for r in requests]), 1e-5)
    assert [s[1] for s in scores] == [r[3] for r in requests]
    for prompt, options, text in expected["generate_until"][-2:]:
        limit = options["max_gen_toks"]
        assert scorer.continuations([encode(prompt)], options["until"], limit) == [text]


def test_requests_without_tokens_or_room_are_refused(tmp_path, caplog):
    scorer = make_scorer(tmp_path)
    with pytest.raises(ValueError, match="context of 0 tokens"):
        scorer.loglikelihoods([([], [1])])
    with pytest.raises(ValueError, match="continuation of 97, expected .* max_length=96"):
        scorer.loglikelihoods([([1], [1] * 97)])
    with pytest.raises(ValueError, match="96 new tokens leave no room"):
        scorer.continuations([[1]], [], 96)
    assert scorer.truncated == 0
    scorer.loglikelihoods([([1] * 97, [1]), ([1] * 96, [1])])
    assert scorer.truncated == 1 and "1 of 2 requests are too long" in caplog.text


def test_wrong_vocabulary(tmp_path):
    tokenizer = dataclasses.replace(BYTES, vocab_size=300)
    with pytest.raises(ValueError, match="has 300 ids, the model 257"):
        Scorer(every_mixer(), tokenizer, Answers(tmp_path / "a"), "")


# ---- answers


def test_a_killed_run_goes_on_without_asking_twice(tmp_path, monkeypatch):
    pairs = random_pairs(24, seed=3)
    whole = make_scorer(tmp_path / "whole")
    expected = whole.loglikelihoods([*pairs, *pairs])
    assert whole.computed == 24 and expected[:24] == expected[24:]

    first, calls = make_scorer(tmp_path / "killed"), []
    add = first.answers.add

    def add_then_die(answers):
        if len(calls) == 3:
            raise KeyboardInterrupt
        calls.append(add(answers))

    monkeypatch.setattr(first.answers, "add", add_then_die)
    with pytest.raises(KeyboardInterrupt):
        first.loglikelihoods(pairs)
    with open(first.answers.path, "ab") as file:
        file.write(b'["0123", [-1.25, fal')  # the machine died while writing
    second = make_scorer(tmp_path / "killed")
    assert 0 < first.computed < 24
    assert_close(
        np.array(second.loglikelihoods(pairs), np.float64), np.array(expected[:24], np.float64)
    )
    assert first.computed + second.computed == 24
    third = make_scorer(tmp_path / "killed")
    assert third.loglikelihoods(pairs) == second.loglikelihoods(pairs) and third.computed == 0


def test_a_damaged_line_costs_one_answer(tmp_path, caplog):
    path = tmp_path / "new" / "answers.jsonl"
    answers = Answers(path)
    answers.add({"a": [-0.1, True], "b": "text\nwith \u2028 lines"})
    path.write_bytes(path.read_bytes() + b'\xff\n["c", 1]\n["d", ')
    again = Answers(path)
    assert [key in again for key in "abcd"] == [True, True, True, False]
    assert again["a"] == [-0.1, True] and again["b"] == "text\nwith \u2028 lines"
    assert "line 3 is damaged" in caplog.text and "line 5 is damaged" in caplog.text
    again.add({"d": 2})
    assert Answers(path)["d"] == 2


def test_what_an_answer_depends_on_is_in_its_key():
    params = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    base = model_fingerprint(CONFIG, params, "float32")
    others = [
        model_fingerprint(CONFIG, params, "bfloat16"),
        model_fingerprint(CONFIG, params | {"a": np.ones((3, 2), np.float32)}, "float32"),
        model_fingerprint(CONFIG, params | {"b": np.array([0, 0, 0, 1e-9], "f4")}, "float32"),
        model_fingerprint(dataclasses.replace(CONFIG, norm_epsilon=1e-6), params, "float32"),
    ]
    assert len({base, *others}) == 5
    assert base == model_fingerprint(CONFIG, dict(reversed(params.items())), "float32")
    keys = {
        request_key(base, "loglikelihood", ([1, 2, 3], 1)),
        request_key(base, "loglikelihood", ([1, 2, 3], 2)),
        request_key(base, "generate", ([1, 2, 3], 1)),
        request_key(others[0], "loglikelihood", ([1, 2, 3], 1)),
    }
    assert len(keys) == 4


# ---- rows


def test_items_become_rows(tmp_path):
    assert set(ITEMS) == set(CONVERTERS) == set(TASKS)
    for task, item in ITEMS.items():
        (tmp_path / f"{task}.jsonl").write_text(json.dumps(item) + "\n\n")
    rows = {task: read_rows(tmp_path, task)[0] for task in ITEMS}
    assert rows["piqa"] == {"goal": "How?", "sol1": "so", "sol2": "no", "label": 1}
    assert rows["arc_easy"]["answerKey"] == "C" == rows["arc_easy"]["choices"]["label"][2]
    assert rows["winogrande"]["answer"] == "1" and rows["hellaswag"]["label"] == "0"
    assert rows["lambada_openai"] == {"text": "Once upon a time"}
    assert rows["fda"] == ITEMS["fda"]


@pytest.mark.parametrize(
    "task, line, message",
    [
        ("piqa", '{"query": "?", "choices": ["a", "b"], "gold": 2}', "gold=2, expected 0 to 1"),
        ("piqa", '{"query": "?", "choices": ["a"], "gold": 0}', "line 2, is no item of piqa"),
        ("piqa", '{"query": "?"', "line 2"),
        ("arc_easy", '{"query": "?", "choices": [1, 2], "gold": 0}', "expected text, got 1"),
        ("lambada_openai", '{"context": "a", "continuation": "b c"}', "not one word"),
        ("hellaswag", '{"query": "none", "choices": ["a"], "gold": 0}', "no 'activity: '"),
        ("fda", '{"text": "a"}', "KeyError: 'value'"),
    ],
)
def test_damaged_items_are_named(task, line, message, tmp_path):
    (tmp_path / f"{task}.jsonl").write_text(f"{json.dumps(ITEMS[task])}\n{line}\n")
    with pytest.raises(ValueError, match=message):
        read_rows(tmp_path, task)


# ---- the command and its table


def test_published_means_are_those_of_their_rows():
    for row in ROWS.values():
        assert len(row) == len(TASKS) + 1
        assert abs(statistics.mean(row[:-1]) - row[-1]) < 0.0051


def test_table():
    found = {
        "results": {"hellaswag": {"acc,none": 0.1, "acc_norm,none": 0.25}},
        "n-samples": {"hellaswag": {"original": 10, "effective": 5}},
        "versions": {"hellaswag": 1.0},
    }
    score = Score.read("hellaswag", found)
    assert score == Score("acc_norm", 25.0, pytest.approx(100 * (0.25 * 0.75 / 4) ** 0.5), 5, "1.0")
    text = to_markdown("mine", {"hellaswag": score}, limit=5)
    assert "|  | mine |  |  |  | 25.00 |  |  |  |  |  |  |" in text
    assert "| 360M | BASED+LLoPS, p = 4 | 53.04 | 66.70 |" in text and "36.26 |" in text
    assert "version 1.0, acc_norm, 5 items" in text and "no result" in text
    complete = {name: dataclasses.replace(score, percent=float(i)) for i, name in enumerate(TASKS)}
    assert "| 8.00 | 4.00 |" in to_markdown("mine", complete, limit=None)


@pytest.mark.parametrize(
    "arguments, status, message",
    [
        (["--tasks=piqa"], 2, "--model=FOLDER is needed"),
        (["--model=m", "--tasks=pica"], 2, "--tasks has 'pica', expected `all` or winogrande"),
        (["--model=m", "--local=l", "--download"], 2, "items come from one of them"),
        (["--model=m", "--limit=0"], 2, "--limit=0, expected at least 1"),
        (["--model={}", "--tokenizer=bytes"], 1, "has no decoder.json"),
        (["--model={}"], 1, "for vocab.json with merges.txt"),
        (
            ["--model={}", "--local={}", "--tasks=fda"],
            1,
            "fda.jsonl, which is not there; .* x.jsonl",
        ),
        (["--model={}", "--local={}"], 1, "has none of winogrande.jsonl, piqa.jsonl"),
    ],
)
def test_what_is_missing_is_named(arguments, status, message, tmp_path, capsys):
    (tmp_path / "x.jsonl").touch()
    argv = ["zero_shot", *(text.format(tmp_path) for text in arguments)]
    try:
        assert zero_shot.main(argv) == status
    except SystemExit as error:
        assert error.code == status
    assert re.search(message, capsys.readouterr().err)
