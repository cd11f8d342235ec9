"""Edge programs against torch's own operations on stored messages."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fastgraph import ops
from fastgraph.edge_programs.builder import Builder
from fastgraph.edge_programs.moments import without_variances
from fastgraph.edge_programs.operations import ELEMENTWISE
from fastgraph.edge_programs.program import PLACES, parse
from fastgraph.registry.registry import REGISTRY
from tests.emulated import repeats_but
from tests.graphs import Case, all_cases, hub_edges, quantised, random_edges
from tests.ops.edge_messages import (
    TORCH,
    Both,
    Message,
    assert_bits_of_threads,
    close,
    ordinary,
)
from tests.wanted import gradients_of


@pytest.fixture
def backend(backend: str) -> str:
    """Each backend that has the kernel."""
    if REGISTRY.backends[backend].kernel("edge_program", "cpu", torch.float32) is None:
        pytest.skip(f"{backend} has no kernel of edge programs")
    return backend


def test_every_operation_is_compared_with_torch() -> None:
    assert set(TORCH) == set(ELEMENTWISE)


CONSTANTS = {"leaky_relu": (0.25,), "elu": (1.5,), "clamp": (-0.5, 1.0)}
POSITIVE = ("log", "log1p", "sqrt")


@pytest.mark.parametrize("values", [quantised, ordinary], ids=["ties", "random"])
@pytest.mark.parametrize("width", [3, 40])
@pytest.mark.parametrize("operation", ELEMENTWISE)
def test_each_operation(
    operation: str, width: int, values: Callable[..., Tensor], backend: str
) -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=values)
    constants = CONSTANTS.get(operation, ())
    places = ("gathered", "row", "edge")[: ELEMENTWISE[operation].arity - len(constants)]
    arguments = [message.operand(place, width) for place in places]
    if operation in POSITIVE or operation == "pow":
        arguments[0] = message.apply("add", message.apply("abs", arguments[0]), 0.5)
    if operation in ("div", "atan2"):  # of which torch has no second derivative at zeros
        arguments[1] = message.apply("add", message.apply("abs", arguments[1]), 0.5)
    if operation == "where":
        arguments[0] = message.apply("lt", arguments[0], arguments[1])
    result = message.apply(operation, *arguments, *constants)
    factor = message.operand("edge", 1)
    message.reduce("sum", message.apply("mul", result, factor))
    message.check(twice=True)


@pytest.mark.parametrize("reduction", ["sum", "max", "std"])
def test_outputs_may_be_the_same_twice(reduction: str) -> None:
    message = Message(Case("random", random_edges(9, 7, 40), 9, 7))
    x = message.operand("gathered", 4)
    for name in (reduction, "mean", reduction):
        message.reduce(name, x)
    message.check()


@pytest.mark.parametrize("place", ["row", "gathered", "edge", "parameter"])
def test_masks_have_no_gradient(place: str) -> None:
    """As what comparisons take has none: no program is made for a gradient that is zero."""
    message = Message(Case("random", random_edges(9, 7, 40), 9, 7))
    mask, x = message.operand(place, 4), message.operand("gathered", 4)
    message.reduce("sum", message.apply("where", mask, x, message.apply("exp", x)))
    message.check(twice=True)
    first = message.operands[f"{place}_0"]
    (out,) = message.run()
    assert torch.autograd.grad(out.sum(), first, allow_unused=True) == (None,)


REDUCED = ("sum", "mean", "max", "min", "edge", "total", "var")


def draw(rng: random.Random, message: Message) -> None:
    """A random program of a few instructions, with several outputs."""
    wide = rng.choice([1, 4, 12, 30, 36, 70])
    divisors = [w for w in (1, 2, 3, wide) if wide % w == 0]
    values = [message.operand(place, rng.choice(divisors)) for place in PLACES]
    values.append(message.operand("gathered", wide))
    safe = [
        name
        for name in ELEMENTWISE
        if name not in ("pow", "exp", "expm1", "div", *POSITIVE, *CONSTANTS)
    ]
    for _ in range(rng.randint(1, 8)):
        operation = rng.choice([*safe, *CONSTANTS, "div", "exp", "log"])
        count = ELEMENTWISE[operation].arity - len(CONSTANTS.get(operation, ()))
        given = [rng.choice(values) for _ in range(count)]
        if count > 1 and len({g.value.width for g in given}) > 1:
            widest = max(g.value.width for g in given)
            if any(widest % g.value.width for g in given):
                continue
        if operation == "div":
            given[1] = message.apply("add", message.apply("abs", given[1]), 1.0)
        if operation == "exp":
            given[0] = message.apply("tanh", given[0])
        if operation == "log":
            given[0] = message.apply("add", message.apply("abs", given[0]), 0.5)
        values.append(message.apply(operation, *given, *CONSTANTS.get(operation, ())))
    heads = [w for w in divisors if w < wide]
    if heads:
        h = rng.choice(heads)
        a, b = (rng.choice([v for v in values if v.value.width == wide]) for _ in "ab")
        product = (a.tensor * b.tensor).unflatten(1, (h, wide // h)).sum(-1)
        values.append(Both(message.builder.dot(a.value, b.value, h), product))
        folded = a.tensor.unflatten(1, (h, wide // h)).sum(-1)
        values.append(Both(message.builder.fold(a.value, h), folded))
        tiled = values[-1].tensor.repeat(1, wide // h)
        values.append(Both(message.builder.tile(values[-1].value, wide), tiled))
        over_heads = a.tensor.unflatten(1, (wide // h, h)).sum(1)
        values.append(Both(message.builder.sum_tiles(a.value, h), over_heads))
        values.append(message.apply("mul", values[-4], rng.choice(values[-5:])))
        values.append(message.apply("mul", values[-3], rng.choice(values[-6:])))
        message.reduce("sum", values[-2])
    for reduction in rng.sample(REDUCED, rng.randint(1, 4)):
        message.reduce(reduction, rng.choice(values[2:]))
    message.reduce("sum", values[-1])


# On the emulator two of them take as long as all others.
@pytest.mark.parametrize("seed", repeats_but({*range(30)} - {19, 27}, range(30)))
def test_random_programs(seed: int, backend: str) -> None:
    rng = random.Random(seed)
    case = rng.choice(all_cases())
    message = Message(case, bool(rng.getrandbits(1)), rng.choice([quantised, ordinary]))
    draw(rng, message)
    assert parse(str(message.program)) == message.program
    message.check(twice=True)


def attention_like(message: Message, width: int = 40) -> None:
    """A gate of both ends, scaled by a narrow product of edge and parameter."""
    k, q, v = (message.operand(place, width) for place in ("row", "gathered", "gathered"))
    gate = message.apply("sigmoid", message.apply("add", k, q))
    scale = message.apply("mul", message.operand("edge", 4), message.operand("parameter", 1))
    for reduction in ("sum", "mean", "max", "min"):
        message.reduce(reduction, message.apply("mul", message.apply("mul", gate, v), scale))


def weighted(message: Message, width: int = 40) -> None:
    """Sums of products with numbers of edges, which a row scales alike or not."""
    x, y, r = (message.operand(place, width) for place in ("gathered", "gathered", "row"))
    wide, narrow = message.operand("edge", 4), message.operand("edge", 2)
    scale = message.operand("row", 2)
    first = message.apply("mul", message.apply("mul", x, wide), scale)
    second = message.apply("mul", narrow, message.apply("mul", scale, y))
    both = message.apply("add", first, second)
    message.reduce("sum", both)
    message.reduce("mean", message.apply("add", both, message.apply("mul", r, wide)))


@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_sums_of_products(case: Case, backend: str) -> None:
    message = Message(case)
    weighted(message)
    message.check(twice=True)


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_graphs(case: Case, transpose: bool, backend: str) -> None:
    message = Message(case, transpose)
    attention_like(message)
    message.check()


@pytest.mark.parametrize("transpose", [False, True], ids=["forward", "transposed"])
@pytest.mark.parametrize("case", all_cases(), ids=str)
def test_variances(case: Case, transpose: bool, backend: str) -> None:
    """Of one edge and of equal values, too, whose standard deviation has no gradient."""
    message = Message(case, transpose)
    x, y = message.operand("gathered", 5), message.operand("row", 5)
    mixed = message.apply("add", x, y)
    for reduction in ("std", "mean", "var"):
        message.reduce(reduction, mixed)
    message.reduce("std", x)
    assert parse(str(message.program)) == message.program
    message.check()


def test_variances_are_computed_of_means() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    x = message.operand("gathered", 3)
    for reduction in ("var", "std"):
        message.reduce(reduction, x)
    moments = without_variances(message.program)
    assert [output.reduction for output in moments.program.outputs] == ["mean", "mean"]
    with pytest.raises(ValueError, match=r"variances must be computed by ops\.edge_program"):
        torch.ops.fastgraph.edge_program(
            list(message.used.values()),
            message.case.edge_index,
            None,
            str(message.program),
            12,
            9,
            False,
        )


@pytest.mark.parametrize("reduction", ["max", "min"])
def test_ties_are_split_as_upstream(reduction: str, backend: str) -> None:
    """Equal messages, a zero extremum, which shares with upstream's initial zeros, and NaN."""
    for case in all_cases():
        message = Message(case)
        x = message.operand("gathered", 3)
        message.reduce(reduction, message.apply("sub", x, message.operand("row", 3)))
        message.check()
    message = Message(Case("nan", random_edges(5, 4, 30), 5, 4))
    x = message.operand("gathered", 3)
    with torch.no_grad():
        message.operands["gathered_0"][2, 1] = torch.nan
        message.operands["gathered_0"][3, 0] = -torch.inf
    x = Both(x.value, message.operands["gathered_0"][message.gathered])
    message.reduce(reduction, x)
    (ours,), theirs = message.run(), message.expected[0]
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    leaf, grad = message.operands["gathered_0"], torch.randn_like(theirs)
    grads = [torch.autograd.grad(y, leaf, grad)[0] for y in (ours, theirs)]
    torch.testing.assert_close(*grads, equal_nan=True)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_for_any_number_of_threads(threads: int, restore_threads: None) -> None:
    message = Message(Case("hub", hub_edges(400, 50_000), 400, 400), values=ordinary)
    attention_like(message)
    weighted(message)
    message.reduce("total", message.apply("tanh", message.operand("gathered", 40)))
    assert_bits_of_threads(message, threads)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_narrower_dtypes(dtype: torch.dtype, backend: str) -> None:
    """Rounded once from values in float32, so nearer to float64 than operands themselves are."""
    message = Message(Case("random", random_edges(30, 20, 300), 30, 20), values=ordinary)
    attention_like(message)
    narrow = {
        name: tensor.detach().to(dtype).requires_grad_() for name, tensor in message.used.items()
    }
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in narrow.items()}
    ours, exact = message.run(**narrow), message.run(**wide)
    rounding = torch.finfo(dtype).eps
    close([o.double() for o in ours], exact, rtol=8 * rounding, atol=8 * rounding)
    factors = [torch.randn_like(o) for o in ours[:2]]  # those without ties
    grads = [
        torch.autograd.grad(out[:2], list(given.values()), [f.to(out[0].dtype) for f in factors])
        for out, given in ((ours, narrow), (exact, wide))
    ]
    # Sums of a few hundred terms that cancel.
    close([g.double() for g in grads[0]], grads[1], rtol=16 * rounding, atol=200 * rounding)


