// place on the GPU: (slots, host leaves..., pool leaves...) -> host leaves, each aliased to its operand. A gather
// into pinned memory: by the copy engine through `staging` device buffers, or straight by the kernel where that is 0.

#include "cuda_engine.cuh"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Place(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::Buffer<ffi::S32> slots,
                 ffi::RemainingArgs host_and_pool, ffi::RemainingRets host, ffi::Span<const int64_t> planes,
                 ffi::Span<const int64_t> moves, int64_t page_size, int64_t num_slots, int64_t rows,
                 int64_t num_chunks, int64_t staging) {
  const Transfer transfer = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks);
  const int64_t num_host = host.size();
  auto pool_leaf = [&](int64_t i) {
    return static_cast<char*>(host_and_pool.get<ffi::AnyBuffer>(num_host + i)->untyped_data());
  };
  auto host_leaf = [&](int64_t i) { return static_cast<char*>((*host.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto leaf_bytes = [&](int64_t i) { return static_cast<int64_t>((*host.get<ffi::AnyBuffer>(i))->size_bytes()); };
  const int64_t per_chunk = num_chunks == 0 ? 0 : num_host / num_chunks;
  if (staging == 0) {
    return MoveAll<Direction::kGather>(stream, transfer, slots.typed_data(), slots.element_count(), per_chunk,
                                       pool_leaf, host_leaf);
  }
  return MoveThroughStaging(Pipeline<Direction::kGather>(stream, transfer, slots.typed_data(), per_chunk, staging,
                                                         pool_leaf, host_leaf, leaf_bytes),
                            scratch);
}

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvPlaceCuda, jaxkv::Place,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::ScratchAllocator>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots
                                  .RemainingArgs()                         // host leaves, then pool leaves
                                  .RemainingRets()                         // host leaves, in place
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks")
                                  .Attr<int64_t>("staging"));
