// Copies of keys and values to shared memory, and the barriers between copies and reads.
#pragma once

#include "cuda/sm80/forward_key_bias.cuh"
#include "cuda/sm80/forward_traits.cuh"

namespace natten_jax::sm80 {

/// Starts to copy the keys of a step, the values, or both.
template <class Traits, bool kKeys, bool kValues>
CUTE_DEVICE void load_step(const ForwardParams& p, const typename Traits::SharedStorage& shared, int step,
                           std::uint32_t k, std::uint32_t v) {
  using Steps = KeySteps<Traits::kThreads>;
  using Copy = typename Traits::KeyCopy;
  const Copy copy;
  const TilePlan& plan = shared.plan;
  const int place = shared.steps.places[step % Steps::kCapacity], column = place >> 3;
  const int4 at = shared.steps.tiles[step % Steps::kCapacity];
  const bool is_window = (place & Steps::kWindow) != 0;
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
    // With few registers, the address of the values is computed before the copies of keys: after them, it would have to
    // wait until they are issued. With registers to spare, it is computed after them, because otherwise the compiler
    // computes the addresses of all tokens before the first copy.
    const char* values;
    if constexpr (Traits::kFewRegisters) values = plan.values[is_window ? 0 : 1];
    if (kKeys) copy_one(k, plan.keys[is_window ? 0 : 1], p.head_dim);
    if constexpr (!Traits::kFewRegisters) values = plan.values[is_window ? 0 : 1];
    if (kValues) copy_one(v, values, p.head_dim_v);
  };
  if (place & Steps::kInside) {
    copy_both(Copy::kAll);
  } else if (is_window) {
    copy_both(shared.columns.visible(copy, PackedPlace::ends(quad(plan.hull_end), at.x, at.y, at.z), column));
  } else {
    std::uint32_t visible = 0;
    CUTE_UNROLL
    for (int i = 0; i < Copy::kPasses; ++i) visible |= static_cast<std::uint32_t>(tokens[i] < p.additional_kv) << i;
    copy_both(visible);
  }
  if constexpr (kKeys && Traits::kHasKeyBias) load_biases<Traits>(p, shared, step);
  commit_copies();
}

/// Schedule of copies and barriers around the steps of a query tile. All threads of the CTA call its functions.
///
/// Two stages, or a ring of more, are filled while others are read. With one stage, a step's values are loaded while
/// its keys are used, and the next step's keys while its values are used. Without stages, keys and values share one
/// buffer, and nothing overlaps.
template <class Traits>
struct StepCopies {
  static constexpr int kStages = Traits::kStages, kAhead = Traits::kAhead;
  static constexpr std::uint32_t kStageBytes = Traits::kStageBytes;

  const ForwardParams& p;
  typename Traits::SharedStorage& shared;
  const int steps;
  const std::uint32_t k, v;
  int stage = 0;  // of the next step, with two stages

  CUTE_DEVICE StepCopies(const ForwardParams& p, typename Traits::SharedStorage& shared)
      : p(p),
        shared(shared),
        steps(shared.plan.steps),
        k(shared_address(shared.keys_and_values)),
        v(k + kStages * kStageBytes) {}

  /// Starts the first copies.
  CUTE_DEVICE void start() {
    for (int step = 0; step < min(steps, kAhead); ++step) {
      load_step<Traits, true, (kStages > 1)>(p, shared, step, k + step * kStageBytes, v + step * kStageBytes);
      if constexpr (Traits::kIsRing) shared.ring.arrive_copies(step);
    }
  }

  /// Call before a step's keys are read. Loads the next steps, and returns the offset of the step's stage in bytes.
  CUTE_DEVICE std::uint32_t begin(int step) {
    const int next = step + kAhead;
    if constexpr (!Traits::kIsRing) {
      wait_copies<0>();
      if constexpr (Traits::kHasKeyBias) prepare_biases<Traits>(shared, step);
      __syncthreads();  // this step's keys are loaded; the buffer that is loaded next is free
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

  /// Call between the reads of a step's keys and values.
  CUTE_DEVICE void between(int step) {
    if (kStages >= 2) return;
    if (kStages == 0) {
      __syncthreads();  // these keys have been read
      load_step<Traits, false, true>(p, shared, step, k, v);
    }
    wait_copies<0>();
    __syncthreads();  // these values are loaded; these keys have been read
    if (kStages == 1 && step + 1 < steps) load_step<Traits, true, false>(p, shared, step + 1, k, v);
  }

  /// Call after a step's values were read.
  CUTE_DEVICE void end(int step) {
    if (kStages == 0 && step + 1 < steps) {
      __syncthreads();  // these values have been read
      load_step<Traits, true, false>(p, shared, step + 1, k, v);
    }
    if constexpr (Traits::kIsRing) shared.ring.release(step);
  }
};

}  // namespace natten_jax::sm80
