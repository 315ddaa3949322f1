// gather on the CPU: (slots, pool leaves...) -> chunk leaves.

#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#endif

#include "cpu_move.h"
#include "handlers.h"

namespace jaxkv {
namespace {

// Asks for large pages for a large result, as NumPy does for its own arrays. Mostly it is in memory that nobody has
// touched yet, and with pages of 4 KiB the faults took as long as the copy. It is a hint: where the memory was used
// before, or the system has pages of another size, nothing comes of it.
void PreferHugePages(void* memory, size_t bytes) {
#ifdef __linux__
  constexpr size_t kWorth = size_t{4} << 20, kPage = 4096;
  if (bytes < kWorth) return;
  const size_t skipped = (kPage - reinterpret_cast<uintptr_t>(memory) % kPage) % kPage;
  madvise(static_cast<char*>(memory) + skipped, bytes - skipped, MADV_HUGEPAGE);
#endif
}

ffi::Error Gather(ffi::ThreadPool threads, ffi::Buffer<ffi::S32> slots, ffi::RemainingArgs pool,
                  ffi::RemainingRets chunks, ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves,
                  int64_t page_size, int64_t num_slots, int64_t rows, int64_t num_chunks) {
  const Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks);
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>(pool.get<ffi::AnyBuffer>(i)->untyped_data()); };
  auto chunk_leaf = [&](int64_t i) { return static_cast<char*>((*chunks.get<ffi::AnyBuffer>(i))->untyped_data()); };
  for (int64_t i = 0; i < static_cast<int64_t>(chunks.size()); ++i) {
    PreferHugePages(chunk_leaf(i), (*chunks.get<ffi::AnyBuffer>(i))->size_bytes());
  }
  MoveAll<Direction::kGather>(transfer, slots.typed_data(), slots.element_count(),
                              num_chunks == 0 ? 0 : chunks.size() / num_chunks, pool_leaf, chunk_leaf, threads);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvGatherCpu, jaxkv::Gather,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::ThreadPool>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // pool leaves
                                  .RemainingRets()                         // chunk leaves
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks"));
