"""A directory belongs to one run, and to one process at a time."""

import argparse
import subprocess
import sys

import pytest
from tiny_runs import tiny, trained

from eshampoo.lab.cli import main
from eshampoo.lab.errors import UserError
from eshampoo.lab.figures.jobs import run_command
from eshampoo.lab.files import held
from eshampoo.lab.run.runlog import FILE_NAME, finished, read_log

WORDS = ["train", "digits-vit", "--scale", "tiny", "--steps", "4", "--threads", "1", "--resume"]
MINE = {"--optimizer": "adamw", "--lr": "0.01", "--seed": "3"}


def command(out, **changes):
    options = MINE | {f"--{key}": value for key, value in changes.items()}
    return [*WORDS, *(word for pair in options.items() for word in pair), "--out", str(out)]


def stopped(run, out, after=3):
    """A run that was interrupted after some steps."""
    seen = []
    trained(run, out, watch=seen.append, stopped=lambda: len(seen) == after)


def files(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_finished_run_is_reported_only_to_whoever_asked_for_it(tmp_path, capsys):
    assert main(command(tmp_path)) == 0
    before = files(tmp_path)
    assert main(command(tmp_path)) == 0
    for change in ({"optimizer": "soap"}, {"lr": "0.5"}, {"seed": "7"}, {"steps": "5"}):
        capsys.readouterr()
        assert main(command(tmp_path, **change)) == 2
        output = capsys.readouterr()
        assert "holds another run (adamw," in output.err
        assert output.err.count("\n") == 1
        assert "final loss" not in output.out
    assert files(tmp_path) == before


def test_options_of_many_digits_reach_the_process_of_a_run(tmp_path):
    """With fewer digits it would train another run, and the next look would refuse it."""
    betas = (0.974662462946591, 0.974919759405183)
    run = tiny("adamw", steps=2, lr=0.0014381744028656841, betas=betas)
    words = run_command(run, tmp_path, 1, argparse.Namespace(data=None, device="cpu"))
    assert main(words[3:]) == 0
    assert finished(tmp_path, run)


def test_another_run_is_not_resumed(tmp_path):
    stopped(tiny("eshampoo"), tmp_path)
    before = files(tmp_path)
    with pytest.raises(UserError, match="holds another run"):
        trained(tiny("eshampoo", tau=0.3), tmp_path, resume=True)
    assert files(tmp_path) == before


def test_a_run_does_not_go_on_with_other_data(tmp_path):
    run = tiny("adamw")
    stopped(run, tmp_path)
    log = tmp_path / FILE_NAME
    examples = read_log(log).header["examples"]
    log.write_text(log.read_text().replace(f'"examples":{examples}', '"examples":7'))
    with pytest.raises(UserError, match=f"on 7 training examples, and there are {examples} here"):
        trained(run, tmp_path, resume=True)


HOLD = """
import sys, time
from pathlib import Path
from eshampoo.lab.files import held
with held(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
def test_the_second_process_into_a_directory_is_refused_until_the_first_ends(tmp_path, capsys):
    words = [sys.executable, "-c", HOLD, str(tmp_path)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        try:
            assert first.stdout.readline() == "held\n"
            assert main(command(tmp_path)) == 2
        finally:
            first.kill()
    error = capsys.readouterr().err
    assert f"another process is training into {tmp_path}" in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())
    assert main(command(tmp_path)) == 0


def test_a_directory_is_held_once(tmp_path):
    """The same within one process; a comparison is held as a whole."""
    words = ["compare", "digits-vit", "--optimizers", "adamw", "--scale", "tiny", "--steps", "2"]
    with held(tmp_path):
        with pytest.raises(UserError, match="another process"), held(tmp_path):
            pass
        assert main([*words, "--seeds", "1", "--out", str(tmp_path)]) == 2
        assert not list(tmp_path.iterdir())
    with held(tmp_path):
        pass
