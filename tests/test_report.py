"""The report: one table of runs beside published rows, in three files; damaged runs."""

import csv
import dataclasses
import html.parser
import json
import pathlib
import re
import shutil
import statistics
import subprocess

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import presets, published, report
from experiments.common import flags
from experiments.common.evaluate import at_chance
from experiments.lra_settings import Config
from experiments.report_runs import group_runs, read_runs

BROWSERS = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome", "chrome")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
VOID = ("meta", "br", "link", "img", "input", "hr")


def write_run(folder, accuracy=0.4, curves=True, ended="2026-01-01", **settings):
    """A folder as `experiments.lra` leaves it."""
    named = {"task": "listops", "kernel": "llops", "preset": "skyformer"} | settings
    preset = presets.resolve(named["preset"], named["task"], named["kernel"], "gpu")[1]
    config = dataclasses.replace(Config(**preset), **named)
    folder.mkdir(parents=True)
    record = {
        "command": f"python -m experiments.lra --task={config.task} --seed={config.seed}",
        "config": flags.to_dict(config),
        "device": "a <fast> & \"new\" | one",
        "ended": ended,
        "git_commit": "0123456789abcdef",
        "metrics": {
            "test_accuracy": accuracy,
            "validation_accuracy": accuracy + 0.01,
            "at_chance": at_chance(accuracy, 0.18, 2000),
            "reference": {"majority class": 0.18, "first token": 0.36},
            "data": "f00d",
            "timing": {"tokens_per_second": 12345.6, "input_wait_fraction": 0.01,
                       "host_fraction": 0.02},
        },
        "seconds": 60.5,
        "versions": {"jax": "0.0.1"},
    }  # fmt: skip
    (folder / "run.json").write_text("{}")
    (folder / "result.json").write_text(json.dumps(record))
    if curves:
        rows = [f"{100 * i},{2.3 / i},{accuracy * (1 - 0.5**i)}" for i in range(1, 9)]
        (folder / "train_eval.csv").write_text("\n".join(["step,loss,accuracy", *rows, ""]))


def make(folder):
    """Run the command line on `folder`; the three files."""
    out = folder.parent / "out" / "table.of.runs"
    report.main(["report", f"--runs={folder}", f"--out={out}"])
    return [pathlib.Path(f"{out}.{suffix}") for suffix in ("md", "csv", "html")]


@pytest.fixture(scope="module")
def reported(tmp_path_factory):
    """Three seeds of llops, one with another rate, softmax at chance, an unfinished run of text."""
    runs = tmp_path_factory.mktemp("report") / "runs"
    for seed, accuracy in enumerate((0.40, 0.42, 0.47)):
        write_run(runs / f"llops-{seed}", accuracy, seed=seed)
    write_run(runs / "rate", 0.3, learning_rate=1e-3)
    write_run(runs / "softmax", 0.19, kernel="softmax", kernel_options="implementation=xla")
    (runs / "going").mkdir()
    (runs / "going" / "run.json").write_text("{}")
    (runs / "going" / "pretrain_train.csv").write_text("step,loss\n10,1.5\n20,1.4\n3")
    return make(runs)


