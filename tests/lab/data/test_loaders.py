"""What all loaders share: the order of examples; a line for data that are missing or damaged."""

import gzip

import pytest
import torch

from eshampoo.lab.data import batch_indices, images, molecules, mri, text
from eshampoo.lab.errors import UserError


def test_data_order_is_a_function_of_seed_and_step():
    """Epochs are permutations without repetition, and differ."""
    epochs = [torch.cat([batch_indices(12, 4, 7, 3 * e + i) for i in range(3)]) for e in range(2)]
    assert all(sorted(epoch.tolist()) == list(range(12)) for epoch in epochs)
    assert epochs[0].tolist() != epochs[1].tolist()
    assert torch.equal(batch_indices(12, 4, 7, 5), batch_indices(12, 4, 7, 5))
    assert not torch.equal(batch_indices(100, 50, 0, 1), batch_indices(100, 50, 1, 0))


@pytest.mark.parametrize(
    "locate", [images.locate_imagewoof, mri.locate_mri, molecules.locate_molecules]
)
@pytest.mark.parametrize("given", [True, False])
def test_missing_data_says_where_it_comes_from_and_which_flag(locate, given, tmp_path):
    with pytest.raises(UserError, match=r"get .*\(.*\).*--data PATH .*ESHAMPOO_DATA"):
        locate(tmp_path if given else None)


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "imagewoof2.tgz").write_bytes(b"no tar")
    (tmp_path / "tox.csv.gz").write_bytes(b"no gzip")
    (tmp_path / "c4.jsonl").write_text('{"text": "good"}\nbad\n')
    (tmp_path / "cut.txt.gz").write_bytes(gzip.compress(b"x" * 9999)[:20])
    with pytest.raises(UserError, match=r"imagewoof2\.tgz is not a readable tar"):
        images.load_imagewoof(tmp_path, size=16, stored=18)
    with pytest.raises(UserError, match=r"tox\.csv\.gz is not a readable CSV"):
        molecules.load_molecules(tmp_path)
    with pytest.raises(UserError, match=r"c4\.jsonl, line 2"):
        text.load_text(tmp_path / "c4.jsonl", vocabulary=300, length=8)
    with pytest.raises(UserError, match=r"cut\.txt\.gz is not readable text"):
        text.load_text(tmp_path / "cut.txt.gz", vocabulary=300, length=8)
