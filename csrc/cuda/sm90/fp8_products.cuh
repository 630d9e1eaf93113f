// The matrix products of a consumer warpgroup of the forward kernel for 8-bit floats.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"

namespace natten_jax::sm90 {

/// Operands and results of a warpgroup's two products, in registers or as views of shared memory. One product computes
/// the logits of a key tile, the other one its weighted values.
///
/// Tensor cores accumulate products of 8-bit floats with a precision of about 13 bits. So they only compute the
/// weighted values of a single key tile, which other instructions add to the output in float32. With heads wider than
/// 64, the output leaves too few registers for separate results of both products. The weighted values then overwrite
/// the logits of their tile, and the product for the logits of the next tile starts only after the weighted values have
/// been added to the output. The weighted values of heads of 256 are computed in parts, which alternate between two
/// sets of registers: one part is computed while another one is added.
template <class Traits>
struct Float8Products {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ProductS = decltype(Traits::query_key_product());
  using ProductO = decltype(Traits::weight_value_product());
  // Numbers of elements that a thread holds of the logits (kLogitElements) and of a part of the weighted values
  // (kPartElements).
  static constexpr int kLogitElements = Traits::kColumns / 2, kPartElements = Traits::kValuePart / 2;
  static constexpr int kSets = Traits::kValueParts == 1 ? 1 : 2;
  static constexpr bool kHasSeparateLogits = Traits::kHeadDim <= 64;
  // Step of `Float8Attention::exchange` that starts the product for the logits of the next tile. If these logits have
  // separate registers, this is the step that starts the last part of the weighted values. Otherwise, the logits
  // overwrite the registers of the last part, so this is the step that adds this part to the output.
  static constexpr int kLogitsStep = kHasSeparateLogits ? Traits::kValueParts - 1 : Traits::kValueParts;
  static constexpr int kFirstOfSets = kHasSeparateLogits ? kLogitElements : 0;
  static_assert(kHasSeparateLogits || kLogitElements <= kPartElements);

  CUTE_HOST_DEVICE static auto query_of(SharedStorage& shared, int warpgroup, int thread) {
    const Tensor tile = local_tile(make_tensor(make_smem_ptr(shared.q), typename Traits::LayoutQ{}),
                                   Shape<_64, Int<Traits::kLoadedHeadDim>>{}, make_coord(warpgroup, 0));
    return ProductS{}.get_thread_slice(thread).partition_fragment_A(tile);
  }
  CUTE_HOST_DEVICE static auto keys_of(SharedStorage& shared, int thread) {
    return ProductS{}.get_thread_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.k), typename Traits::LayoutK{}));
  }
  CUTE_HOST_DEVICE static auto values_of(SharedStorage& shared, int thread) {
    return ProductO{}.get_thread_slice(thread).partition_fragment_B(
        make_tensor(make_smem_ptr(shared.transposed), typename Traits::LayoutTransposed{}));
  }

  decltype(keys_of(std::declval<SharedStorage&>(), 0)) keys;
  decltype(values_of(std::declval<SharedStorage&>(), 0)) values;
  decltype(query_of(std::declval<SharedStorage&>(), 0, 0)) query;
  decltype(make_tensor<float>(Int<kFirstOfSets + kSets * kPartElements>{})) results;
  decltype(make_tensor<float>(Int<Traits::kValueParts * kPartElements>{})) o;
  // Register operand of the product with the values. It contains the weights for the elements of the logits that the
  // thread holds, in the same order.
  decltype(make_tensor<Element>(Layout<Shape<Shape<_4, _2, _2>, _1, Int<Traits::kWeightSteps>>>{})) weights;

  CUTE_DEVICE Float8Products(SharedStorage& shared, int warpgroup, int thread)
      : keys(keys_of(shared, thread)), values(values_of(shared, thread)), query(query_of(shared, warpgroup, thread)) {}

  /// Registers of a tile's logits.
  CUTE_DEVICE auto s() { return make_tensor(results.data(), Layout<Int<kLogitElements>>{}); }

  /// Starts the product for the logits. `stage` is the buffer of the keys.
  CUTE_DEVICE void start_s(int stage) {
    ProductS product;
    Tensor result = s();
    warpgroup_fence_operand(result);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < Traits::kQuerySteps; ++k) {
      multiply(product, query(_, 0, k), keys(_, 0, k, stage), result);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  /// Starts the product for a part of the weighted values. `stage` is the buffer of the values.
  CUTE_DEVICE void start_o(int part, int stage) {
    ProductO product;
    Tensor result = values_of_part(part);
    warpgroup_fence_operand(result);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < Traits::kWeightSteps; ++k) {
      multiply(product, weights(_, 0, k), values(_, part, k, stage), result);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  /// Rescales a part of the output, and adds the same part of the weighted values, which must be complete.
  CUTE_DEVICE void add_part(int part, const float (&rescale)[2]) {
    Tensor found = values_of_part(part);
    warpgroup_fence_operand(found);
    CUTE_UNROLL
    for (int e = 0; e < kPartElements; ++e) {
      float& sum = o(part * kPartElements + e);
      sum = fmaf(sum, rescale[e / 2 % 2], found(e));
    }
  }

 private:
  /// Registers of a part of the weighted values.
  CUTE_DEVICE auto values_of_part(int part) {
    return make_tensor(results.data() + kFirstOfSets + part % kSets * kPartElements, Layout<Int<kPartElements>>{});
  }

  template <class Product, class A, class B, class C>
  CUTE_DEVICE static void multiply(const Product& product, const A& a, const B& b, C& c) {
    constexpr int kSize = decltype(size(c))::value;
    Tensor flat = make_tensor(c.data(), Layout<Shape<Shape<_2, _2, Int<kSize / 4>>>>{});
    gemm(product, a, b, flat);
  }
};

}  // namespace natten_jax::sm90
