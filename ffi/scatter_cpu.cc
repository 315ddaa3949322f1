// scatter on the CPU: (slots, chunk leaves..., pool leaves...) -> pool leaves, each aliased to its operand.

#include "cpu_move.h"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Scatter(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs chunks_and_pool,
                   ffi::RemainingRets pool, ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves,
                   int64_t page_size, int64_t num_slots, int64_t rows, int64_t num_chunks) {
  const Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks);
  const int64_t num_chunk_leaves = chunks_and_pool.size() - pool.size();
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>((*pool.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto chunk_leaf = [&](int64_t i) {
    return static_cast<char*>(chunks_and_pool.get<ffi::AnyBuffer>(i)->untyped_data());
  };
  MoveAll<Direction::kScatter>(transfer, slots.typed_data(), slots.element_count(),
                               num_chunks == 0 ? 0 : num_chunk_leaves / num_chunks, pool_leaf, chunk_leaf, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvScatterCpu, jaxkv::Scatter,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // chunk leaves, then pool leaves
                                  .RemainingRets()                         // pool leaves, in place
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks"));
