"""The command: what it does, and one clear line for everything typed wrongly."""

import builtins
import html
import re

import made_data
import pytest
import torch

from eshampoo import EShampoo
from eshampoo.lab import catalogue
from eshampoo.lab.cli import main
from eshampoo.lab.report.compare import group_logs, verdict
from eshampoo.lab.run.runlog import FILE_NAME, find_logs, read_log

SHORT = ["--scale", "tiny", "--steps", "12", "--threads", "1"]


def complaint(capsys, *arguments):
    """The one line that a mistake gets."""
    assert main([str(argument) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("eshampoo: ")
    assert error.count("\n") == 1
    return error


@pytest.fixture
def compared(tmp_path):
    """A short comparison with two optimizers and two seeds."""
    optimizers = "adamw,eshampoo:frequency=3:merge_dims=false"
    words = ["compare", "digits-vit", "--optimizers", optimizers, "--seeds", "2", *SHORT]
    assert main([*words, "--out", str(tmp_path / "runs")]) == 0
    return tmp_path / "runs"


@pytest.mark.slow
def test_compare_ends_with_a_table_a_verdict_and_a_page(compared, capsys):
    logs = find_logs(compared)
    assert [log.finished for log in logs] == [True] * 4
    assert {log.run.seed for log in logs} == {0, 1}
    page = (compared / "report.html").read_text()
    assert html.escape(verdict(group_logs(logs))) in page
    assert not re.search(r"https?://|<script", page)
    assert page.count("<img") == 2 + 3
    assert "eshampoo compare digits-vit" in page
    assert not list(compared.rglob("*.pt"))


def test_compare_says_where_the_time_went_and_what_to_try_next(tmp_path, capsys):
    words = ["compare", "digits-vit", "--optimizers", "adamw", "--seeds", "1", *SHORT]
    assert main([*words, "--out", str(tmp_path / "runs")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("Where the time went: AdamW ") for line in lines)
    scope = {"model": torch.nn.Linear(3, 2)}
    exec("\n".join(line.strip() for line in lines[-2:]), scope)
    assert type(scope["optimizer"]) is EShampoo


def test_report_is_made_again_from_the_logs_alone(compared, capsys):
    (compared / "report.html").unlink()
    assert main(["report", str(compared)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "EShampoo" in output
    assert (compared / "report.html").exists()


def test_train_takes_any_keyword_and_hides_where_the_data_lie(tmp_path, capsys):
    data = made_data.wikitext_folder(tmp_path)
    out = tmp_path / "run"
    words = ["train", "text-llama", "--optimizer", "eshampoo", "--tau=0.3", "--frequency", "2"]
    words += ["--betas", "0.8,0.9", "--max-dim", "64", "--data", str(data), "--out", str(out)]
    assert main([*words, *SHORT]) == 0
    log = read_log(out / FILE_NAME)
    expected = {"tau": 0.3, "frequency": 2, "betas": (0.8, 0.9), "max_dim": 64}
    assert expected.items() <= log.run.options.items()
    assert str(data) not in (out / FILE_NAME).read_text()
    assert "--data DATA" in log.header["command"]
    before = (out / FILE_NAME).read_bytes()
    assert main([*words, *SHORT, "--resume"]) == 0
    assert (out / FILE_NAME).read_bytes() == before
    assert "holds a run already" in complaint(capsys, *words, *SHORT)


@pytest.mark.parametrize(
    "words",
    [
        "muon --momentum 0.9",
        "caspr",
        "klshampoo --sides right",
        "shampoo --sides left --moment row",
        "eshampoo --moment block --exponent 0.4",
        "shampoo --statistics observe --exponent 1 --variant shampoo2",
    ],
)
def test_train_knows_every_member_of_the_family(words, tmp_path):
    typed = ["train", "digits-vit", "--optimizer", *words.split(), "--out", str(tmp_path / "run")]
    assert main([*typed, *SHORT]) == 0
    log = read_log(tmp_path / "run" / FILE_NAME)
    assert log.finished
    assert not log.end["diverged"]


@pytest.mark.slow
def test_tensorboard_gets_the_loss(tmp_path):
    words = ["train", "digits-vit", "--optimizer", "adamw", "--tensorboard", *SHORT]
    assert main([*words, "--out", str(tmp_path)]) == 0
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_workloads_are_listed_with_the_status_of_their_data(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    made_data.imagewoof_folder(tmp_path)
    assert main(["workloads", "--data", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in catalogue.WORKLOADS)
    assert "found imagewoof2" in output
    assert "missing" in output
    assert "ready" in output


def test_mistakes_get_one_line_with_the_value_the_rule_and_the_fix(tmp_path, capsys):
    train = ["train", "digits-vit", "--out", tmp_path / "run", *SHORT]
    assert "unknown workload 'digit-vit'; choose one of: digits-vit" in complaint(
        capsys, "train", "digit-vit", "--optimizer", "adamw"
    )
    assert "unknown optimizer 'adam'; choose one of: adamw" in complaint(
        capsys, *train, "--optimizer", "adam"
    )
    assert "no keyword 'freqency'; did you mean 'frequency'?" in complaint(
        capsys, *train, "--optimizer", "eshampoo", "--freqency", "3"
    )
    assert "--tau needs a value" in complaint(capsys, *train, "--optimizer", "eshampoo", "--tau")
    assert "refuses its options" in complaint(capsys, *train, "--optimizer", "eshampoo", "--tau=-1")
    assert "'0' must be a whole number" in complaint(
        capsys, "compare", "digits-vit", "--seeds", "0"
    )
    assert "cannot read 'lr'" in complaint(
        capsys, "compare", "digits-vit", "--optimizers", "adamw:lr"
    )
    assert "invalid choice: 'big'" in complaint(capsys, "compare", "digits-vit", "--scale", "big")
    assert "unknown argument '--sed'" in complaint(capsys, "compare", "digits-vit", "--sed", "3")
    assert "unknown figure 'fig9'; choose one of: fig1" in complaint(capsys, "reproduce", "fig9")
    assert "invalid choice: 'trian'" in complaint(capsys, "trian")
    assert not (tmp_path / "run").exists()


REFUSED = {
    "a schedule that starts late": (["--tau", "0.8@0.5"], "cannot read the schedule '0.8@0.5'"),
    "two starts": (["--tau", "0.8,0.1@0.5,0.2@0.5"], "cannot read the schedule"),
    "a value that comes later": (["--tau", "0.8,-1@0.5"], "refuses its options"),
    "a seed beyond torch's": (["--seed", "9" * 19], "must be a whole number"),
    "betas without an end": (["--betas", "0.9,inf"], "is not a finite number"),
    "a schedule of shapes": (["--max-dim", "8,16@0.5"], "the shapes of the state depend on it"),
    "a device without values": (["--device", "meta"], "cannot compute on 'meta'"),
}


@pytest.mark.parametrize(("words", "told"), REFUSED.values(), ids=REFUSED)
def test_a_refused_command_gets_one_line_and_leaves_nothing(words, told, tmp_path, capsys):
    out = tmp_path / "deep" / "run"
    train = ["train", "digits-vit", "--optimizer", "eshampoo", *SHORT, "--out", out]
    assert told in complaint(capsys, *train, *words)
    assert not list(tmp_path.iterdir())


def test_a_run_that_raises_at_its_gradients_ends_in_one_line(tmp_path, capsys):
    train = ["train", "digits-vit", "--optimizer", "eshampoo", *SHORT, "--out", tmp_path / "run"]
    error = complaint(capsys, *train, "--nonfinite", "raise", "--lr", "1e25")
    assert "has NaN or Inf" in error


def test_a_comparison_with_itself_is_refused(capsys):
    words = ["compare", "digits-vit", "--optimizers", "adamw,eshampoo,adamw", *SHORT]
    assert "'adamw' is listed twice" in complaint(capsys, *words)


def test_a_comparison_or_a_figure_that_is_refused_leaves_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    complaint(capsys, "compare", "imagewoof-vit", "--optimizers", "adamw", *SHORT)
    complaint(capsys, "compare", "digits-vit", "--optimizers", "eshampoo:tau=-1", *SHORT)
    complaint(capsys, "reproduce", "fig1", "--scale", "tiny")
    assert not list(tmp_path.iterdir())


def test_missing_data_and_places_that_cannot_be_used_get_one_line(tmp_path, capsys):
    words = ["--optimizer", "adamw", *SHORT]
    message = complaint(capsys, "train", "imagewoof-vit", "--out", tmp_path / "run", *words)
    assert "github.com/fastai/imagenette" in message
    assert "--data" in message
    message = complaint(capsys, "reproduce", "fig1", "--scale", "tiny", "--out", tmp_path / "fig")
    assert "github.com/fastai/imagenette" in message
    occupied = tmp_path / "file"
    occupied.write_text("")
    message = complaint(capsys, "train", "digits-vit", "--out", occupied / "run", *words)
    assert "choose another --out" in message
    assert "is not a directory" in complaint(capsys, "report", tmp_path / "nowhere")
    assert f"no {FILE_NAME} below" in complaint(capsys, "report", tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda lines: [*lines[:3], lines[3][:20]],
        lambda lines: lines[1:],
    ],
)
def test_a_corrupt_log_gets_one_line(damage, tmp_path, capsys):
    words = ["train", "digits-vit", "--optimizer", "adamw", *SHORT, "--out", str(tmp_path)]
    assert main(words) == 0
    path = tmp_path / FILE_NAME
    path.write_text("\n".join(damage(path.read_text().splitlines())) + "\n")
    capsys.readouterr()
    message = complaint(capsys, "report", tmp_path)
    assert str(path) in message
    assert "repeat the run" in message


def test_a_missing_library_is_told_with_the_command_that_installs_it(capsys, monkeypatch):
    genuine = builtins.__import__

    def without_rich(name, *arguments):
        if name.partition(".")[0] == "eshampoo" and name.endswith("commands"):
            raise ModuleNotFoundError("No module named 'rich'", name="rich")
        return genuine(name, *arguments)

    monkeypatch.setattr(builtins, "__import__", without_rich)
    assert "pip install 'eshampoo[lab]'" in complaint(capsys, "workloads")
