// Parameters of the kernel of all gradients of whole layouts with a relative bias, and its distribution of batch
// entries and heads.
#pragma once

#include <type_traits>

#include "cuda/small/given_table.h"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// A CTA loops over batch entries of one head: it holds a single table, and writes a single sum for the table's
/// gradient. If batch entries have separate tables or scales, it processes a single entry.
struct WholeBiasParams : BackwardParams {
  GivenTable given;
  int entries_of_batch;  // batch entries
  int pieces;            // CTAs that share the batch entries of a head and region

  /// Returns the number of tables of sums that are added up for a table's gradient: one per region, and one per piece
  /// unless batch entries have separate tables. They are consecutive in memory.
  CUTLASS_HOST_DEVICE std::int64_t sums_of_table() const { return region.count * (given.is_of_entry ? 1 : pieces); }
};

/// Parameters of the kernel, with or without a relative bias.
template <bool kHasBias>
using WholeParams = std::conditional_t<kHasBias, WholeBiasParams, BackwardParams>;

}  // namespace natten_jax::small