def rows_of(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_a_row_is_the_mean_and_spread_over_seeds(reported):
    own = [row for row in rows_of(reported[1]) if not row["source"]]
    assert [(row["kernel"], row["preset"], row["n"]) for row in own] == [
        ("llops", "skyformer", "3"),
        ("llops", "skyformer learning_rate=0.001", "1"),
        ("softmax", "skyformer", "1"),
    ]
    three, one, chance = own
    assert float(three["accuracy"]) == pytest.approx(43)
    assert float(three["spread"]) == pytest.approx(statistics.stdev([40, 42, 47]))
    assert float(three["validation"]) == pytest.approx(44)
    assert (one["spread"], chance["options"]) == ("", "implementation=xla")
    assert [row["at chance"] for row in own] == ["0", "0", "1"]
    assert three["protocol"] == "from scratch, 2 layers of width 64" and three["steps"] == "50,000"


def test_published_rows_of_the_same_task_stand_beside(reported):
    rows = rows_of(reported[1])
    assert {row["task"] for row in rows} == {"listops"}
    (row,) = (row for row in rows if row["kernel"] == "LLoPS, p = 4")
    assert (row["accuracy"], row["source"]) == ("48.29", "LLoPS, table 2")
    assert "self-pretraining" in row["protocol"]
    assert rows.index(row) > 2


@pytest.mark.parametrize("publication", published.PUBLICATIONS)
def test_published_means_are_those_of_their_rows(publication):
    assert set(publication.tasks) <= set(published.TASKS)
    for method, numbers in publication.rows.items():
        scores, mean = numbers[: len(publication.tasks)], numbers[len(publication.tasks) :]
        assert len(scores) == len(publication.tasks) and len(mean) <= 1, method
        assert all(abs(np.mean(scores) - m) < 0.0051 for m in mean), method


def test_markdown_has_the_same_table(reported):
    text = reported[0].read_text()
    lines = [re.split(r"(?<!\\)\|", line)[1:-1] for line in text.splitlines() if line[:1] == "|"]
    assert {len(line) for line in lines} == {len(report.COLUMNS)}
    assert [cell.strip() for cell in lines[0]] == list(report.COLUMNS)
    assert len(lines) == 2 + len(rows_of(reported[1]))
    assert "43.00" in text and "1 AT CHANCE" in text and "0123456" in text
    assert "listops, first token: 36.0%" in text
    assert "going: in phase pretrain, step 20" in text
    assert "python -m experiments.lra --task=listops --seed=2" in text


class Strict(html.parser.HTMLParser):
    """Fails on tags that do not close in order, repeated ids, scripts, and loads from elsewhere."""

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.rows, self.count = [], [], [], {}
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        assert tag != "script"
        for name, value in attrs:
            assert not name.startswith("on")
            if name == "id":
                self.ids.append(value)
            if name in ("src", "href", "xlink:href", "data", "action"):
                assert value.startswith("#")
            assert "url(" not in (value or "") or "url(#" in value
        if tag == "tr":
            self.rows.append(0)
        if tag in ("td", "th"):
            self.rows[-1] += 1
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if self.open[-1:] == ["style"]:
            assert "@import" not in data and "url(" not in data


def parse(text):
    parser = Strict()
    parser.feed(text)
    parser.close()
    assert not parser.open and len(set(parser.ids)) == len(parser.ids)
    return parser


def test_html_is_well_formed_and_complete_in_itself(reported):
    text = reported[2].read_text()
    assert text.startswith("<!DOCTYPE html>")
    parser = parse(text)
    assert set(parser.rows) == {len(report.COLUMNS)}
    assert len(parser.rows) == 1 + len(rows_of(reported[1]))
    assert parser.count["svg"] == 1 and 'class="chance"' in text
    for shown in (
        'a <fast> & "new" | one',
        "1 AT CHANCE",
        "going: in phase pretrain",
        "first token",
    ):
        assert shown in parser.text
    drawn = re.findall(r'<path d="([^"]*)"[^>]*clip-path', text)
    assert sum(path.count("L") == 7 for path in drawn) == 2 * 5  # 8 points, 2 panels, 5 runs


def test_figures_of_several_tasks_share_no_ids(tmp_path):
    write_run(tmp_path / "runs" / "a")
    write_run(tmp_path / "runs" / "b", task="text", pretrain_steps=5,
              task_options="validation=test")  # fmt: skip
    (tmp_path / "runs" / "b" / "pretrain_eval.csv").write_text("step,loss\n1,3\n2,2\n")
    page = make(tmp_path / "runs")[2].read_text()
    assert parse(page).count["svg"] == 2
    assert "skyformer task_options=validation=test" in page  # where the best step was chosen
    assert "pretrain: validation loss" in page and "self-pretraining, masked, 2 layers" in page
    ids = set(parse(page).ids)
    assert all(name in ids for name in re.findall(r'(?:href="|url\()#([^")]*)', page))


@pytest.mark.skipif(BROWSER is None, reason=f"no browser on the PATH; looked for {BROWSERS}")
def test_a_browser_shows_the_table_and_the_curves(reported, tmp_path):
    def browse(*arguments):
        done = subprocess.run(
            [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars",
             "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={tmp_path / 'profile'}",
             *arguments, reported[2].as_uri()],
            capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    seen, written = parse(browse("--dump-dom")), parse(reported[2].read_text())
    assert seen.rows == written.rows and seen.ids == written.ids
    assert seen.count.pop("tbody") == 1 and seen.count == written.count  # the browser adds it
    browse(f"--screenshot={tmp_path / 'page.png'}", "--window-size=1600,1600")
    picture = (imread(tmp_path / "page.png")[..., :3] * 255).astype(int)
    for colour in ((0x1F, 0x77, 0xB4), (0xFF, 0x7F, 0x0E), (0x2C, 0xA0, 0x2C), (0xFF, 0xDD, 0xDD)):
        assert (np.abs(picture - colour).max(-1) < 3).sum() > 50, colour


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "{}", '{"config": {}, "metrics": {}}', b"\xff\xfe", None],
)
def test_a_damaged_record_is_named_and_left_out(tmp_path, caplog, content):
    write_run(tmp_path / "runs" / "good")
    write_run(tmp_path / "runs" / "bad")
    path = tmp_path / "runs" / "bad" / "result.json"
    if content is None:
        record = json.loads(path.read_text())
        record["metrics"]["test_accuracy"] = float("nan")
        content = json.dumps(record)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    before = path.read_bytes()
    rows = [row for row in rows_of(make(tmp_path / "runs")[1]) if not row["source"]]
    assert len(rows) == 1 and str(path) in caplog.text and path.read_bytes() == before


