"""The graph network of AlgoPerf's OGBG workload (Battaglia et al.) on batches of molecules."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def perceptron(inputs: int, width: int, dropout: float) -> nn.Sequential:
    """Build one update function: linear layer, norm, ReLU, dropout."""
    return nn.Sequential(
        nn.Linear(inputs, width), nn.LayerNorm(width), nn.ReLU(), nn.Dropout(dropout)
    )


def gathered(values: Tensor, owners: Tensor, count: int) -> Tensor:
    """Sum the rows of ``values`` that have the same owner."""
    return values.new_zeros(count, values.shape[1]).index_add_(0, owners, values)


class Categories(nn.Module):
    """Sum of the embeddings of several categorical features (OGB's atom and bond encoders)."""

    def __init__(self, sizes: Sequence[int], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(size, width) for size in sizes)

    def forward(self, features: Tensor) -> Tensor:
        columns = zip(self.tables, features.unbind(1), strict=True)
        return torch.stack([table(column) for table, column in columns]).sum(0)


class GraphNetwork(nn.Module):
    """Rounds of message passing: edges, then atoms, then the whole molecule are updated."""

    def __init__(
        self,
        tasks: int,
        *,
        atom_sizes: Sequence[int],
        bond_sizes: Sequence[int],
        width: int,
        rounds: int,
        dropout: float,
    ) -> None:
        super().__init__()
        self.width = width
        self.atoms = Categories(atom_sizes, width)
        self.bonds = Categories(bond_sizes, width)
        self.edge_updates = nn.ModuleList(
            perceptron(4 * width, width, dropout) for _ in range(rounds)
        )
        self.node_updates = nn.ModuleList(
            perceptron(4 * width, width, dropout) for _ in range(rounds)
        )
        self.graph_updates = nn.ModuleList(
            perceptron(3 * width, width, dropout) for _ in range(rounds)
        )
        self.head = nn.Linear(width, tasks)

    def forward(
        self,
        atoms: Tensor,  # [atoms, features]
        bonds: Tensor,  # [bonds, features], each bond in both directions
        senders: Tensor,  # [bonds], indices of atoms
        receivers: Tensor,
        molecule: Tensor,  # [atoms], index of the molecule
        count: Tensor,  # number of molecules
    ) -> Tensor:
        graphs, total = int(count), len(atoms)
        owner = molecule[senders]
        nodes, edges = self.atoms(atoms), self.bonds(bonds)
        graph = nodes.new_zeros(graphs, self.width)
        for update_edges, update_nodes, update_graph in zip(
            self.edge_updates, self.node_updates, self.graph_updates, strict=True
        ):
            ends = [nodes[senders], nodes[receivers]]
            edges = edges + update_edges(torch.cat([edges, *ends, graph[owner]], 1))
            sent, got = gathered(edges, senders, total), gathered(edges, receivers, total)
            nodes = nodes + update_nodes(torch.cat([nodes, sent, got, graph[molecule]], 1))
            sums = [gathered(nodes, molecule, graphs), gathered(edges, owner, graphs)]
            graph = graph + update_graph(torch.cat([graph, *sums], 1))
        logits: Tensor = self.head(graph)
        return logits
