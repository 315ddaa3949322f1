// exchange on the GPU: (slots that go, slots that come, delta tables..., host leaves that come..., host leaves that
// go..., pool leaves...) -> pool leaves, each aliased to its operand. A place and a fetch at once: the copy engines of
// both directions are busy together. No slot may be both of those that go and of those that come.
//
// It writes the host leaves that go though they are operands, whose contents no one has a use for: XLA has the results
// of one custom call in one kind of memory. settle, which follows it, makes results of them:
// (a pool leaf, host leaves...) -> host leaves, each aliased to its operand, and moves nothing.

#include <algorithm>
#include <vector>

#include "cuda_engine.cuh"
#include "handlers.h"

namespace jaxkv {
namespace {

ffi::Error Exchange(cudaStream_t stream, ffi::ScratchAllocator scratch, ffi::Buffer<ffi::S32> going_slots,
                    ffi::Buffer<ffi::S32> coming_slots, ffi::RemainingArgs operands, ffi::RemainingRets pool,
                    ffi::Span<const int64_t> planes, ffi::Span<const int64_t> moves, int64_t rows,
                    int64_t num_chunks, ffi::Span<const int64_t> coming_planes,
                    ffi::Span<const int64_t> coming_moves, int64_t coming_rows, int64_t coming_chunks,
                    ffi::Span<const int64_t> turn, int64_t page_size, int64_t num_slots, int64_t going_leaves,
                    int64_t staging) {
  if (num_chunks < 1 || coming_chunks < 1 || rows < 1 || coming_rows < 1) {
    return ffi::Error::InvalidArgument("jaxkv: an exchange has chunks both ways");
  }
  const Transfer going = DecodeTransfer(planes, moves, page_size, num_slots, rows, num_chunks);
  Transfer coming =
      DecodeTransfer(coming_planes, coming_moves, page_size, num_slots, coming_rows, coming_chunks, turn);
  DecodeDeltas(coming, operands);
  const int64_t first = NumDeltaOperands(coming);
  const int64_t last = operands.size() - pool.size();  // of the host leaves
  auto leaf = [&](int64_t i) { return static_cast<char*>(operands.get<ffi::AnyBuffer>(i)->untyped_data()); };
  auto bytes = [&](int64_t i) { return static_cast<int64_t>(operands.get<ffi::AnyBuffer>(i)->size_bytes()); };
  auto pool_leaf = [&](int64_t i) { return static_cast<char*>((*pool.get<ffi::AnyBuffer>(i))->untyped_data()); };
  auto host_leaf = [&](int64_t start) { return [=](int64_t i) { return leaf(start + i); }; };
  auto leaf_bytes = [&](int64_t start) { return [=](int64_t i) { return bytes(start + i); }; };

  // XLA does not know that the leaves that go are written, and must not have made one of two of them.
  std::vector<char*> host(last - first);
  for (int64_t i = first; i < last; ++i) host[i - first] = leaf(i);
  std::sort(host.begin(), host.end());
  if (std::adjacent_find(host.begin(), host.end()) != host.end()) {
    return ffi::Error::Internal("jaxkv: two arrays of an exchange are one");
  }

  Pipeline<Direction::kGather> out(stream, going, going_slots.typed_data(), going_leaves / num_chunks, staging,
                                   pool_leaf, host_leaf(last - going_leaves), leaf_bytes(last - going_leaves));
  Pipeline<Direction::kScatter> in(stream, coming, coming_slots.typed_data(),
                                   (last - going_leaves - first) / coming_chunks, staging, pool_leaf,
                                   host_leaf(first), leaf_bytes(first));
  ffi::Error moved = out.Start(scratch);
  if (moved.success()) moved = in.Start(scratch);
  // The kernels of both share the program's stream, and one that waits for its copy holds up the other's. So chunks
  // that go are gathered ahead, as far as there are buffers, and a wait for one direction is a wait for both.
  const int64_t ahead = staging - 1;
  for (int64_t c = -ahead; c < std::max(out.size(), in.size()) && moved.success(); ++c) {
    if (c + ahead < out.size()) moved = out.Step(c + ahead);
    if (c >= 0 && c < in.size() && moved.success()) moved = in.Step(c);
  }
  const ffi::Error out_finished = out.Finish(), in_finished = in.Finish();
  if (moved.failure()) return moved;
  return out_finished.failure() ? out_finished : in_finished;
}

ffi::Error Settle(ffi::RemainingArgs, ffi::RemainingRets) { return ffi::Error::Success(); }

}  // namespace
}  // namespace jaxkv

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvExchangeCuda, jaxkv::Exchange,
                              xla::ffi::Ffi::Bind()
                                  .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                  .Ctx<xla::ffi::ScratchAllocator>()
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots that go
                                  .Arg<xla::ffi::Buffer<xla::ffi::S32>>()  // slots that come
                                  .RemainingArgs()  // delta tables, host leaves that come, that go, pool leaves
                                  .RemainingRets()  // pool leaves, in place
                                  .Attr<xla::ffi::Span<const int64_t>>("planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("moves")
                                  .Attr<int64_t>("rows")
                                  .Attr<int64_t>("num_chunks")
                                  .Attr<xla::ffi::Span<const int64_t>>("coming_planes")
                                  .Attr<xla::ffi::Span<const int64_t>>("coming_moves")
                                  .Attr<int64_t>("coming_rows")
                                  .Attr<int64_t>("coming_chunks")
                                  .Attr<xla::ffi::Span<const int64_t>>("turn")
                                  .Attr<int64_t>("page_size")
                                  .Attr<int64_t>("num_slots")
                                  .Attr<int64_t>("going_leaves")
                                  .Attr<int64_t>("staging"));

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxkvSettleCuda, jaxkv::Settle,
                              xla::ffi::Ffi::Bind()
                                  .RemainingArgs()    // a pool leaf, host leaves
                                  .RemainingRets());  // host leaves, in place
