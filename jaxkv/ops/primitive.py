"""What gather and scatter share as JAX primitives.

An op is one primitive with one lowering a platform: FFI where a handler was built (cpu, cuda), plain XLA
everywhere else. `custom_partitioning` stands around it (the compiler cannot see into a custom call, and would
gather a sharded pool first), and a guard before that refuses what neither has a rule for: vmap and gradients.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType

from . import checks, native

IMPLEMENTATIONS = (None, "xla", "ffi")
FFI_PLATFORMS = ("cpu", "cuda")


def check_implementation(implementation: str | None) -> None:
    """Checks the name of an implementation.

    Raises:
        ValueError: it is unknown.
        RuntimeError: it is "ffi", and no handlers were built for any platform; whether there are some for the
            platform a program runs on is known, and checked, when that program is lowered.
    """
    checks.check_choice("implementation", implementation, IMPLEMENTATIONS)
    if implementation == "ffi" and not any(map(native.available, FFI_PLATFORMS)):
        raise RuntimeError(_ffi_missing("cuda" if jax.default_backend() == "gpu" else jax.default_backend()))


def define(
    name: str,
    *,
    abstract: Callable[..., list[Any]],
    xla: Callable[..., Sequence[jax.Array]],
    ffi: Callable[..., Any],
) -> Primitive:
    """Defines an op.

    Args:
        name: of the op; its FFI target is `jaxkv_<name>`.
        abstract: types of the results, from types of the operands and the parameters.
        xla: the op in plain jax.numpy.
        ffi: the lowering rule of the custom call.
    """
    primitive = Primitive(f"jaxkv_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    primitive.def_impl(functools.partial(_run, primitive))
    lower_xla = mlir.lower_fun(xla, multiple_results=True)

    def lowering(platform: str | None) -> Callable[..., Any]:
        def lower(ctx: Any, *operands: Any, implementation: str | None, **params: Any) -> Any:
            built = platform is not None and native.available(platform)
            if implementation == "ffi" and not built:
                raise RuntimeError(_ffi_missing(platform or ", ".join(ctx.module_context.platforms)))
            if implementation == "xla" or not built:
                return _lower_local(lower_xla, ctx, *operands, **params)
            return ffi(ctx, *operands, **params)

        return lower

    mlir.register_lowering(primitive, lowering(None))
    for platform in FFI_PLATFORMS:
        mlir.register_lowering(primitive, lowering(platform), platform=platform)
    return primitive


def _run(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Runs an op where nothing compiles around it: as other values are transformed, or where jit is disabled."""
    if params["implementation"] != "xla" and any(len(operand.devices()) > 1 for operand in operands):
        # Nothing splits the custom call here, and where the compiler brings a sharded operand together for it, payloads
        # travel as floats. The XLA form moves integers.
        if params["implementation"] == "ffi":
            raise RuntimeError(
                "implementation: 'ffi' is not possible on several devices where nothing is compiled (jit is disabled, "
                "or the op runs by itself); pass None or 'xla'"
            )
        params = {**params, "implementation": "xla"}
    with jax.disable_jit(False):
        return _program(primitive, **params)(*operands)


@functools.lru_cache(maxsize=256)
def _program(primitive: Primitive, **params: Any) -> Any:
    return jax.jit(functools.partial(primitive.bind, **params))


def _lower_local(lower: Callable[..., Any], ctx: Any, *operands: Any, **params: Any) -> Any:
    """Lowers what runs on one device's own part, which custom_partitioning has taken out of the mesh already.

    On an explicit mesh JAX would still put a sharding on every value inside, as custom calls that nobody resolves
    any more (seen with jax 0.12).
    """
    meshes = [jax.sharding.get_abstract_mesh(), *(aval.sharding.mesh for aval in ctx.avals_in)]
    if not any(AxisType.Explicit in mesh.axis_types for mesh in meshes):
        return lower(ctx, *operands, **params)
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        avals = [aval.update(sharding=None) for aval in ctx.avals_in]
        return lower(ctx.replace(avals_in=avals), *operands, **params)


def guarded(name: str, instead: str, operands: Sequence[jax.Array]) -> Sequence[jax.Array]:
    """The operands, unchanged, past a point that vmap and differentiation do not pass.

    Args:
        name: of the op, for the message.
        instead: what to do instead of vmap.
        operands: of the op.
    """
    return _guard_p.bind(*operands, name=name, instead=instead)


def result_types(operands: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """The results vary over every manual mesh axis that an operand varies over (inside `shard_map`)."""
    varying = frozenset().union(*(getattr(aval, "vma", None) or frozenset() for aval in operands))
    return [aval.update(vma=varying) for aval in results] if varying else list(results)


def _ffi_missing(platform: str) -> str:
    why = native.why_not(platform) if platform in FFI_PLATFORMS else "handlers exist for cpu and cuda"
    return f"implementation: 'ffi' is not available on platform {platform!r}: {why}"


def _refuse_vmap(*_: Any, name: str, instead: str) -> Any:
    raise NotImplementedError(f"jaxkv {name} cannot be vmapped: {instead}")


def _refuse_gradient(*_: Any, name: str, instead: str) -> Any:
    del instead
    raise NotImplementedError(
        f"jaxkv {name} cannot be differentiated, since it moves cached bytes: wrap its floating-point arguments in "
        f"jax.lax.stop_gradient"
    )


_guard_p = Primitive("jaxkv_guard")
_guard_p.multiple_results = True
_guard_p.def_impl(lambda *operands, name, instead: operands)
_guard_p.def_abstract_eval(lambda *avals, name, instead: list(avals))
mlir.register_lowering(_guard_p, lambda ctx, *operands, name, instead: operands)
batching.primitive_batchers[_guard_p] = _refuse_vmap
ad.primitive_jvps[_guard_p] = _refuse_gradient
