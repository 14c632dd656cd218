"""Molecules as graphs with many binary tasks: MoleculeNet's CSV files, and OGB's."""

import csv
import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from eshampoo.lab.data import Batch, seeded
from eshampoo.lab.data.cache import cached, fingerprint
from eshampoo.lab.errors import UserError, missing_data

ORIGIN = (
    "ToxCast or Tox21 (moleculenet.org: toxcast_data.csv.gz) or OGB's folder ogbg_molpcba"
    " (ogb.stanford.edu)"
)
HYBRIDISATIONS = ("SP", "SP2", "SP3", "SP3D", "SP3D2")
BOND_TYPES = ("SINGLE", "DOUBLE", "TRIPLE", "AROMATIC")
# the number of values of each feature; the last value stands for everything else
ATOM_SIZES = (120, 4, 12, 12, 10, 6, 6, 2, 2)
BOND_SIZES = (5, 7, 2)


@dataclass(frozen=True)
class MoleculeData:
    """All molecules one after another; a batch is one disconnected graph."""

    atoms: Tensor  # [atoms, 9]
    bonds: Tensor  # [bonds, 3]
    ends: Tensor  # [bonds, 2], numbered within the molecule
    first_atom: Tensor  # [molecules + 1]
    first_bond: Tensor  # [molecules + 1]
    labels: Tensor  # [molecules, tasks], NaN where unknown
    train: Tensor  # numbers of molecules
    test: Tensor

    @property
    def outputs(self) -> int:
        return self.labels.shape[1]

    def __len__(self) -> int:
        return len(self.train)

    def batch(self, indices: Tensor, generator: torch.Generator) -> Batch:
        return self.graph(self.train[indices])

    def validation(self) -> Iterator[Batch]:
        for part in torch.split(self.test, 256):
            yield self.graph(part)

    def graph(self, molecules: Tensor) -> Batch:
        """Return (atoms, bonds, senders, receivers, molecule of each atom, count, labels)."""
        sizes = self.first_atom[molecules + 1] - self.first_atom[molecules]
        offsets = torch.cumsum(sizes, 0) - sizes
        atoms, owners = ranges(self.first_atom, molecules)
        bonds, bond_owners = ranges(self.first_bond, molecules)
        ends = self.ends[bonds] + offsets[bond_owners, None]
        count = torch.tensor(len(molecules))
        labels = self.labels[molecules]
        return self.atoms[atoms], self.bonds[bonds], ends[:, 0], ends[:, 1], owners, count, labels


