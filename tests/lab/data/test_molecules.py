"""Molecules from MoleculeNet and OGB become graphs with labels."""

import made_data
import torch

from eshampoo.lab.data import molecules


def test_moleculenet_csv_becomes_graphs(tmp_path):
    data = molecules.load_molecules(made_data.moleculenet_csv(tmp_path))
    assert len(data) + len(data.test) == 30  # the unreadable row is left out
    assert data.outputs == 2
    atoms, bonds, senders, receivers, owner, count, labels = data.graph(torch.tensor([1, 0]))
    assert len(atoms) == 6 + 3  # benzene, ethanol
    assert len(bonds) == 12 + 4
    assert int(count) == 2
    assert owner.tolist() == [0] * 6 + [1] * 3
    assert torch.equal(owner[senders], owner[receivers])
    assert labels[:, 0].tolist() == [1, 0]


def test_ogb_folder_brings_its_own_split(tmp_path):
    data = molecules.load_molecules(made_data.ogb_folder(tmp_path))
    assert data.train.tolist() == list(range(20))
    assert data.test.tolist() == list(range(20, 30))
    assert data.labels[0].tolist() == [0, 1]
