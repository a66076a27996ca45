"""Calls of compiled functions by address. numba copies a function into each caller and optimizes the copy again, but a
function that is called by address is compiled once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic


def address_of(function: Any, kinds: Sequence[types.Type]) -> int:
    """Compile a function that returns nothing, and return the address of its machine code, valid as long as the
    function exists. kinds: types of the arguments, the very ones that `call_at` is compiled with."""
    function.compile(tuple(kinds))
    made = function.overloads[tuple(kinds)]
    return int(made.library.get_pointer_to_function(made.fndesc.llvm_func_name))


@intrinsic  # type: ignore[untyped-decorator]
def call_at(typing_context: Any, address: Any, args: Any) -> Any:
    """Call the function at an address with a tuple of arguments. An exception that it raises is raised here, too."""
    kinds = tuple(args.types)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        convention = context.call_conv
        function = builder.inttoptr(values[0], convention.get_function_type(types.none, kinds).as_pointer())
        unpacked = cgutils.unpack_tuple(builder, values[1], len(kinds))
        status, _ = convention.call_function(builder, function, types.none, kinds, unpacked)
        with cgutils.if_unlikely(builder, status.is_error):
            convention.return_status_propagate(builder, status)
        return context.get_dummy_value()

    return types.none(types.intp, args), generate


def call_once(builder: Any, name: str, body: Callable[..., None], *args: Any) -> None:
    """Generate a call of a function named `name`, whose code `body` generates. The function is not inlined, so that it
    is compiled only once."""
    kind = ir.FunctionType(ir.VoidType(), [each.type for each in args])
    function = cgutils.get_or_insert_function(builder.module, kind, f"specdec_{name}")
    if function.is_declaration:
        function.linkage = "linkonce_odr"
        function.attributes.add("noinline")
        own_builder = ir.IRBuilder(function.append_basic_block())
        body(own_builder, *function.args)
        own_builder.ret_void()
    builder.call(function, args)
