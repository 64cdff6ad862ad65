"""Writing LLVM's own instructions from within numba: functions, loops, vectors.

numba leaves it to LLVM whether and how a loop is vectorised. LLVM gives up where it cannot rule out that arrays overlap
(measured on the loops of attention: 2 to 3 billion multiply-adds a second, against 13 to 50 for `tiles`), and otherwise
takes vectors of half the machine's width. So the loops that take most of the time are written as vectors here.
"""

import platform
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic as _numba_intrinsic

_intrinsic: Any = _numba_intrinsic  # for a type checker, its result would want the typing context as an argument
LARGE_REGISTERS = bool(llvmlite.binding.get_host_cpu_features().get("avx512f"))
INDEX = ir.IntType(64)
FLOAT = ir.FloatType()
INT = ir.IntType(32)
BYTE = ir.IntType(8)
LANES = 16
"""Elements of a vector, unless another number is given."""
FLOATS = ir.VectorType(FLOAT, LANES)
WORDS = ir.VectorType(INT, LANES)


class Strided(NamedTuple):
    """Rows in a flat float32 array, `stride` elements apart, of which the first begins at `start`."""

    array: np.ndarray
    start: int
    stride: int


def constant(kind: Any, number: float) -> ir.Constant:
    """A number, or a vector of it."""
    return ir.Constant(kind, [number] * kind.count if isinstance(kind, ir.VectorType) else number)


