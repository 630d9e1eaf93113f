// What the kernel of all gradients of whole layouts is launched with where there is a relative bias, and how it shares
// out batch entries and heads.
#pragma once

#include <type_traits>

#include "cuda/small/given_table.h"
#include "cuda/small/params.h"

namespace natten_jax::small {

/// A CTA goes over batch entries of one head: it has one table, and one sum for the table's gradient. Where these have
/// tables or scales of their own, it goes over one.
struct WholeBiasParams : BackwardParams {
  GivenTable given;
  int entries_of_batch;  // batch entries
  int pieces;            // CTAs that share the batch entries of a head and region

  /// Tables that are added up for one of the gradient: of all regions, and of all pieces unless batch entries have
  /// tables of their own. Those of a table's gradient follow each other.
  CUTLASS_HOST_DEVICE std::int64_t sums_of_table() const { return region.count * (given.is_of_entry ? 1 : pieces); }
};

/// What it is launched with in any case.
template <bool kHasBias>
using WholeParams = std::conditional_t<kHasBias, WholeBiasParams, BackwardParams>;

}  // namespace natten_jax::small
