"""The table of registers, without a compiler."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda import registers
from tests.cuda.registers import Usage
from tests.cuda.sass import Loop

LOG = """
ptxas info    : Compiling entry function 'void fastgraph::cuda::(anonymous namespace)::rows<float, \
(fastgraph::cuda::(anonymous namespace)::Record)2, 4>(fastgraph::cuda::Op<float>)' for 'sm_90'
ptxas info    : Function properties for rows
    16 bytes stack frame, 24 bytes spill stores, 20 bytes spill loads
ptxas info    : Used 72 registers, used 1 barriers, 16 bytes stack, 1024 bytes smem
ptxas info    : Compiling entry function 'merge(float*)' for 'sm_80'
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 30 registers, used 0 barriers
"""
ROWS = "rows<float, (Record)2, 4>"


def test_what_the_assembler_reports() -> None:
    assert registers.parsed(LOG) == {
        ROWS: {"sm_90": Usage(72, 24, 16, 1024)},
        "merge": {"sm_80": Usage(30, 0, 0, 0)},
    }


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = {ROWS: {"sm_80": Usage(1, 2, 3, 4), "sm_90": Usage(5, 6, 7, 8, Loop(90, 4, 2))}}
    registers.write_table(tmp_path / "table.json", table)
    assert registers.read_table(tmp_path / "table.json") == table
    assert registers.read_table(tmp_path / "missing.json") == {}


def test_kernels_that_keep_more_in_memory_than_the_table_says() -> None:
    old = {"a": {"sm_90": Usage(64, 16, 32, 0)}}
    few = {"a": {"sm_90": Usage(128, 24, 40, 0)}, "b": {"sm_90": Usage(32, 8, 8, 0)}}
    assert not registers.excesses(old, few)
    many = {"a": {"sm_80": Usage(64, 12, 16, 0), "sm_90": Usage(64, 28, 44, 0)}}
    assert registers.excesses(old, many) == [
        "a on sm_80: 12 bytes spilled instead of 0",
        "a on sm_80: 16 bytes of stack frame instead of 0",
        "a on sm_90: 28 bytes spilled instead of 16",
        "a on sm_90: 44 bytes of stack frame instead of 32",
    ]


def test_loops_that_are_longer_or_wait_more_often() -> None:
    def table(**loops: Loop) -> registers.Usages:
        return {kernel: {"sm_90": Usage(64, 0, 0, 0, loop)} for kernel, loop in loops.items()}

    old = table(a=Loop(100, 4, 2), b=Loop(100, 4, 2), c=Loop(0, 0, 0), d=Loop(50, 4, 1))
    # As long as compilers differ; twice as many loads for as many waits; not known on a side.
    new = table(a=Loop(110, 4, 2), b=Loop(90, 8, 4), c=Loop(500, 1, 1), d=Loop(0, 0, 0))
    assert not registers.excesses(old, new)
    assert registers.excesses(old, table(a=Loop(111, 4, 2), b=Loop(100, 6, 4))) == [
        "a on sm_90: 111 instructions in its loop instead of 100",
        "b on sm_90: waits 4 times for 6 loads instead of 2 times for 4",
    ]


def test_without_a_disassembler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(registers.sass, "find_disassembler", lambda: None)
    usages = registers.parsed(LOG)
    assert registers.with_loops(usages, Path("library.so")) == usages
    assert capsys.readouterr().out.startswith("skipped: no loops of CUDA kernels")


def test_loops_are_joined_to_kernels_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    usages = {"rows<4>": {"sm_80": Usage(1, 0, 0, 0), "sm_90": Usage(2, 0, 0, 0)}}
    code = {"_Z4rowsILi4EEvv": [], "_Z5otherv": []}
    monkeypatch.setattr(registers.sass, "find_disassembler", lambda: "cuobjdump")
    monkeypatch.setattr(registers.sass, "disassembled", lambda *_: code)
    monkeypatch.setattr(registers.sass, "busiest_loop", lambda _: Loop(9, 2, 1))
    assert registers.with_loops(usages, Path("library.so")) == {
        "rows<4>": {"sm_80": Usage(1, 0, 0, 0), "sm_90": Usage(2, 0, 0, 0, Loop(9, 2, 1))}
    }
    with pytest.raises(SystemExit, match="no machine code of gone<1>"):
        registers.with_loops({"gone<1>": usages["rows<4>"]}, Path("library.so"))


def test_what_was_not_built_stays_in_the_table() -> None:
    old = {"a": {"sm_80": Usage(1, 0, 0, 0), "sm_90": Usage(2, 0, 0, 0)}, "gone": {}}
    found = {"a": {"sm_90": Usage(3, 0, 0, 0)}, "new": {"sm_90": Usage(4, 0, 0, 0)}}
    assert registers.updated(old, found) == {
        "a": {"sm_80": Usage(1, 0, 0, 0), "sm_90": Usage(3, 0, 0, 0)},
        "new": {"sm_90": Usage(4, 0, 0, 0)},
    }


@pytest.mark.parametrize(("log", "said"), [("", "nothing"), (LOG, "sm_80, sm_90")])
def test_architectures_that_were_not_compiled_are_missed(
    log: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registers, "find_nvcc", lambda: "nvcc")
    monkeypatch.setattr(registers, "build", lambda *_: log)
    with pytest.raises(SystemExit, match=f"the assembler reports on {said}$"):
        registers.main(["--architectures", "80,86,90"])


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(registers, "find_nvcc", lambda: None)
    registers.main([])
    assert (
        capsys.readouterr().out == "skipped: the CUDA kernels are not compiled, there is no nvcc\n"
    )