FUNCTIONS: dict[str, tuple[float, float]] = {
    "exp": (-100, 88.5),
    "expm1": (-90, 88),
    "log": (1e-38, 1e38),
    "log1p": (-0.99, 1e6),
    "sigmoid": (-80, 80),
    "tanh": (-12, 12),
    "softplus": (-80, 30),
    "sqrt": (0, 1e30),
    "erf": (-5, 5),
}


@pytest.mark.parametrize("operation", FUNCTIONS)
def test_functions_in_float32(operation: str) -> None:
    low, high = FUNCTIONS[operation]
    special = [0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, 1e-6, -1e-6, 1.0, -1.0, 200.0]
    x = torch.cat(
        [
            torch.linspace(low, high, 4000),
            torch.linspace(-1, 1, 4000) if low < 0 else torch.linspace(0, 2, 4000),
            torch.tensor(special),
        ]
    ).unsqueeze(1)
    x = torch.where(x < low, x.sign(), x) if operation == "log1p" else x
    loops = torch.arange(len(x)).repeat(2, 1)
    builder = Builder()
    program = builder.program(
        ("sum", builder.apply(operation, builder.operand("x", "gathered", 1)))
    )
    (ours,) = ops.edge_program(program, {"x": x}, loops)
    exact = TORCH[operation](x.double())
    torch.testing.assert_close(ours, exact.float(), rtol=6e-7, atol=1e-37, equal_nan=True)


