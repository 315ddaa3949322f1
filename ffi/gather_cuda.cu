// gather on the GPU: (slots, pool leaves...) -> chunk leaves.

#include "cuda_move.cuh"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Gather(cudaStream_t stream, ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs pool,
                  ffi::RemainingRets chunks, ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves,
                  int64_t page_size, int64_t num_slots, int64_t rows, int64_t num_chunks) {
  const Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks);
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>(pool.get<ffi::AnyBuffer>(i)->untyped_data()); };
  auto chunk_leaf = [&](int64_t i) { return static_cast<char*>((*chunks.get<ffi::AnyBuffer>(i))->untyped_data()); };
  return MoveAll<Direction::kGather>(stream, transfer, slots.typed_data(), slots.element_count(),
                              num_chunks == 0 ? 0 : chunks.size() / num_chunks, pool_leaf, chunk_leaf);
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvGatherCuda, jaxkv::Gather,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // pool leaves
                                  .RemainingRets()                         // chunk leaves
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks"),
                              {xla::ffi::Traits::kCmdBufferCompatible});  // kernels alone: a graph may hold them
