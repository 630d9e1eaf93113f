// Copies of keys and values to shared memory in the forward kernel, and the barriers between copies and reads.
#pragma once

#include "cuda/sm80/forward_key_bias.cuh"
#include "cuda/sm80/forward_traits.cuh"

namespace natten_jax::sm80 {

/// Starts the copies of a step's keys (if `kKeys`) and values (if `kValues`) to shared memory at `k` and `v`.
template <class Traits, bool kKeys, bool kValues>
CUTE_DEVICE void load_step(const ForwardParams& p, const typename Traits::SharedStorage& shared, int step,
                           std::uint32_t k, std::uint32_t v) {
  using Steps = KeySteps<Traits::kThreads>;
  using Copy = typename Traits::KeyCopy;
  const Copy copy;
  const TilePlan& plan = shared.plan;
  const int packed_column = shared.steps.packed_columns[step % Steps::kCapacity], column = packed_column >> 3;
  const int4 at = shared.steps.tiles[step % Steps::kCapacity];
  const bool is_window = (packed_column & Steps::kWindow) != 0;
  int tokens[Copy::kPasses];
  if (is_window) {
    shared.columns.load(copy, tokens, column, at.w);
  } else {
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) tokens[i] = at.w + copy.first + i * Copy::kStride;
  }
  const auto copy_both = [&](std::uint32_t visible) __attribute__((always_inline)) {
    const auto copy_one = [&](std::uint32_t tile, const char* base, int head_dim) {
      const int head_bytes = head_dim * static_cast<int>(sizeof(typename Traits::Element));
      copy.copy(tile, base, head_bytes * p.heads_kv, head_bytes, tokens, visible);
    };
    // If registers are few, read the address of the values before the keys are copied: a later read would wait until
    // all copies of keys are issued. If there are enough registers, read the address after the copies of keys: after an
    // earlier read, the compiler would compute the addresses of all tokens before the first copy.
    const char* values;
    if constexpr (Traits::kFewRegisters) values = plan.values[is_window ? 0 : 1];
    if (kKeys) copy_one(k, plan.keys[is_window ? 0 : 1], p.head_dim);
    if constexpr (!Traits::kFewRegisters) values = plan.values[is_window ? 0 : 1];
    if (kValues) copy_one(v, values, p.head_dim_v);
  };
  if (packed_column & Steps::kInside) {
    copy_both(Copy::kAll);
  } else if (is_window) {
    copy_both(shared.columns.visible(copy, PackedPosition::ends(quad(plan.hull_end), at.x, at.y, at.z), column));
  } else {
    std::uint32_t visible = 0;
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) visible |= static_cast<std::uint32_t>(tokens[i] < p.additional_kv) << i;
    copy_both(visible);
  }
  if constexpr (kKeys && Traits::kHasKeyBias) load_biases<Traits>(p, shared, step);
  commit_copies();
}

/// Copies and barriers before, in and after each step of a query tile. All threads of the CTA call the methods.
///
///   kStages > 2   a ring: several stages are loaded while another is read
///   kStages 2     one stage is loaded while the other is read
///   kStages 1     while a step's keys are read, its values are loaded; while its values are read, the next step's keys
///                 are loaded
///   kStages 0     keys and values share one buffer, so no load overlaps with a read
template <class Traits>
struct StepCopies {
  static constexpr int kStages = Traits::kStages, kAhead = Traits::kAhead;
  static constexpr std::uint32_t kStageBytes = Traits::kStageBytes;

  const ForwardParams& p;
  typename Traits::SharedStorage& shared;
  const int steps;
  const std::uint32_t k, v;
  int stage = 0;  // stage of the next step, if kStages is 2

  CUTE_DEVICE StepCopies(const ForwardParams& p, typename Traits::SharedStorage& shared)
      : p(p),
        shared(shared),
        steps(shared.plan.steps),
        k(shared_address(shared.keys_and_values)),
        v(k + kStages * kStageBytes) {}

  /// Starts the copies of the first `kAhead` steps.
  CUTE_DEVICE void start() {
    for (int step = 0; step < min(steps, kAhead); ++step) {
      load_step<Traits, true, (kStages > 1)>(p, shared, step, k + step * kStageBytes, v + step * kStageBytes);
      if constexpr (Traits::kIsRing) shared.ring.arrive_copies(step);
    }
  }

  /// Call before a step's keys are read. Waits for these keys, and starts the next copies if a buffer is free. Returns
  /// the offset of the step's stage in bytes.
  CUTE_DEVICE std::uint32_t begin(int step) {
    const int next = step + kAhead;
    if constexpr (!Traits::kIsRing) {
      wait_copies<0>();
      if constexpr (Traits::kHasKeyBias) prepare_biases<Traits>(shared, step);
      __syncthreads();  // the step's keys are loaded; all threads have read the buffer that is loaded next
    }
    const std::uint32_t stage_bytes = kStages < 2 ? 0 : (Traits::kIsRing ? step % kStages : stage) * kStageBytes;
    stage ^= 1;
    if (next % Traits::kThreads == 0) {
      shared.steps.fill(p, shared.plan, Traits::kColumns, next);
      __syncthreads();
    }
    if constexpr (Traits::kIsRing) {
      if (next < steps) {
        shared.ring.wait_free(next);
        const std::uint32_t next_bytes = next % kStages * kStageBytes;
        load_step<Traits, true, true>(p, shared, next, k + next_bytes, v + next_bytes);
        shared.ring.arrive_copies(next);
      }
      shared.ring.wait_full(step);
    } else if (kStages == 1) {
      load_step<Traits, false, true>(p, shared, step, k, v);
    } else if (kStages == 2 && next < steps) {
      load_step<Traits, true, true>(p, shared, next, k + stage * kStageBytes, v + stage * kStageBytes);
    }
    return stage_bytes;
  }

  /// Call after a step's keys have been read and before its values are read.
  CUTE_DEVICE void between(int step) {
    if (kStages >= 2) return;
    if (kStages == 0) {
      __syncthreads();  // all threads have read the step's keys
      load_step<Traits, false, true>(p, shared, step, k, v);
    }
    wait_copies<0>();
    __syncthreads();  // the step's values are loaded; all threads have read the step's keys
    if (kStages == 1 && step + 1 < steps) load_step<Traits, true, false>(p, shared, step + 1, k, v);
  }

  /// Call after a step's values have been read.
  CUTE_DEVICE void end(int step) {
    if (kStages == 0 && step + 1 < steps) {
      __syncthreads();  // all threads have read the step's values
      load_step<Traits, true, false>(p, shared, step + 1, k, v);
    }
    if constexpr (Traits::kIsRing) shared.ring.release(step);
  }
};

}  // namespace natten_jax::sm80
