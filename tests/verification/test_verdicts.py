"""Verdicts on a device are cached, and a check that crashes does no other harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch_geometric.nn import GATv2Conv, GCNConv

import fastgraph
from fastgraph.backends import reference
from fastgraph.machine import cache
from fastgraph.plugins.backend import FALLBACK_PRIORITY, FLOATING
from fastgraph.registry.registry import REGISTRY, Registry
from fastgraph.verification import verdicts
from fastgraph.verification.checking import Finding, operators
from fastgraph.verification.verdicts import UnfinishedCheckError

GOOD = Finding("spmm", torch.float32, 12, 0.5, None)
BAD = Finding("gatv2", torch.bfloat16, 3, float("inf"), "gatv2 (hubs): result 0 differs")
IDENTITY = "Some GPU; driver 12080; kernels 0123"

# A backend whose kernels end the process, or take for ever, as one on a GPU may.
PLUGIN = """
import os, time
from fastgraph.backends import reference
from fastgraph.plugins.hookspecs import hookimpl

class Planted:
    name, priority = "planted", -50
    def unavailable(self):
        return None
    def kernel(self, operator, device_type, dtype):
        return {"spmm": reference.spmm, "head_scores": KERNEL}.get(operator)

def crash(x, att):
    os.abort()

def wait(x, att):
    time.sleep(600)

KERNEL = {"crash": crash, "wait": wait, "fine": reference.head_scores}[os.environ["PLANTED"]]

@hookimpl
def fastgraph_backends():
    return [Planted()]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def planted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forking_interpreter: None
) -> pytest.MonkeyPatch:
    """The backend as it would be installed, for children."""
    packages = tmp_path / "packages"
    info = packages / "planted-1.0.dist-info"
    info.mkdir(parents=True)
    (packages / "planted.py").write_text(PLUGIN)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fastgraph]\nplanted = planted\n")
    root = Path(__file__).parents[2]
    monkeypatch.setenv("PYTHONPATH", f"{packages}:{root}")
    return monkeypatch


class Backend:
    """One that must be verified."""

    priority = 500

    def __init__(self, name: str = "gpu", identity: str = IDENTITY) -> None:
        self.name, self._identity = name, identity

    def unavailable(self) -> str | None:
        return None

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        known = operator in ("spmm", "gatv2", "gatv2_backward") and device_type == "cuda"
        return (lambda *given, addend=None, wanted=None: self.name) if known else None

    def identities(self) -> dict[str, str]:
        return {"cpu": self._identity}


