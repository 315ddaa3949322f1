// jaxkv._native: hands the handlers' addresses to Python, which registers them with JAX
// (jaxkv/ops/native.py). Nothing is registered from here: Python first compares versions.
#include <nanobind/nanobind.h>

#include "handlers.h"
#include "xla/ffi/api/c_api.h"

namespace nb = nanobind;

namespace {

nb::capsule Target(XLA_FFI_Handler* handler) {
  // Unnamed, as those that jax.ffi.pycapsule makes.
  return nb::capsule(reinterpret_cast<void*>(handler));
}

// {XLA platform: {target name: handler}}; a platform that was not built is absent.
nb::dict Registrations() {
  nb::dict platforms;
  nb::dict cpu;
#define JAXKV_CPU_TARGET(stem, Stem) cpu["jaxkv_" #stem] = Target(Jaxkv##Stem##Cpu);
  JAXKV_FOR_EACH_OP(JAXKV_CPU_TARGET)
  platforms["cpu"] = cpu;
#ifdef JAXKV_CUDA
  nb::dict cuda;
#define JAXKV_CUDA_TARGET(stem, Stem) cuda["jaxkv_" #stem] = Target(Jaxkv##Stem##Cuda);
  JAXKV_FOR_EACH_CUDA_OP(JAXKV_CUDA_TARGET)
  platforms["CUDA"] = cuda;
#endif
  return platforms;
}

nb::dict BuildInfo() {
  nb::dict info;
  info["jaxlib_headers"] = JAXKV_JAXLIB_VERSION;
  info["compiler"] = JAXKV_COMPILER;
#ifdef JAXKV_CUDA
  info["cuda"] = JAXKV_CUDA;
  info["cuda_architectures"] = JAXKV_CUDA_ARCHITECTURES;
#else
  info["cuda"] = nb::none();
  info["cuda_architectures"] = nb::none();
#endif
  info["cuda_status"] = JAXKV_CUDA_STATUS;
  return info;
}

}  // namespace

NB_MODULE(_native, m) {
  m.doc() = "Compiled handlers of jaxkv's ops, for jax.ffi.";
  m.def("registrations", &Registrations,
        "Handlers to register: {XLA platform: {target name: capsule}}.");
  m.def(
      "ffi_api_version", [] { return nb::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR); },
      "(major, minor) of the XLA FFI headers this was compiled with.");
  m.def("build_info", &BuildInfo, "What was compiled, with what, and why not more.");
}
