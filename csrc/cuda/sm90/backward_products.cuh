// The five matrix products that a warpgroup of the backward kernel computes for each query tile: S^T = K Q^T,
// dP^T = V dO^T, dV += P^T dO, dK += dS^T Q, dQ = dS K.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace natten_jax::sm90 {

/// Operands and results of the products, in registers or as views of shared memory, and methods that start the
/// products.
///
/// Two warpgroups divide each product:
///
///   S, dP     by keys if a tile has 128 keys, by queries if it has 64
///   dK, dV    by keys if a tile has 128 keys, by columns (elements of the head) if it has 64
///   dQ        by columns; with heads of 64, the warpgroups instead alternate in computing the dQ of a query tile
template <class Traits>
struct GradientProducts {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  static constexpr int kHeadDim = Traits::kHeadDim, kKeys = Traits::kKeys, kQueries = Traits::kQueries;
  static constexpr int kStages = Traits::kStages, kScoreBuffers = Traits::kScoreBuffers;
  static constexpr int kLogitColumns = Traits::kSplitsKeys ? kQueries : kQueries / 2;
  static constexpr int kGradientColumns = Traits::kSplitsKeys ? kHeadDim : kHeadDim / 2;
  static constexpr int kSumColumns = Traits::kAlternates ? kHeadDim : kHeadDim / 2;
  static constexpr auto kRowsFirst = GMMA::Major::MN, kRowsLast = GMMA::Major::K;

  using KeyRows = typename Traits::template Rows<kKeys, kHeadDim, 1>;
  using KeyColumns = typename Traits::template Columns<kKeys, kHeadDim, 1>;
  using QueryRows = typename Traits::template Rows<kQueries, kHeadDim, kStages>;
  using QueryColumns = typename Traits::template Columns<kQueries, kHeadDim, kStages>;
  using ScoreRows = typename Traits::template Rows<kKeys, kQueries, kScoreBuffers>;
  using ScoreColumns = typename Traits::template Columns<kKeys, kQueries, kScoreBuffers>;

