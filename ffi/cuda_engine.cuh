// The engine path: kernels between pages and device staging, the copy engine between staging and pinned memory.
//
// Chunks go through a ring of staging buffers: while the copy engine moves one on its own stream, the kernel fills
// (or empties) another on the stream of the program. Events order the two, and the program's stream waits for the
// last copy before the handler's successor runs, so to XLA it is one operation.

#ifndef JAXKV_CUDA_ENGINE_CUH_
#define JAXKV_CUDA_ENGINE_CUH_

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "cuda_move.cuh"

namespace jaxkv {

// A stream for copies, one that wakes the host before their end, and the events of one call.
//
// Making and destroying a stream and three events a chunk took 0.1 ms of a call, so idle ones are kept, for each
// device, and lent to one call at a time. They carry nothing from call to call: an event that is recorded again leaves
// those alone that wait for its earlier record. They are never destroyed: at exit CUDA may be gone before us.
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
    copies->error_ = copies->is_whole() ? found : cudaErrorInvalidResourceHandle;
    return copies;
  }
  static void Return(CopyStream* copies) {
    if (!copies->is_whole()) return delete copies;
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
  // Has the driver's thread for host functions do nothing, when `event` fires.
  //
  // By this thread XLA hears that a program is done. It has slept while the copies ran, and takes 0.1 ms longer to get
  // up than one that was up half a millisecond before. (On a stream of its own: copies would wait for the function.)
  // It is a hint: where it fails, all that is lost is that.
  void WakeHostAt(cudaEvent_t event) {
    const bool queued = cudaStreamWaitEvent(waking_, event, 0) == cudaSuccess &&
                        cudaLaunchHostFunc(waking_, [](void*) {}, nullptr) == cudaSuccess;
    if (!queued) cudaGetLastError();
  }
  cudaStream_t stream() const { return stream_; }
  cudaError_t error() const { return error_; }

 private:
  explicit CopyStream(int device) : device_(device) {
    if (cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking) != cudaSuccess) stream_ = nullptr;
    if (cudaStreamCreateWithFlags(&waking_, cudaStreamNonBlocking) != cudaSuccess) waking_ = nullptr;
  }
  ~CopyStream() {  // of one that could not be made whole
    if (stream_ != nullptr) cudaStreamDestroy(stream_);
    if (waking_ != nullptr) cudaStreamDestroy(waking_);
  }
  static std::mutex& Mutex() {
    static auto* mutex = new std::mutex;
    return *mutex;
  }
  static std::map<int, std::vector<CopyStream*>>& Idle() {
    static auto* idle = new std::map<int, std::vector<CopyStream*>>;
    return *idle;
  }
  bool is_whole() const { return stream_ != nullptr && waking_ != nullptr; }
  void Keep(cudaError_t error) {
    if (error_ == cudaSuccess) error_ = error;
  }
  const int device_;
  cudaStream_t stream_ = nullptr, waking_ = nullptr;
  std::vector<cudaEvent_t> events_;
  size_t used_ = 0;
  cudaError_t error_ = cudaSuccess;
};

struct ReturnCopyStream {
  void operator()(CopyStream* copies) const { CopyStream::Return(copies); }
};

// Chunks on their way through `staging` buffers, one after the other: the steps of a call, queued in order.
//
// `chunk_leaf(i)` is a leaf in pinned memory (the leaves of chunk c follow those of chunk c - 1) and `leaf_bytes(i)`
// its size; `pool_leaf` as in MoveAll. Of a scatter the first chunks may have been sent to the device already,
// `arrived` of them: then their leaves are there, and their memory is the ring that the others go through.
template <Direction direction>
class Pipeline {
 public:
  using Leaf = std::function<char*(int64_t)>;

  Pipeline(cudaStream_t stream, const Transfer& transfer, const int32_t* slots, int64_t leaves_per_chunk,
           int64_t staging, Leaf pool_leaf, Leaf chunk_leaf, std::function<int64_t(int64_t)> leaf_bytes,
           int64_t arrived = 0)
      : stream_(stream),
        transfer_(transfer),
        slots_(slots),
        leaves_(leaves_per_chunk),
        staging_(arrived > 0 ? arrived : std::min(staging, transfer.num_chunks)),
        arrived_(arrived),
        pool_leaf_(std::move(pool_leaf)),
        chunk_leaf_(std::move(chunk_leaf)),
        leaf_bytes_(std::move(leaf_bytes)),
        offset_(leaves_per_chunk + 1, 0),
        emptied_(transfer.num_chunks) {
    constexpr int64_t kAlignment = 256;  // of a leaf in a buffer: a kernel's widest words, and whole sectors
    for (int64_t i = 0; i < leaves_; ++i) {
      offset_[i + 1] = (offset_[i] + leaf_bytes_(i) + kAlignment - 1) / kAlignment * kAlignment;
    }
    transfer_.num_chunks = 1;  // a step moves one
  }
  Pipeline(const Pipeline&) = delete;
  Pipeline& operator=(const Pipeline&) = delete;

  int64_t size() const { return static_cast<int64_t>(emptied_.size()); }
  bool is_empty() const { return size() == 0 || transfer_.rows == 0; }

