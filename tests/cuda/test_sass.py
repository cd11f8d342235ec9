"""Tests of the reader of machine code, without a disassembler."""

from __future__ import annotations

from tests.cuda import sass
from tests.cuda.sass import Loop


def listed(*texts: str) -> str:
    """Instructions as the disassembler lists them, each with its encoding."""
    lines = (
        f"        /*{16 * number:04x}*/   {text} ;   /* 0x000fe20000000800 */\n"
        "                                           /* 0x000fe20000000800 */\n"
        for number, text in enumerate(texts)
    )
    return f'\t\tFunction : rows\n\t.headerflags\t@"EF_CUDA_SM90"\n{"".join(lines)}'


GATHERING = listed(
    "LDG.E R1, desc[UR4][R2.64]",  # outside of the loop
    "IADD3 R3, R1, 0x1, RZ",
    # 0x20, the outer loop
    "LDG.E.CONSTANT R9, desc[UR4][R2.64]",
    "SHFL.IDX PT, R10, R9, R0, 0x1f",
    # 0x40, the inner one: two packs together, then one whose address the first of them gives
    "LDG.E.128 R4, desc[UR4][R2.64]",
    "@P0 LDG.E.128 R12, desc[UR4][R2.64+0x10]",
    "FADD R20, R7, R20",
    "LDG.E.U8 R16, desc[UR4][R4.64]",
    "FADD R21, R15, R21",
    "FADD R22, R16, R22",
    "ISETP.GE.AND P0, PT, R0, R1, PT",
    "@!P0 BRA 0x40",
    "@P1 BRA 0x20",
    "EXIT",
    "BRA 0xe0",  # the end of every function
)


def test_instructions_are_found_with_their_addresses() -> None:
    ((name, code),) = sass.parsed(GATHERING)
    assert name == "rows" and len(code) == 15
    assert code[5].text == "@P0 LDG.E.128 R12, desc[UR4][R2.64+0x10]"
    assert [i.target for i in code if i.target is not None] == [0x40, 0x20, 0xE0]


def test_the_loop_that_loads_most() -> None:
    ((_, code),) = sass.parsed(GATHERING)
    # It waits for the first two, and for the one behind them.
    assert sass.busiest_loop(code) == Loop(instructions=8, loads=3, waits=2)


def test_loads_in_flight_together_are_one_wait() -> None:
    ((_, code),) = sass.parsed(
        listed(
            "LDG.E R4, desc[UR4][R2.64]",
            "LDG.E R5, desc[UR4][R2.64+0x4]",
            "IADD3 R2, R2, 0x8, RZ",
            "FADD R6, R4, R6",
            "FADD R6, R5, R6",
            "@P0 BRA 0x0",
        )
    )
    assert sass.busiest_loop(code) == Loop(instructions=6, loads=2, waits=1)


def test_a_kernel_without_a_loop() -> None:
    ((_, code),) = sass.parsed(listed("LDG.E R4, desc[UR4][R2.64]", "EXIT", "BRA 0x20"))
    assert sass.busiest_loop(code) == Loop(0, 0, 0)
