"""Writing LLVM's own instructions from within numba: functions, loops, vectors.

numba leaves it to LLVM whether and how a loop is vectorised. LLVM gives up where it cannot rule out that arrays overlap
(measured on the loops of attention: 2 to 3 billion multiply-adds a second, against 13 to 50 for `tiles`), and otherwise
takes vectors of half the machine's width. So the loops that take most of the time are written as vectors here.
"""

import platform
from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as _numba_intrinsic

intrinsic: Any = _numba_intrinsic  # for a type checker, its result would want the typing context as an argument
INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
INT = ir.IntType(32)


def vector_function(name: str, write: Callable[..., Any], returned: Any = types.void) -> Any:
    """A function for compiled code, in LLVM's own instructions, which `write(builder, arguments)` writes.

    Its arguments are float32 numbers, integers, and arrays, each followed by the index to begin at: array and index
    become one pointer. The result is a float32 if `returned` says so, else there is none. It is a function of its own
    in each module that calls it, never inlined, or each of its many uses would be compiled anew.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        (kinds,), (given,) = signature.args, args
        passed, values = [], iter(zip(kinds, cgutils.unpack_tuple(builder, given), strict=True))
        for kind, value in values:
            if isinstance(kind, types.Array):
                data = context.make_array(kind)(context, builder, value).data
                passed.append(builder.gep(data, [next(values)[1]]))
            else:
                passed.append(value)
        result = call_function(builder, name, ir.VoidType() if returned == types.void else FLOAT, passed, write)
        return context.get_dummy_value() if returned == types.void else result

    def define(_: Any, *given: Any) -> Any:
        numbers = (types.float32 if isinstance(kind, types.Float) else types.intp for kind in given)
        kinds = [kind if isinstance(kind, types.Array) else number for kind, number in zip(given, numbers, strict=True)]
        return returned(types.BaseTuple.from_types(kinds)), generate

    return intrinsic(define)


def call_function(builder: ir.IRBuilder, name: str, returned: Any, args: list[Any], write: Callable[..., Any]) -> Any:
    """Call the function `name` of the module, which `write(builder, arguments)` writes unless it is there already."""
    kind = ir.FunctionType(returned, [argument.type for argument in args])
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        body = ir.IRBuilder(function.append_basic_block())
        if (value := write(body, function.args)) is None:
            body.ret_void()
        else:
            body.ret(value)
    return builder.call(function, args)


def loop(
    builder: ir.IRBuilder, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Run `values = body(n, values)` for `n < count`, from `initial` on, and return the last values."""
    before = builder.block
    condition, inside, after = (builder.append_basic_block(name) for name in ("condition", "inside", "after"))
    builder.branch(condition)
    builder.position_at_end(condition)
    n = builder.phi(INDEX)
    n.add_incoming(ir.Constant(INDEX, 0), before)
    values = [builder.phi(value.type) for value in initial]
    for value, start in zip(values, initial, strict=True):
        value.add_incoming(start, before)
    builder.cbranch(builder.icmp_signed("<", n, count), inside, after)
    builder.position_at_end(inside)
    updated = body(n, list(values))
    for value, update in zip(values, updated, strict=True):
        value.add_incoming(update, builder.block)
    n.add_incoming(builder.add(n, ir.Constant(INDEX, 1)), builder.block)
    builder.branch(condition)
    builder.position_at_end(after)
    return list(values)


def reduce(builder: ir.IRBuilder, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
    """All elements of a vector combined into one: its left half with its right half, then the halves of the result."""
    lanes = vector.type.count
    while lanes > 1:
        lanes //= 2
        halves = [
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT, lanes), [*range(at, at + lanes)]))
            for at in (0, lanes)
        ]
        vector = combine(*halves)
    return builder.extract_element(vector, ir.Constant(INT, 0))


def load(builder: ir.IRBuilder, place: Any, vector: ir.VectorType) -> Any:
    """The vector that begins at `place`, of whatever alignment."""
    return builder.load(builder.bitcast(place, vector.as_pointer()), align=4)


def store(builder: ir.IRBuilder, values: list[Any], places: list[Any]) -> None:
    """Store each vector where its place begins."""
    for value, place in zip(values, places, strict=True):
        builder.store(value, builder.bitcast(place, value.type.as_pointer()), align=4)


def call_llvm(builder: ir.IRBuilder, name: str, returned: Any, *args: Any) -> Any:
    """Call a function that LLVM or the system has: an intrinsic such as `llvm.fma.v16f32`."""
    kind = ir.FunctionType(returned, [argument.type for argument in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def gep(builder: ir.IRBuilder, place: Any, offset: Any) -> Any:
    """The place `offset` elements, a number or a value, behind `place`."""
    return builder.gep(place, [offset if not isinstance(offset, int) else ir.Constant(INDEX, offset)])


def to_all_lanes(builder: ir.IRBuilder, value: Any, lanes: int) -> Any:
    """A vector of `lanes` times a number."""
    undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(INT, 0))
    return builder.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(INT, lanes), [0] * lanes))


def fma(builder: ir.IRBuilder, x: Any, y: Any, z: Any) -> Any:
    """`x * y + z` of vectors, rounded once."""
    return call_llvm(builder, f"llvm.fma.v{x.type.count}f32", x.type, x, y, z)


def first_lanes(builder: ir.IRBuilder, count: Any, lanes: int) -> Any:
    """The mask of the first `count` of `lanes` lanes."""
    counts = to_all_lanes(builder, builder.trunc(count, INT), lanes)
    return builder.icmp_signed("<", ir.Constant(counts.type, list(range(lanes))), counts)


def masked_load(builder: ir.IRBuilder, place: Any, mask: Any, otherwise: Any) -> Any:
    """Load the lanes of `mask` from `place` on, and take `otherwise` for the rest; no other memory is read."""
    name = f"llvm.masked.load.v{mask.type.count}f32.p0"
    return call_llvm(builder, name, otherwise.type, place, ir.Constant(INT, 4), mask, otherwise)


def masked_store(builder: ir.IRBuilder, value: Any, place: Any, mask: Any) -> None:
    """Store the lanes of `mask` from `place` on; no other memory is written."""
    name = f"llvm.masked.store.v{mask.type.count}f32.p0"
    call_llvm(builder, name, ir.VoidType(), value, place, ir.Constant(INT, 4), mask)


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_FLUSH = 0x8040
"""Of MXCSR, x86's control register of vectors: results, and operands, below the least normal number are zeros."""


def _exchange_control(builder: Any, change: Callable[[Any], Any]) -> Any:
    """Replace this thread's MXCSR by `change` of it, and return what it was."""
    place = builder.alloca(INT)
    address = builder.bitcast(place, ir.IntType(8).as_pointer())
    call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), address)
    given = builder.load(place)
    builder.store(change(given), place)
    call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), address)
    return given


@intrinsic
def flush_denormals(_: Any) -> Any:
    """Treat numbers below the least normal float32 as zeros in this thread; returns the setting before.

    A sum that holds one takes a hundred times as long: where attention is sharp, most weights are about that small.
    Where this is no x86 nothing changes.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if not IS_X86:
            return ir.Constant(INT, 0)
        return _exchange_control(builder, lambda given: builder.or_(given, ir.Constant(INT, _FLUSH)))

    return types.int32(), generate


@intrinsic
def restore_denormals(_: Any, given: Any) -> Any:
    """Restore this thread's setting that `flush_denormals` returned."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if IS_X86:
            _exchange_control(builder, lambda _: args[0])
        return context.get_dummy_value()

    return types.void(types.int32), generate