def test_damaged_curves_are_named_and_the_row_stays(tmp_path, caplog):
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "a" / "train_eval.csv").write_text("step,loss,accuracy\n1,2\n")
    page = make(tmp_path / "runs")[2].read_text()
    assert "train_eval.csv" in caplog.text and "svg" not in parse(page).count
    assert "40.00" in page


def test_of_one_seed_the_last_run_counts_and_other_data_are_another_row(tmp_path, caplog):
    write_run(tmp_path / "runs" / "a-late", 0.5, ended="2026-01-02")
    write_run(tmp_path / "runs" / "b-early", 0.3)
    write_run(tmp_path / "runs" / "c", 0.2)
    path = tmp_path / "runs" / "c" / "result.json"
    path.write_text(path.read_text().replace("f00d", "beef"))
    groups = group_runs(read_runs(tmp_path / "runs")[0])
    assert sorted(run.folder.name for group in groups for run in group.runs) == ["a-late", "c"]
    assert "same settings and seed twice" in caplog.text and "b-early" in caplog.text


def test_a_preset_of_another_version_is_compared_with_the_defaults(tmp_path, caplog):
    write_run(tmp_path / "runs" / "a")
    path = tmp_path / "runs" / "a" / "result.json"
    path.write_text(path.read_text().replace('"skyformer"', '"formerly"'))
    (row,) = (row for row in rows_of(make(tmp_path / "runs")[1]) if not row["source"])
    assert row["preset"].startswith("formerly ") and "clip=value" in row["preset"]
    assert caplog.text.count("no preset to compare settings with") == 1


def test_without_finished_runs_it_says_so(tmp_path, capsys):
    (tmp_path / "going").mkdir()
    (tmp_path / "going" / "run.json").write_text("{}")
    with pytest.raises(SystemExit) as stop:
        report.main(["report", f"--runs={tmp_path}", f"--out={tmp_path / 'out'}"])
    assert stop.value.code == 2
    message = capsys.readouterr().err
    assert "no finished run below" in message and "going: no step yet" in message
    assert not list(tmp_path.glob("out*"))


def test_at_chance_is_within_three_standard_errors():
    """sqrt(0.25 / 2500) = 0.01."""
    assert at_chance(0.529, 0.5, 2500) and at_chance(0.4, 0.5, 2500)
    assert not at_chance(0.531, 0.5, 2500)