  // MMA types. ProductS: for S and dP. ProductKv: for dK and dV. ProductQ: for dQ.
  using ProductS = decltype(make_tiled_mma(
      GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kLogitColumns>, Int<kHeadDim>>, kRowsLast,
                           kRowsLast>()));
  using ProductKv = decltype(Traits::kv_product());
  using ProductQ =
      decltype(make_tiled_mma(GMMA::ss_op_selector<Element, Element, float, Shape<_64, Int<kSumColumns>, Int<kKeys>>,
                                                   kRowsFirst, kRowsFirst>()));
  using Accumulator = decltype(partition_fragment_C(ProductS{}, Shape<_64, Int<kLogitColumns>>{}));
  using Gradient = decltype(partition_fragment_C(ProductKv{}, Shape<_64, Int<kGradientColumns>>{}));
  using Sums = decltype(partition_fragment_C(ProductQ{}, Shape<_64, Int<kSumColumns>>{}));
  // Register operand of the products for dK and dV. It consists of the elements that the thread holds of the
  // accumulator `s` or `ds`, in the same order.
  using Operand = decltype(make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kLogitColumns / 16>>>{}));

  /// The part of each tile that a warpgroup reads or computes.
  struct Part {
    int warpgroup, thread;

    CUTE_DEVICE int row_block() const { return Traits::kSplitsKeys ? warpgroup : 0; }
    CUTE_DEVICE int column_block() const { return Traits::kSplitsKeys ? 0 : warpgroup; }
    CUTE_DEVICE int sum_block() const { return Traits::kAlternates ? 0 : warpgroup; }

    template <class Layout, class Extents>
    CUTE_DEVICE static auto tile_part(Element* tile, Layout layout, Extents extents, int row, int column) {
      return local_tile(make_tensor(make_smem_ptr(tile), layout), extents, make_coord(row, column, _0{}));
    }
    CUTE_DEVICE auto key_rows(Element* tile) const {
      return ProductS{}.get_thread_slice(thread).partition_fragment_A(
          tile_part(tile, KeyRows{}, Shape<_64, Int<kHeadDim>, _1>{}, row_block(), 0));
    }
    CUTE_DEVICE auto query_rows(Element* tile) const {
      return ProductS{}.get_thread_slice(thread).partition_fragment_B(
          tile_part(tile, QueryRows{}, Shape<Int<kLogitColumns>, Int<kHeadDim>, Int<kStages>>{}, column_block(), 0));
    }
    CUTE_DEVICE auto query_columns(Element* tile) const {
      return ProductKv{}.get_thread_slice(thread).partition_fragment_B(tile_part(
          tile, QueryColumns{}, Shape<Int<kGradientColumns>, Int<kQueries>, Int<kStages>>{}, column_block(), 0));
    }
    CUTE_DEVICE auto score_columns(Element* tile) const {
      return ProductQ{}.get_thread_slice(thread).partition_fragment_A(
          tile_part(tile, ScoreColumns{}, Shape<_64, Int<kKeys>, Int<kScoreBuffers>>{}, 0, 0));
    }
    CUTE_DEVICE auto key_columns(Element* tile) const {
      return ProductQ{}.get_thread_slice(thread).partition_fragment_B(
          tile_part(tile, KeyColumns{}, Shape<Int<kSumColumns>, Int<kKeys>, _1>{}, sum_block(), 0));
    }
  };

  decltype(std::declval<Part>().key_rows(nullptr)) keys, values;
  decltype(std::declval<Part>().query_rows(nullptr)) queries, out_cotangents;
  decltype(std::declval<Part>().query_columns(nullptr)) queries_t, out_cotangents_t;
  decltype(std::declval<Part>().score_columns(nullptr)) scores_t;
  decltype(std::declval<Part>().key_columns(nullptr)) keys_t;
  Accumulator s, ds;
  Gradient dk, dv;
  Sums dq;
  Operand weights, score_gradients;

  CUTE_DEVICE GradientProducts(SharedStorage& shared, const Part& part)
      : keys(part.key_rows(shared.k)),
        values(part.key_rows(shared.v)),
        queries(part.query_rows(shared.q[0])),
        out_cotangents(part.query_rows(shared.out_cotangent[0])),
        queries_t(part.query_columns(shared.q[0])),
        out_cotangents_t(part.query_columns(shared.out_cotangent[0])),
        scores_t(part.score_columns(shared.score_gradient[0])),
        keys_t(part.key_columns(shared.k)) {}

  /// Initialises S with the biases of the thread's two keys. `start_s` then adds to S.
  CUTE_DEVICE void start_at(const float (&biases)[2]) {
    CUTE_UNROLL
    for (int e = 0; e < size(s); ++e) s(e) = biases[e / 2 % 2];
  }
  /// Starts the product for S. `stage` is the buffer of Q.
  CUTE_DEVICE void start_s(int stage, int head_dim) {
    constexpr auto kFirst = Traits::kHasKeyBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    start_head_product(keys(_, _, _, _0{}), queries(_, _, _, stage), head_dim, s, kFirst);
  }
  /// Starts the product for dP, the gradient of the weights. `stage` is the buffer of dO.
  CUTE_DEVICE void start_ds(int stage, int head_dim_v) {
    start_head_product(values(_, _, _, _0{}), out_cotangents(_, _, _, stage), head_dim_v, ds);
  }
  /// Starts the product for dQ. `buffer` is the buffer of dS.
  CUTE_DEVICE void start_dq(int buffer) {
    start(ProductQ{}, scores_t(_, _, _, buffer), keys_t(_, _, _, _0{}), dq, [](int) { return false; });
  }

  /// Starts a product that is added to dV or dK. `rows` are the weights or dS, in registers or shared memory, and
  /// `columns` is dO or Q.
  template <class Rows, class Columns>
  CUTE_DEVICE static void start_sum(const Rows& rows, const Columns& columns, Gradient& sum) {
    ProductKv product;
    warpgroup_fence_operand(sum);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::One;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rows); ++k) gemm(product, rows(_, _, k), columns(_, _, k), sum);
    warpgroup_commit_batch();
  }

  /// Weights or dS in shared memory, as argument `rows` of `start_sum`.
  CUTE_DEVICE static auto in_shared(Element* tile, const Part& part) {
    return ProductKv{}
        .get_thread_slice(part.thread)
        .partition_fragment_A(make_tensor(make_smem_ptr(tile), ScoreRows{}))(_, _, _, _0{});
  }

 private:
  /// Starts a product that sums over the head dimension.
  template <class Rows, class Columns>
  CUTE_DEVICE static void start_head_product(const Rows& rows, const Columns& columns, int head_dim,
                                             Accumulator& result, GMMA::ScaleOut first = GMMA::ScaleOut::Zero) {
    const auto ends = [&](int step) { return Traits::kIsNarrow && end_before<kHeadDim / kStep>(step, head_dim); };
    start(ProductS{}, rows, columns, result, ends, first);
  }

  template <class Product, class Rows, class Columns, class Result, class EndBefore>
  CUTE_DEVICE static void start(Product product, const Rows& rows, const Columns& columns, Result& result,
                                const EndBefore& ends, GMMA::ScaleOut first = GMMA::ScaleOut::Zero) {
    warpgroup_fence_operand(result);
    warpgroup_arrive();
    product.accumulate_ = first;
    CUTE_UNROLL
    for (int k = 0; k < size<2>(rows); ++k) {
      if (ends(k)) break;
      gemm(product, rows(_, _, k), columns(_, _, k), result);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }
};

}  // namespace natten_jax::sm90