def test_angles_in_float32() -> None:
    special = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-40, -1e-40, 1.0, 3e38])
    random = torch.randn(4000, generator=torch.Generator().manual_seed(0))
    y = torch.cat([special.repeat_interleave(len(special)), random, random * 1e-6]).unsqueeze(1)
    x = torch.cat([special.repeat(len(special)), random.flip(0), random.roll(1)]).unsqueeze(1)
    loops = torch.arange(len(x)).repeat(2, 1)
    builder = Builder()
    operands = [builder.operand(name, "gathered", 1) for name in ("y", "x")]
    program = builder.program(("max", builder.apply("atan2", *operands)))
    (ours,) = ops.edge_program(program, {"y": y, "x": x}, loops)
    exact = torch.atan2(y.double(), x.double()).float()
    torch.testing.assert_close(ours, exact, rtol=3e-7, atol=0, equal_nan=True)
    is_known = ~exact.isnan()
    assert torch.equal(ours.signbit()[is_known], exact.signbit()[is_known])


def test_gradients_that_nobody_wants_are_not_computed() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    attention_like(message)
    out = torch.cat(message.run())
    leaves = message.used
    every, called = gradients_of(out, list(leaves.values()))
    assert called.passes["edge_program"] == 2
    for (name, leaf), whole in zip(leaves.items(), every, strict=True):
        (alone,), called = gradients_of(out, [leaf])
        assert called.passes == {"edge_program": 1}, name
        assert alone is not None and whole is not None
        assert torch.equal(alone, whole), name