def ranges(first: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows first[i] … first[i+1]-1 of every chosen i, and i's position in ``chosen``."""
    sizes = first[chosen + 1] - first[chosen]
    owners = torch.repeat_interleave(torch.arange(len(chosen)), sizes)
    within = torch.arange(int(sizes.sum())) - (torch.cumsum(sizes, 0) - sizes)[owners]
    return first[chosen][owners] + within, owners


def locate_molecules(path: Path | None) -> Path:
    """Find the CSV file at ``path``, or the first one inside it."""
    if path is not None and path.is_file():
        return path
    if path is not None and path.is_dir():
        for pattern in ("mapping/mol.csv.gz", "ogbg_mol*/mapping/mol.csv.gz", "tox*.csv*"):
            # in reverse order ToxCast comes before Tox21, which has fewer tasks
            for found in sorted(path.glob(pattern), reverse=True):
                return found
    raise missing_data("molecules", path, f"{ORIGIN} and give the file or folder")


def load_molecules(path: Path | None) -> MoleculeData:
    """Load molecules from CSV, with OGB's split if it is there, or with one in ten held out."""
    source = locate_molecules(path)
    arrays = cached(f"molecules-{fingerprint(source)}", lambda: parse(source))
    rows = arrays.pop("row")
    splits = sorted(source.parent.parent.glob("split/*/train.csv.gz"))
    if splits:
        where = {int(row): number for number, row in enumerate(rows)}
        train, test = (
            torch.tensor([where[i] for i in split_rows(splits[0].parent / name) if i in where])
            for name in ("train.csv.gz", "valid.csv.gz")
        )
    else:
        order = torch.randperm(len(rows), generator=seeded(0))
        test, train = order[: len(order) // 10], order[len(order) // 10 :]
    if not len(train) or not len(test):
        raise UserError(f"{source} has no molecules for training or for validation; get {ORIGIN}")
    return MoleculeData(train=train, test=test, **arrays)


def read_csv(path: Path) -> list[list[str]]:
    """Read the rows of a CSV file, compressed or not."""
    try:
        if path.suffix == ".gz":
            with gzip.open(path, "rt", newline="") as file:
                return list(csv.reader(file))
        with open(path, newline="") as file:
            return list(csv.reader(file))
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} is not a readable CSV file: {error}; get {ORIGIN}") from error


def split_rows(path: Path) -> list[int]:
    """Read the row numbers in one of OGB's split files."""
    try:
        return [int(row[0]) for row in read_csv(path)]
    except (IndexError, ValueError) as error:
        raise UserError(f"{path} is not a list of row numbers: {error}; get {ORIGIN}") from error


def read_molecules(source: Path) -> list[tuple[str, list[float]]]:
    """Read SMILES and labels of every row: 0, 1, or not a number where a cell is empty."""
    header, *rows = read_csv(source) or [[]]
    tasks = [i for i, name in enumerate(header) if name not in ("smiles", "mol_id")]
    if "smiles" not in header or not tasks:
        raise UserError(f"{source} has no column 'smiles' or none for a task; give {ORIGIN}")
    smiles = header.index("smiles")
    found = []
    for number, row in enumerate(rows, 2):
        try:
            if len(row) != len(header):
                raise ValueError(f"{len(row)} cells where the header has {len(header)}")
            labels = [float(row[i]) if row[i] else torch.nan for i in tasks]
            if any(label not in (0, 1) for label in labels if label == label):
                raise ValueError("a label that is neither 0 nor 1 nor empty")
        except ValueError as error:
            raise UserError(f"{source}, row {number}: {error}; get {ORIGIN}") from error
        found.append((row[smiles], labels))
    return found


def parse(source: Path) -> dict[str, Tensor]:
    """Make graphs and labels of all molecules that RDKit understands."""
    from rdkit import Chem, RDLogger

    RDLogger.DisableLog("rdApp.*")  # type: ignore[attr-defined]
    atoms, bonds, ends, kept, labels = [], [], [], [], []
    first_atom, first_bond = [0], [0]
    for number, (smiles, known) in enumerate(read_molecules(source)):
        molecule = Chem.MolFromSmiles(smiles)
        if molecule is None or molecule.GetNumAtoms() == 0:
            continue
        atoms += [atom_features(atom) for atom in molecule.GetAtoms()]
        for bond in molecule.GetBonds():
            a, b = bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()
            bonds += [bond_features(bond)] * 2
            ends += [[a, b], [b, a]]
        first_atom.append(len(atoms))
        first_bond.append(len(bonds))
        kept.append(number)
        labels.append(known)
    if not kept:
        raise UserError(f"{source} has no molecule that RDKit can read; get {ORIGIN}")
    return {
        "atoms": torch.tensor(atoms),
        "bonds": torch.tensor(bonds).view(-1, len(BOND_SIZES)),
        "ends": torch.tensor(ends).view(-1, 2),
        "first_atom": torch.tensor(first_atom),
        "first_bond": torch.tensor(first_bond),
        "labels": torch.tensor(labels),
        "row": torch.tensor(kept),
    }


def atom_features(atom: Any) -> list[int]:  # noqa: ANN401 - rdkit has no usable types
    """Return OGB's nine features of an atom, each below its size in ``ATOM_SIZES``."""
    hybridisation = str(atom.GetHybridization())
    values = (
        atom.GetAtomicNum(),
        int(atom.GetChiralTag()),
        atom.GetTotalDegree(),
        atom.GetFormalCharge() + 5,
        atom.GetTotalNumHs(),
        atom.GetNumRadicalElectrons(),
        HYBRIDISATIONS.index(hybridisation) if hybridisation in HYBRIDISATIONS else 5,
        int(atom.GetIsAromatic()),
        int(atom.IsInRing()),
    )
    return [min(max(v, 0), size - 1) for v, size in zip(values, ATOM_SIZES, strict=True)]


def bond_features(bond: Any) -> list[int]:  # noqa: ANN401 - rdkit has no usable types
    """Return OGB's three features of a bond, each below its size in ``BOND_SIZES``."""
    kind = str(bond.GetBondType())
    values = (
        BOND_TYPES.index(kind) if kind in BOND_TYPES else 4,
        int(bond.GetStereo()),
        int(bond.GetIsConjugated()),
    )
    return [min(v, size - 1) for v, size in zip(values, BOND_SIZES, strict=True)]
