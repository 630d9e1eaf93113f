// Logit scales of the query heads whose tokens the vector lanes hold.
//
// This is kernel code: it is compiled once per instruction set, each time in a separate namespace.
#pragma once

#include "cpu/lane_block.h"
#include "cpu/vector.h"
#include "natten_jax/logsumexp.h"

namespace natten_jax::cpu::NATTEN_JAX_ISA {
namespace {

/// Factor that converts products of queries and keys to logits in base 2.
NATTEN_JAX_INLINE float exponent_scale(const HeadScale& scale) {
  return scale.logits * kLog2E;
}

/// The scale of a lane's query head.
NATTEN_JAX_INLINE HeadScale scale_of_lane(const Problem& p, const Item& item, const LaneBlock& block, int lane) {
  return p.scale.for_head(item.batch * p.heads + block.row[lane] % p.heads);
}

/// Writes the exponent scale of each lane's query head to `scales`.
NATTEN_JAX_INLINE void write_exponent_scales(const Problem& p, const Item& item, const LaneBlock& block,
                                             float* scales) {
  for (int lane = 0; lane < kLanes; ++lane) scales[lane] = exponent_scale(scale_of_lane(p, item, block, lane));
}

}  // namespace
}  // namespace natten_jax::cpu::NATTEN_JAX_ISA
