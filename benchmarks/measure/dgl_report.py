"""The floors of DGL's layers, and the tables as Markdown."""

from __future__ import annotations

from typing import Any

from measure.report import Floor, geometric_mean, highest, lowest, median, ratio

_MEANS = {
    ("GATv2Conv", "GATConv", "AGNNConv"): 5.0,
    ("DotGatConv",): 2.5,
    ("graph transformer",): 2.5,
    ("GraphConv", "SAGEConv mean", "SAGEConv pool"): 1.5,
}
_WHOLE = {"GATv2Conv": 8.0, "GATConv": 8.0, "DotGatConv": 2.5, "GraphConv": 1.3}
_MIB = 2**20


def _ratios(results: dict[str, Any], group: str, layers: tuple[str, ...]) -> dict[str, float]:
    found = {}
    for name, cells in results["cells"].items():
        for layer in layers:
            value = ratio(cells.get(layer, {}), group, "upstream", "ours")
            if value is not None:
                found[f"{name} {layer}"] = value
    return found


def _mean(what: str, values: dict[str, float], required: float) -> Floor:
    if not values:
        return Floor(what, f">= {required:g}x", "not measured", None)
    mean = geometric_mean(list(values.values()))
    return Floor(what, f">= {required:g}x", f"{mean:.2f}x", mean >= required)


def floors(results: dict[str, Any]) -> list[Floor]:
    """All floors, met or not."""
    layers = tuple({layer: 0 for cells in results["cells"].values() for layer in cells})
    listed = [
        lowest("layer, slowest cell", _ratios(results, "layer", layers), 1),
        lowest(
            "message passing alone, slowest cell", _ratios(results, "message_passing", layers), 1
        ),
    ]
    for group, required in _MEANS.items():
        what = f"message passing alone, geometric mean of {', '.join(group)}"
        listed.append(_mean(what, _ratios(results, "message_passing", group), required))
    for layer, required in _WHOLE.items():
        values = _ratios(results, "layer", (layer,))
        tolokers = {name: value for name, value in values.items() if name.startswith("tolokers")}
        listed.append(lowest(f"{layer} on tolokers", tolokers, required))
    memory = results["memory"]
    found = {"tolokers": memory["upstream"] / max(memory["ours"], 1)} if memory else {}
    listed.append(lowest("peak memory of GATv2Conv below DGL's", found, 10))
    sampled = results["sampled"]
    epochs = {
        name: row["upstream"]["median"] / row["ours"]["median"] for name, row in sampled.items()
    }
    listed.append(lowest("an epoch of sampled GraphSAGE", epochs, 1.2))
    overheads = {name: row["overhead_us"] for name, row in results["routed_call"].items()}
    listed.append(highest("a routed call on a small graph", overheads, 80, "us"))
    return listed


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def markdown(results: dict[str, Any], listed: list[Floor]) -> str:
    """All tables."""
    lines = [
        "# DGL layers on the CPU",
        "",
        f"`{results['command']}`",
        "",
        f"Milliseconds of forward and backward, medians, {results['channels']} channels; each",
        "graph has a self-loop at every node. The ceiling is DGL's time over that of dense",
        "products alone.",
        "",
        "| graph | layer | DGL | ours | times | dense | ceiling | alone: DGL | ours | times |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, cells in results["cells"].items():
        for layer, cell in cells.items():
            columns = [
                _figure(median(cell, "layer", "upstream")),
                _figure(median(cell, "layer", "ours")),
                _times(ratio(cell, "layer", "upstream", "ours")),
                _figure(median(cell, "layer", "dense")),
                _times(ratio(cell, "layer", "upstream", "dense")),
                _figure(median(cell, "message_passing", "upstream")),
                _figure(median(cell, "message_passing", "ours")),
                _times(ratio(cell, "message_passing", "upstream", "ours")),
            ]
            lines.append(f"| {name} | {layer} | {' | '.join(columns)} |")
    ceilings = [
        value
        for cells in results["cells"].values()
        for cell in cells.values()
        if (value := ratio(cell, "layer", "upstream", "dense")) is not None
    ]
    if ceilings:
        lines += ["", f"Geometric mean of the ceilings: {geometric_mean(ceilings):.2f}."]
    for name, row in results["sampled"].items():
        times = {column: _figure(spread["median"]) for column, spread in row.items()}
        lines += [
            "",
            f"An epoch of GraphSAGE on sampled neighbours of {name}: DGL {times['upstream']} ms, "
            f"ours {times['ours']} ms, of which the sampler takes {times['sampler']} ms. "
            f"Without the aggregation it takes {times['dense']} ms.",
        ]
    if results["memory"]:
        upstream, ours = (results["memory"][side] / _MIB for side in ("upstream", "ours"))
        lines += ["", f"Peak memory of GATv2Conv: DGL {upstream:,.0f} MiB, ours {ours:,.0f} MiB."]
    for name, row in results["routed_call"].items():
        lines += ["", f"{name}: {row['overhead_us']:.0f} us over the native call."]
    lines += ["", "| floor | required | measured | met |", "| --- | --- | --- | --- |"]
    for floor in listed:
        met = {True: "yes", False: "no", None: "-"}[floor.met]
        lines.append(f"| {floor.what} | {floor.required} | {floor.measured} | {met} |")
    facts = [f"- {name}: {fact}" for name, fact in results["machine"].items()]
    return "\n".join([*lines, "", *facts])
