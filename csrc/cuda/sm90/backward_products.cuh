// The five products of a warpgroup of the backward kernel: their operands, results and starts.
#pragma once

#include "cuda/sm90/backward_traits.cuh"

namespace natten_jax::sm90 {

/// Operands and results, in registers and as views of shared memory.
///
/// The warpgroups split the keys. With only 64 keys, they split the queries of the logits and the columns of dK and dV
/// instead. They split the columns of dQ or, if it has few, alternate in computing whole tiles.
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

  // Products for S and the gradient of the weights; for dK and dV; for dQ.
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
  // A thread's elements of an accumulator are its elements of the next product's register operand, in the same order.
  using Operand = decltype(make_tensor<Element>(Layout<Shape<Shape<_2, _2, _2>, _1, Int<kLogitColumns / 16>>>{}));

  /// Position of a warpgroup's part in the tiles.
  struct Part {
    int warpgroup, thread;

    CUTE_DEVICE int row_block() const { return Traits::kSplitsKeys ? warpgroup : 0; }
    CUTE_DEVICE int column_block() const { return Traits::kSplitsKeys ? 0 : warpgroup; }
    CUTE_DEVICE int sum_block() const { return Traits::kAlternates ? 0 : warpgroup; }

    template <class Layout, class Extents>
    CUTE_DEVICE static auto of(Element* tile, Layout layout, Extents extents, int row, int column) {
      return local_tile(make_tensor(make_smem_ptr(tile), layout), extents, make_coord(row, column, _0{}));
    }
    CUTE_DEVICE auto key_rows(Element* tile) const {
      return ProductS{}.get_thread_slice(thread).partition_fragment_A(
          of(tile, KeyRows{}, Shape<_64, Int<kHeadDim>, _1>{}, row_block(), 0));
    }
    CUTE_DEVICE auto query_rows(Element* tile) const {
      return ProductS{}.get_thread_slice(thread).partition_fragment_B(
          of(tile, QueryRows{}, Shape<Int<kLogitColumns>, Int<kHeadDim>, Int<kStages>>{}, column_block(), 0));
    }
    CUTE_DEVICE auto query_columns(Element* tile) const {
      return ProductKv{}.get_thread_slice(thread).partition_fragment_B(
          of(tile, QueryColumns{}, Shape<Int<kGradientColumns>, Int<kQueries>, Int<kStages>>{}, column_block(), 0));
    }
    CUTE_DEVICE auto score_columns(Element* tile) const {
      return ProductQ{}.get_thread_slice(thread).partition_fragment_A(
          of(tile, ScoreColumns{}, Shape<_64, Int<kKeys>, Int<kScoreBuffers>>{}, 0, 0));
    }
    CUTE_DEVICE auto key_columns(Element* tile) const {
      return ProductQ{}.get_thread_slice(thread).partition_fragment_B(
          of(tile, KeyColumns{}, Shape<Int<kSumColumns>, Int<kKeys>, _1>{}, sum_block(), 0));
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

  /// Initialises S, to which `start_s` adds, with the biases of the thread's two keys.
  CUTE_DEVICE void start_at(const float (&biases)[2]) {
    CUTE_UNROLL
    for (int e = 0; e < size(s); ++e) s(e) = biases[e / 2 % 2];
  }
  /// Starts the logits of the queries in a buffer.
  CUTE_DEVICE void start_s(int stage, int head_dim) {
    constexpr auto kFirst = Traits::kHasKeyBias ? GMMA::ScaleOut::One : GMMA::ScaleOut::Zero;
    start_of_heads(keys(_, _, _, _0{}), queries(_, _, _, stage), head_dim, s, kFirst);
  }
  /// Starts the gradient of the weights.
  CUTE_DEVICE void start_ds(int stage, int head_dim_v) {
    start_of_heads(values(_, _, _, _0{}), out_cotangents(_, _, _, stage), head_dim_v, ds);
  }
  /// Starts dQ from the dS in a buffer.
  CUTE_DEVICE void start_dq(int buffer) {
    start(ProductQ{}, scores_t(_, _, _, buffer), keys_t(_, _, _, _0{}), dq, [](int) { return false; });
  }

  /// Starts to add the product of weights or dS, in registers or shared memory, to a gradient.
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

  /// Operand of `start_sum` in shared memory: weights or dS.
  CUTE_DEVICE static auto in_shared(Element* tile, const Part& part) {
    return ProductKv{}
        .get_thread_slice(part.thread)
        .partition_fragment_A(make_tensor(make_smem_ptr(tile), ScoreRows{}))(_, _, _, _0{});
  }

 private:
  /// Starts a product over the head dimension.
  template <class Rows, class Columns>
  CUTE_DEVICE static void start_of_heads(const Rows& rows, const Columns& columns, int head_dim, Accumulator& result,
                                         GMMA::ScaleOut first = GMMA::ScaleOut::Zero) {
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