def test_batched_gradients() -> None:
    message = Message(Case("random", random_edges(12, 9, 60), 12, 9), values=ordinary)
    attention_like(message)
    out, leaves = message.run()[0], list(message.used.values())
    grads = torch.randn(3, *out.shape, dtype=out.dtype)
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    each = [torch.autograd.grad(out, leaves, grad, retain_graph=True) for grad in grads]
    close(together, [torch.stack(parts) for parts in zip(*each, strict=True)])


TEXT = "x = gathered 6\nw = edge 2\nr = row 1\nt0 = mul w x\nt1 = add t0 r\nsum t1\nmax t1"


def call(**changes: object) -> tuple[Tensor, ...]:
    given: dict[str, object] = {
        "x": torch.randn(5, 2, 3, requires_grad=True),
        "w": torch.randn(20, 2, requires_grad=True),
        "r": torch.randn(5, 1),
        "index": random_edges(5, 5, 20),
        "program": TEXT,
    }
    given |= changes
    tensors = {name: given.pop(name) for name in "xwr"}
    operands = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    return ops.edge_program(given.pop("program"), operands, **given)  # type: ignore[arg-type]


def test_operands_of_any_strides() -> None:
    x, w = torch.randn(3, 2, 5).permute(2, 1, 0), torch.randn(2, 40).t()[::2]
    index, r = random_edges(5, 5, 20), torch.randn(5, 1)
    found = call(x=x, w=w, r=r.expand(5, 1), index=index)
    for ours, theirs in zip(
        found, call(x=x.contiguous(), w=w.contiguous(), r=r, index=index), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.randn(5, 5)}, r"x must be \[nodes, \*channels\] with 6 channels.*\[5, 5\]"),
        ({"w": torch.randn(20)}, r"w must be \[edges, \*channels\] with 2 channels"),
        ({"w": torch.randn(19, 2)}, r"w must have shape \[20, 2\], got \[19, 2\]"),
        ({"w": torch.randn(20, 2).double()}, "w must have the dtype and device of x"),
        ({"x": torch.ones(5, 6, dtype=torch.int64)}, "x must be one of"),
        ({"r": None}, r"operands must be those of the program, \['x', 'w', 'r'\], got"),
        ({"num_out": 4}, r"r must have shape \[4, 1\], got \[5, 1\]"),
        ({"program": "x = gathered 6\nsum y"}, "line 'sum y': 'y' is no value"),
        ({"program": "x = gathered 6\nt0 = cube x\nsum t0"}, "cube is no operation"),
        ({"program": "x = gathered six\nsum x"}, "line 'x = gathered six'"),
    ],
)
def test_wrong_arguments_are_named(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = gathered 0\nsum x", "width of at least 1"),
        ("sum = gathered 1\nsum sum", "must not be a keyword"),
        ("x = gathered 6\ny = row 4\nt0 = add x y\nsum t0", "each divides the largest"),
        ("x = gathered 6\nt0 = add x\nsum t0", "2 arguments, got 1"),
        ("x = gathered 6\nt0 = dot x x 4\nsum t0", "divisor of width 6"),
        ("x = gathered 6\nt0 = spread x 9\nsum t0", "multiple of width 6"),
        ("x = gathered 6\nmedian x", "must be one of"),
        ("x = gathered 6\ny = row 4\nsum x", r"\['y'\] that are not"),
        ("x = gathered 6", "at least one output"),
        ("t0 = constant 1.0\nsum t0", "at least one operand"),
        ("x = gathered 6\nx = row 4\nsum x", "there already"),
        ("x = gathered 6\nsum x x x", "expected `NAME"),
    ],
)
def test_wrong_programs_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_copies_have_all_that_a_program_has() -> None:
    program = parse("x = gathered 6\nt0 = relu x\nsum t0\nflat x")
    copy = pickle.loads(pickle.dumps(program))
    assert copy == program
    assert copy.flat == ("x",)
    assert str(copy) == str(program)
    assert without_variances(program).program.flat == ("x",)
    assert copy != parse("x = gathered 6\nt0 = relu x\nsum t0")


