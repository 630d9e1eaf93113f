// The products of a warpgroup of the forward kernel for 8-bit floats.
#pragma once

#include "cuda/sm90/fp8_traits.cuh"

namespace natten_jax::sm90 {

/// The operands and results of one warpgroup's two products, in registers and as views of shared memory.
///
/// The matrix units keep about 13 bits of what they add to. So the weighted values of each key tile are a product of
/// its own, which is added to the output in float32. That takes registers of its own, too: those that the logits of the
/// tile before have left. Both are computed in parts of 64 columns that alternate between two halves of them, so that
/// one part is under way while another is added up.
template <class Traits>
struct Float8Products {
  using Element = typename Traits::Element;
  using SharedStorage = typename Traits::SharedStorage;
  using ProductS = decltype(Traits::query_key_product());
  using ProductO = decltype(Traits::weight_value_product());
  static constexpr int kOfPart = Traits::kPart / 2;  // a thread's elements of a part of two rows
  static constexpr int kHalves = 2;

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
        make_tensor(make_smem_ptr(shared.turned), typename Traits::LayoutTurned{}));
  }

  decltype(keys_of(std::declval<SharedStorage&>(), 0)) keys;
  decltype(values_of(std::declval<SharedStorage&>(), 0)) values;
  decltype(query_of(std::declval<SharedStorage&>(), 0, 0)) query;
  decltype(make_tensor<float>(Int<kHalves * kOfPart>{})) parts;
  decltype(make_tensor<float>(Int<Traits::kValueParts * kOfPart>{})) o;
  // Element for element, the accumulator of one product is the register operand of the next.
  decltype(make_tensor<Element>(Layout<Shape<Shape<_4, _2, _2>, _1, Int<Traits::kWeightSteps>>>{})) weights;

  CUTE_DEVICE Float8Products(SharedStorage& shared, int warpgroup, int thread)
      : keys(keys_of(shared, thread)), values(values_of(shared, thread)), query(query_of(shared, warpgroup, thread)) {}

  /// The logits of a tile, once they are complete.
  CUTE_DEVICE auto s() { return make_tensor(parts.data(), Layout<Int<Traits::kKeyParts * kOfPart>>{}); }
  /// One half of the registers.
  CUTE_DEVICE auto half(int i) {
    return make_tensor(parts.data() + i * kOfPart, Layout<Shape<_2, _2, Int<kOfPart / 4>>>{});
  }

  /// Starts the logits of the keys in a part of a buffer, in the half of the part's number.
  CUTE_DEVICE void start_s(int part, int stage) {
    ProductS product;
    Tensor s = half(part);
    warpgroup_fence_operand(s);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < Traits::kQuerySteps; ++k) {
      multiply(product, query(_, 0, k), keys(_, part, k, stage), s);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  /// Starts a part of the weighted values in a buffer, in a half.
  CUTE_DEVICE void start_o(int part, int stage, int to) {
    ProductO product;
    Tensor o = half(to);
    warpgroup_fence_operand(o);
    warpgroup_arrive();
    product.accumulate_ = GMMA::ScaleOut::Zero;
    CUTE_UNROLL
    for (int k = 0; k < Traits::kWeightSteps; ++k) {
      multiply(product, weights(_, 0, k), values(_, part, k, stage), o);
      product.accumulate_ = GMMA::ScaleOut::One;
    }
    warpgroup_commit_batch();
  }

  /// Adds a complete part, in a half, to the output, which shrinks before.
  CUTE_DEVICE void add_part(int part, int from, const float (&rescale)[2]) {
    Tensor found = half(from);
    warpgroup_fence_operand(found);
    CUTE_UNROLL
    for (int e = 0; e < kOfPart; ++e) {
      float& sum = o(part * kOfPart + e);
      sum = fmaf(sum, rescale[e / 2 % 2], found(e));
    }
  }

 private:
  template <class Product, class A, class B, class C>
  CUTE_DEVICE static void multiply(const Product& product, const A& a, const B& b, C& c) {
    Tensor flat = make_tensor(c.data(), Layout<Shape<Shape<_2, _2, Int<kOfPart / 4>>>>{});
    gemm(product, a, b, flat);
  }
};

}  // namespace natten_jax::sm90
