// The products of a warpgroup of the forward kernel, and the order in which warpgroups issue them.
#pragma once

#include "cuda/sm90/forward_traits.cuh"

namespace natten_jax::sm90 {

/// Order in which warpgroups issue their products (ping-pong): while one does, another computes exponentials.
template <class Traits>
struct ProductOrder {
  // Each barrier joins two warpgroups: the last one to issue products and its successor.
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
  /// Gives the first turn to the first warpgroup.
  CUTE_DEVICE void start() const {
    if (Traits::kPingPong && warpgroup == Traits::kWarpgroups - 1) pass_turn();
  }
};

/// Operands and results of one warpgroup's two products, in registers and as views of shared memory.
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
  // A thread's elements of an accumulator are its elements of the next product's register operand, in the same order.
  decltype(make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<Traits::kColumns / 16>>>{})) weights;

  CUTE_DEVICE AttentionProducts(SharedStorage& shared, int warpgroup, int thread)
      : keys(keys_of(shared, thread)), values(values_of(shared, thread)), query(query_of(shared, warpgroup, thread)) {}

  /// Starts the logits of the keys in a buffer.
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
  /// Starts to add the weighted values in a buffer to the output.
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