def test_indices_beyond_the_nodes() -> None:
    with pytest.raises(IndexError, match="index 7"):
        call(index=random_edges(5, 5, 20).index_fill(1, torch.tensor([3]), 7))


def test_numbers_of_nodes_are_needed_where_no_operand_has_them() -> None:
    program, index, w = "w = edge 1\nsum w", random_edges(5, 5, 20), torch.randn(20)
    with pytest.raises(ValueError, match="num_in or num_out must be given"):
        ops.edge_program(program, {"w": w}, index)
    (out,) = ops.edge_program(program, {"w": w}, index, num_out=6)
    torch.testing.assert_close(out, torch.zeros(6, 1).index_add(0, index[1], w.unsqueeze(1)))


def test_no_record_no_gradient() -> None:
    operands = [torch.randn(5, 6, requires_grad=True)]
    arguments = (operands, random_edges(5, 5, 20), None, "x = gathered 6\nmax x", 5, 5, False)
    (out,) = torch.ops.fastgraph.edge_program.default(*arguments)
    with pytest.raises(RuntimeError, match="must have max_ties of the same value"):
        out.sum().backward()


def test_opcheck() -> None:
    x, w, r = torch.randn(5, 6, requires_grad=True), torch.randn(20, 2), torch.randn(5, 1)
    arguments = ([x, w, r], random_edges(5, 5, 20), None, TEXT + "\nmax_ties t1", 5, 5, False)
    torch.library.opcheck(torch.ops.fastgraph.edge_program.default, arguments)


def test_no_backend_for_gpus_says_so() -> None:
    REGISTRY.select(None)
    refusal = REGISTRY.refusal("edge_program", "cuda", torch.float32)
    assert refusal is not None and "no backend computes edge_program" in refusal.reason
    assert REGISTRY.refusal("edge_program", "cpu", torch.float32) is None
