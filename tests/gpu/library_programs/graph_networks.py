"""PyTorch Geometric."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from step_parts import Program
from torch import nn

from library_programs.record import CALLS, many, on_the_device, program, training, variant


def graphs(device: str, graphs_each: int = 4, nodes: int = 6, edges: int = 14) -> list[tuple[Any, ...]]:
    """Batches of equal sizes, as dicts."""

    def make(g):
        offset = (torch.arange(graphs_each) * nodes).repeat_interleave(edges)
        edge_index = torch.randint(nodes, (2, graphs_each * edges), generator=g) + offset
        return [
            torch.randn(graphs_each * nodes, 5, generator=g),
            edge_index,
            torch.arange(graphs_each).repeat_interleave(nodes),
            torch.randint(3, (graphs_each,), generator=g),
        ]

    return many(make, device)


def graph_network(device: str, kind: str, pool: str, given_size: bool, **options: Any) -> Program:
    from torch_geometric import nn as gnn

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            if kind == "gat":
                self.conv1, self.conv2 = (
                    gnn.GATConv(5, 4, heads=4, dropout=0.2, **options),
                    gnn.GATConv(16, 16, concat=False, **options),
                )
            else:
                conv = {"gcn": gnn.GCNConv, "sage": gnn.SAGEConv, "graph": gnn.GraphConv}[kind]
                self.conv1, self.conv2 = conv(5, 16, **options), conv(16, 16, **options)
            self.norm = gnn.BatchNorm(16)
            self.lin = nn.Linear(16, 3)

        def forward(self, x, edge_index, batch, size=None):
            x = self.norm(self.conv1(x, edge_index).relu())
            x = self.conv2(x, edge_index)
            x = getattr(gnn, f"global_{pool}_pool")(x, batch, size=size)
            x = F.dropout(x, p=0.5, training=self.training)
            return self.lin(x)

    model = Net().to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4, **on_the_device(device))
    criterion = nn.CrossEntropyLoss()

    def loss_and_hits(x, edge_index, batch, y):
        out = model(x, edge_index, batch, 4 if given_size else None)
        return criterion(out, y), (out.argmax(dim=1) == y).sum()

    return training(loss_and_hits, optimizer, graphs(device), model, zeroed="last", detached=False)


variant("pyg_gcn_mean_pool_with_given_size", graph_network, "gcn", "mean", True)
# GCNConv and GATConv with their own loops take edges by a boolean mask, and are refused.
variant("pyg_gcn_without_self_loops", graph_network, "gcn", "add", True, add_self_loops=False)
variant("pyg_gat_without_self_loops", graph_network, "gat", "mean", True, add_self_loops=False)
# Refused is fine: the number of graphs is read on the host.
variant("pyg_graphsage_without_size", graph_network, "sage", "mean", False)
# Refused is fine: the number of graphs is read on the host.
variant("pyg_gcn_mean_pool_without_size", graph_network, "gcn", "mean", False)
variant("pyg_gat_add_pool", graph_network, "gat", "add", True)
variant("pyg_graphsage_max_pool", graph_network, "sage", "max", True)


@program
def pyg_gcn_on_a_data_batch(device: str) -> Program:
    """The loader's `Batch` objects as arguments: refused is fine, they are no containers."""
    from torch_geometric import nn as gnn
    from torch_geometric.data import Batch, Data

    model = gnn.GCN(5, 16, num_layers=2, out_channels=16, dropout=0.1).to(device)
    head = nn.Linear(16, 3).to(device)
    optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], lr=0.01, fused=True)
    g = torch.Generator().manual_seed(45)

    def one() -> Data:
        return Data(
            x=torch.randn(6, 5, generator=g),
            edge_index=torch.randint(6, (2, 14), generator=g),
            y=torch.randint(3, (1,), generator=g),
        )

    loader = [(Batch.from_data_list([one() for _ in range(4)]).to(device),) for _ in range(CALLS)]

    def loss_of(data):
        out = model(data.x, data.edge_index)
        out = head(gnn.global_mean_pool(out, data.batch, size=data.num_graphs))
        return F.cross_entropy(out, data.y)

    return training(loss_of, optimizer, loader, model, head)


def node_classification(device: str, cached: bool) -> Program:
    from torch_geometric import nn as gnn

    x, edge_index = torch.randn(24, 5).to(device), torch.randint(24, (2, 80)).to(device)
    y = torch.randint(3, (24,)).to(device)
    conv1, conv2 = gnn.GCNConv(5, 16, cached=cached).to(device), gnn.GCNConv(16, 3, cached=cached).to(device)
    optimizer = torch.optim.Adam(
        [{"params": conv1.parameters(), "weight_decay": 5e-4}, {"params": conv2.parameters(), "weight_decay": 0}],
        lr=0.01,
        **on_the_device(device),
    )

    def loss_of(rows):
        h = F.dropout(x, p=0.5)
        h = F.dropout(conv1(h, edge_index).relu(), p=0.5)
        out = conv2(h, edge_index)
        return F.cross_entropy(out[rows], y[rows])

    data = many(lambda g: [torch.randperm(24, generator=g)[:10]], device)
    return training(loss_of, optimizer, data, conv1, conv2)


# Cora's way, the rows by index, as arguments.
variant("pyg_node_classification_of_the_whole_graph", node_classification, False)
# The layers keep the normalised edges of the first call.
variant("pyg_node_classification_with_cached_normalisation", node_classification, True)
