// fetch on the CPU: (slots, delta tables..., host leaves..., pool leaves...) -> pool leaves, each aliased to its
// operand. A scatter from pinned memory, which on a CPU is memory like any other: one copy, and no use for `staging` or
// `arrived`.

#include "cpu_move.h"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Fetch(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> slots,
                 ffi::RemainingArgs operands, ffi::RemainingRets pool, ffi::Span<const int64_t> planes,
                 ffi::Span<const int64_t> moves, ffi::Span<const int64_t> turn, int64_t page_size,
                 int64_t num_slots, int64_t rows,
                 int64_t num_chunks, int64_t, int64_t) {
  Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks, turn);
  DecodeDeltas(transfer, operands);
  const int64_t first = NumDeltaOperands(transfer);
  const int64_t num_host = operands.size() - first - pool.size();
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>((*pool.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto host_leaf = [&](int64_t i) {
    return static_cast<char*>(operands.get<ffi::AnyBuffer>(first + i)->untyped_data());
  };
  const int64_t per_chunk = num_chunks == 0 ? 0 : num_host / num_chunks;
  MoveAll<Direction::kScatter>(transfer, slots.typed_data(), slots.element_count(), per_chunk, pool_leaf, host_leaf,
                               threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvFetchCpu, jaxkv::Fetch,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
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
