// The FFI handlers that this extension exports, one line an op.
//
// An op `<stem>` is two files: `<stem>_cpu.cc` defines the handler `Jaxkv<Stem>Cpu`, `<stem>_cuda.cu`
// defines `Jaxkv<Stem>Cuda`. JAX knows both as "jaxkv_<stem>", one for each platform. To add an op,
// add its stem here and in CMakeLists.txt. What keeps a copy engine busy both ways is for GPUs
// alone: exchange and settle, both in exchange_cuda.cu.
#ifndef JAXKV_HANDLERS_H_
#define JAXKV_HANDLERS_H_

#include "xla/ffi/api/ffi.h"

#define JAXKV_FOR_EACH_OP(X) \
  X(gather, Gather)          \
  X(scatter, Scatter)        \
  X(place, Place)            \
  X(fetch, Fetch)

#define JAXKV_FOR_EACH_CUDA_OP(X) \
  JAXKV_FOR_EACH_OP(X)            \
  X(exchange, Exchange)           \
  X(settle, Settle)

#define JAXKV_DECLARE_CPU(stem, Stem) XLA_FFI_DECLARE_HANDLER_SYMBOL(Jaxkv##Stem##Cpu);
#define JAXKV_DECLARE_CUDA(stem, Stem) XLA_FFI_DECLARE_HANDLER_SYMBOL(Jaxkv##Stem##Cuda);
JAXKV_FOR_EACH_OP(JAXKV_DECLARE_CPU)
JAXKV_FOR_EACH_CUDA_OP(JAXKV_DECLARE_CUDA)
#undef JAXKV_DECLARE_CPU
#undef JAXKV_DECLARE_CUDA

#endif  // JAXKV_HANDLERS_H_
