"""Every format of text becomes tokens, and Python's own reference is a corpus."""

import made_data
import pytest
import torch

from eshampoo.lab.data import seeded, text


@pytest.mark.parametrize(
    "make",
    [
        made_data.wikitext_folder,
        made_data.c4_lines,
        lambda directory: made_data.c4_lines(directory, ("prefix", "gold_completion")),
        made_data.text_file,
    ],
)
def test_text_formats_become_tokens(make, tmp_path):
    data = text.load_text(make(tmp_path), vocabulary=300, length=8)
    inputs, targets = data.batch(torch.tensor([0, 2]), seeded(0))
    assert 256 < data.outputs <= 300
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert torch.equal(inputs[1], data.train[16:24])


def test_python_ships_a_corpus():
    train, test = text.corpus(None)
    assert sum(map(len, train)) > 300_000
    assert sum(map(len, test)) > 10_000
