"""How good predictions are."""

from torch import Tensor


def accuracy_or_roc_auc(logits: Tensor, classes: Tensor) -> float:
    """Accuracy; of two classes the area under the ROC curve."""
    if logits.shape[1] == 2:
        return roc_auc(logits[:, 1] - logits[:, 0], classes)
    return float((logits.argmax(1) == classes).double().mean())


def roc_auc(scores: Tensor, classes: Tensor) -> float:
    """How often a node of class 1 scores higher than one of class 0; ties count a half."""
    _, place, counts = scores.unique(return_inverse=True, return_counts=True)
    rank = (counts.cumsum(0) - (counts - 1) / 2).double()[place]
    positive = int(classes.sum())
    pairs = positive * (len(classes) - positive)
    return float((rank[classes == 1].sum() - positive * (positive + 1) / 2) / pairs)
