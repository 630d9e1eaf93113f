// The matrix products of a consumer warpgroup of the forward kernel, and the order in which warpgroups issue them.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace natten_jax::sm90 {

/// Order in which warpgroups issue their products. With ping-pong scheduling, they take turns: while the tensor cores
/// compute the products of one warpgroup, another warpgroup computes exponentials.
template <class Traits>
struct ProductOrder {
  // Each warpgroup waits for its turn at a separate named barrier. The threads of the previous warpgroup arrive there
  // when they have issued their products. So two warpgroups take part in each barrier.
  static constexpr int kThreads = 2 * kWarpgroup;

  int warpgroup;

  CUTE_DEVICE explicit ProductOrder(int warpgroup) : warpgroup(warpgroup) {}

  CUTE_DEVICE void await_turn() const {
    if constexpr (Traits::kPingPong) {
      cutlass::arch::NamedBarrier::sync(kThreads, named_barrier(kProductOrder + warpgroup));
    }
  }
  CUTE_DEVICE void pass_turn() const {
    if constexpr (Traits::kPingPong) {
      const int next = warpgroup == Traits::kWarpgroups - 1 ? 0 : warpgroup + 1;
      cutlass::arch::NamedBarrier::arrive(kThreads, named_barrier(kProductOrder + next));
    }
  }
  /// Passes the first turn to the first warpgroup.
  CUTE_DEVICE void start() const {
    if (Traits::kPingPong && warpgroup == Traits::kWarpgroups - 1) pass_turn();
  }
};

/// Operands and results of a warpgroup's two products, in registers or as views of shared memory. One product computes
/// `s`, the unscaled logits. The other one adds weighted values to the output `o`.
template <class Traits>
struct AttentionProducts {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ProductS = decltype(Traits::query_key_product());
  using ProductO = decltype(Traits::weight_value_product());

  CUTE_HOST_DEVICE static auto rows_of_group(Element* tile, int warpgroup) {
    return local_tile(make_tensor(make_smem_ptr(tile), typename Traits::LayoutQ{}), Shape<_64, Int<Traits::kHeadDim>>{},
                      make_coord(warpgroup, 0));
  }
  CUTE_HOST_DEVICE static auto query_of(SharedStorage& shared, int warpgroup, int thread) {
    return ProductS{}.get_thread_slice(thread).partition_fragment_A(rows_of_group(shared.q, warpgroup));
  }
  CUTE_HOST_DEVICE static auto keys_of(SharedStorage& shared, int thread) {
    return ProductS{}.get_thread_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{}));
  }
  CUTE_HOST_DEVICE static auto values_of(SharedStorage& shared, int thread) {
    return ProductO{}.get_thread_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.v), typename Traits::LayoutVt{}));
  }

  decltype(keys_of(std::declval<SharedStorage&>(), 0)) keys;
  decltype(values_of(std::declval<SharedStorage&>(), 0)) values;
  decltype(query_of(std::declval<SharedStorage&>(), 0, 0)) query;
  decltype(partition_fragment_C(ProductS{}, Shape<_64, Int<Traits::kColumns>>{})) s;
  decltype(partition_fragment_C(ProductO{}, Shape<_64, Int<Traits::kHeadDim>>{})) o;
  // Register operand of the product with the values. It contains the weights for the elements of `s` that the thread
  // holds, in the same order.
  decltype(make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<Traits::kColumns / 16>>>{})) weights;

  CUTE_DEVICE AttentionProducts(SharedStorage& shared, int warpgroup, int thread)
      : keys(keys_of(shared, thread)), values(values_of(shared, thread)), query(query_of(shared, warpgroup, thread)) {}

  /// Starts the product of queries and keys. `stage` is the buffer of the keys.
  CUTE_DEVICE void start_s(int stage, int head_dim) {
    ProductS product;
    warpgroup_fence_operand(s);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(query); ++k) {
      if (Traits::kIsNarrow && end_before<Traits::kHeadDim / kStep>(k, head_dim)) break;
      gemm(product, query(_, _, k), keys(_, _, k, stage), s);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }
  /// Starts the product of weights and values, which is added to `o`. `stage` is the buffer of the values.
  CUTE_DEVICE void start_o(int stage) {
    ProductO product;
    warpgroup_fence_operand(o);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(weights); ++k) gemm(product, weights(_, _, k), values(_, _, k, stage), o);
    warpgroup_commit_batch();
  }
};

}  // namespace natten_jax::sm90
