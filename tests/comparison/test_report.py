"""The page with plots, as a real browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")

from fastgraph.cli.programs.report import check_report, render, write_report
from fastgraph.cli.programs.scripts import Run, ScriptComparison, Side, Step
from fastgraph.routing.status import NOT_COUNTED, StatusRow

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")

# Runs in the page and leaves what it measured in an attribute, where --dump-dom shows it.
MEASURE = """\
<script>
const boxes = [...document.querySelectorAll(".plots svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const widths = ["#8c8c8c", "#1f77b4"].map((color) =>
    svg.querySelector(`path[clip-path][style*="stroke: ${color}"]`).getBBox().width);
  return { name: svg.getAttribute("aria-label"), width: box.width, height: box.height, widths };
});
const cells = [...document.querySelectorAll("table.cost td")].map((cell) => cell.innerText);
document.body.dataset.found = JSON.stringify({ boxes, cells });
</script>
"""


def run(side: Side, seconds: float, *, title: str = "", shift: int = 0) -> Run:
    steps = tuple(Step(i * seconds, 2.0 - i / 10, (300 + i) << 20) for i in range(8))
    layers = (StatusRow("GCNConv", 7, 1, Counter({"explaining <b>": 1})),)
    return Run(
        side=side,
        shift=shift,
        exit_code=0,
        seconds=9 * seconds,
        peak_bytes=(500 if side == "plain" else 250) << 20,
        on_gpu=False,
        output=f"epoch 1\n<script>alert({title!r})</script>\nlast of {side}\n",
        steps=steps,
        layers=layers if side == "fastgraph" else (),
        dropping=(),
        compiled=side == "fastgraph",
    )


def comparison(title: str = "train.py --epochs 8") -> ScriptComparison:
    runs = (run("plain", 0.5), run("fastgraph", 0.125))
    return ScriptComparison(title, runs, huge_pages=False)


def test_page_asks_for_nothing_from_elsewhere_and_escapes() -> None:
    page = render([comparison("<i>train</i>.py"), comparison("other.py")])
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"url\((?!#)", page)
    assert "@import" not in page
    assert "<i>train" not in page
    assert "<script" not in page
    assert "explaining &lt;b&gt;" in page
    # Several plots on one page must not take each other's clip paths and markers.
    defined = Counter(re.findall(r'\bid="([^"]+)"', page))
    used = set(re.findall(r'(?:href="#|url\(#)([^")]+)', page))
    assert used
    assert {name: defined[name] for name in used} == dict.fromkeys(used, 1)


def test_page_has_the_numbers() -> None:
    page = render([comparison()])
    for words in ("500.00 ms", "125.00 ms", "500 MiB", "250 MiB", "4.00 times", "50 %", "1.300000"):
        assert words in page, words
    assert page.count("<svg") == 3
    assert 'class="overview"' not in page
    assert 'class="overview"' in render([comparison(), comparison()])


def test_program_without_steps_has_no_plots() -> None:
    bare = tuple(
        Run(side, 0, 0, 1.0, 1 << 20, False, "", (), (), (), False)
        for side in ("plain", "fastgraph")
    )
    page = render([ScriptComparison("a.py", bare, huge_pages=True)])
    assert "<svg" not in page
    assert "No optimizer steps were seen" in page
    assert "THP_MEM_ALLOC_ENABLE" in page
    assert NOT_COUNTED not in page
    assert NOT_COUNTED in render([comparison()])


def test_equal_comparisons_give_equal_pages() -> None:
    assert render([comparison()]) == render([comparison()])


def test_paths_are_checked_first(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError, match="expected a file, got the directory"):
        check_report(tmp_path)
    with pytest.raises(OSError, match="expected a file in a writable directory"):
        write_report(tmp_path / "missing" / "page.html", [comparison()])


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_browser_draws_the_plots(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    write_report(page, [comparison(), comparison("second.py")])
    text = page.read_text()
    # The page itself allows no script at all.
    policy = "style-src 'unsafe-inline'"
    assert text.count(policy) == 1
    text = text.replace(policy, f"{policy}; script-src 'unsafe-inline'")
    page.write_text(text.replace("</body>", f"{MEASURE}</body>"))
    command = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--dump-dom",
        page.as_uri(),
    ]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    (found,) = re.findall(r'data-found="([^"]*)"', shown.stdout)
    measured = json.loads(found.replace("&quot;", '"').replace("&amp;", "&"))
    names = ["time per step (ms)", "peak memory (MiB)", "loss"]
    assert [box["name"] for box in measured["boxes"]] == 2 * names
    for box in measured["boxes"]:
        assert box["width"] > 200, box
        assert box["height"] > 100, box
        assert all(width > 100 for width in box["widths"]), box  # the curves
    assert measured["cells"][:4] == ["python", "500.00 ms", "8", "500 MiB"]
    assert "250 MiB" in measured["cells"]
