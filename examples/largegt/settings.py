"""The paper's settings (arXiv 2312.11109), which ``--like`` makes those that are not given."""

from __future__ import annotations

import argparse

PAPER = {
    "products": {"batch_size": 1024, "hidden_channels": 256, "k": 100, "position_channels": 64},
    "snap-patents": {"batch_size": 2048, "hidden_channels": 128, "k": 50, "position_channels": 64},
    # Of the authors' release.
    "papers100M": {"batch_size": 1024, "hidden_channels": 512, "k": 100, "position_channels": 128},
}


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The arguments of a script, with ``--like`` among them."""
    parser.add_argument("--like", choices=PAPER, help="the paper's settings for a graph")
    args = parser.parse_args()
    if args.like is not None:
        of_paper = PAPER[args.like]
        parser.set_defaults(**{name: of_paper[name] for name in of_paper.keys() & vars(args)})
        args = parser.parse_args()
    return args
