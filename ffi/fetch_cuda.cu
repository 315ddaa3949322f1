// fetch on the GPU: (slots, delta tables..., host leaves..., pool leaves...) -> pool leaves, each aliased to its
// operand. A scatter from pinned memory: by the copy engine through `staging` device buffers, or straight by the kernel
// where that is 0. The host leaves of the first `arrived` chunks are on the device, and are the buffers; they are
// written though they are operands, whose contents no one has a use for afterwards.

#include "cuda_engine.cuh"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Fetch(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::Buffer<ffi::S32> slots,
                 ffi::RemainingArgs operands, ffi::RemainingRets pool, ffi::Span<const int64_t> planes,
                 ffi::Span<const int64_t> moves, ffi::Span<const int64_t> turn, int64_t page_size,
                 int64_t num_slots, int64_t rows,
                 int64_t num_chunks, int64_t staging, int64_t arrived) {
  Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks, turn);
  DecodeDeltas(transfer, operands);
  const int64_t first = NumDeltaOperands(transfer);
  const int64_t num_host = operands.size() - first - pool.size();
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>((*pool.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto host_leaf = [&](int64_t i) {
    return static_cast<char*>(operands.get<ffi::AnyBuffer>(first + i)->untyped_data());
  };
  auto leaf_bytes = [&](int64_t i) {
    return static_cast<int64_t>(operands.get<ffi::AnyBuffer>(first + i)->size_bytes());
  };
  const int64_t per_chunk = num_chunks == 0 ? 0 : num_host / num_chunks;
  if (staging == 0 || arrived >= num_chunks) {
    return MoveAll<Direction::kScatter>(stream, transfer, slots.typed_data(), slots.element_count(), per_chunk,
                                        pool_leaf, host_leaf);
  }
  return MoveThroughStaging(Pipeline<Direction::kScatter>(stream, transfer, slots.typed_data(), per_chunk, staging,
                                                          pool_leaf, host_leaf, leaf_bytes, arrived),
                            scratch);
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvFetchCuda, jaxkv::Fetch,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::ScratchAllocator>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // delta tables, host leaves, pool leaves
                                  .RemainingRets()                         // pool leaves, in place
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<xla::ffi::Span<const int64_t>>("turn")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks")
                                  .Attr<int64_t>("staging")
                                  .Attr<int64_t>("arrived"));