  ffi::Error Start(ffi::ScratchAllocator& scratch) {
    if (arrived_ == 0) {
      auto memory = scratch.Allocate(offset_[leaves_] * staging_);  // the allocator aligns as we do, and takes no wish
      if (!memory.has_value()) {
        return ffi::Error(ffi::ErrorCode::kResourceExhausted, "jaxkv: no device memory for staging buffers");
      }
      memory_ = static_cast<char*>(*memory);
    }
    copies_.reset(CopyStream::Borrow());
    if (copies_->error() != cudaSuccess) {
      const std::string why = cudaGetErrorString(copies_->error());
      copies_.reset();
      return ffi::Error::Internal("jaxkv: no stream for copies: " + why);
    }
    // The staging memory, and what is in pinned memory, are this call's from here on.
    copies_->Wait(copies_->stream(), copies_->Mark(stream_));
    return Queued();
  }

  // Queues chunk c; those before it were queued.
  ffi::Error Step(int64_t c) {
    ffi::Error moved = ffi::Error::Success();
    if constexpr (direction == Direction::kGather) {
      if (c >= staging_) copies_->Wait(stream_, emptied_[c - staging_]);
      moved = Move(c);
      copies_->Wait(copies_->stream(), copies_->Mark(stream_));
      Copy(c);
      emptied_[c] = copies_->Mark(copies_->stream());
      if (IsLastButOne(c)) copies_->WakeHostAt(emptied_[c]);
    } else {
      if (c >= arrived_) {
        if (c >= staging_) copies_->Wait(copies_->stream(), emptied_[c - staging_]);
        Copy(c);
        const cudaEvent_t arrived = copies_->Mark(copies_->stream());
        copies_->Wait(stream_, arrived);
        if (IsLastButOne(c)) copies_->WakeHostAt(arrived);
      }
      moved = Move(c);
      emptied_[c] = copies_->Mark(stream_);
    }
    return moved.failure() ? moved : Queued();
  }

  // Also after a failure: XLA takes the staging memory back, and no copy may still be at it.
  ffi::Error Finish() {
    if (copies_ == nullptr) return ffi::Error::Success();  // nothing was started
    copies_->Wait(stream_, copies_->Mark(copies_->stream()));
    // The order may not have been queued.
    if (copies_->error() != cudaSuccess) cudaStreamSynchronize(copies_->stream());
    return Queued();
  }

 private:
  // Whether all that was asked of the copies' stream was taken: without its order nothing more may be queued.
  ffi::Error Queued() const {
    if (copies_->error() == cudaSuccess) return ffi::Error::Success();
    return ffi::Error::Internal(std::string("jaxkv: ") + cudaGetErrorString(copies_->error()));
  }
  // When its copy ends, there is as long to go as one takes: time enough to get up, and not to fall asleep again.
  bool IsLastButOne(int64_t c) const { return c == size() - 2; }
  char* Buffer(int64_t c, int64_t leaf) const {
    const int64_t at = c % staging_;
    return arrived_ > 0 ? chunk_leaf_(at * leaves_ + leaf) : memory_ + at * offset_[leaves_] + offset_[leaf];
  }
  void Copy(int64_t c) {
    for (int64_t leaf = 0; leaf < leaves_; ++leaf) {
      char* host = chunk_leaf_(c * leaves_ + leaf);
      char* device = Buffer(c, leaf);
      const bool out = direction == Direction::kGather;
      copies_->Copy(out ? host : device, out ? device : host, leaf_bytes_(leaf));
    }
  }
  ffi::Error Move(int64_t c) {
    Transfer one = transfer_;
    one.deltas = transfer_.deltas.From(c * transfer_.rows);
    return MoveAll<direction>(stream_, one, slots_ + c * transfer_.rows, transfer_.rows, leaves_, pool_leaf_,
                              [&](int64_t leaf) { return Buffer(c, leaf); });
  }

  const cudaStream_t stream_;
  Transfer transfer_;
  const int32_t* const slots_;
  const int64_t leaves_, staging_, arrived_;
  const Leaf pool_leaf_, chunk_leaf_;
  const std::function<int64_t(int64_t)> leaf_bytes_;
  std::vector<int64_t> offset_;  // of each leaf in a buffer, and the buffer's size
  std::vector<cudaEvent_t> emptied_;
  char* memory_ = nullptr;
  std::unique_ptr<CopyStream, ReturnCopyStream> copies_;
};

// Moves all chunks of a pipeline.
template <Direction direction>
ffi::Error MoveThroughStaging(Pipeline<direction>&& chunks, ffi::ScratchAllocator& scratch) {
  if (chunks.is_empty()) return ffi::Error::Success();
  ffi::Error moved = chunks.Start(scratch);
  for (int64_t c = 0; c < chunks.size() && moved.success(); ++c) moved = chunks.Step(c);
  const ffi::Error finished = chunks.Finish();
  return moved.failure() ? moved : finished;
}

}  // namespace jaxkv

#endif  // JAXKV_CUDA_ENGINE_CUH_
