"""Parts of the documentation that are made from the code, and the hook by which mkdocs makes them.

Tables stand in the pages, between a line ``<!-- generated: NAME -->`` and ``<!-- end -->``, so that
pages are whole wherever they are read. ``python docs/generate.py`` brings them up to date, those of
DGL where DGL is installed; a test fails where they are not.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

DOCS = Path(__file__).parent
ROOT = DOCS.parent

sys.path.append(str(DOCS))  # as a hook this file is loaded by its path
layer_tables = importlib.import_module("layer_tables")

# Pages whose text lies at the root of the repository, where people look for it.
AT_ROOT = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}

_PART = re.compile(r"(<!-- generated: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)

# What tests read behind the language of a block, and pages do not show.
_MARK = re.compile(r"^( *```\w+) (?:no-run|output)$", re.MULTILINE)

_SUMS = "`spmm` (sum, mean), `segment_reduce` (max, min)"
_ATTENTION = {
    "GATConv": "`gat_with_scores`; `gat` and `head_scores` for bipartite graphs",
    "GATv2Conv": "`gatv2`",
    "TransformerConv": "`attention`; `edge_attention` for features of edges",
}
_LEFT_BY_GPS = (
    "other kinds of attention than `multihead`; `MultiheadAttention` with hooks, of a subclass, "
    "with `kdim`, `add_bias_kv` or `add_zero_attn`; a `batch` that is not sorted; autocast; "
    "compiled code; GPUs"
)
_LEFT_BY_ATTENTION = (
    'an overridden `message` or `edge_update`; `flow="target_to_source"`; no features of the '
    "destinations; CSC matrices; features of edges beside a sparse matrix; attention weights of a "
    "graph that is no plain `edge_index`; dropout in a captured CUDA graph"
)


def settings_table() -> str:
    """Every setting: its name, variable, place in ``enable()``, default and meaning."""
    import attrs

    import fastgraph
    from fastgraph.settings import Settings

    arguments = inspect.signature(fastgraph.enable).parameters
    meanings = _attributes(Settings)
    rows = []
    for field in attrs.fields(Settings):
        variable = field.metadata["variable"]
        meaning = meanings[field.name].removeprefix(f"``{variable}``. ").replace("``", "`")
        argument = f"`{field.name}`" if field.name in arguments else ""
        rows.append((f"`{field.name}`", f"`{variable}`", argument, f"`{field.default}`", meaning))
    return _table(("setting", "variable", "`enable()` argument", "default", "meaning"), rows)


def _attributes(cls: type) -> dict[str, str]:
    """The section ``Attributes`` of a docstring: names and their texts, each on one line."""
    section = inspect.cleandoc(cls.__doc__ or "").split("\nAttributes:\n")[1].split("\n\n")[0]
    found = re.findall(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", section, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}


def routed_layers() -> list[str]:
    """Names of PyG's layers that have a route."""
    from fastgraph.pyg.framework import PyG

    return PyG().routed_layers()


def layers_table() -> str:
    """Every routed layer: its message, its operators, and what is left to upstream."""
    import torch_geometric.nn.conv as conv

    from fastgraph.pyg.messages import known_message

    rows = []
    for name in sorted(routed_layers()):
        if name in _ATTENTION:
            rows.append((f"`{name}`", "attention", _ATTENTION[name], _LEFT_BY_ATTENTION))
            continue
        if name == "GPSConv":
            rows.append(("`GPSConv`", "attention of all pairs", "`dense_attention`", _LEFT_BY_GPS))
            continue
        message = known_message(getattr(conv, name))
        assert message is not None
        operators = f"`gcn`; {_SUMS}" if name == "GCNConv" else _SUMS
        if message.weight is None:
            rows.append((f"`{name}`", "`x_j`", operators, ""))
            continue
        product = f"`{message.weight} * x_j`"
        form = f"`x_j` or {product}" if message.optional else product
        rows.append((f"`{name}`", form, operators, "weights under max or min that need a gradient"))
    headings = ("layer", "message", "operators", "left to upstream besides")
    return _table(headings, rows)


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


TABLES: dict[str, Callable[[], str | None]] = {
    "settings": settings_table,
    "layers": layers_table,
    **layer_tables.tables(),
}
"""The functions that make the parts; without its library one gives ``None``, and its part stays."""


def up_to_date(markdown: str) -> str:
    """A page with its generated parts made anew."""

    def made(part: re.Match[str]) -> str:
        text = TABLES[part[2]]()
        return part[0] if text is None else f"{part[1]}\n{text}\n\n{part[3]}"

    return _PART.sub(made, markdown)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie at the root."""
    from mkdocs.structure.files import File

    for name, source in AT_ROOT.items():
        text = (ROOT / source).read_text().replace("](docs/", "](")
        for page, other in AT_ROOT.items():
            text = text.replace(f"]({other}", f"]({page}")
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Make generated parts, and hide what only tests read."""
    return _MARK.sub(r"\1", up_to_date(markdown))


def main() -> None:
    """Bring the pages up to date."""
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text()
        after = up_to_date(before)
        if after != before:
            page.write_text(after)
            print(f"written: {page.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
