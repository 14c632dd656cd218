"""Every format of text becomes tokens, and Python's own reference is a corpus."""

import made_data
import pytest
import torch

from eshampoo.lab.data import seeded, text
from eshampoo.lab.errors import UserError


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


def test_a_folder_of_texts_has_one_for_each_workload(tmp_path):
    wiki, c4 = made_data.wikitext_folder(tmp_path), made_data.c4_lines(tmp_path)
    assert text.locate_text(tmp_path) == wiki
    assert text.locate_c4(tmp_path) == c4
    assert text.locate_c4(wiki) == wiki


def test_characters_are_numbered_and_new_ones_are_the_last(tmp_path):
    path = tmp_path / "tinyshakespeare.txt"
    path.write_text("abcab" * 9 + "abzzb")
    (tmp_path / "another.txt").write_text("not this one")
    data = text.load_characters(tmp_path, length=3)
    assert data.outputs == 4
    assert data.train.tolist() == [0, 1, 2, 0, 1] * 9
    assert data.test.tolist() == [0, 1, 3, 3, 1]
    with pytest.raises(UserError, match="5 characters"):
        text.load_characters(path, length=5)


def test_a_line_break_of_unicode_inside_a_document_is_no_end_of_a_line(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.write_text('{"text": "first\u2028second"}\n{"text": "third\x85"}')
    assert text.json_documents(path) == ["first\u2028second", "third\x85"]
