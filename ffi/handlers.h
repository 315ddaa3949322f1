// The FFI handlers that this extension exports, one line an op.
//
// An op `<stem>` is two files: `<stem>_cpu.cc` defines the handler `Jaxkv<Stem>Cpu`, `<stem>_cuda.cu`
// defines `Jaxkv<Stem>Cuda`. JAX knows both as "jaxkv_<stem>", one for each platform. To add an op,
// add its stem here and in CMakeLists.txt.
#ifndef JAXKV_HANDLERS_H_
#define JAXKV_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

#define JAXKV_FOR_EACH_OP(X) \
  X(gather, Gather)          \
  X(scatter, Scatter)        \
  X(place, Place)            \
  X(fetch, Fetch)

#define JAXKV_DECLARE(stem, Stem)                     \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(Jaxkv##Stem##Cpu); \
  XLA_FFI_DECLARE_HANDLER_SYMBOL(Jaxkv##Stem##Cuda);
JAXKV_FOR_EACH_OP(JAXKV_DECLARE)
#undef JAXKV_DECLARE

#endif  // JAXKV_HANDLERS_H_