class Builder(ir.IRBuilder):
    """Writes LLVM's instructions; beside those of the base class, loops and vectors."""

    def offset(self, place: Any, *factors: Any) -> Any:
        """The place so many elements behind `place` as the product of one or two factors, numbers or values."""
        first, *others = (constant(INDEX, factor) if isinstance(factor, int) else factor for factor in factors)
        return self.gep(place, [self.mul(first, others[0]) if others else first])

    def rows_of(self, base: Any, stride: Any, rows: int) -> list[Any]:
        """The places where the first `rows` rows begin, `stride` elements apart."""
        return [self.offset(base, stride, row) for row in range(rows)]

    def loop(self, count: Any, initial: list[Any], body: Callable[[Any, list[Any]], list[Any]]) -> list[Any]:
        """Run `values = body(n, values)` for `n < count`, from `initial` on, and return the last values."""
        before = self.block
        condition, inside, after = (self.append_basic_block(name) for name in ("condition", "inside", "after"))
        self.branch(condition)
        self.position_at_end(condition)
        n = self.phi(INDEX)
        n.add_incoming(constant(INDEX, 0), before)
        values = [self.phi(value.type) for value in initial]
        for value, start in zip(values, initial, strict=True):
            value.add_incoming(start, before)
        self.cbranch(self.icmp_signed("<", n, count), inside, after)
        self.position_at_end(inside)
        updated = body(n, list(values))
        for value, update in zip(values, updated, strict=True):
            value.add_incoming(update, self.block)
        n.add_incoming(self.add(n, constant(INDEX, 1)), self.block)
        self.branch(condition)
        self.position_at_end(after)
        return list(values)

    def each_vector(
        self, count: Any, initial: list[Any], body: Callable[[Any, Any, list[Any]], list[Any]]
    ) -> list[Any]:
        """Run `values = body(start, mask, values)` for the vectors of `count` elements, from `initial` on.

        `mask` is None for whole vectors. The last elements, which fill none, are left out where there are none: an
        exponential of no elements would take as long as one of sixteen.
        """
        lanes = constant(INDEX, LANES)
        vectors, left = self.sdiv(count, lanes), self.srem(count, lanes)
        values = self.loop(vectors, initial, lambda n, values: body(self.mul(n, lanes), None, values))
        mask, some = self.first_lanes(left), self.zext(self.icmp_signed(">", left, constant(INDEX, 0)), INDEX)
        return self.loop(some, values, lambda _, values: body(self.mul(vectors, lanes), mask, values))

    def reduce(self, vector: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All elements of a vector combined into one: its left half with its right half, then the halves of that."""
        lanes = vector.type.count
        while lanes > 1:
            lanes //= 2
            halves = [
                self.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(INT, lanes), [*range(at, at + lanes)]))
                for at in (0, lanes)
            ]
            vector = combine(*halves)
        return self.extract_element(vector, constant(INT, 0))

    def read(self, place: Any, kind: Any = FLOATS, mask: Any = None, otherwise: float = 0.0) -> Any:
        """The vector that begins at `place`, of whatever alignment.

        With a `mask` no other lanes of memory than its own are read, and others are `otherwise`.
        """
        if mask is None:
            return self.load(self.bitcast(place, kind.as_pointer()), align=4)
        name, rest = f"llvm.masked.load.v{kind.count}f32.p0", constant(kind, otherwise)
        return call_llvm(self, name, kind, place, constant(INT, 4), mask, rest)

    def write(self, value: Any, place: Any, mask: Any = None) -> None:
        """Store a vector where `place` begins; with a `mask` no other lanes of memory than its own are written."""
        if mask is None:
            self.store(value, self.bitcast(place, value.type.as_pointer()), align=4)
            return
        name = f"llvm.masked.store.v{mask.type.count}f32.p0"
        call_llvm(self, name, ir.VoidType(), value, place, constant(INT, 4), mask)

    def to_all_lanes(self, value: Any, lanes: int = LANES) -> Any:
        """A vector of `lanes` times a number."""
        undefined = ir.Constant(ir.VectorType(value.type, lanes), ir.Undefined)
        first = self.insert_element(undefined, value, constant(INT, 0))
        return self.shuffle_vector(first, undefined, constant(ir.VectorType(INT, lanes), 0))

    def joined(self, left: Any, right: Any) -> Any:
        """The elements of one vector, then those of another of as many."""
        lanes = 2 * left.type.count
        return self.shuffle_vector(left, right, ir.Constant(ir.VectorType(INT, lanes), [*range(lanes)]))

    def fma(self, a: Any, b: Any, c: Any) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """`a * b + c` of vectors, rounded once."""
        return call_llvm(self, f"llvm.fma.v{a.type.count}f32", a.type, a, b, c)

    def first_lanes(self, count: Any) -> Any:
        """The mask of the first `count` lanes."""
        return self.icmp_signed("<", ir.Constant(WORDS, [*range(LANES)]), self.to_all_lanes(self.trunc(count, INT)))

    def least(self, one: Any, other: Any) -> Any:
        """The smaller of two integers."""
        return self.select(self.icmp_signed("<", one, other), one, other)

    def prefetch(self, place: Any) -> None:
        """Prefetch the cache line at `place`."""
        flags = (constant(INT, flag) for flag in (0, 3, 1))
        call_llvm(self, "llvm.prefetch.p0i8", ir.VoidType(), self.bitcast(place, BYTE.as_pointer()), *flags)

    def call_function(self, name: str, args: Sequence[Any], write: Callable[..., Any], returned: Any = None) -> Any:
        """Call the function `name` of the module, which `write(builder, arguments)` writes unless it is there already.

        It is never inlined, or each of its many uses would be compiled anew.
        """
        kind = ir.FunctionType(returned or ir.VoidType(), [argument.type for argument in args])
        function = cgutils.get_or_insert_function(self.module, kind, name)
        if function.is_declaration:
            function.linkage = "linkonce_odr"
            function.attributes.add("noinline")
            body = Builder(function.append_basic_block())
            if (value := write(body, function.args)) is None:
                body.ret_void()
            else:
                body.ret(value)
        return self.call(function, args)


def call_llvm(builder: ir.IRBuilder, name: str, returned: Any, *args: Any) -> Any:
    """Call a function that LLVM or the system has: an intrinsic such as `llvm.prefetch.p0i8`."""
    kind = ir.FunctionType(returned, [argument.type for argument in args])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), args)


def instructions(returned: Any = types.void) -> Callable[[Callable[..., Any]], Any]:
    """Makes a function for compiled code of one that writes it, `write(builder, arguments)`, where it is called.

    Its arguments are float32 numbers, integers, `Strided`s and the like, and arrays, each followed by the index to
    begin at: array and index become one pointer.
    """

    def decorate(write: Callable[..., Any]) -> Any:
        def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            own, passed, values = Builder(builder.block), [], iter(_flat(builder, signature.args[0], args[0]))
            for kind, value in values:
                if isinstance(kind, types.Array):
                    data = context.make_array(kind)(context, builder, value).data
                    passed.append(builder.gep(data, [next(values)[1]]))
                else:
                    passed.append(value)
            own.position_at_end(builder.block)
            result = write(own, passed)
            builder.position_at_end(own.block)
            return context.get_dummy_value() if returned == types.void else result

        def define(_: Any, *given: Any) -> Any:
            return returned(types.BaseTuple.from_types(tuple(map(_as_passed, given)))), generate

        return _intrinsic(define)

    return decorate


def _as_passed(kind: Any) -> Any:
    if isinstance(kind, types.Array | types.BaseTuple):
        return kind
    return types.float32 if isinstance(kind, types.Float) else types.intp


def _flat(builder: Any, kind: Any, given: Any) -> list[tuple[Any, Any]]:
    """Types and values of what a tuple has, and of what tuples in it have."""
    found: list[tuple[Any, Any]] = []
    for one, value in zip(kind.types, cgutils.unpack_tuple(builder, given), strict=True):
        found += _flat(builder, one, value) if isinstance(one, types.BaseTuple) else [(one, value)]
    return found


def vector_function(name: str, write: Callable[..., Any], returned: Any = types.void) -> Any:
    """A function for compiled code as `instructions` makes it, of its own in each module that calls it.

    The result is a float32 if `returned` says so, else there is none.
    """
    kind = None if returned == types.void else FLOAT
    return instructions(returned)(lambda builder, args: builder.call_function(name, args, write, kind))


IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
_FLUSH = 0x8040
"""Of MXCSR, x86's control register of vectors: results, and operands, below the least normal number are zeros."""


def _exchange_control(builder: Builder, change: Callable[[Any], Any]) -> Any:
    """Replace this thread's MXCSR by `change` of it, and return what it was."""
    place = builder.alloca(INT)
    address = builder.bitcast(place, BYTE.as_pointer())
    call_llvm(builder, "llvm.x86.sse.stmxcsr", ir.VoidType(), address)
    given = builder.load(place)
    builder.store(change(given), place)
    call_llvm(builder, "llvm.x86.sse.ldmxcsr", ir.VoidType(), address)
    return given


@instructions(types.int32)
def flush_denormals(builder: Builder, _: list[Any]) -> Any:
    """Treat numbers below the least normal float32 as zeros in this thread; returns the setting before.

    A sum that holds one takes a hundred times as long: where attention is sharp, most weights are about that small.
    Where this is no x86 nothing changes.
    """
    if not IS_X86:
        return constant(INT, 0)
    return _exchange_control(builder, lambda given: builder.or_(given, constant(INT, _FLUSH)))


@instructions()
def restore_denormals(builder: Builder, args: list[Any]) -> None:
    """Restore this thread's setting that `flush_denormals` returned."""
    if IS_X86:
        _exchange_control(builder, lambda _: builder.trunc(args[0], INT))