def test_a_kept_verdict_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts.keep(IDENTITY, [GOOD, BAD])
    path = cache.path_of(verdicts._KIND, IDENTITY)
    assert verdicts.read(IDENTITY) == [GOOD, BAD]
    assert [p.name for p in path.parent.iterdir()] == [path.name]  # and nothing is left beside it
    monkeypatch.setattr(verdicts, "check_in_child", lambda *_: pytest.fail("checked again"))
    found = verdicts.failures(Backend())
    assert list(found) == [("gatv2", torch.bfloat16)]
    assert found["gatv2", torch.bfloat16] == f"gpu failed its check on cpu: {BAD.failure}"


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"\xff\xfe", b'{"identity": 1}', b'{"identity": "another", "content": []}'],
)
def test_what_is_no_verdict_is_checked_again(
    content: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdicts.keep(IDENTITY, [GOOD])
    path = cache.path_of(verdicts._KIND, IDENTITY)
    path.write_bytes(content)
    monkeypatch.setattr(verdicts, "check_in_child", lambda *_: [BAD])
    assert list(verdicts.failures(Backend())) == [("gatv2", torch.bfloat16)]
    assert json.loads(path.read_bytes())["identity"] == IDENTITY


def test_another_library_or_driver_is_another_device() -> None:
    verdicts.keep(IDENTITY, [GOOD])
    assert verdicts.read(IDENTITY.replace("0123", "0124")) is None


def test_where_nothing_can_be_kept_each_process_checks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder.write_text("in the way of a folder")
    monkeypatch.setattr(verdicts, "check_in_child", lambda *_: [BAD])
    assert list(verdicts.failures(Backend())) == [("gatv2", torch.bfloat16)]
    assert folder.is_file()


def test_a_child_checks(planted: pytest.MonkeyPatch) -> None:
    planted.setenv("PLANTED", "fine")
    found = verdicts.check_in_child("planted", "cpu")
    assert {finding.operator for finding in found} == {"spmm", "head_scores"}
    assert [finding.failure for finding in found] == [None] * 8


def test_a_child_that_dies_takes_nobody_along(planted: pytest.MonkeyPatch) -> None:
    planted.setenv("PLANTED", "crash")
    found = verdicts.failures(Backend("planted"))
    assert set(found) == {(name, dtype) for name in operators() for dtype in FLOATING}
    assert "planted could not be checked on cpu: the check ended with status -6" in str(found)
    assert not cache.path_of(verdicts._KIND, IDENTITY).exists()  # the next process tries again


def test_a_child_that_hangs_is_ended(planted: pytest.MonkeyPatch) -> None:
    planted.setenv("PLANTED", "wait")
    planted.setattr(verdicts, "_TIMEOUT", 3.0)
    with pytest.raises(UnfinishedCheckError, match="took more than 3 s"):
        verdicts.check_in_child("planted", "cpu")


class Fallback(Backend):
    priority = FALLBACK_PRIORITY
    identities = None  # type: ignore[assignment]

    def __init__(self) -> None:
        super().__init__("reference")


def registry(verify: Any) -> Registry:
    found = Registry()
    found._backends = {backend.name: backend for backend in (Backend(), Fallback())}
    found.verify_with(verify)
    found.select(None)
    return found


def test_layers_are_routed_to_what_passed_only() -> None:
    asked: list[str] = []

    def verify(backend: Any) -> dict[tuple[str, torch.dtype], str]:
        asked.append(backend.name)
        return {("gatv2", torch.bfloat16): "gpu failed its check on cuda:0: off by 3"}

    found = registry(verify)
    assert not asked  # waking a GPU is for the first call on it
    assert found.refusal("spmm", "cpu", torch.float32) is not None
    assert not asked
    assert found.refusal("spmm", "cuda", torch.float32) is None
    assert found.refusal("gatv2", "cuda", torch.float32) is None
    refusal = found.refusal("gatv2", "cuda", torch.bfloat16)
    assert refusal is not None
    assert refusal.reason.endswith("gpu failed its check on cuda:0: off by 3")
    for operator in ("gatv2", "gatv2_backward"):
        assert found.kernel(operator, "cuda", torch.bfloat16)() == "reference"
        assert found.kernel(operator, "cuda", torch.float32)() == "gpu"
    found.select(None)
    assert found.refusal("gatv2", "cuda", torch.bfloat16) == refusal
    assert asked == ["gpu"]


def test_who_selects_a_backend_by_name_gets_it() -> None:
    found = registry(lambda _: pytest.fail("verified"))
    found.select("gpu")
    assert found.refusal("gatv2", "cuda", torch.bfloat16) is None
    assert found.kernel("gatv2", "cuda", torch.bfloat16)() == "gpu"


def test_a_compiled_call_waits_for_one_that_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    found = registry(lambda _: {})
    with monkeypatch.context() as patch:
        patch.setattr(torch.compiler, "is_compiling", lambda: True)
        refusal = found.refusal("spmm", "cuda", torch.float32)
    assert refusal is not None and "python -m fastgraph check" in refusal.reason
    assert found.refusal("spmm", "cuda", torch.float32) is None


class OnCpu(Backend):
    """The reference, which has to be verified."""

    def kernel(self, operator: str, device_type: str, dtype: torch.dtype) -> Any:
        return getattr(reference, operator, None) if device_type == "cpu" else None


def test_status_says_what_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And layers that need it run upstream's own code, others ours."""
    failure = "gatv2 (hubs, 2 x 33): result 0 is off by 1.0e+00, 1.0e-05 is allowed"
    bad = Finding("gatv2", torch.float32, 3, 1e5, failure)
    verdicts.keep(IDENTITY, [GOOD, bad])
    x, edges = torch.randn(4, 8), torch.tensor([[0, 1, 2], [1, 2, 3]])
    layers = GATv2Conv(8, 8), GCNConv(8, 8)
    expected = [layer(x, edges) for layer in layers]
    with monkeypatch.context() as patch:
        fallback = reference.ReferenceBackend()
        patch.setattr(REGISTRY, "_backends", {"gpu": OnCpu(), "reference": fallback})
        patch.setattr(REGISTRY, "_verdicts", {})
        with fastgraph.enabled(min_edges=0):
            found = [layer(x, edges) for layer in layers]
            rows = {row.layer.rpartition(".")[2]: row for row in fastgraph.status().rows}
    REGISTRY.select(None)
    torch.testing.assert_close(found, expected)
    assert [rows[name].routed for name in ("GATv2Conv", "GCNConv")] == [0, 1]
    (reason,) = rows["GATv2Conv"].reasons
    assert reason.startswith("no backend computes gatv2 for torch.float32 on cpu; gpu failed")
    assert reason.endswith(f" its check on cpu: {failure}")
