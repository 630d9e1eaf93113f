// Parameters of the kernel that computes all gradients of whole layouts, for problems with a relative bias. Whole
// layouts fit in one CTA. The parameters include the distribution of batch entries and heads over CTAs.
#pragma once

#include <type_traits>

#include "cuda/small/given_table.h"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// A CTA processes batch entries of one head. It holds a single bias table, and writes a single table of sums for the
/// gradient of the bias. If batch entries have separate tables or scales, a CTA processes a single batch entry.
struct WholeBiasParams : BackwardParams {
  GivenTable given;
  int entries_of_batch;  // batch entries
  int pieces;            // number of CTAs that process the batch entries of a head and region

  /// Returns how many tables of sums are added up for the gradient of one bias table: one per region if batch entries
  /// have separate bias tables, otherwise one per region and piece. These tables of sums are consecutive in memory.
  CUTLASS_HOST_DEVICE std::int64_t sums_of_table() const { return region.count * (given.is_per_entry ? 1 : pieces); }
};

/// Parameters of the kernel, with or without a relative bias.
template <bool kHasBias>
using WholeParams = std::conditional_t<kHasBias, WholeBiasParams, BackwardParams>;

}  // namespace natten_jax::small
