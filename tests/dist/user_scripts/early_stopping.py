"""Early stopping on the state of the best epoch, with a scheduler, a log file and a CSV file."""

import copy
import csv
import logging

import torch
import torch.nn.functional as F
from torch_geometric.data import Data
from torch_geometric.nn import GATConv

logging.basicConfig(filename="train.log", level=logging.INFO, format="%(message)s", force=True)
torch.manual_seed(2)
n = 50
data = Data(
    x=torch.randn(n, 5), y=torch.randint(0, 4, (n,)), edge_index=torch.randint(0, n, (2, 300))
)
data.train_mask = torch.zeros(n, dtype=torch.bool)
data.train_mask[:25] = True
data.val_mask = ~data.train_mask


class GAT(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = GATConv(5, 4, heads=2, dropout=0.2)
        self.conv2 = GATConv(8, 4, concat=False)

    def forward(self, x, edge_index):
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


model = GAT()
optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
best, patience, weights = float("inf"), 0, None
with open("history.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["epoch", "loss", "val", "lr"])
    for epoch in range(15):
        model.train()
        optimizer.zero_grad()
        out = model(data.x, data.edge_index)
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            model.eval()
            out = model(data.x, data.edge_index)
            val = F.cross_entropy(out[data.val_mask], data.y[data.val_mask]).item()
        scheduler.step(val)
        writer.writerow(
            [epoch, f"{loss.item():.6f}", f"{val:.6f}", optimizer.param_groups[0]["lr"]]
        )
        logging.info("epoch %d val %.6f", epoch, val)
        with open("losses.txt", "a") as log:
            log.write(f"{loss.item():.6f}\n")
        if val < best:
            best, patience = val, 0
            weights = copy.deepcopy(model.state_dict())
            torch.save(model.state_dict(), "best.pt")
        else:
            patience += 1
            if patience == 4:
                print(f"stopped after epoch {epoch}")
                break

for state in (weights, torch.load("best.pt", weights_only=True)):
    model.load_state_dict(state)
    out = model(data.x, data.edge_index)
    print(f"best {best:.6f}, out {out[0, 1]:.4f} {out.norm().item():.6f}")
logging.shutdown()
for name in ("train.log", "history.csv", "losses.txt"):
    print(open(name).read())
