// The engine path: kernels between pages and device staging, the copy engine between staging and pinned memory.
//
// Chunks go through a ring of staging buffers: while the copy engine moves one on its own stream, the kernel fills
// (or empties) another on the stream of the program. Events order the two, and the program's stream waits for the
// last copy before the handler's successor runs, so to XLA it is one operation.

#ifndef JAXKV_CUDA_ENGINE_CUH_
#define JAXKV_CUDA_ENGINE_CUH_

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda_move.cuh"

namespace jaxkv {

// A stream for copies and the events of one call.
//
// Making and destroying a stream and three events a chunk took 0.1 ms of a call, so idle ones are kept, for each device,
// and lent to one call at a time. They carry nothing from call to call: an event that is recorded again leaves those
// alone that wait for its earlier record. They are never destroyed: at exit CUDA may be gone before us.
class CopyStream {
 public:
  static CopyStream* Borrow() {
    int device = 0;
    const cudaError_t found = cudaGetDevice(&device);
    CopyStream* copies = nullptr;
    {
      std::lock_guard<std::mutex> lock(Mutex());
      auto& idle = Idle()[device];
      if (!idle.empty()) {
        copies = idle.back();
        idle.pop_back();
      }
    }
    if (copies == nullptr) copies = new CopyStream(device);
    copies->used_ = 0;
    copies->error_ = copies->stream_ == nullptr ? cudaErrorInvalidResourceHandle : found;
    return copies;
  }
  static void Return(CopyStream* copies) {
    if (copies->stream_ == nullptr) return delete copies;
    std::lock_guard<std::mutex> lock(Mutex());
    Idle()[copies->device_].push_back(copies);
  }

  // An event that fires when what was given to `stream` so far is done.
  cudaEvent_t Mark(cudaStream_t stream) {
    if (used_ == events_.size()) {
      cudaEvent_t event = nullptr;
      Keep(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
      if (event == nullptr) return nullptr;  // the call fails with what was kept
      events_.push_back(event);
    }
    Keep(cudaEventRecord(events_[used_], stream));
    return events_[used_++];
  }
  void Wait(cudaStream_t stream, cudaEvent_t event) { Keep(cudaStreamWaitEvent(stream, event, 0)); }
  void Copy(void* target, const void* source, size_t bytes) {
    Keep(cudaMemcpyAsync(target, source, bytes, cudaMemcpyDefault, stream_));
  }
  cudaStream_t stream() const { return stream_; }
  cudaError_t error() const { return error_; }

 private:
  explicit CopyStream(int device) : device_(device) {
    if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) stream_ = nullptr;
  }
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<int, std::vector<CopyStream*>>& Idle() {
    static auto* idle = new std::map<int, std::vector<CopyStream*>>;
    return *idle;
  }
  void Keep(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  const int device_;
  cudaStream_t stream_ = nullptr;
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
  cudaError_t error_ = cudaSuccess;
};

struct ReturnCopyStream {
  void operator()(CopyStream* copies) const { CopyStream::Return(copies); }
};

// Moves the chunks of a call through `staging` buffers. `host_leaf(i)` is a leaf in pinned memory (the leaves of
// chunk c follow those of chunk c - 1) and `leaf_bytes(i)` its size; `pool` as in MoveAll.
template <Direction direction, typename PoolLeaf, typename HostLeaf, typename LeafBytes>
ffi::Error MoveThroughStaging(cudaStream_t stream, ffi::ScratchAllocator& scratch, Transfer transfer,
                              const int32_t* slots, int64_t leaves_per_chunk, int64_t staging, PoolLeaf pool,
                              HostLeaf host_leaf, LeafBytes leaf_bytes) {
  const int64_t num_chunks = transfer.num_chunks;
  if (num_chunks == 0 || transfer.rows == 0) return ffi::Error::Success();
  constexpr int64_t kAlignment = 256;  // of a leaf in a buffer: a kernel's widest words, and whole sectors
  std::vector<int64_t> offset(leaves_per_chunk + 1, 0);
  for (int64_t i = 0; i < leaves_per_chunk; ++i) {
    offset[i + 1] = (offset[i] + leaf_bytes(i) + kAlignment - 1) / kAlignment * kAlignment;
  }
  staging = std::min(staging, num_chunks);
  auto memory = scratch.Allocate(offset[leaves_per_chunk] * staging);  // the allocator aligns as we do, and takes no wish
  if (!memory.has_value()) {
    return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxkv: no device memory for staging buffers");
  }
  auto buffer = [&](int64_t c, int64_t leaf) {
    return static_cast<char*>(*memory) + (c % staging) * offset[leaves_per_chunk] + offset[leaf];
  };

  const std::unique_ptr<CopyStream, ReturnCopyStream> borrowed(CopyStream::Borrow());
  CopyStream& copies = *borrowed;
  if (copies.error() != cudaSuccess) {
    return ffi::Error::Internal(std::string("jaxkv: no stream for copies: ") + cudaGetErrorString(copies.error()));
  }
  transfer.num_chunks = 1;
  std::vector<cudaEvent_t> emptied(num_chunks);
  // The staging memory, and what is in pinned memory, are this call's from here on.
  copies.Wait(copies.stream(), copies.Mark(stream));
  ffi::Error moved = ffi::Error::Success();
  for (int64_t c = 0; c < num_chunks && moved.success(); ++c) {
    auto copy = [&] {
      for (int64_t leaf = 0; leaf < leaves_per_chunk; ++leaf) {
        char* host = host_leaf(c * leaves_per_chunk + leaf);
        char* device = buffer(c, leaf);
        copies.Copy(direction == Direction::kGather ? host : device, direction == Direction::kGather ? device : host,
                    leaf_bytes(leaf));
      }
    };
    auto move = [&] {
      Transfer one = transfer;
      one.deltas = transfer.deltas.From(c * transfer.rows);
      return MoveAll<direction>(stream, one, slots + c * transfer.rows, transfer.rows, leaves_per_chunk, pool,
                                [&](int64_t leaf) { return buffer(c, leaf); });
    };
    if (direction == Direction::kGather) {
      if (c >= staging) copies.Wait(stream, emptied[c - staging]);
      moved = move();
      copies.Wait(copies.stream(), copies.Mark(stream));
      copy();
      emptied[c] = copies.Mark(copies.stream());
    } else {
      if (c >= staging) copies.Wait(copies.stream(), emptied[c - staging]);
      copy();
      copies.Wait(stream, copies.Mark(copies.stream()));
      moved = move();
      emptied[c] = copies.Mark(stream);
    }
  }
  // Also after a failure: XLA takes the staging memory back, and no copy may still be at it.
  copies.Wait(stream, copies.Mark(copies.stream()));
  if (moved.failure()) return moved;
  if (copies.error() != cudaSuccess) {
    return ffi::Error::Internal(std::string("jaxkv: ") + cudaGetErrorString(copies.error()));
  }
  return ffi::Error::Success();
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_ENGINE_CUH_
