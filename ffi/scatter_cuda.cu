// scatter on the GPU: (slots, delta tables..., chunk leaves..., pool leaves...) -> pool leaves, each aliased to its
// operand.

#include "cuda_move.cuh"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Scatter(cudaStream_t stream, ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs operands,
                   ffi::RemainingRets pool, ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves,
                   ffi::Span<const int64_t> turn, int64_t page_size, int64_t num_slots, int64_t rows,
                   int64_t num_chunks) {
  Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks, turn);
  DecodeDeltas(transfer, operands);
  const int64_t first = NumDeltaOperands(transfer);
  const int64_t num_chunk_leaves = operands.size() - first - pool.size();
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>((*pool.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto chunk_leaf = [&](int64_t i) {
    return static_cast<char*>(operands.get<ffi::AnyBuffer>(first + i)->untyped_data());
  };
  return MoveAll<Direction::kScatter>(stream, transfer, slots.typed_data(), slots.element_count(),
                               num_chunks == 0 ? 0 : num_chunk_leaves / num_chunks, pool_leaf, chunk_leaf);
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvScatterCuda, jaxkv::Scatter,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // delta tables, chunk leaves, pool leaves
                                  .RemainingRets()                         // pool leaves, in place
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<xla::ffi::Span<const int64_t>>("turn")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks"),
                              {xla::ffi::Traits::kCmdBufferCompatible});  // kernels alone: a graph may hold them
