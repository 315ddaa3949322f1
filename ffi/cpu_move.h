// The strided copy on the CPU: tokens in blocks, blocks shared with XLA's own thread pool.

#ifndef JAXKV_CPU_MOVE_H_
#define JAXKV_CPU_MOVE_H_

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <memory>
#include <mutex>

#include "cpu_turn.h"
#include "transfer.h"

namespace jaxkv {

enum class Direction { kGather, kScatter };

// Runs body(0) ... body(blocks - 1). The caller works too and waits only for blocks that another thread has
// begun, so a pool whose threads are all busy (or are this one) costs speed and never a deadlock.
template <typename Body>
void ParallelFor(ffi::ThreadPool& pool, int64_t blocks, Body body) {
  struct State {
    std::atomic<int64_t> next{0};
    std::atomic<int64_t> done{0};
    std::mutex mutex;
    std::condition_variable finished;
  };
  auto state = std::make_shared<State>();
  auto work = [state, blocks, body] {
    for (int64_t block; (block = state->next.fetch_add(1)) < blocks;) {
      body(block);
      if (state->done.fetch_add(1) + 1 == blocks) {
        std::lock_guard<std::mutex> lock(state->mutex);
        state->finished.notify_all();
      }
    }
  };
  for (int64_t i = std::min(pool.num_threads(), blocks) - 1; i > 0; --i) pool.Schedule([work] { work(); });
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->finished.wait(lock, [&] { return state->done.load() == blocks; });
}

// Copies `run` bytes, or zeroes them where `source` is null. Constant sizes let the compiler drop the call.
inline void CopyRun(char* target, const char* source, int64_t run) {
  if (source == nullptr) {
    std::memset(target, 0, run);
    return;
  }
  switch (run) {
    case 1: std::memcpy(target, source, 1); break;
    case 2: std::memcpy(target, source, 2); break;
    case 4: std::memcpy(target, source, 4); break;
    case 8: std::memcpy(target, source, 8); break;
    default: std::memcpy(target, source, run);
  }
}

// One token of one plane; `source_is_zero` writes zero bytes instead.
template <Direction direction>
void MoveToken(const Move& move, char* pool, char* chunk, bool source_is_zero) {
  for (int64_t head = 0; head < move.heads; ++head) {
    for (int64_t dim = 0; dim < move.dims; ++dim) {
      char* in_pool = pool + head * move.pool.head + dim * move.pool.dim;
      char* in_chunk = chunk + head * move.chunk.head + dim * move.chunk.dim;
      char* target = direction == Direction::kGather ? in_chunk : in_pool;
      const char* source = direction == Direction::kGather ? in_pool : in_chunk;
      CopyRun(target, source_is_zero ? nullptr : source, move.run);
    }
  }
}

// Moves `num_tokens` tokens. `pool` and `chunk` give the address of a leaf by its number; the leaves of chunk c
// follow those of chunk c - 1. A gather writes zero rows for slots it does not serve, a scatter skips them.
template <Direction direction, typename PoolLeaf, typename ChunkLeaf>
void MoveAll(const Transfer& transfer, const int32_t* slots, int64_t num_tokens, int64_t leaves_per_chunk,
             PoolLeaf pool, ChunkLeaf chunk, ffi::ThreadPool& threads) {
  constexpr int64_t kBlockBytes = 1 << 18;  // large against a task's cost, small against a cache's share of L2
  for (int64_t m = 0; m < transfer.num_moves; ++m) {
    const Move& move = transfer.moves[m];
    const TurnRow turn = move.table < 0 ? nullptr : TurnRowOf(transfer.turn.format);
    const int64_t token_bytes = std::max<int64_t>(move.heads * move.dims * move.run, 1);
    const int64_t block_tokens = std::clamp<int64_t>(kBlockBytes / token_bytes, 1, std::max<int64_t>(num_tokens, 1));
    const int64_t blocks_per_plane = (num_tokens + block_tokens - 1) / block_tokens;
    auto body = [&, block_tokens, blocks_per_plane](int64_t block) {
      const Plane& plane = transfer.planes[move.first_plane + block / blocks_per_plane];
      const int64_t first = block % blocks_per_plane * block_tokens;
      const int64_t last = std::min(first + block_tokens, num_tokens);
      char* pool_base = pool(plane.pool_leaf) + plane.pool_offset + move.pool_start;
      for (int64_t token = first; token < last; ++token) {
        const int64_t slot = slots[token];
        const bool served = slot >= 0 && slot < transfer.num_slots;
        if (!served && direction == Direction::kScatter) continue;
        const bool has_row = token < transfer.num_rows();
        const int64_t chunk_index = has_row ? token / transfer.rows : 0;
        const int64_t row = has_row ? token % transfer.rows : 0;
        char* in_pool = pool_base;
        if (served) in_pool += TokenOffset(move.pool, slot / transfer.page_size, slot % transfer.page_size);
        char* in_chunk = in_pool;  // never read: a token without a row is zeroed
        if (has_row) {
          in_chunk = chunk(chunk_index * leaves_per_chunk + plane.chunk_leaf) + plane.chunk_offset + move.chunk_start +
                     TokenOffset(move.chunk, row / transfer.page_size, row % transfer.page_size);
        }
        if (turn != nullptr) {
          turn(move, transfer.turn, transfer.deltas, token, in_pool, has_row ? in_chunk : nullptr);
        } else {
          MoveToken<direction>(move, in_pool, in_chunk, !served || !has_row);
        }
      }
    };
    ParallelFor(threads, blocks_per_plane * move.num_planes, body);
  }
}

}  // namespace jaxkv

#endif  // JAXKV_CPU_MOVE_H_
